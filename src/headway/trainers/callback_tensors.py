"""Tensors that callbacks keep for a model's parameters, as parts of a checkpoint.

Owns: which callbacks have such tensors and under which key they go. Does not own: their way into
files and back (checkpoint/parameter_state.py), what they are (the callbacks).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.checkpoint import SharingPattern, StateComponent
from headway.checkpoint.parameter_state import ParameterState

if TYPE_CHECKING:
    from torch import nn

    from headway.engine.events import EventBus


def tensor_components(bus: EventBus, model: nn.Module) -> list[StateComponent]:
    """One component for each callback that defines `parameter_state`, in the order of calls."""
    return [
        StateComponent(
            f"callback-{name}",
            ParameterState(callback, model),
            SharingPattern.SHARDED,
            required=False,
        )
        for name, callback in bus.callbacks.items()
        if name not in bus.disabled and callable(getattr(callback, "parameter_state", None))
    ]


def part_of(component: StateComponent) -> str:
    """With which part of a checkpoint a component of another name is loaded."""
    return "callbacks" if isinstance(component.stateful, ParameterState) else "trainer"
