"""Everything a trial of training changes, kept on the host and put back bit for bit.

Owns: copies of weights, buffers, gradients, modes, optimizer and generators of one process, of a
sharded tensor only the own part. Does not own: data positions, nor what a trial is for.

The copies are on the host, so that the device needs no memory for them; tensors are written back
in place, so that whoever holds them (a wrapper, an optimizer, a checkpoint) holds the same ones.
"""

from __future__ import annotations

import copy
import random
import signal
import threading
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_PLAIN = (bool, int, float, str, type(None))


@contextmanager
def preserve(
    model: nn.Module, optimizer: Optimizer | None = None, others: Iterable[object] = ()
) -> Iterator[Preserved]:
    """Put everything back at the end, whatever ends it; inside, `restore()` does so at any time.

    `others` are objects whose attributes change, such as counters.
    """
    kept = Preserved(model, optimizer, others)
    try:
        yield kept
    finally:
        with uninterrupted():
            kept.restore()


class Preserved:
    """The state of a model and what trains it, as it was when this was made."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None = None, others: Iterable[object] = ()
    ) -> None:
        self._random = take_randomness()
        self._modules = [(module, _KeptModule(module)) for module in model.modules()]
        self._parameters = [(p, _KeptTensor(p), _keep(p.grad)) for p in model.parameters()]
        seen: set[int] = set()
        self._optimizers = [_KeptOptimizer(o, seen) for o in _find_optimizers(optimizer)]
        self._others = [(thing, dict(vars(thing))) for thing in others]

    def restore(self) -> None:
        """Put it all back; the copies stay for another time."""
        for parameter, value, gradient in self._parameters:
            value.restore()
            parameter.grad = _put_back(gradient)
        for module, kept in self._modules:
            kept.restore(module)
        for optimizer in self._optimizers:
            optimizer.restore()
        for thing, attributes in self._others:
            vars(thing).clear()
            vars(thing).update(attributes)
        put_back_randomness(self._random)


def find_leaves(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that one is made of: itself, a local part, packed values and scales."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        inner = getattr(tensor, name)
        if isinstance(inner, Tensor):  # a mesh may be among them
            yield from find_leaves(inner)


class _KeptTensor:
    """A tensor object and the bits that belong in it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        with torch.no_grad():
            self._copies = [leaf.detach().to("cpu", copy=True) for leaf in find_leaves(tensor)]

    @torch.no_grad()
    def restore(self) -> Tensor:
        for leaf, value in zip(find_leaves(self._tensor), self._copies):
            leaf.detach().copy_(value)
        return self._tensor


class _KeptModule:
    """What a module has besides parameters: buffers, its mode, its extra state."""

    def __init__(self, module: nn.Module) -> None:
        self._training = module.training
        self._buffers = {
            name: None if buffer is None else _KeptTensor(buffer)
            for name, buffer in module._buffers.items()
        }
        self._extra: Any = None
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            self._extra = copy.deepcopy(module.get_extra_state())

    def restore(self, module: nn.Module) -> None:
        module.training = self._training
        for name in [name for name in module._buffers if name not in self._buffers]:
            del module._buffers[name]
        for name, kept in self._buffers.items():
            module._buffers[name] = None if kept is None else kept.restore()
        if self._extra is not None:
            module.set_extra_state(copy.deepcopy(self._extra))


class _KeptMapping:
    """A dictionary object and what belongs in it."""

    def __init__(self, mapping: MutableMapping[Any, Any], left_out: tuple[str, ...] = ()) -> None:
        self._mapping, self._left_out = mapping, left_out
        self._items = {key: _keep(value) for key, value in mapping.items() if key not in left_out}

    def restore(self) -> MutableMapping[Any, Any]:
        for key in [k for k in self._mapping if k not in self._items and k not in self._left_out]:
            del self._mapping[key]
        for key, kept in self._items.items():
            self._mapping[key] = _put_back(kept)
        return self._mapping


class _KeptOptimizer:
    """State (also that there is none yet), groups and plain attributes of an optimizer.

    Optimizers that are parts of another share them with it: what is `seen` is kept already.
    """

    def __init__(self, optimizer: Optimizer, seen: set[int]) -> None:
        self._optimizer = optimizer
        self._mappings: list[_KeptMapping] = []
        mappings: list[MutableMapping[Any, Any]] = [optimizer.state, *optimizer.param_groups]
        for mapping in mappings:
            if id(mapping) not in seen:
                seen.add(id(mapping))
                left_out = () if mapping is optimizer.state else ("params",)
                self._mappings.append(_KeptMapping(mapping, left_out))
        self._names = set(vars(optimizer))
        self._plain = {n: v for n, v in vars(optimizer).items() if isinstance(v, _PLAIN)}

    def restore(self) -> None:
        for mapping in self._mappings:
            mapping.restore()
        own = vars(self._optimizer)
        for name in set(own) - self._names:
            del own[name]
        own.update(self._plain)


def _keep(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _KeptTensor(value)
    if isinstance(value, dict):
        return _KeptMapping(value)
    return copy.deepcopy(value)


def _put_back(kept: Any) -> Any:
    if isinstance(kept, _KeptTensor | _KeptMapping):
        return kept.restore()
    return copy.deepcopy(kept)


def _find_optimizers(optimizer: Optimizer | None) -> list[Optimizer]:
    """An optimizer and those that it is made of."""
    found: list[Optimizer] = []
    pending = [] if optimizer is None else [optimizer]
    while pending:
        current = pending.pop(0)
        if any(current is known for known in found):
            continue
        found.append(current)
        for value in vars(current).values():
            if value is not current.state and value is not current.param_groups:
                inner = value.values() if isinstance(value, dict) else value
                inner = inner if isinstance(value, dict | list | tuple) else [value]
                pending += [item for item in inner if isinstance(item, Optimizer)]
    return found


def take_randomness() -> dict[str, Any]:
    """The state of every global generator of the process."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    return states


def put_back_randomness(states: dict[str, Any]) -> None:
    """Set every global generator to a state that `take_randomness` gave."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])
    if "mps" in states:
        torch.mps.set_rng_state(states["mps"])


@contextmanager
def preserved_randomness() -> Iterator[None]:
    """Whatever is drawn inside, every global generator is afterwards as it was."""
    states = take_randomness()
    try:
        yield
    finally:
        put_back_randomness(states)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait for the end: half a restoration is none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, Any]] = []
    found = {
        number: signal.signal(number, lambda *signalled: came.append(signalled))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in found.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if came:
            signal.raise_signal(came[0][0])
