"""Moving the state of a run from its device to the host, and back, bit by bit the same.

Owns: which memory that is, and its way. Does not own: when (commands.py), nor checkpoints.

Not tensors are moved but the memory under them: a parameter stays the object that optimizer,
wrappers and hooks know, and all tensors that look into the same memory (tied weights, a shard and
its flat view) have their bytes again afterwards. What is not found here stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headway.config.rules_values import GRAPH_MODES


class StateParking:
    """The weights, buffers, gradients and optimizer state of one rank that lie on a device."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self._parked: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    @property
    def is_parked(self) -> bool:
        """Whether the state is on the host."""
        return bool(self._parked)

    @property
    def frees_memory(self) -> bool:
        """Whether there is a device other than the host to free."""
        return self._device.type != "cpu"

    def find_obstacle(self, compile_mode: str | None = None) -> str | None:
        """Why it cannot be moved; None if it can."""
        if self._device.type not in ("cpu", "cuda"):
            return f"memory of {self._device.type} devices cannot be given back and taken again"
        # These replay kernels with the addresses that they were recorded with.
        if compile_mode in GRAPH_MODES and self._device.type == "cuda":
            return f"torch_compile_mode={compile_mode!r} records CUDA graphs, which hold addresses"
        for parameter in self._model.parameters():
            if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
                return "DeepSpeed keeps weights and optimizer state in buffers of its own"
            if type(parameter).__name__ == "FlatParameter":
                return "torch's first FSDP keeps weights in buffers of its own; FSDP2 can do it"
        if not all(storage.resizable() for storage in self._storages()):
            return "some weights lie in memory that torch did not allocate"
        return None

    def park(self) -> None:
        """Copy all to the host and give the device's memory back."""
        assert not self._parked, "the state is on the host"
        self._synchronise()
        storages, copies = self._storages(), []
        if not all(storage.resizable() for storage in storages):
            # Since the question was asked; what could be given back now could not be taken again.
            raise RuntimeError("others have come to hold some of its memory")
        for storage in storages:
            host = torch.UntypedStorage(storage.nbytes())
            host.copy_(storage)
            copies.append((storage, host))
        # Not before all copies are there: on a host that has no room everything is as it was.
        self._parked = copies
        for storage, _ in copies:
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def unpark(self) -> None:
        """Take device memory again and fill it; raises and leaves all parked if there is none."""
        taken: list[torch.UntypedStorage] = []
        try:
            for storage, host in self._parked:
                taken.append(storage)
                storage.resize_(host.nbytes())
        except RuntimeError:
            for storage in taken:
                storage.resize_(0)
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            raise
        for storage, host in self._parked:
            storage.copy_(host)
        self._synchronise()
        self._parked.clear()

    def lend(self) -> None:
        """Have the tensors of a run that ends look at the host's copies: it can be saved then, on a
        device that has no room, but cannot go on."""
        hosts = {storage._cdata: host for storage, host in self._parked}
        for tensor in self._tensors():
            host = hosts.get(tensor.untyped_storage()._cdata)
            if host is not None:
                copy = torch.empty(0, dtype=tensor.dtype)
                copy.set_(host, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload]
                tensor.data = copy
        self._parked.clear()

    def _synchronise(self) -> None:
        """Streams other than the current one may still use the memory."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _storages(self) -> list[torch.UntypedStorage]:
        """Each piece of memory once, however many tensors look into it."""
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            if storage.device.type == self._device.type and storage.nbytes():
                found.setdefault(storage.data_ptr(), storage)
        return list(found.values())

    def _tensors(self) -> Iterator[Tensor]:
        held: list[Any] = [*self._model.parameters(), *self._model.buffers()]
        held += [p for group in self._optimizer.param_groups for p in group["params"]]
        held += [p.grad for p in held if isinstance(p, Tensor) and p.grad is not None]
        held += list(self._optimizer.state.values())
        while held:
            one = held.pop()
            if isinstance(one, dict):
                held += one.values()
            elif isinstance(one, list | tuple):
                held += one
            elif hasattr(one, "to_local") and hasattr(one, "_local_tensor"):  # a shard
                held.append(one._local_tensor)
            elif hasattr(one, "__tensor_flatten__"):
                held += [getattr(one, name) for name in one.__tensor_flatten__()[0]]
            elif isinstance(one, Tensor):
                yield one
