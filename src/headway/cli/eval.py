"""`headway eval DIR --data FILES --tasks NAMES`: figures of a model on data and on tasks.

The data is cut into sequences that do not overlap; the first token of each is only context. The
documents in a sequence do not see each other, and a document's first token is not predicted. Bits
per byte are the bits per token times the data's tokens per byte, so they compare across tokenizers.
Tasks are those of `DownstreamEvaluatorCallbackConfig`.
"""

from __future__ import annotations

import argparse
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from headway.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_DEFAULT_LENGTH = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.epilog = (
        "The data is cut into sequences that do not overlap; the first token of each is only "
        "context. The documents in a sequence do not see each other, and the first token of a "
        "document is not predicted: nothing stands before it."
    )
    parser.add_argument("dir", metavar="DIR", help="a model, checkpoint or run folder")
    parser.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="FILE",
        help="token files (.hwt), or text files, folders and JSONL",
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=[],
        metavar="TASK",
        help="tasks that come with Headway (continuations, everyday, opposites) or .jsonl files",
    )
    parser.add_argument(
        "--sequence-length", type=int, metavar="N", help="default: 1024, or the model's longest"
    )
    parser.add_argument("--batch-size", type=int, default=8, metavar="N")
    parser.add_argument("--max-batches", type=int, default=-1, metavar="N", help="default: all")
    parser.add_argument("--tokenizer", help="in place of the folder's own")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, mps; default: the best there is")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print the figures."""
    from headway.cli.messages import print_json, print_table

    facts = measure(options)
    if options.json:
        print_json(facts)
        return 0
    rows = [("model", facts["model"])]
    if options.data:
        per_byte = facts["bits_per_byte"]
        rows += [
            ("data", f"{', '.join(facts['data'])}: {facts['tokens']:,} tokens in the files"),
            ("loss", f"{facts['loss']:.4f} nats per token"),
            ("perplexity", f"{facts['perplexity']:,.4g}"),
            ("bits per byte", "not known" if per_byte is None else f"{per_byte:.4f}"),
        ]
    rows += [(name, f"{value:.4f}") for name, value in facts.get("tasks", {}).items()]
    print_table(rows)
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Open model and data, evaluate, put the figures together."""
    from headway.cli.model_folder import (
        check_vocabulary,
        find_model_folder,
        load_folder_tokenizer,
        load_model,
    )
    from headway.errors import ConfigError, not_there

    if not options.data and not options.tasks:
        raise ConfigError("--data or --tasks is needed: what is the model to be measured on?")
    for name in ("sequence_length", "batch_size", "max_batches"):
        value = getattr(options, name)
        if value is not None and value < 1 and not (name == "max_batches" and value == -1):
            raise ConfigError(f"--{name.replace('_', '-')}: must be at least 1, got {value}")
    folder = find_model_folder(options.dir)
    tokenizer = _tokenizer_for(options, folder, load_folder_tokenizer)
    missing = [path for path in options.data if not Path(path).exists()]
    if missing:
        raise ConfigError([f"--data: {not_there(path)}" for path in missing])
    model = load_model(folder)
    if tokenizer is not None:
        check_vocabulary(model, tokenizer, folder)
    facts: dict[str, Any] = {"model": str(folder)}
    if options.data:
        facts |= _measure_data(options, model, tokenizer)
    if options.tasks:
        facts["tasks"] = _measure_tasks(options, model, tokenizer)
    return facts


def _measure_data(
    options: argparse.Namespace, model: nn.Module, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    from headway.args import TrainingArguments
    from headway.errors import ConfigError
    from headway.trainers.preflight import longest_sequence
    from headway.trainers.trainer import Trainer

    longest = longest_sequence(model)
    length = options.sequence_length or min(_DEFAULT_LENGTH, longest or _DEFAULT_LENGTH)
    if longest is not None and length > longest:
        raise ConfigError(f"--sequence-length={length} is longer than the model's {longest}")
    dataset, num_bytes, num_counted = open_data(options.data, tokenizer, length)
    trainer = Trainer(
        args=TrainingArguments(
            per_device_eval_batch_size=options.batch_size,
            max_eval_steps=options.max_batches,
            device=options.device,
            seed=0,  # one that is drawn would be told
        ),
        model=model,
        eval_dataset=dataset,
        processing_class=tokenizer,
        default_callbacks=False,
    )
    metrics = trainer.evaluate()
    loss = metrics["eval_loss"]
    per_byte = loss / math.log(2) * num_counted / num_bytes if num_bytes else None
    return {
        "data": list(options.data),
        "loss": loss,
        "perplexity": metrics["eval_perplexity"],
        "bits_per_byte": per_byte,
        "tokens": dataset.num_tokens,
        "sequence_length": length,
        "seconds": metrics["eval_runtime"],
    }


def _measure_tasks(
    options: argparse.Namespace, model: nn.Module, tokenizer: Tokenizer | None
) -> dict[str, float]:
    """`{task} ({figure})` of each task."""
    from headway.args import TrainingArguments
    from headway.callbacks import DownstreamEvaluatorCallbackConfig
    from headway.strategies.torch_settings import torch_settings
    from headway.trainers.trainer import Trainer

    trainer = Trainer(
        args=TrainingArguments(device=options.device, seed=0),
        model=model,
        processing_class=tokenizer,
        callbacks={"tasks": DownstreamEvaluatorCallbackConfig(options.tasks)},
        default_callbacks=False,
    )
    with torch_settings(trainer.args):
        figures = trainer.callbacks["tasks"].perform_eval()
    return {name.removeprefix("eval/downstream/"): value for name, value in figures.items()}


def _tokenizer_for(options: argparse.Namespace, folder: Path, load: Any) -> Tokenizer | None:
    """A tokenizer is needed for text; for token files it only counts bytes."""
    from headway.errors import ConfigError

    try:
        loaded: Tokenizer = load(folder, options.tokenizer)
        return loaded
    except ConfigError:
        only_files = all(path.endswith(".hwt") for path in options.data) and not options.tasks
        if options.tokenizer is None and only_files:
            return None
        raise


def open_data(
    paths: list[str], tokenizer: Tokenizer | None, length: int
) -> tuple[Any, int | None, int]:
    """A dataset over the files, and how many bytes how many of its tokens stand for."""
    from headway.callbacks.evaluate.byte_counts import count_bytes, is_of_another
    from headway.data.datasets import TextDataset, TokenDataset
    from headway.data.text import DAMAGED, DocumentReader, list_some
    from headway.data.tokenizer import ByteTokenizer
    from headway.errors import ConfigError

    kinds = {path.endswith(".hwt") for path in paths}
    if len(kinds) > 1:
        raise ConfigError("--data: give token files (.hwt) or text, not both at once")
    if kinds == {True}:
        dataset = TokenDataset(paths, length)
        num_bytes, num_counted = 0, 0
        for file in dataset.files:
            if tokenizer is None or is_of_another(file, tokenizer):
                return dataset, None, 0
            counted = count_bytes(file, tokenizer)
            num_bytes, num_counted = num_bytes + counted[0], num_counted + counted[1]
        return dataset, num_bytes, num_counted
    assert tokenizer is not None, "text is read with a tokenizer"
    reader = DocumentReader(
        paths, as_text=not isinstance(tokenizer, ByteTokenizer), option="--data"
    )
    documents = list(reader)
    if reader.damaged_files:
        logger.warning(DAMAGED, len(reader.damaged_files), list_some(reader.damaged_files))
    if not any(documents):
        raise ConfigError(f"--data: there is no text in {', '.join(paths)}")
    text_data = TextDataset(documents, tokenizer, length)  # type: ignore[arg-type]
    return text_data, reader.num_bytes, text_data.num_tokens
