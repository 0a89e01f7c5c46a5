"""Tensors that somebody besides the optimizer keeps for a model's parameters and buffers.

Owns: their way into a checkpoint, as named tensors of a SHARDED component (`<slot>.<name>`), and
back into a model that is cut in another way. Does not own: what the tensors mean, nor the files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.header import StoredTensor
from headway.checkpoint.intake import Destination
from headway.checkpoint.model import collect_model
from headway.checkpoint.sharding import as_slice, local_tensor
from headway.checkpoint.staged import TensorSlice
from headway.checkpoint.tensors import ShardReader, num_bytes

Slots = Mapping[str, Mapping[str, Tensor]]

_FLOAT_BYTES = 4


class KeepsParameterState(Protocol):
    """Who keeps such tensors.

    A slot is a name without dots; in it, tensors by the name under which the model's own are
    stored, each of the shape of this rank's part of that one. They may change after an optimizer
    step and before the end of that step, and at no other time: a save copies them meanwhile.
    """

    def parameter_state(self) -> Slots: ...

    def load_parameter_state(self, slots: dict[str, dict[str, Tensor]]) -> None:
        """Take the tensors of a checkpoint; no slot at all if nothing was kept when it was made.

        Two attributes may say more: `parameter_state_on_host` that they are to come into host
        memory rather than to the parameter's device, and `max_parameter_slots` how many slots of
        float32 there may be later, so that saves have room for them from the start.
        """
        ...


class ParameterState:
    """The component that stores what `keeper` keeps for the tensors of `model`."""

    def __init__(self, keeper: KeepsParameterState, model: nn.Module) -> None:
        self._keeper, self._model = keeper, model

    def state_dict(self) -> dict[str, Tensor | TensorSlice]:
        """The tensors (not copied) by slot and name, with their place in the whole."""
        slots = self._keeper.parameter_state()
        if not any(slots.values()):
            return {}
        live = collect_model(self._model).stored
        return {
            f"{slot}.{name}": _place(value, live[name])
            for slot, tensors in slots.items()
            for name, value in tensors.items()
        }

    def load_state_dict(self, state: Any) -> None:
        raise TypeError("a model's other tensors are read by `load_from`")

    def load_from(self, reader: ShardReader) -> None:
        """Read this rank's part of what is stored for the tensors that it holds."""
        live = collect_model(self._model).stored
        held = self._keeper.parameter_state()
        on_host = bool(getattr(self._keeper, "parameter_state_on_host", False))
        slots: dict[str, dict[str, Tensor]] = {}
        names = {key: key.partition(".") for key in reader.weight_map}
        destinations = []
        here = [key for key, (_, _, name) in names.items() if name in live]
        for key, stored in reader.locate(here).items():
            slot, _, name = names[key]
            if tuple(live[name].shape) != stored.shape:
                raise CheckpointError(
                    f"{reader.index_path}: {key} is {list(stored.shape)} there, "
                    f"{list(live[name].shape)} here"
                )
            current = held.get(slot, {}).get(name)
            tensor, destination = _prepare(stored, live[name], current, on_host)
            slots.setdefault(slot, {})[name] = tensor
            destinations.append(destination)
        reader.fill(destinations)
        self._keeper.load_parameter_state(slots)

    def expected_growth_bytes(self, padded: Callable[[int], int] = int) -> int:
        """By how much what is kept may grow, each tensor's bytes rounded up by `padded`."""
        limit = int(getattr(self._keeper, "max_parameter_slots", 0))
        if not limit:
            return 0
        live = collect_model(self._model).stored.values()
        kept = [local_tensor(t) for t in live if t.is_floating_point() and _moves(t)]
        most = limit * sum(padded(_FLOAT_BYTES * tensor.numel()) for tensor in kept)
        now = sum(
            padded(num_bytes(value))
            for tensors in self._keeper.parameter_state().values()
            for value in tensors.values()
        )
        return max(0, most - now)


def _moves(tensor: Tensor) -> bool:
    return tensor.requires_grad or not isinstance(tensor, nn.Parameter)


def _place(value: Tensor, owner: Tensor) -> Tensor | TensorSlice:
    """A kept tensor as a checkpoint takes it: where its owner's part lies."""
    part = as_slice(owner)
    if isinstance(part, TensorSlice):
        return TensorSlice(value, part.shape, part.offsets)
    return value


def _prepare(
    stored: StoredTensor, owner: Tensor, current: Tensor | None, on_host: bool
) -> tuple[Tensor, Destination]:
    """The tensor that this rank's part is read into: the one in use, if it is of that kind."""
    part = as_slice(owner)
    local = part.tensor if isinstance(part, TensorSlice) else part
    device = torch.device("cpu") if on_host else local.device
    fits = current is not None and (current.shape, current.dtype, current.device) == (
        local.shape,
        stored.dtype,
        device,
    )
    tensor = current if fits else None
    if tensor is None:
        tensor = torch.empty(local.shape, dtype=stored.dtype, device=device)
    offsets = part.offsets if isinstance(part, TensorSlice) else None
    return tensor, Destination(stored, tensor, offsets)
