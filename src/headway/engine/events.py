"""Events and the callbacks that listen to them.

Owns the list of events, the callback base class, registration (names, order) and dispatch, with
what follows when a handler raises. Does not own how a handler is called (binding), when an event
fires (loop, evaluate, trainer) nor what flags lead to.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from headway.dist.failure import comes_of_lost_rank
from headway.engine.binding import Handler, bind, is_foreign, is_foreign_base
from headway.engine.blame import name_culprit
from headway.engine.callback_config import CallbackConfig
from headway.engine.closing import ClosingTime
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError, unknown

logger = logging.getLogger(__name__)

# Event -> the keyword arguments it brings beyond the common ones.
EVENTS: dict[str, tuple[str, ...]] = {
    "on_init_end": (),
    "on_load_model_weights": ("path",),
    "on_load": ("path",),
    "on_train_begin": (),
    "on_start_settled": (),
    "on_epoch_begin": (),
    "on_step_begin": (),
    "on_window": ("window",),
    "on_forward_backward_begin": (),
    "on_forward_backward_end": (),
    "on_substep_end": (),
    "on_gradients": (),
    "on_pre_optimizer_step": (),
    "on_optimizer_step": (),
    "on_train_metrics": ("loss", "grad_norm", "tokens"),
    "on_step_end": (),
    "on_metrics": ("step", "metrics"),
    "on_log_step": ("logs",),
    "on_log": ("logs",),
    "on_prediction_step": (),
    "on_evaluate": ("metrics",),
    "on_predict": ("metrics",),
    "on_save": ("checkpoint_path", "step"),
    "on_step_settled": (),
    "on_epoch_end": (),
    "on_run_settled": (),
    "on_train_end": (),
    "on_push_begin": (),
    "on_error": ("exception",),
    "on_close": (),
}

COMMON_ARGUMENTS = (
    "model",
    "processing_class",
    "optimizer",
    "lr_scheduler",
    "train_dataloader",
    "eval_dataloader",
    "trainer",
)
FAILURE_POLICIES = ("raise", "disable")
COMMANDED = "a command"
"""In the place of an event, for what somebody outside of the run asks for."""
# Before the first step a mistake in an observer's options is worth stopping for.
_EVENTS_OF_SETUP = ("on_init_end", "on_train_begin", "on_start_settled")


class TrainerCallback:
    """Base of Headway's callbacks. A subclass writes only the `on_*` methods it wants.

    Every handler is called with `args, state, control` and keyword arguments (`model`,
    `optimizer`, `trainer`, ...); it may name the subset it needs. State survives a restart when
    `state_dict` and `load_state_dict` are defined.
    """

    priority: int = 0
    """Higher runs first; equal ones keep the order of registration."""
    failure_policy: str = "raise"
    """What an exception in a handler does: `raise` ends the run, `disable` only the callback.

    A callback that only observes chooses `disable`: it warns and hears of nothing but `on_close`
    from then on. Its `ConfigError` before the first step still ends the run.
    """
    decides_nonfinite: bool = False
    """Whether it decides what follows a loss or gradient that is not finite, in place of the option
    `nonfinite_action`; of which steps, `sees_nonfinite` tells."""

    _bus: EventBus | None = None
    _has_run = False

    @property
    def name(self) -> str:
        """Identifies the callback in messages and in checkpoints."""
        return type(self).__name__

    def sees_nonfinite(self, metrics: Mapping[str, float]) -> bool:
        """With `decides_nonfinite`: whether what it watches of a bad step shows that it was one."""
        return True

    def _forget_run(self) -> None:
        """Another run begins, before its checkpoint is loaded if it is resumed."""

    def block_ephemeral_checkpoints(self) -> None:
        """No ephemeral saves until `unblock_ephemeral_checkpoints`; on all ranks alike."""
        bus, name = self._registration()
        bus.ephemeral_blockers.add(name)

    def unblock_ephemeral_checkpoints(self) -> None:
        """This callback has nothing against ephemeral saves; others may."""
        bus, name = self._registration()
        bus.ephemeral_blockers.discard(name)

    def wait_at_close(self, wait: Callable[[float], Any], timeout_s: float) -> None:
        """In `on_close`: have `wait(seconds)` called when all callbacks have closed.

        All such waits share their time: each gets what is left of its `timeout_s` by then.
        """
        if self._bus is None or not self._bus.closing.is_on:
            wait(timeout_s)
        else:
            bus, name = self._registration()
            bus.closing.put_off(name, wait, timeout_s)

    def _registration(self) -> tuple[EventBus, str]:
        names = [] if self._bus is None else self._bus.callbacks.items()
        found = next((name for name, callback in names if callback is self), None)
        if self._bus is None or found is None:
            raise RuntimeError(f"{self.name} is registered with no trainer")
        return self._bus, found


def _own_methods(callback: object) -> dict[str, Any]:
    """The `on_*` callables that the callback's own classes (not the bases) define."""
    found: dict[str, Any] = {}
    for cls in type(callback).__mro__:
        if cls in (object, TrainerCallback) or is_foreign_base(cls):
            continue
        for key, value in vars(cls).items():
            if key.startswith("on_") and callable(value):
                found.setdefault(key, value)
    return found


class EventBus:
    """Holds the callbacks of one trainer and delivers events to them, in order."""

    def __init__(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self.args = args
        self.state = state
        self.control = control
        self.kwargs: dict[str, Any] = dict.fromkeys(COMMON_ARGUMENTS)
        self.stopped_by: tuple[str, str, str] | None = None
        """Who first asked to end the run: (callback name, event, "stop" or "abort")."""
        self.disabled: dict[str, str] = {}
        """Callbacks that failed and are called no more: name -> what happened."""
        self.ephemeral_blockers: set[str] = set()
        """Who wants no ephemeral saves for now; none is made while there is anybody."""
        self.closing = ClosingTime()
        self._closed: set[str] = set()
        self._delivering: tuple[str, int] | None = None
        self._callbacks: list[tuple[str, Any]] = []
        self._handlers: dict[str, list[tuple[str, Handler]]] = {event: [] for event in EVENTS}

    @property
    def callbacks(self) -> dict[str, Any]:
        """Registered callbacks by unique name, in the order in which they are called."""
        return dict(self._callbacks)

    @property
    def delivering(self) -> str | None:
        """The callback in whose handler the calling thread is, if it is in one."""
        current = self._delivering
        return current[0] if current and current[1] == threading.get_ident() else None

    @property
    def busy_with(self) -> str | None:
        """The callback whose handler runs right now, on whatever thread."""
        current = self._delivering
        return current[0] if current else None

    def restart(self) -> None:
        """A run begins: nothing is asked for, nobody has stopped it, no callback has failed or
        knows of the run before, which may have been another trainer's."""
        self.control, self.stopped_by = TrainerControl(), None
        self.ephemeral_blockers.clear()
        self._closed.clear()
        if self.disabled:
            self.disabled.clear()
            self._rebuild()
        for callback in self.callbacks.values():
            if isinstance(callback, TrainerCallback):
                if callback._has_run:
                    callback._forget_run()
                callback._has_run = True

    def withdraw_stop(self) -> None:
        """The run goes back: a stop that was asked for because of how things stood does not hold.
        That of a command does, whoever asked before."""
        if self.stopped_by is not None and self.stopped_by[1] != COMMANDED:
            self.control.should_training_stop, self.stopped_by = False, None

    def add(self, callback: Any, name: str | None = None) -> str:
        """Register a callback (instance, or class to instantiate); returns its unique name."""
        if isinstance(callback, type):
            callback = callback()
        methods = _own_methods(callback)
        wanted = name or _given_name(callback)
        if isinstance(callback, CallbackConfig):
            raise ConfigError(
                f"callback {wanted!r}: {type(callback).__name__} says how to make a callback and "
                "is none; give it to a trainer, or what its build(trainer) returns"
            )
        if not (methods or isinstance(callback, TrainerCallback) or is_foreign(callback)):
            raise ConfigError(
                f"callbacks: {callback!r} given, which has no on_* method and is never called; "
                "allowed: instances or subclasses of TrainerCallback, objects with on_* methods"
            )
        for method in methods:
            if method not in EVENTS:
                raise ConfigError(f"callback {wanted!r}: " + unknown("event", method, EVENTS))
        policy = _policy(callback)
        if policy not in FAILURE_POLICIES:
            raise ConfigError(
                f"callback {wanted!r}: " + unknown("failure_policy", policy, FAILURE_POLICIES)
            )
        priority = getattr(callback, "priority", 0)
        if not isinstance(priority, int | float):
            raise ConfigError(
                f"callback {wanted!r}: priority: {priority!r} given; allowed: a number, higher "
                "runs first"
            )
        for known, registered in self._callbacks:
            if registered is callback:
                raise ConfigError(
                    f"callback {wanted!r} is registered already, as {known!r}; every event would "
                    "reach it twice"
                )
        # One that goes by its class gets a number; a name of its own must be the only one, since
        # it is what its state in checkpoints is found by.
        if wanted in self.callbacks and (name or wanted != type(callback).__name__):
            first = type(self.callbacks[wanted]).__name__
            raise ConfigError(
                f"two callbacks have the name {wanted!r}: {first} and {type(callback).__name__}; "
                "give each its own"
            )
        unique, count = wanted, 1
        while unique in self.callbacks:
            count += 1
            unique = f"{wanted}_{count}"
        self._callbacks.append((unique, callback))
        if isinstance(callback, TrainerCallback):
            callback._bus = self
        self._callbacks.sort(key=lambda entry: -getattr(entry[1], "priority", 0))
        self._rebuild()
        return unique

    def remove(self, callback: Any) -> Any | None:
        """Unregister the first callback that is, or is an instance of, `callback`."""
        for entry in self._callbacks:
            found = entry[1]
            if isinstance(found, callback) if isinstance(callback, type) else found is callback:
                self._callbacks.remove(entry)
                self.ephemeral_blockers.discard(entry[0])
                self.disabled.pop(entry[0], None)
                self._rebuild()
                return found
        return None

    def listens(self, event: str) -> bool:
        """Whether any callback handles the event."""
        return bool(self._handlers[event])

    def _rebuild(self) -> None:
        for event, handlers in self._handlers.items():
            handlers[:] = [
                (name, bind(callback, name, event, {*COMMON_ARGUMENTS, *EVENTS[event]}))
                for name, callback in self._callbacks
                if event in _own_methods(callback)
                and (name not in self.disabled or event == "on_close")
            ]

    def fire(self, event: str, **extra: Any) -> None:
        """Deliver an event; what a handler raises names its callback and ends the run, unless the
        callback's policy is to be disabled."""
        handlers = self._handlers[event]
        if not handlers:
            return
        for name, handler in tuple(handlers):
            try:
                self._deliver(name, event, handler, extra)
            except BaseException as error:
                mistake = isinstance(error, ConfigError) and event in _EVENTS_OF_SETUP
                if not mistake and self.tolerate(name, event, error):
                    continue
                name_culprit(error, name, event)
                raise

    def fire_to_all(self, event: str, **extra: Any) -> list[BaseException]:
        """Deliver an event to every handler even if some raise; returns what they raised, without
        that of callbacks whose policy is to be disabled."""
        errors: list[BaseException] = []
        for name, act in self._acts(event, extra):
            try:
                act()
            except Exception as error:
                if self.tolerate(name, event, error):
                    continue
                name_culprit(error, name, event)
                logger.exception("callback %r failed in %s", name, event)
                errors.append(error)
        return errors

    def _acts(
        self, event: str, extra: Mapping[str, Any]
    ) -> Iterator[tuple[str, Callable[[], Any]]]:
        """What each callback does at an event; at `on_close` also what it waits for, after all."""
        if event == "on_close":
            self.closing.begin()
        for name, handler in tuple(self._handlers[event]):
            if event == "on_close":
                if name in self._closed:  # what failed as a run closed has it closed again
                    continue
                self._closed.add(name)
            yield name, partial(self._deliver, name, event, handler, extra)
        if event == "on_close":
            yield from self.closing.end()

    def tolerate(self, name: str, where: str, error: BaseException) -> bool:
        """Go on without a callback that failed; False where its policy, or the error, forbids."""
        if not isinstance(error, Exception) or _policy(self.callbacks.get(name)) != "disable":
            return False
        if comes_of_lost_rank(error):  # training does not go on
            return False
        if name in self.disabled:  # it failed again, in `on_close` or in `state_dict`
            logger.debug("disabled callback %r failed in %s", name, where, exc_info=error)
            return True
        # Warnings of ranks other than the first are not shown, as all ranks would give the same
        # ones; what failed on such a rank alone would then never be told.
        alone = not self.state.is_world_process_zero
        alone = alone and not getattr(error, "told_by_all_ranks", False)
        who = f"rank {getattr(self.args, 'process_index', '?')}: " if alone else ""
        # A full disk is no mistake in a program: where it was noticed is for the debug log.
        is_plain = isinstance(error, OSError) and not logger.isEnabledFor(logging.DEBUG)
        logger.log(
            logging.ERROR if alone else logging.WARNING,
            f"{who}callback %r failed in %s and is disabled; training goes on without it%s",
            name,
            where,
            f" ({type(error).__name__}: {error})" if is_plain else "",
            exc_info=None if is_plain else error,
        )
        self.disabled[name] = f"{where}: {type(error).__name__}: {error}"
        self._rebuild()
        return True

    def _deliver(self, name: str, event: str, handler: Handler, extra: Mapping[str, Any]) -> None:
        before = self.control
        was_stopping = before.should_training_stop
        was_aborting = before.should_abort_without_save
        outer, self._delivering = self._delivering, (name, threading.get_ident())
        try:
            result = handler(self.args, self.state, before, {**self.kwargs, **extra})
        finally:
            self._delivering = outer
        control = self.control
        if result is not None and result is not control:
            if not hasattr(result, "should_training_stop"):
                raise TypeError(f"{event} must return None or a control, not {result!r}")
            # Another object (Hugging Face callbacks may return a fresh one): a stop already
            # asked for is never lost, and fields that it lacks stay as they are.
            self.control = control = _adopt(result, control)
        if self.stopped_by is None:
            if control.should_abort_without_save and not was_aborting:
                self.stopped_by = (name, event, "abort")
            elif control.should_training_stop and not was_stopping:
                self.stopped_by = (name, event, "stop")

    def state_dict(self) -> dict[str, Any]:
        """State of every callback that has some, by unique name."""
        states: dict[str, Any] = {}
        for name, callback in self._callbacks:
            try:
                if callable(getattr(callback, "state_dict", None)):
                    states[name] = callback.state_dict()
                elif _exports_state(callback):
                    states[name] = callback.state()
            except Exception as error:
                if not self.tolerate(name, "state_dict", error):
                    name_culprit(error, name, "state_dict")
                    raise
        return states

    def load_state_dict(self, states: dict[str, Any]) -> None:
        for name, callback in self._callbacks:
            if name not in states:
                continue
            try:
                if callable(getattr(callback, "load_state_dict", None)):
                    callback.load_state_dict(states[name])
                elif _exports_state(callback):
                    # from_state makes a new object; the registered one keeps its identity.
                    vars(callback).update(vars(type(callback).from_state(states[name])))
            except Exception as error:
                if not self.tolerate(name, "load_state_dict", error):
                    name_culprit(error, name, "load_state_dict")
                    raise
        absent = sorted(set(states) - set(self.callbacks))
        if absent:
            logger.warning("the checkpoint holds state of callbacks not in this run: %s", absent)


def _policy(callback: object) -> str:
    """What follows when the callback raises; objects from elsewhere end the run."""
    return getattr(callback, "failure_policy", TrainerCallback.failure_policy)


def _given_name(callback: object) -> str:
    """What a callback calls itself; objects from elsewhere go by their class."""
    chosen = getattr(callback, "callback_name", None)
    if chosen is None and isinstance(callback, TrainerCallback):
        chosen = callback.name
    return chosen if isinstance(chosen, str) and chosen else type(callback).__name__


def _exports_state(callback: object) -> bool:
    return callable(getattr(callback, "state", None)) and callable(
        getattr(callback, "from_state", None)
    )


def _adopt(result: Any, previous: TrainerControl) -> TrainerControl:
    adopted = TrainerControl()
    for flag, usual in adopted.to_dict().items():
        # What Hugging Face's control does not know was not meant to be lowered.
        given = getattr(result, flag, getattr(previous, flag))
        setattr(adopted, flag, bool(given) if isinstance(usual, bool) else given)
    adopted.should_training_stop |= previous.should_training_stop
    adopted.should_abort_without_save |= previous.should_abort_without_save
    return adopted


def normalise_callbacks(
    callbacks: Sequence[Any] | Mapping[str, Any] | None,
) -> list[tuple[str | None, Any]]:
    """Callbacks come as a list, or as a dict of name -> callback (None removes nothing here)."""
    if callbacks is None:
        return []
    if isinstance(callbacks, Mapping):
        return [(name, callback) for name, callback in callbacks.items() if callback is not None]
    if isinstance(callbacks, str) or not isinstance(callbacks, Iterable):
        raise ConfigError(f"callbacks must be a list, or a dict of names, got {callbacks!r}")
    return [(None, callback) for callback in callbacks]
