"""The folder that PEFT makes of a model's adapters, of a model that no rank holds whole.

Owns: telling such a model, which of its tensors PEFT saves, and giving PEFT those that the ranks
hold together. Does not own: what is in the folder (PEFT), nor how ranks write tensors (checkpoint).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headway.checkpoint import CheckpointContents, SharingPattern, StateComponent
from headway.checkpoint.component import file_stem
from headway.checkpoint.model import clean_name, collect_model
from headway.checkpoint.ranks import Ranks
from headway.checkpoint.sharding import is_spread
from headway.checkpoint.tensors import read_shards
from headway.models.hf import hf_config_of

logger = logging.getLogger(__name__)


def has_adapters(model: nn.Module) -> bool:
    """Whether it is one of PEFT's, which says itself what is saved of it."""
    return hasattr(model, "peft_config") and hf_config_of(model) is None


def is_whole(model: nn.Module) -> bool:
    """Whether this rank has all of every tensor of the module."""
    return not any(is_spread(tensor) for tensor in model.state_dict().values())


class Adapters:
    """Those tensors of a model that PEFT saves, as the one component of what all ranks write.

    The base model, which may be far larger, is neither written nor read.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._model: Any = model
        self._tensors = collect_model(model).by_name
        names: list[str] = []
        with ranks.together("asking PEFT what it saves"):
            if ranks.is_main:
                names = sorted(_choose(self._model, _blanks(self._tensors)))
        self._names = ranks.share(names)
        self._component = StateComponent("adapters", self, SharingPattern.SHARDED)

    def contents(self) -> CheckpointContents:
        """What the ranks write."""
        return CheckpointContents(
            model=self._model, stores_model=False, components=[self._component]
        )

    def state_dict(self) -> dict[str, Tensor]:
        return {name: self._tensors[name] for name in self._names}

    def load_state_dict(self, state: Any) -> None:
        raise TypeError("PEFT loads adapters")

    def save(self, written: Path, folder: Path, tokenizer: Any) -> None:
        """Let PEFT make its folder of what the ranks have written."""
        folder.mkdir(parents=True, exist_ok=True)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
        values = read_shards(written, file_stem(self._component))
        # It looks for its own among all names.
        state = {**_blanks(self._tensors), **values}
        with _holding(self._model, values):
            self._model.save_pretrained(str(folder), state_dict=state)


def _choose(model: Any, blanks: Mapping[str, Tensor]) -> set[str]:
    """The names of what PEFT saves of a model; all of them where it does not tell."""
    names = {id(tensor): name for name, tensor in blanks.items()}
    if any(getattr(one, "is_prompt_learning", False) for one in model.peft_config.values()):
        # Computed by the modules that are trained, which are called for it.
        return {clean_name(name) for name, p in model.named_parameters() if p.requires_grad}
    try:
        from peft import get_peft_model_state_dict

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it will say the same when it saves
            found = [
                tensor
                for adapter in model.peft_config
                for tensor in get_peft_model_state_dict(
                    model, state_dict=dict(blanks), adapter_name=adapter
                ).values()
            ]
        return {names[id(tensor)] for tensor in found}
    except Exception as error:
        # Some methods save what they compute from values, which blanks do not have.
        logger.info("PEFT does not tell what it saves (%r): it is given all weights", error)
        return set(blanks)


def _blanks(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the same shapes without values."""
    return {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in tensors.items()
    }


@contextmanager
def _holding(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with whole parameters in the place of this rank's parts of them."""
    replaced: list[tuple[nn.Module, str, Any]] = []
    try:
        for name, parameter in list(model.named_parameters()):
            if clean_name(name) in values and is_spread(parameter):
                path, _, leaf = name.rpartition(".")
                owner = model.get_submodule(path)
                replaced.append((owner, leaf, parameter))
                whole = values[clean_name(name)].to(parameter.device)
                owner._parameters[leaf] = nn.Parameter(whole, requires_grad=False)
        yield
    finally:
        for owner, leaf, parameter in replaced:
            owner._parameters[leaf] = parameter
