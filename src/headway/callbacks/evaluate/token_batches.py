"""Batches of labelled token files, each of one label.

Owns: cutting files into sequences and sequences into batches, their order, the bytes behind them.
Does not own: the figures (lm_evaluator.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headway.callbacks.evaluate.byte_counts import count_bytes, is_of_another
from headway.data.datasets import TokenDataset
from headway.data.order import SampleOrder
from headway.data.tokenizer import Tokenizer
from headway.errors import ConfigError

PathLike = str | os.PathLike[str]
Files = Mapping[str, PathLike | Sequence[PathLike]]


class LabelledBatch(dict[str, Any]):
    """A batch that knows its label; what a model is given is the same as of any other batch."""

    def __init__(self, content: Mapping[str, Any], label: int) -> None:
        super().__init__(content)
        self.label = label


@dataclass(frozen=True)
class _Span:
    """The samples of one batch."""

    label: int
    first: int
    end: int


class TokenBatches:
    """The batches of token files by label, in an order that mixes the labels.

    A sequence of batches that makes each when it is asked for. Files are cut into sequences of
    `sequence_length` that do not overlap; the documents in one do not see each other.
    """

    def __init__(
        self, files: Files, sequence_length: int, batch_size: int, *, packing: str = "stream"
    ) -> None:
        self.labels = tuple(files)
        self.datasets = [_open(files[label], sequence_length, packing, label) for label in files]
        self.sequence_length, self.batch_size = sequence_length, batch_size
        self._spans = [
            _Span(number, first, min(first + batch_size, len(dataset)))
            for number, dataset in enumerate(self.datasets)
            for first in range(0, len(dataset), batch_size)
        ]
        self._order: Any = None
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Choose one of the orders of the batches."""
        order = SampleOrder(len(self._spans), seed=0)
        self._order = order.at(epoch, np.arange(len(self._spans), dtype=np.int64))

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> LabelledBatch:
        from headway.data.collate import default_collator

        if not 0 <= index < len(self):
            raise IndexError(index)
        span = self._spans[int(self._order[index])]
        samples = self.datasets[span.label].__getitems__(range(span.first, span.end))
        return LabelledBatch(default_collator(samples), span.label)

    def num_tokens_of(self, index: int) -> int:
        """The tokens of a batch, padding included, as far as they are known without reading it."""
        span = self._spans[int(self._order[index])]
        return (span.end - span.first) * self.sequence_length

    @property
    def vocab_size_needed(self) -> int:
        return max(dataset.vocab_size_needed for dataset in self.datasets)

    def bytes_per_token(self, tokenizer: Tokenizer | None) -> list[float | None]:
        """By label how many bytes a token stands for; None where that cannot be known."""
        return [_bytes_per_token(dataset, tokenizer) for dataset in self.datasets]


def _open(paths: Any, sequence_length: int, packing: str, label: str) -> TokenDataset:
    try:
        return TokenDataset(paths, sequence_length, packing=packing)
    except ConfigError as error:
        raise ConfigError([f"label {label!r}: {text}" for text in error.problems]) from error
    except OSError as error:
        raise ConfigError(f"label {label!r}: {error}") from error


def _bytes_per_token(dataset: TokenDataset, tokenizer: Tokenizer | None) -> float | None:
    num_bytes = num_tokens = 0
    for file in dataset.files:
        if tokenizer is None or is_of_another(file, tokenizer):
            return None
        counted = count_bytes(file, tokenizer)
        num_bytes, num_tokens = num_bytes + counted[0], num_tokens + counted[1]
    return num_bytes / num_tokens if num_bytes else None
