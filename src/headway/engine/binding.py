"""How a handler of an event is called.

Owns: reading its signature, and what callbacks written for Hugging Face's trainer count on. Does
not own: which events there are and what they bring, registration and dispatch (events.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from copy import copy
from typing import Any

from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError

_SUBJECTS = ("args", "state", "control")

Handler = Callable[[Any, TrainerState, TrainerControl, dict[str, Any]], Any]


def is_foreign_base(cls: type) -> bool:
    """Hugging Face's base class, whose no-op methods must not be dispatched."""
    return cls.__name__ == "TrainerCallback" and cls.__module__.startswith("transformers.")


def is_foreign(callback: object) -> bool:
    """Whether a callback was written for Hugging Face's trainer."""
    return any(is_foreign_base(cls) for cls in type(callback).__mro__)


def bind(callback: object, name: str, event: str, brings: Collection[str]) -> Handler:
    """Make one call that hands a handler what its signature asks for, of what the event brings."""
    method = getattr(callback, event)
    parameters = list(inspect.signature(method).parameters.values())
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    available = {*_SUBJECTS, *brings}
    by_name = [p.name for p in parameters if p.name in available]
    lead = [p.name for p in plain[:3]]
    positional = (
        lead == list(_SUBJECTS)
        or any(p.kind is p.VAR_POSITIONAL for p in parameters)
        or (len(plain) >= 3 and not available.intersection(lead))
    )
    # Hugging Face's bar asks for `eval_dataloader=None`: a name with a default may be absent.
    used = set(lead) | available if positional else available
    for p in plain + [p for p in parameters if p.kind is p.KEYWORD_ONLY]:
        if p.default is p.empty and p.name not in used:
            raise ConfigError(
                f"callback {name!r}: {event} asks for {p.name!r}, which this event does not "
                f"bring. Allowed: {', '.join(sorted(available))}"
            )
    ours = type(callback).__module__.split(".")[0] == "headway"
    copies_logs = event == "on_log" and not ours
    rest = [n for n in by_name if n not in lead] if positional else by_name

    def call(
        args: Any, state: TrainerState, control: TrainerControl, kwargs: dict[str, Any]
    ) -> Any:
        if copies_logs:  # Hugging Face's PrinterCallback pops from the dict
            kwargs = {**kwargs, "logs": dict(kwargs["logs"])}
        if positional:
            if takes_all:
                return method(args, state, control, **kwargs)
            return method(args, state, control, **{n: kwargs[n] for n in rest if n in kwargs})
        everything = {"args": args, "state": state, "control": control, **kwargs}
        if takes_all:
            return method(**everything)
        return method(**{n: everything[n] for n in rest if n in everything})

    return _as_of_save(call) if event == "on_save" and is_foreign(callback) else call


def _as_of_save(call: Handler) -> Handler:
    """A save in the background is announced steps later; Hugging Face's callbacks find the folder
    by `state.global_step`. What else they write to the state holds."""

    def call_as_of_save(
        args: Any, state: TrainerState, control: TrainerControl, kwargs: dict[str, Any]
    ) -> Any:
        shown = copy(state)
        shown.global_step = kwargs["step"]
        before = dict(vars(shown))
        result = call(args, shown, control, kwargs)
        for name, value in vars(shown).items():
            if name not in before or value is not before[name]:
                setattr(state, name, value)
        return result

    return call_as_of_save
