"""Checks on model, data and place together, before the first step.

Owns mistakes that only show when these are there: ids outside the vocabulary, sequences longer than
the model takes, batches of a shape that a precision cannot take, a folder that cannot be written.
Does not own the arguments' own rules (config).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset

from headway.args import PipelineTrainingArguments, TrainingArguments
from headway.data.counting import IGNORED_LABEL
from headway.data.loader import WindowLoader
from headway.data.tokenizer import load_tokenizer
from headway.errors import ConfigError
from headway.models.decoder import Decoder
from headway.models.hf import makes_causal_loss
from headway.precision import fp8
from headway.trainers.collation import ColumnChoice, fit_collator
from headway.trainers.plan import RunPlan, sample_length

logger = logging.getLogger(__name__)

# An in-memory list is looked at whole up to here; larger data declares what it needs.
_MOST_SAMPLES_SCANNED = 10_000


def check_output_dir(output_dir: str | Path) -> None:
    """Refuse an output_dir that cannot be made or written; nothing is made yet."""
    folder = Path(output_dir).absolute()
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not there.is_dir():
        raise ConfigError(f"output_dir: {folder} cannot be a directory, {there} is none")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"output_dir: {folder} cannot be written, {there} does not allow it")


def vocabulary_size(model: nn.Module) -> int | None:
    """How many token ids the model's embedding has, if it tells."""
    get = getattr(model, "get_input_embeddings", None)
    if not callable(get):
        return None
    try:
        embedding = get()
    except NotImplementedError:  # transformers models without one
        return None
    weight = getattr(embedding, "weight", None)
    return None if weight is None else int(weight.shape[0])


def longest_sequence(model: nn.Module) -> int | None:
    """How many positions the model takes, if it tells."""
    config = getattr(model, "config", None)
    names = ["max_seq_len", "max_position_embeddings", "n_positions"]
    if getattr(config, "relative_attention_num_buckets", None):
        names.remove("n_positions")  # T5's counts nothing: it knows places by their distance
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:  # XLNet's -1 is no limit
            return value
    return None


class GuardedCollator:
    """Collates, and refuses a batch that the model cannot take: an index error deep in the model,
    or a failed assertion on the device, would not say which data it was."""

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        model: nn.Module,
        option: str,
        *,
        own_loss: bool = False,
    ) -> None:
        self.__wrapped__ = collate
        self._collate = fit_collator(collate, model)
        self._choose = ColumnChoice(collate, model, option)
        self._vocabulary, self._positions = vocabulary_size(model), longest_sequence(model)
        # An encoder-decoder's labels are another text than its inputs.
        config = getattr(model, "config", None)
        self._labels_go_with_ids = not getattr(config, "is_encoder_decoder", False)
        # A loss of the user's own, also in a class made of Decoder, may leave out other labels.
        is_decoder = getattr(type(model), "forward", None) is Decoder.forward
        self._leaves_out_one = not own_loss and (is_decoder or makes_causal_loss(model))
        self._option = option

    def __call__(self, items: list[Any]) -> Any:
        batch = self._collate(self._choose(items))
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if isinstance(ids, torch.Tensor) and ids.device.type == "cpu":
            problem = self._problem(ids.numpy(), batch.get("labels"))
            if problem is not None:
                raise ConfigError(problem)
        return batch

    def _problem(self, ids: np.ndarray[Any, Any], labels: Any) -> str | None:
        if ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
            return None
        vocabulary, positions = self._vocabulary, self._positions
        if vocabulary is not None and ids.max() >= vocabulary:
            return _vocabulary_problem(self._option, int(ids.max()), vocabulary)
        if ids.min() < 0:
            return f"{self._option}: the data has the negative token id {int(ids.min())}"
        if positions is not None and ids.shape[-1] > positions:
            return _length_problem(self._option, int(ids.shape[-1]), positions)
        if not isinstance(labels, torch.Tensor) or labels.dim() != ids.ndim:
            return None
        if not self._labels_go_with_ids or labels.is_floating_point():
            return None
        if tuple(labels.shape) != ids.shape:
            return (
                f"{self._option}: labels have the shape {list(labels.shape)}, but input_ids "
                f"{list(ids.shape)}; a label belongs to each token, -100 where none is wanted"
            )
        if vocabulary is not None and labels.numpy().max() >= vocabulary:
            return _vocabulary_problem(self._option, int(labels.max()), vocabulary, "a label")
        if self._leaves_out_one and labels.numpy().min() < 0:
            predicted = labels.numpy()[..., 1:]
            wrong = predicted[(predicted < 0) & (predicted != IGNORED_LABEL)]
            if wrong.size:
                return (
                    f"{self._option}: a label is {int(wrong[0])}, which is no token; what is not "
                    f"to count has the label {IGNORED_LABEL}"
                )
        return None


def check_data_fits(
    model: nn.Module, loader: WindowLoader, option: str, tokenizer: Any = None
) -> None:
    """Refuse data that the model cannot take; looks at samples without training on them.

    With the run's `tokenizer`, token files of another one are told.
    """
    if tokenizer is not None:
        _warn_of_other_tokenizer(loader.dataset, tokenizer, option)
    vocabulary, positions = vocabulary_size(model), longest_sequence(model)
    problems: list[str] = []
    dataset = loader.dataset
    needed = getattr(dataset, "vocab_size_needed", None)
    if isinstance(needed, int) and vocabulary is not None and needed > vocabulary:
        problems.append(_vocabulary_problem(option, needed - 1, vocabulary))
    length = getattr(dataset, "sequence_length", None)
    if isinstance(length, int) and positions is not None and length > positions:
        problems.append(_length_problem(option, length, positions))
    if not problems:
        problems += _scan(dataset, vocabulary, positions, option)
    if problems:
        raise ConfigError(problems)


def _warn_of_other_tokenizer(dataset: Any, tokenizer: Any, option: str) -> None:
    try:
        own = load_tokenizer(tokenizer)
    except ConfigError:  # something that only tokenises for its owner
        return
    for source in getattr(dataset, "sources", None) or [dataset]:
        for file in getattr(source, "files", None) or []:
            made_by = getattr(file, "header", {}).get("tokenizer") or {}
            if made_by and made_by.get("digest") != own.digest:
                logger.warning(
                    "%s: %s was made with another tokenizer (%s) than the run's (%s): its ids mean "
                    "something else there",
                    option,
                    file.path,
                    made_by.get("name", "unknown"),
                    own.name,
                )


def _scan(dataset: Any, vocabulary: int | None, positions: int | None, option: str) -> list[str]:
    if isinstance(dataset, list | tuple) and len(dataset) <= _MOST_SAMPLES_SCANNED:
        samples = list(dataset)
    elif isinstance(dataset, IterableDataset):
        return []
    elif hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        samples = [dataset[0]] if len(dataset) else []
    else:
        return []
    for index, sample in enumerate(samples):
        if not isinstance(sample, Mapping) or "input_ids" not in sample:
            continue
        ids = np.asarray(sample["input_ids"])
        if ids.size == 0:
            return [f"{option}: sample {index} has no tokens"]
        if not np.issubdtype(ids.dtype, np.integer):
            return [f"{option}: input_ids of sample {index} are {ids.dtype}, not integers"]
        if int(ids.min()) < 0:
            return [f"{option}: sample {index} has the negative token id {int(ids.min())}"]
        if vocabulary is not None and int(ids.max()) >= vocabulary:
            return [_vocabulary_problem(option, int(ids.max()), vocabulary, f"sample {index}")]
        if positions is not None and ids.shape[-1] > positions:
            return [_length_problem(option, int(ids.shape[-1]), positions, index)]
    return []


def _vocabulary_problem(option: str, token_id: int, vocabulary: int, what: str = "the data") -> str:
    return (
        f"{option}: {what} has the token id {token_id}, but the model's vocabulary ends at "
        f"{vocabulary - 1}; give the model vocab_size >= {token_id + 1} or use its own tokenizer"
    )


def _length_problem(option: str, length: int, positions: int, index: int | None = None) -> str:
    where = "the data has" if index is None else f"sample {index} has"
    return (
        f"{option}: {where} sequences of {length} tokens, but the model takes at most "
        f"{positions}; shorten sequence_length or raise the model's max_seq_len"
    )


def check_fp8_tokens(
    args: TrainingArguments, loader: WindowLoader, collate: Any, plan: RunPlan, device: torch.device
) -> None:
    """Refuse micro-batches of which FP8 cannot make the gradient of a weight.

    `collate` is what the user gave. Data that does not tell its length can only be warned of.
    """
    if args.fp8_recipe is None or not fp8.limits_tokens(args.fp8_recipe, device):
        return
    multiple = fp8.TOKEN_MULTIPLE
    padding = getattr(collate, "pad_to_multiple_of", None) or 1
    cure = f"PadCollator(pad_to_multiple_of={multiple}) or fp8_recipe='rowwise_with_gw_hp' helps"
    needs = f"fp8_recipe={args.fp8_recipe!r} needs a multiple of {multiple} tokens in a micro-batch"
    length = sample_length(loader.dataset) or _equal_length(loader.dataset)
    if length is None:
        if padding % multiple:
            logger.warning("%s, and train_dataset does not tell its length; %s", needs, cure)
        return
    width = -(-length // padding) * padding
    pipeline = args if isinstance(args, PipelineTrainingArguments) else None
    pieces = 1 if pipeline is None else pipeline.n_microbatches
    full = args.per_device_train_batch_size
    if full * width // pieces % multiple:
        raise ConfigError(
            f"{needs}; {full} samples of {width} tokens are {full * width // pieces}"
            + (f" in each of {pieces} parts" if pieces > 1 else "")
            + f". Change per_device_train_batch_size, or {cure}"
        )
    # A pipeline fills its last batch up.
    last = _last_sizes(loader, plan) if pipeline is None else []
    odd = [size for size in last if size * width % multiple]
    if odd:
        raise ConfigError(
            f"{needs}; the last one of an epoch has {odd[0]} samples of {width} tokens, "
            f"{odd[0] * width}. Set dataloader_drop_last=True, or {cure}"
        )


def _equal_length(dataset: Any) -> int | None:
    """Tokens in every sample of a list, where they are equally many."""
    if not isinstance(dataset, list | tuple) or len(dataset) > _MOST_SAMPLES_SCANNED:
        return None
    found = {
        len(sample["input_ids"]) if isinstance(sample, Mapping) and "input_ids" in sample else None
        for sample in dataset
    }
    return found.pop() if len(found) == 1 else None


def _last_sizes(loader: WindowLoader, plan: RunPlan) -> list[int]:
    """Micro-batches of the last window of an epoch on all ranks, if the run comes to it."""
    reached = plan.expected_steps is None or plan.expected_steps >= plan.steps_per_epoch
    if loader.num_samples is None or not reached:
        return []
    deal = loader.deal
    rest = deal.usable(loader.num_samples) % deal.window_samples
    ranks = (replace(deal, rank=rank) for rank in range(deal.world_size))
    return [size for own in ranks for size in own.split(rest)[1]]
