"""The ten events and the handlers that listen to them.

Owns registration, removal and order. Does not own when an event fires (bridge).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from headway.compat.xaytune.state import TrainState
from headway.errors import ConfigError, unknown

logger = logging.getLogger(__name__)

EVENTS = (
    "train_start",
    "train_end",
    "epoch_start",
    "epoch_end",
    "step_start",
    "step_end",
    "eval_start",
    "eval_end",
    "checkpoint_saved",
    "error",
)
CONTEXT = ("model", "optimizer", "scheduler", "trainer")
"""What a handler may ask for by name after the state."""

Handler = TypeVar("Handler", bound=Callable[..., Any])


class CallbackManager:
    """Handlers by event, called in the order in which they were registered.

    A handler takes the state and, by name, any of `model`, `optimizer`, `scheduler`, `trainer`.
    One that raises ends the run; only those of `error` cannot.
    """

    def __init__(self) -> None:
        self._handlers: dict[str, list[tuple[Callable[..., Any], tuple[str, ...]]]] = {
            event: [] for event in EVENTS
        }

    def on(self, event: str) -> Callable[[Handler], Handler]:
        """Decorator that registers a handler."""
        handlers = self._handlers_of(event)

        def register(handler: Handler) -> Handler:
            handlers.append((handler, _asked_for(handler, event)))
            return handler

        return register

    def remove(self, handler: Callable[..., Any], event: str | None = None) -> bool:
        """Unregister a handler from one event, or from all; says whether it was there."""
        removed = False
        for name in EVENTS if event is None else (event,):
            handlers = self._handlers_of(name)
            kept = [entry for entry in handlers if entry[0] != handler]
            removed |= len(kept) < len(handlers)
            handlers[:] = kept
        return removed

    def fire(self, event: str, state: TrainState, **context: Any) -> None:
        """Call the handlers of an event."""
        for handler, names in tuple(self._handlers_of(event)):
            arguments = {name: context.get(name) for name in names}
            if event != "error":
                handler(state, **arguments)
                continue
            try:  # each handler must hear of the failure, which is the error to report
                handler(state, **arguments)
            except Exception:
                logger.exception("a handler of 'error' failed: %r", handler)

    def _handlers_of(self, event: str) -> list[tuple[Callable[..., Any], tuple[str, ...]]]:
        if event not in self._handlers:
            raise ConfigError(unknown("event", event, EVENTS))
        return self._handlers[event]


def _asked_for(handler: Callable[..., Any], event: str) -> tuple[str, ...]:
    """The names from `CONTEXT` that a handler takes beside the state."""
    if not callable(handler):
        raise ConfigError(f"a handler of {event!r} must be callable, got {handler!r}")
    try:
        parameters = list(inspect.signature(handler).parameters.values())
    except (TypeError, ValueError):  # some built-in callables have no signature
        return ()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return CONTEXT
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if parameters and parameters[0].kind in positional:
        parameters = parameters[1:]
    elif not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise ConfigError(f"a handler of {event!r} must take the state; {handler!r} does not")
    for p in parameters:
        needed = p.default is p.empty and p.kind is not p.VAR_POSITIONAL
        if needed and p.name not in CONTEXT:
            raise ConfigError(f"handler of {event!r}: " + unknown("argument", p.name, CONTEXT))
    return tuple(p.name for p in parameters if p.name in CONTEXT)


global_callbacks = CallbackManager()
"""Handlers that every trainer of the process calls, before those of its own manager."""

on = global_callbacks.on
