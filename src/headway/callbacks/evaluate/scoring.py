"""What a model says of a batch: its loss, or the loss of every single token.

Owns: asking a strategy for them, whichever it is. Does not own: batches (passes.py), figures
(the evaluators).

A strategy hands the model, or in a pipeline the last stage of it, to an objective. An objective of
our own in that place looks at the logits where they are made, piece by piece, so that they are
neither sent to other ranks nor kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.callbacks.evaluate.evaluator import BatchScores, Evaluator
from headway.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from headway.strategies.objective import Objective

IGNORED_LABEL = -100
# Of so many targets at once the logits are copied to float32.
_CHUNK_TOKENS = 1024


class Scorer:
    """Scores batches with one model: cross entropy, whatever loss the run trains with."""

    def __init__(self, model: Any) -> None:
        from headway.strategies.objective import Objective

        objective = Objective(model)
        self._plain: Any = objective
        self._tokens: Any = TokenObjective(objective)

    def score(self, strategy: Any, batch: Any, evaluator: Evaluator) -> BatchScores | None:
        """The scores of a batch; None where its last stage is on another rank."""
        if not evaluator.needs_tokens:
            step = strategy.eval_forward(batch, self._plain)
            if step.loss_sum is None:
                raise ConfigError(f"evaluator {evaluator.title!r}: its batches have no labels")
            return BatchScores(step.loss_sum.detach(), step.num_targets)
        tokens = self._tokens
        tokens.pieces.clear()
        strategy.eval_forward(batch, tokens)
        scores: BatchScores | None = tokens.take()
        return scores


class TokenObjective:
    """Stands where a strategy expects the objective and keeps the loss of every token."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self.pieces: list[tuple[Tensor, Tensor, Tensor]] = []

    def evaluate(
        self, model: Any, batch: Any, *, with_logits: bool = False
    ) -> tuple[Tensor, int | Tensor, None, None]:
        """As of an objective: the sum over targets and their count."""
        labels = batch["labels"]
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        # Without labels the model computes no loss of its own, which would be for nothing.
        _, _, logits, _ = self._objective.evaluate(model, inputs, with_logits=True)
        if logits is None or logits.dim() != 3 or logits.shape[:2] != labels.shape:
            found = "none" if logits is None else f"some of shape {list(logits.shape)}"
            raise ConfigError(
                f"to score single tokens the model has to give logits [rows, length, vocabulary] "
                f"for labels {list(labels.shape)}; it gave {found}"
            )
        losses, greedy = token_cross_entropy(logits, labels)
        num_targets = (labels[:, 1:] != IGNORED_LABEL).sum()
        self.pieces.append((losses, greedy, num_targets))
        return losses.sum(), num_targets, None, None

    def take(self) -> BatchScores | None:
        """What was kept of a batch, its pieces put together."""
        import torch

        if not self.pieces:
            return None
        losses = torch.cat([piece[0] for piece in self.pieces])
        greedy = torch.cat([piece[1] for piece in self.pieces])
        num_targets = torch.stack([piece[2] for piece in self.pieces]).sum()
        self.pieces.clear()
        return BatchScores(losses.sum(), num_targets, losses, greedy)


def token_cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy of each label [rows, length], and whether it is the likeliest token.

    Labels stand at the place of their token and are predicted from the one before, so the first
    of a row never counts.
    """
    import torch

    wanted = labels[:, 1:] != IGNORED_LABEL
    picked, targets = logits[:, :-1][wanted], labels[:, 1:][wanted]
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    values = torch.empty(len(targets), dtype=dtype, device=logits.device)
    greedy = torch.empty(len(targets), dtype=torch.bool, device=logits.device)
    for start in range(0, len(targets), _CHUNK_TOKENS):
        span = slice(start, start + _CHUNK_TOKENS)
        chunk = picked[span].to(dtype)
        values[span] = torch.nn.functional.cross_entropy(chunk, targets[span], reduction="none")
        greedy[span] = chunk.argmax(-1) == targets[span]
    losses = torch.zeros(labels.shape, dtype=dtype, device=logits.device)
    all_greedy = torch.ones(labels.shape, dtype=torch.bool, device=logits.device)
    losses[:, 1:][wanted] = values
    all_greedy[:, 1:][wanted] = greedy
    return losses, all_greedy
