"""How well a model answers the questions of a task."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from headway.callbacks.evaluate.evaluator import BatchScores, Evaluator, Join, ModelLimits
from headway.callbacks.evaluate.requests import IGNORED_LABEL, RequestBatches, make_requests
from headway.callbacks.evaluate.tasks import Task, read_task
from headway.callbacks.watch.ranges import require_count
from headway.data.tokenizer import Tokenizer
from headway.errors import ConfigError

if TYPE_CHECKING:
    from os import PathLike

    from torch import Tensor

logger = logging.getLogger(__name__)


class DownstreamEvaluator(Evaluator):
    """Scores a task (see tasks.py) by how likely the model finds each answer.

    `{task} (accuracy)`: the likeliest choice is the right one, or the completion is what the model
    would write. `(length-normalized accuracy)`: the same of the likelihood per character.
    `(CE loss)`: nats per token of the right answer, `(BPB)`: its bits per byte, both the mean over
    items. An item counts once, and only if a pass saw all of its choices.

    With `lazy` the file is read when the first pass begins.
    """

    needs_tokens = True

    def __init__(
        self,
        name: str,
        task: str,
        path: str | PathLike[str],
        tokenizer: Tokenizer,
        *,
        batch_tokens: int = 16384,
        lazy: bool = False,
    ) -> None:
        require_count("DownstreamEvaluator: batch_tokens", batch_tokens, least=1)
        self._task: Task | None = None if lazy else read_task(task, path)
        self.task_name, self._path = task, path
        self.tokenizer, self.batch_tokens = tokenizer, batch_tokens
        self._longest: int | None = None
        self._num_requests = 0
        self._kept: list[tuple[range, Tensor]] = []
        super().__init__(name, batches_factory=self._make_batches)

    @property
    def title(self) -> str:
        return f"{self.name}/{self.task_name}"

    @property
    def task(self) -> Task:
        if self._task is None:
            self._task = read_task(self.task_name, self._path)
        return self._task

    def check(self, limits: ModelLimits) -> None:
        vocabulary = limits.vocab_size
        if vocabulary is not None and self.tokenizer.vocab_size > vocabulary:
            raise ConfigError(
                f"evaluator {self.title!r}: the tokenizer {self.tokenizer.name!r} has "
                f"{self.tokenizer.vocab_size} ids, the model takes {vocabulary}"
            )
        if limits.num_positions != self._longest:
            self._longest, self._batches = limits.num_positions, None
        if self._task is not None:
            assert self.batches is not None  # an answer that is too long is told at the start

    def _make_batches(self) -> RequestBatches:
        requests = make_requests(self.task, self.tokenizer, self._longest)
        if requests.num_cut:
            logger.warning(
                "evaluator %r: %d of %d texts are longer than the model's %s tokens; the beginning "
                "of their prompts is left out",
                self.title,
                requests.num_cut,
                len(requests.all),
                self._longest,
            )
        self._num_requests = len(requests.all)
        return RequestBatches(requests.all, self.batch_tokens)

    def reset_metrics(self) -> None:
        self._kept = []

    def update_metrics(self, batch: Any, scores: BatchScores) -> None:
        import torch

        assert scores.token_losses is not None and scores.is_greedy is not None
        likelihoods = -scores.token_losses.sum(1, dtype=_widest(scores.token_losses))
        num_scored = (batch["labels"][:, 1:] != IGNORED_LABEL).sum(1)
        greedy = scores.is_greedy.all(1)
        rows = [likelihoods, num_scored.to(likelihoods), greedy.to(likelihoods)]
        self._kept.append((batch.numbers, torch.stack(rows, dim=1)))

    def compute_metrics(self, join: Join) -> dict[str, float]:
        import torch

        # Likelihood, tokens, greedy, times seen; each request is on one rank, unless seen again.
        found = torch.zeros(self._num_requests, 4, dtype=torch.float64)
        for numbers, own in self._kept:
            found[numbers.start : numbers.stop, :3] += own.cpu()
            found[numbers.start : numbers.stop, 3] += 1
        self._kept = []
        rows: list[list[float]] = join(found).tolist()
        return {f"{self.task_name} ({label})": value for label, value in self._figures(rows)}

    def _figures(self, rows: list[list[float]]) -> list[tuple[str, float]]:
        right, right_normed, nats, bits = [], [], [], []
        first = 0
        for item in self.task.items:
            own = rows[first : first + len(item.choices)]
            first += len(item.choices)
            if not all(row[3] for row in own):
                continue
            likelihoods = [row[0] / row[3] for row in own]
            answer, loss = own[item.answer], -likelihoods[item.answer]
            nats.append(loss / (answer[1] / answer[3]))
            bits.append(loss / math.log(2) / len(item.choices[item.answer].encode()))
            if self.task.kind == "completion":
                right.append(answer[2] == answer[3])
                continue
            right.append(_best(likelihoods) == item.answer)
            normed = [x / len(choice) for x, choice in zip(likelihoods, item.choices)]
            right_normed.append(_best(normed) == item.answer)
        figures = [("accuracy", _mean(right))]
        if self.task.kind == "multiple_choice":
            figures.append(("length-normalized accuracy", _mean(right_normed)))
        return [*figures, ("CE loss", _mean(nats)), ("BPB", _mean(bits))]


def _widest(values: Tensor) -> Any:
    import torch

    return torch.float32 if values.device.type == "mps" else torch.float64


def _best(likelihoods: list[float]) -> int:
    """The first of the largest; what is not a number counts as the smallest."""
    plain = [-math.inf if math.isnan(value) else value for value in likelihoods]
    return plain.index(max(plain))


def _mean(values: list[Any]) -> float:
    return sum(values) / len(values) if values else math.nan
