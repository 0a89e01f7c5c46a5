"""Counting the places where Python waits for the device.

Owns: seeing a value leave the device (item, tolist, a truth test, ...) and where in the code.
Does not own: what to allow; a test says between which steps the count must stay at zero.

Without a GPU the operations that would wait on one are counted on CPU tensors instead. There a
move `.to("cpu")` is not counted, since it is also how a batch goes to the training device;
`.cpu()` is. Neither compiled code nor other threads are seen.
"""

from __future__ import annotations

import functools
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_TORCH = str(Path(torch.__file__).parent)
_INNER = (_TORCH, "<frozen ")
_OPTIMIZERS = str(Path(_TORCH, "optim"))
_DISPATCH = str(Path(_TORCH, "utils", "_python_dispatch"))

_METHODS = (
    "item",
    "tolist",
    "numpy",
    "cpu",
    "nonzero",
    "__array__",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "__complex__",
    "__contains__",
)

# Operations whose result, or its shape, the host has to know before it can go on.
_WAITING_OPS = {
    "_local_scalar_dense",
    "_unique",
    "_unique2",
    "bincount",
    "equal",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
    "unique_dim_consecutive",
}


@dataclass(frozen=True)
class HostSync:
    """One wait: which operation, and the innermost line outside torch that asked for it."""

    operation: str
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.operation} at {self.file}:{self.line} in {self.function}"


@dataclass
class HostSyncs:
    """The waits seen so far; `ignore` holds path fragments of call sites not to count."""

    ignore: tuple[str, ...] = ()
    records: list[HostSync] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.records)

    def reset(self) -> None:
        """Forget what was seen, for counting from here on."""
        self.records.clear()

    def report(self) -> str:
        """The waits, one per line, for the message of an assertion."""
        return "\n".join(map(str, self.records)) or "no host sync"

    def add(self, operation: str, *, on_device: bool = False) -> None:
        """Record a wait asked for by the code that is running now."""
        stack = [frame for frame in traceback.extract_stack() if not _is_watcher(frame.filename)]
        # torch's optimizers keep their step counters on the host; reading those waits for nothing.
        if not on_device and stack[-1].filename.startswith(_OPTIMIZERS):
            return
        outside = (frame for frame in reversed(stack) if not frame.filename.startswith(_INNER))
        site = next(outside, stack[-1])
        if not any(fragment in site.filename for fragment in self.ignore):
            self.records.append(HostSync(operation, site.filename, site.lineno or 0, site.name))


@contextmanager
def count_host_syncs(
    *, device_type: str | None = None, ignore: Sequence[str] = ()
) -> Iterator[HostSyncs]:
    """Count the host syncs of the block; the yielded object has `count` and `records`.

    `device_type` 'cuda' asks the CUDA runtime itself, 'cpu' watches the operations; by default
    the former where there is a CUDA device.
    """
    syncs = HostSyncs(tuple(ignore))
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda":
        with _watch_cuda(syncs):
            yield syncs
    else:
        with _WatchOperations(syncs) as operations, _watch_methods(operations):
            yield syncs


class _WatchOperations(TorchDispatchMode):
    """Sees the operations below Python, whoever called them."""

    def __init__(self, syncs: HostSyncs) -> None:
        super().__init__()
        self.syncs = syncs
        self.covered = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.covered and _waits(func, args, kwargs):
            self.syncs.add(func.overloadpacket.__name__)
        return func(*args, **kwargs)


@contextmanager
def _watch_methods(operations: _WatchOperations) -> Iterator[None]:
    """See the methods that read a tensor without an operation of their own, such as tolist.

    They are replaced on the class: a torch function mode would be off inside backward hooks.
    """
    own = {name: vars(torch.Tensor)[name] for name in _METHODS if name in vars(torch.Tensor)}
    thread = threading.get_ident()
    for name in _METHODS:
        setattr(torch.Tensor, name, _listening(name, operations, thread))
    try:
        yield
    finally:
        for name in _METHODS:
            if name in own:
                setattr(torch.Tensor, name, own[name])
            else:
                delattr(torch.Tensor, name)


def _listening(name: str, operations: _WatchOperations, thread: int) -> Callable[..., Any]:
    original = getattr(torch.Tensor, name)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        if operations.covered or threading.get_ident() != thread:
            return original(*args, **kwargs)
        operations.syncs.add(name)
        operations.covered = True
        try:
            return original(*args, **kwargs)
        finally:
            operations.covered = False

    return method


def _waits(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    name = func.overloadpacket.__name__
    if name in _WAITING_OPS:
        return True
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None and "Tensor" in func._overloadname
    if name in ("index", "index_put", "index_put_"):
        # One value under a mask becomes a masked fill, which does not wait.
        single = name != "index" and args[2].numel() == 1
        return not single and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
    if name == "_to_copy":
        leaves = args[0].device.type != "cpu" and torch.device(
            kwargs.get("device") or args[0].device
        ) == torch.device("cpu")
        return leaves and not kwargs.get("non_blocking")
    if name == "copy_":
        leaves = args[0].device.type == "cpu" and args[1].device.type != "cpu"
        return leaves and not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    return False


@contextmanager
def _watch_cuda(syncs: HostSyncs) -> Iterator[None]:
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        show: Callable[..., Any] = warnings.showwarning

        def listen(message: Any, *args: Any, **kwargs: Any) -> None:
            if "synchronizing CUDA operation" in str(message):
                syncs.add("cuda", on_device=True)
            elif "Synchronization debug mode is a prototype" not in str(message):
                show(message, *args, **kwargs)

        # Replaced here and put back by `catch_warnings`.
        warnings.showwarning = listen
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def _is_watcher(filename: str) -> bool:
    return filename in (__file__, warnings.__file__) or filename.startswith(_DISPATCH)
