"""Perplexity and bits per byte on token files, by label."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headway.callbacks.evaluate.evaluator import BatchScores, Evaluator, Join, ModelLimits
from headway.callbacks.evaluate.token_batches import TokenBatches
from headway.data.tokenizer import Tokenizer
from headway.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


class LMEvaluator(Evaluator):
    """`{label}/CE loss`, `{label}/PPL` and `{label}/BPB` of labelled token files.

    Each is over all targets of all ranks, and not a number where a pass saw none. Bits per byte
    are there where it is known how many bytes a token stands for: with the tokenizer that made the
    files.
    """

    def __init__(
        self,
        name: str = "lm",
        batches: TokenBatches | None = None,
        batches_factory: Callable[[], TokenBatches] | None = None,
        deterministic: bool = True,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        super().__init__(name, batches, batches_factory, deterministic)
        self.tokenizer = tokenizer
        self._bytes_per_token: list[float | None] | None = None
        self._sums: Tensor | None = None

    @property
    def batches(self) -> TokenBatches:
        batches: TokenBatches = super().batches
        return batches

    def check(self, limits: ModelLimits) -> None:
        super().check(limits)
        if self._batches is None:
            return
        needed, vocabulary = self.batches.vocab_size_needed, limits.vocab_size
        if vocabulary is not None and needed > vocabulary:
            raise ConfigError(
                f"evaluator {self.title!r}: its token files have the id {needed - 1}, the model "
                f"takes ids below {vocabulary}"
            )
        longest = limits.num_positions
        if longest is not None and self.batches.sequence_length > longest:
            raise ConfigError(
                f"evaluator {self.title!r}: sequence_length={self.batches.sequence_length} is "
                f"longer than the model's {longest}"
            )

    def reset_metrics(self) -> None:
        self._sums = None

    def update_metrics(self, batch: Any, scores: BatchScores) -> None:
        if self._sums is None:
            self._sums = self._zeros(scores.loss_sum.device)
        self._sums[batch.label, 0] += scores.loss_sum
        self._sums[batch.label, 1] += scores.num_targets

    def _zeros(self, device: Any) -> Tensor:
        import torch

        wide = torch.float32 if device.type == "mps" else torch.float64
        return torch.zeros(len(self.batches.labels), 2, dtype=wide, device=device)

    def compute_metrics(self, join: Join) -> dict[str, float]:
        import torch

        own = self._zeros(torch.device("cpu")) if self._sums is None else self._sums.cpu()
        self._sums = None
        if self._bytes_per_token is None:
            self._bytes_per_token = self.batches.bytes_per_token(self.tokenizer)
        metrics = {}
        for label, (loss_sum, num_targets), num_bytes in zip(
            self.batches.labels, join(own.double()).tolist(), self._bytes_per_token
        ):
            loss = loss_sum / num_targets if num_targets else math.nan
            metrics[f"{label}/CE loss"] = loss
            metrics[f"{label}/PPL"] = math.exp(loss) if not loss >= 700 else math.inf
            if num_bytes is not None:
                metrics[f"{label}/BPB"] = loss / math.log(2) / num_bytes
        return metrics
