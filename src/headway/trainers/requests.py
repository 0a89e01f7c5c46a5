"""What a trainer offers to those who act on a run: ending it, and work beside it.

Owns: these methods. Does not own: the agreement of all ranks and the threads (engine).
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from headway.dist.channel import RankChannel
from headway.engine.bookkeeping import HARD_TIMEOUT_S, SOFT_TIMEOUT_S, Bookkeeping, Operation
from headway.engine.cancel import CancelRequests
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.dist.env import DistributedEnvInterface
    from headway.engine.loop import TrainingLoop
    from headway.engine.state import TrainerState


class RunRequests:
    """The part of a trainer that takes requests about the run as a whole."""

    env: DistributedEnvInterface
    state: TrainerState
    cancel: CancelRequests
    bookkeeping: Bookkeeping
    _bookkeeping_channel: RankChannel | None = None
    _loop: TrainingLoop | None = None

    @property
    def asked_to_end(self) -> bool:
        """Whether long work should not go on: a signal, a cancellation or a limit of time.

        Of this rank alone; ranks have to agree before they act on it.
        """
        return self._loop is not None and self._loop.asked_to_end

    @property
    def saves_at_end(self) -> bool:
        """Whether the end of the run under way is saved, also where it comes early."""
        return self._loop is not None and self._loop.saves_at_end

    def stop_by(self, moment_s: float | None) -> None:
        """End this process with a checkpoint at a moment of `time.monotonic()`, as `stop_at` does.

        While a run goes on; may be called again with another one. Rank 0's counts for all.
        """
        if self._loop is not None:
            self._loop.parts.length.stop_by(moment_s)

    def ask_to_stop(self, why: str) -> None:
        """Save and stop as after a SIGTERM, with its exit code; from any thread and any rank."""
        if self._loop is not None:
            self._loop.signals.ask_to_stop(why)

    def stop_on(self, number: signal.Signals, noticed: Callable[[str], None]) -> bool:
        """Have a signal ask for a stop for the rest of the run; False off the main thread."""
        return self._loop is not None and self._loop.signals.stop_on(number, noticed)

    def flush_metrics(self) -> None:
        """Deliver what was recorded up to here; every rank must call it, while a run goes on."""
        if self._loop is not None:
            self._loop.delivery.flush()

    def cancel_run(self, reason: str, no_sync: bool = False) -> None:
        """End the run after the step it is in; from any thread and any rank, at any time.

        All ranks end after the same step with the same reason, which `state.cancel_reason` shows
        from then on. `no_sync=True` shows it at once; then every rank must call this at the same
        point.
        """
        self.cancel.ask(reason, by_all=no_sync)

    @property
    def is_canceled(self) -> bool:
        """Whether the run ends by `cancel_run`, as far as this rank knows."""
        return self.state.cancel_reason is not None

    def run_bookkeeping_op(
        self,
        op: Callable[..., Any],
        *args: Any,
        cb: Callable[[Any], Any] | None = None,
        op_name: str | None = None,
        cancel_in_progress: bool = False,
        allow_multiple: bool = True,
        distributed: bool = False,
        soft_timeout: float | None = None,
        hard_timeout: float | None = None,
        **kwargs: Any,
    ) -> bool:
        """Call `op(*args, **kwargs)` beside training; returns whether that will happen.

        `cb` gets its result on the main thread, at the end of a step. Of operations with one
        `op_name`, `allow_multiple=False` lets no second one come to one under way, and
        `cancel_in_progress=True` throws away the result of those before. `distributed`: it talks to
        other ranks, over `bookkeeping_channel`; then every rank must begin it at the same step.
        """
        for option, value in (("op", op), ("cb", cb)):
            if not callable(value) and (option == "op" or value is not None):
                raise ConfigError(f"run_bookkeeping_op: {option} must be callable, got {value!r}")
        soft_s = SOFT_TIMEOUT_S if soft_timeout is None else soft_timeout
        hard_s = HARD_TIMEOUT_S if hard_timeout is None else hard_timeout
        for option, seconds in (("soft_timeout", soft_s), ("hard_timeout", hard_s)):
            if not seconds > 0:
                raise ConfigError(
                    f"run_bookkeeping_op: {option} must be more than 0 seconds, got {seconds!r}"
                )
        if distributed and self._bookkeeping_channel is None and self.env.world_size > 1:
            self._bookkeeping_channel = RankChannel()
        operation = Operation(
            op_name or str(getattr(op, "__qualname__", type(op).__qualname__)),
            partial(op, *args, **kwargs),
            cb,
            distributed,
            soft_s,
            hard_s,
        )
        return self.bookkeeping.begin(
            operation, allow_multiple=allow_multiple, cancel_in_progress=cancel_in_progress
        )

    @property
    def bookkeeping_channel(self) -> RankChannel | None:
        """On which a `distributed` operation talks to the other ranks; None for a single one."""
        return self._bookkeeping_channel
