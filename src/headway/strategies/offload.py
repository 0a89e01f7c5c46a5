"""Activations in host memory between the forward and the backward pass.

Owns: the hooks on what autograd saves, the copies both ways and their order. Does not own: where
the context is entered (strategies, through `train_context`), recomputation (recompute.py).

Whole storages travel, each once however many views of it are saved, and views are laid over what
comes back: strides stay, and with them the kernels that are chosen and the bits they give.
Nothing waits on the host: copies run on streams of their own, and the stream of the computation
waits on the device where it has to. At most `_IN_FLIGHT` storages are kept for copies that are not
done; then the computation waits for them, so that memory is really free when it is reused.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef

from headway.errors import ConfigError

logger = logging.getLogger(__name__)

MIN_BYTES = 256 * 1024
"""Smaller storages stay: starting a copy costs more than it brings."""
_IN_FLIGHT = 4
"""Storages being copied to the host; the last ones of a forward are still there in its backward."""
_AHEAD = 4
"""Storages fetched before they are asked for."""


class Lane(Protocol):
    """Copies to the host and back, and waiting for them."""

    def send(self, source: Tensor) -> tuple[Tensor, Any]:
        """Begin to copy bytes to the host; the copy, and a mark of its end."""

    def fetch(self, held: Tensor, sent: Any) -> tuple[Tensor, Any]:
        """Begin to copy bytes back once they are there; the copy, and a mark of its end."""

    def wait(self, mark: Any) -> None:
        """Let the computation, not the host, wait for a mark."""


class CudaLane:
    """Pinned memory and two streams, one for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def send(self, source: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        # The pinned memory comes from torch's own cache and returns to it.
        held = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=True)
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            held.copy_(source, non_blocking=True)
            return held, self._out.record_event()

    def fetch(self, held: Tensor, sent: torch.cuda.Event) -> tuple[Tensor, torch.cuda.Event]:
        # Taken on the computing stream, where it will be freed: the copy must not begin before
        # what that stream has yet to do with the same memory.
        back = torch.empty(held.numel(), dtype=torch.uint8, device=self._device)
        self._back.wait_stream(torch.cuda.current_stream(self._device))
        self._back.wait_event(sent)
        with torch.cuda.stream(self._back):
            back.copy_(held, non_blocking=True)
            return back, self._back.record_event()

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)


class HostLane:
    """Plain copies within the host: the same order of events, for machines without a GPU."""

    def send(self, source: Tensor) -> tuple[Tensor, None]:
        return source.clone(), None

    def fetch(self, held: Tensor, sent: None) -> tuple[Tensor, None]:
        return held.clone(), None

    def wait(self, mark: None) -> None:
        pass


class _Cargo:
    """One storage that autograd saved, on its way out or back."""

    def __init__(self, saved: Tensor, lane: Lane, place: int) -> None:
        self._lane = lane
        self.place, self.version = place, saved._version
        self._original: Tensor | None = saved
        self._copy: Tensor | None = None
        self._arrival: Any = None
        """Mark of a copy back that nobody has waited for."""
        self.num_packs = self._num_unpacks = 0
        self._held, self._sent = lane.send(_bytes_of(saved))

    def free_original(self) -> None:
        """Free the device's memory, which may be used again in the computation's order."""
        if self._original is not None:
            self._lane.wait(self._sent)
            self._original = None

    def check(self) -> None:
        """Refuse what was changed while it was being copied: nobody knows what the copy has."""
        if self._original is not None and self._original._version != self.version:
            raise RuntimeError(
                "enable_activation_offloading: a tensor that the backward pass needs "
                f"({list(self._original.shape)}, {self._original.dtype}) was modified by an "
                "inplace operation after it was saved"
            )

    def fetch(self) -> None:
        """Begin to bring the bytes back, unless they are there or are not needed any more."""
        there = self._original is not None or self._copy is not None
        if not there and self._num_unpacks < self.num_packs:
            self._copy, self._arrival = self._lane.fetch(self._held, self._sent)

    def take(self) -> Tensor:
        """The bytes on the device, for one of the views that were saved."""
        if self._num_unpacks == self.num_packs:  # a graph is walked again
            self._num_unpacks = 0
        self.check()
        self.fetch()
        self._settle()
        found = self._copy if self._original is None else _bytes_of(self._original)
        assert found is not None
        self._num_unpacks += 1
        if self._num_unpacks == self.num_packs:
            self.free_original()
            self._copy = None
        return found

    def _settle(self) -> None:
        if self._arrival is not None:
            self._lane.wait(self._arrival)
            self._arrival = None

    def __del__(self) -> None:
        # Memory that is still being written to must not be anybody else's.
        self._settle()


@dataclass
class _View:
    """What autograd holds in the place of a tensor."""

    cargo: _Cargo
    tape: list[weakref.ref[_Cargo]]
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class ActivationOffload:
    """Makes the context of a training forward; see the module's text."""

    def __init__(self, lane: Lane, device: torch.device, *, min_bytes: int = MIN_BYTES) -> None:
        self._lane, self._device, self._min_bytes = lane, device, min_bytes
        self._model: nn.Module | None = None
        self._weights: set[int] = set()
        self._is_sharded = self._weights_appear = False
        self._leaving: deque[_Cargo] = deque()
        # The reference to a storage keeps its number from being given to another one.
        self._known: dict[int, tuple[StorageWeakRef, weakref.ref[_Cargo]]] = {}
        self._tape: list[weakref.ref[_Cargo]] = []
        self.num_bytes = 0
        """Sent to the host in the last forward."""

    def watch(self, model: nn.Module) -> None:
        """Leave this model's parameters and buffers where they are."""
        self._model = model
        self._is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
        self._weights_appear = self._is_sharded

    @contextmanager
    def __call__(self) -> Iterator[None]:
        before = self._note_weights()
        while self._leaving:
            self._leaving.popleft().free_original()
        # Fetching ahead follows the order of one forward; another may come before its backward.
        self._tape, self._known, self.num_bytes = [], {}, 0
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._known = {}
        self._weights_appear = self._weights_appear and len(self._weights) != before

    def _note_weights(self) -> int:
        """Look where the weights are; returns how many storages hold them."""
        if self._model is not None:
            tensors = (*self._model.parameters(), *self._model.buffers())
            found = {t.untyped_storage()._cdata for t in tensors if not _is_special(t)}
            # What FSDP2 gathers a block into is the block's only while it runs, and used again.
            self._weights = found | self._weights if self._is_sharded else found
        return len(self._weights)

    def _is_weight(self, key: int) -> bool:
        if key not in self._weights and self._weights_appear:
            self._note_weights()  # FSDP2 gathers each block for the first time in a forward
        return key in self._weights

    def _pack(self, tensor: Tensor) -> Any:
        if _is_special(tensor) or tensor.device != self._device:
            return tensor
        storage = tensor.untyped_storage()
        key = storage._cdata
        if storage.nbytes() < self._min_bytes or self._is_weight(key):
            return tensor
        cargo = self._find(key, tensor._version)
        if cargo is None:
            cargo = _Cargo(tensor, self._lane, len(self._tape))
            self._known[key] = StorageWeakRef(storage), weakref.ref(cargo)
            self._tape.append(weakref.ref(cargo))
            self.num_bytes += storage.nbytes()
            self._leaving.append(cargo)
            if len(self._leaving) > _IN_FLIGHT:
                oldest = self._leaving.popleft()
                oldest.check()
                oldest.free_original()
        cargo.num_packs += 1
        offset = int(tensor.storage_offset())
        return _View(cargo, self._tape, tensor.dtype, tensor.size(), tensor.stride(), offset)

    def _find(self, key: int, version: int) -> _Cargo | None:
        """What is known of a storage, unless it was written to in between."""
        known = self._known.get(key)
        if known is None or known[0].expired():
            return None
        cargo = known[1]()
        return cargo if cargo is not None and cargo.version == version else None

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _View):
            tensor: Tensor = packed
            return tensor
        place, held = packed.cargo.place, packed.cargo.take()
        for number in range(place - 1, max(-1, place - 1 - _AHEAD), -1):
            ahead = packed.tape[number]()
            if ahead is not None:
                ahead.fetch()
        view = torch.empty(0, dtype=packed.dtype, device=held.device)
        return view.set_(held.untyped_storage(), packed.offset, packed.size, packed.stride)


def make_offload(device: torch.device) -> ActivationOffload | None:
    """The context for a device; None, with a warning, where activations are on the host anyway."""
    if device.type != "cuda":
        logger.warning(
            "enable_activation_offloading=True: the run is on %s, whose activations are in host "
            "memory already; nothing is moved",
            device,
        )
        return None
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    return ActivationOffload(CudaLane(device), device)


def refuse_flex_attention(model: nn.Module) -> None:
    """Flex attention keeps what it saves to itself, on the device, and breaks under such hooks."""
    config = getattr(model, "config", None)
    given = [getattr(config, name, None) for name in ("attention", "_attn_implementation")]
    if "flex" in given or "flex_attention" in given:
        raise ConfigError(
            "enable_activation_offloading=True cannot be used with flex attention; set the "
            "model's attention to 'sdpa', or enable_activation_offloading to False"
        )


def _bytes_of(tensor: Tensor) -> Tensor:
    """All bytes of the storage that a tensor is a view of."""
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())


def _is_special(tensor: Tensor) -> bool:
    """Tensors without plain memory of their own: sharded, quantized, or of a compiler's trial."""
    return type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.layout != torch.strided
