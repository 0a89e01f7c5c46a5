"""What a trainer offers to those who give it callbacks.

Owns: which callbacks a run has (given ones, defaults, what configurations are built to). Does not
own: names, order and delivery (engine/events).

`TrialRegistration` registers as a trainer would where there is none, to find mistakes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.callbacks import default_callbacks as make_default_callbacks
from headway.callbacks import reporting_callbacks
from headway.engine.callback_config import CallbackConfig
from headway.engine.events import EventBus, TrainerCallback, normalise_callbacks
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.args import TrainingArguments


class Registration:
    """The part of a trainer that holds its callbacks."""

    args: TrainingArguments
    bus: EventBus

    def _register_callbacks(self, given: Any, with_defaults: bool) -> None:
        listed = [(name, self._built(cb, name)) for name, cb in normalise_callbacks(given)]
        listed = [(name, callback) for name, callback in listed if callback is not None]
        classes = [cb if isinstance(cb, type) else type(cb) for _, cb in listed]
        own = make_default_callbacks(self.args) if with_defaults else []
        for default in [*own, *reporting_callbacks(self.args)]:
            if not any(issubclass(cls, type(default)) for cls in classes):
                self.bus.add(default)
        for name, callback in listed:
            self.bus.add(callback, name)

    def _built(self, given: Any, name: str | None) -> Any | None:
        """A callback as it is; of a configuration what it is built to, which may be nothing."""
        if isinstance(given, type) and issubclass(given, CallbackConfig):
            given = given()
        if not isinstance(given, CallbackConfig):
            return given
        built = given.build(self)
        if built is not None and not isinstance(built, TrainerCallback):
            raise ConfigError(
                f"callback {name or type(given).__name__!r}: build() must return a "
                f"TrainerCallback or None, not {built!r}"
            )
        return built

    @property
    def control(self) -> TrainerControl:
        return self.bus.control

    @property
    def callbacks(self) -> dict[str, Any]:
        """Callbacks by name, in the order in which they are called."""
        return self.bus.callbacks

    def add_callback(self, callback: Any, name: str | None = None) -> None:
        """Register a callback: an instance, a class to make one of, or a configuration of one."""
        built = self._built(callback, name)
        if built is not None:
            self.bus.add(built, name)

    def pop_callback(self, callback: Any) -> Any | None:
        """Unregister and return the first callback that is, or is an instance of, this one."""
        return self.bus.remove(callback)

    def remove_callback(self, callback: Any) -> None:
        """Unregister the first callback that is, or is an instance of, this one."""
        self.bus.remove(callback)


class _OnlyInTraining(AttributeError):
    """A configuration asked for something of a trainer that is not known without one."""


class TrialRegistration(Registration):
    """Stands in a trainer's place: it takes callbacks and builds configurations, no more.

    `known` is what configurations find of the trainer. One that asks for more is not built: only
    its name is taken.
    """

    def __init__(self, args: TrainingArguments, **known: Any) -> None:
        self.args = args
        self.bus = EventBus(args, TrainerState(), TrainerControl())
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:
        raise _OnlyInTraining(f"{name!r} is not known before a trainer is made")

    def register(self, given: Any) -> None:
        """Find what only registration finds: a misspelt hook, files that are not there."""
        for name, callback in normalise_callbacks(given):
            try:
                self.add_callback(callback, name)
            except _OnlyInTraining:
                if name is not None:
                    self.bus.add(TrainerCallback(), name)
