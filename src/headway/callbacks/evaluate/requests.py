"""What a model is asked for a task: token ids of which the last ones are to be scored.

Owns: how texts become ids, cutting what is too long, putting requests into batches.
Does not own: tasks (tasks.py), scores (downstream_evaluator.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headway.callbacks.evaluate.tasks import Item, Task
from headway.data.tokenizer import Tokenizer
from headway.errors import ConfigError

IGNORED_LABEL = -100


@dataclass(frozen=True)
class Request:
    """One text for the model: the likelihood of its last `num_scored` ids is asked for."""

    ids: tuple[int, ...]
    num_scored: int


@dataclass(frozen=True)
class Requests:
    """The requests of a task, choice by choice, and how many of them were cut."""

    all: tuple[Request, ...]
    num_cut: int


def make_requests(task: Task, tokenizer: Tokenizer, longest: int | None) -> Requests:
    """The requests of a task, in its order; `longest` is what the model can see at once.

    Prompt and choice are encoded together, so that their border is where the tokenizer puts it:
    what the prompt alone has as ids comes before, the rest is scored. Of a text that is too long
    the beginning is left out.
    """
    pairs = [(item.prompt, choice) for item in task.items for choice in item.choices]
    places = [item for item in task.items for _ in item.choices]
    whole = tokenizer.encode_batch([prompt + choice for prompt, choice in pairs])
    prompts = tokenizer.encode_batch([prompt for prompt, _ in pairs])
    made, num_cut = [], 0
    for ids, before, item in zip(whole, prompts, places):
        if not before:
            ids, before = _begin(ids, tokenizer, item)
        num_scored = len(ids) - len(before)
        _check(num_scored, longest, item)
        if longest is not None and len(ids) > longest:
            ids, num_cut = ids[-longest:], num_cut + 1
        made.append(Request(tuple(ids), num_scored))
    return Requests(tuple(made), num_cut)


def _begin(ids: list[int], tokenizer: Tokenizer, item: Item) -> tuple[list[int], list[int]]:
    """A text without a prompt follows the end of another, which predicts its first token."""
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"{item.place}: the prompt is empty, and tokenizer {tokenizer.name!r} has no "
            "end-of-text token that could stand before the answer"
        )
    return [tokenizer.eos_token_id, *ids], [tokenizer.eos_token_id]


def _check(num_scored: int, longest: int | None, item: Item) -> None:
    if num_scored < 1:
        raise ConfigError(
            f"{item.place}: with this tokenizer an answer adds no token to the prompt"
        )
    if longest is not None and num_scored >= longest:
        raise ConfigError(
            f"{item.place}: an answer has {num_scored} tokens, but the model takes {longest}, one "
            "of which has to come before"
        )


class RequestBatch(dict[str, Any]):
    """A batch that knows the numbers of its requests, row by row."""

    def __init__(self, content: dict[str, Any], numbers: range) -> None:
        super().__init__(content)
        self.numbers = numbers


class RequestBatches:
    """Requests in their order, in batches of at most `batch_tokens` tokens, padding included.

    A request that has more by itself is a batch of its own.
    """

    def __init__(self, requests: Sequence[Request], batch_tokens: int) -> None:
        self._requests = list(requests)
        self._spans: list[range] = []
        first, width = 0, 0
        for number, request in enumerate(self._requests):
            width = max(width, len(request.ids))
            if number > first and width * (number - first + 1) > batch_tokens:
                self._spans.append(range(first, number))
                first, width = number, len(request.ids)
        if self._requests:
            self._spans.append(range(first, len(self._requests)))

    def __len__(self) -> int:
        return len(self._spans)

    def num_tokens_of(self, index: int) -> int:
        """The tokens of a batch, padding included."""
        span = self._spans[index]
        return len(span) * max(len(self._requests[number].ids) for number in span)

    def __getitem__(self, index: int) -> RequestBatch:
        import torch

        span = self._spans[index]
        rows = [self._requests[number] for number in span]
        width = max(len(row.ids) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        labels = torch.full_like(ids, IGNORED_LABEL)
        for place, row in enumerate(rows):
            end = len(row.ids)
            ids[place, :end] = torch.tensor(row.ids)
            labels[place, end - row.num_scored : end] = ids[place, end - row.num_scored : end]
        # No mask: the padding comes after all that is scored, where a causal model does not look.
        return RequestBatch({"input_ids": ids, "labels": labels}, span)
