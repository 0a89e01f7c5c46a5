"""Cancelling a run: asked for anywhere, at any time; agreed on by all ranks at the end of a step.

Owns: the request of this rank, and which rank's reason counts. Does not own: when the ranks agree,
nor what ends then (loop).

A request only raises a bit in the agreement that all ranks take part in at every step anyway. Where
any rank raised it, all of them tell each other their reasons, once, and end after that very step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headway.dist.agreement import spell_ranks
from headway.engine.state import TrainerState
from headway.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Request:
    reason: str
    by_all: bool


class CancelRequests:
    """This rank's wish to end the run, and what all ranks made of theirs."""

    def __init__(self, state: TrainerState) -> None:
        self._state = state
        self._own: _Request | None = None
        self.agreed = False
        """Whether all ranks know that the run is canceled."""

    def begin(self) -> None:
        """A run begins; what was asked before, for this one, still holds."""
        own = self._own
        self._state.cancel_reason = own.reason if own is not None and own.by_all else None
        self._state.cancel_step = None

    @property
    def wanted(self) -> bool:
        """Whether this rank asks for an end that is not agreed on yet."""
        return self._own is not None and not self.agreed

    def ask(self, reason: str, *, by_all: bool = False) -> None:
        """Ask for an end; the first reason stays. From any thread, also in a signal handler.

        `by_all`: every rank asks at this same point, so that the state can show it at once.
        """
        if not isinstance(reason, str) or not reason.strip():
            raise ConfigError(
                f"cancel_run: reason must be a text that is not empty, got {reason!r}"
            )
        if self._own is None:
            self._own = _Request(reason, by_all)
        if by_all and self._state.cancel_reason is None:
            self._state.cancel_reason = self._own.reason

    def agree(self, exchange: Callable[[Any], list[Any]]) -> None:
        """Settle on one reason; all ranks together, at the end of the same step."""
        if self.agreed:
            return
        own = self._own
        said = exchange(None if own is None else [own.reason, own.by_all])
        asking = [rank for rank, request in enumerate(said) if request is not None]
        silent = [rank for rank, request in enumerate(said) if request is None]
        reason = said[asking[0]][0]
        self.agreed = True
        self._state.cancel_reason, self._state.cancel_step = reason, self._state.global_step
        if silent and any(said[rank][1] for rank in asking):
            logger.warning(
                "cancel_run: no_sync=True is for calls that every rank makes together, but %s "
                "made none; the run ends all the same",
                spell_ranks(silent),
            )
        logger.warning(
            "the run is canceled at step %d by %s: %s",
            self._state.global_step,
            spell_ranks(asking[:1]),
            reason,
        )

    def clear(self) -> None:
        """The run is over: what was asked of it does not hold for the next."""
        self._own, self.agreed = None, False
