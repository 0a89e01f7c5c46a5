"""The L2 norm of every parameter's gradient, as a file for diagnosis and heat maps."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headway.callbacks.watch.norm_log import NormLogger
from headway.callbacks.watch.shards import Shards, norms_of, put_in_slots
from headway.callbacks.watch.sharing import attempt
from headway.engine.state import TrainerControl, TrainerState

if TYPE_CHECKING:
    from torch import Tensor, nn

logger = logging.getLogger(__name__)

# What clipping adds to a norm before it divides by it.
_CLIP_EPSILON = 1e-6


class GradNormLogger(NormLogger):
    """Writes `gradient_norms.jsonl`: per record `grad_norms`, a map from parameter to norm.

    With `format="array"` it is `gradient_norms.json`, one JSON array.

    The norms are those before clipping, over all ranks; `grad_norm` is their total and
    `clip_factor` what clipping multiplied the gradients by. A record is written at each evaluation
    (in a run without any: with each log record), or every `log_steps` steps. `include` are glob
    patterns of names; without them every parameter is listed, and `grad_norm` is of those listed.

    Norms are computed on the device, at steps that may be written, and read in one transfer.
    """

    LOG_FILENAME = "gradient_norms.jsonl"

    def __init__(
        self,
        log_steps: int | None = None,
        include: Sequence[str] | str | None = None,
        format: str = "lines",
    ) -> None:
        super().__init__(log_steps, include, format)
        self._measured: tuple[int, Callable[[], Tensor]] | None = None
        self._clipped: Tensor | None = None
        """The norm of all gradients of the step, by which they are clipped."""
        self._told_none = False

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, model: nn.Module
    ) -> None:
        self._measured, self._told_none = None, False
        self.shards = None
        if args.fuse_optim_with_backward:
            logger.warning(
                "GradNormLogger writes nothing: fuse_optim_with_backward uses up each gradient "
                "during the backward pass"
            )
            return
        self.begin(args, model, state)

    def on_load(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._measured = None
        super().on_load(args, state, control)

    def on_gradients(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._measured = None
        if self.takes_part(state) and self.cadence.may_come(args, state):
            shards = self.shards
            assert shards is not None
            self._measured = (state.global_step + 1, attempt(lambda: _measure(shards)))

    def on_train_metrics(
        self, args: Any, state: TrainerState, control: TrainerControl, grad_norm: Tensor | None
    ) -> None:
        self._clipped = grad_norm

    def on_close(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._measured = self._clipped = None
        super().on_close(args, state, control)

    def write_norms(self, args: Any, state: TrainerState) -> None:
        shards, measured, self._measured = self.shards, self._measured, None
        assert shards is not None
        if measured is None or measured[0] != state.global_step:
            return
        result, clipped, num_names = measured[1], self._clipped, len(shards.names)

        def compute() -> tuple[Tensor, Tensor]:
            sums = result()
            return sums, sums[:1] * 0 if clipped is None else clipped.reshape(1)

        sums, (clipped_norm,) = self.join(compute, 2 * num_names, 1)
        norms = {
            name: math.sqrt(square)
            for name, square, present in zip(shards.names, sums, sums[num_names:])
            if present
        }
        if not norms:
            self._tell_none()
            return
        total = math.sqrt(sum(norm * norm for norm in norms.values()))
        self.write(
            args,
            state,
            {
                "grad_norm": total,
                "clip_factor": _clip_factor(clipped_norm, args.max_grad_norm),
                "grad_norms": norms,
            },
        )

    def _tell_none(self) -> None:
        if not self._told_none:
            self._told_none = True
            logger.warning("GradNormLogger writes nothing: no parameter has a gradient to read")


def _measure(shards: Shards) -> Tensor:
    """Squares of the norms of this rank's parts by name, then which of them there are."""
    import torch

    found = [(s.slot, g) for s in shards.answered if (g := s.local_gradient) is not None]
    slots = [slot for slot, _ in found]
    norms = norms_of([gradient for _, gradient in found])
    squares = put_in_slots(norms, slots, len(shards.names)).square()
    present = put_in_slots(
        [torch.ones_like(n) for n in norms[:1]] * len(norms), slots, len(squares)
    )
    return torch.cat([squares, present])


def _clip_factor(norm: float, max_norm: float | None) -> float | None:
    """What clipping does to gradients of this norm; None where a norm that is no number tells."""
    if not max_norm:
        return 1.0
    if not math.isfinite(norm):
        return None
    return min(1.0, max_norm / (norm + _CLIP_EPSILON))
