"""Hooks that look at what modules give in training, and at the gradients of it.

Owns: which modules are hooked, when a hook looks, and that no hook ever fails a training step. Does
not own: the statistics (statistics.py), the steps at which hooks are set (gap_monitor.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headway.callbacks.watch.statistics import (
    ACTIVATION_GRADS,
    ACTIVATIONS,
    Entry,
    look_at_instances,
)

if TYPE_CHECKING:
    from torch import Tensor, nn


class ActivationHooks:
    """Collects entries between `attach` and `detach`, while `listening`."""

    def __init__(self) -> None:
        self.listening = False
        self.entries: list[Entry] = []
        self.error: Exception | None = None
        """What a hook failed with: training goes on, the owner of the hooks hears of it."""
        self._handles: list[Any] = []

    @property
    def attached(self) -> bool:
        return bool(self._handles)

    def attach(self, modules: dict[str, nn.Module]) -> None:
        """Hook these modules; a failure is kept as `error`."""
        self.entries, self.error = [], None
        try:
            for name, module in modules.items():
                self._handles.append(module.register_forward_hook(self._make_hook(name)))
        except Exception as raised:
            self.error = raised

    def detach(self) -> None:
        """Take all hooks off; always safe to call."""
        self.listening = False
        while self._handles:
            self._handles.pop().remove()

    def _make_hook(self, name: str) -> Callable[..., None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            # A forward inside a backward makes activations again that were looked at before.
            if not self.listening or _in_backward():
                return
            self._note((ACTIVATIONS, name), _first_tensor(output))

        return look

    def _note(self, key: tuple[str, str], values: Tensor | None) -> None:
        import torch

        if values is None:
            return
        try:
            with torch.no_grad():
                entry = look_at_instances(key, values)
            if entry is None:
                return
            self.entries.append(entry)
            if key[0] == ACTIVATIONS and values.requires_grad:
                name = key[1]
                # On the tensor and not on the module: modules with backward hooks hand on copies.
                values.register_hook(lambda grad: self._note((ACTIVATION_GRADS, name), grad))
        except Exception as raised:
            self.error = self.error or raised


def find_modules(
    model: nn.Module, wanted: Callable[[str], bool], *, compiled: bool
) -> dict[str, nn.Module]:
    """The modules to hook, by their names in the whole model.

    Of a `compiled` model those that are called from outside of compiled code: inside, a hook would
    break the graph or never be called.
    """
    from headway.checkpoint.model import clean_name

    found: dict[str, nn.Module] = {}
    inside: set[int] = set()
    for name, module in model.named_modules():
        if compiled and "forward" in module.__dict__:
            inside.update(id(child) for child in module.modules() if child is not module)
        name = clean_name(name)
        if name and id(module) not in inside and wanted(name):
            found[name] = module
    return found


def _in_backward() -> bool:
    import torch

    return torch._C._current_graph_task_id() != -1


def _first_tensor(output: Any) -> Tensor | None:
    """The tensor that a module gives, or the first of several; None for anything else."""
    from torch import Tensor

    from headway.checkpoint.sharding import is_spread

    if isinstance(output, tuple | list) and output:
        output = output[0]
    if not isinstance(output, Tensor) or is_spread(output) or not output.is_floating_point():
        return None
    return output
