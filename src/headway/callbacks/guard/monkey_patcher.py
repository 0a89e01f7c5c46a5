"""Keeps the slices of device meshes, where the installed torch makes a new one each time.

Owns: the one change that is made to torch, when it is worth making, and that it is taken back. Does
not own: meshes (strategies).

FSDP of older releases sliced its mesh again and again in every step, and each slice is a new object
that costs as much as a small kernel. From torch 2.11 on a training step takes no slice at all, so
that there is nothing to gain unless a model slices meshes itself.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from headway.callbacks.watch.ranges import require_count, require_flag
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerState

logger = logging.getLogger(__name__)

NOT_NEEDED_FROM = (2, 11)
Slice = Callable[[Any, Any], Any]


class MonkeyPatcherCallback(TrainerCallback):
    """While a run goes on, `DeviceMesh.__getitem__` gives the same slice for the same names.

    `enabled`: None does so where torch is older than 2.11, True always, False never. At most
    `max_slices` are kept.
    """

    def __init__(self, enabled: bool | None = None, *, max_slices: int = 128) -> None:
        kind = type(self).__name__
        if enabled is not None:
            require_flag(f"{kind}: enabled", enabled)
        require_count(f"{kind}: max_slices", max_slices, least=1)
        self.enabled, self.max_slices = enabled, max_slices
        self.active = False

    def on_train_begin(self, state: TrainerState) -> None:
        wanted = is_needed() if self.enabled is None else self.enabled
        if wanted and not self.active:
            _cache.install(self.max_slices)
            self.active = True
        elif not wanted and self.enabled is None and state.is_world_process_zero:
            logger.info("MonkeyPatcherCallback: this torch takes no slices of meshes in a step")

    def on_close(self) -> None:
        if self.active:
            _cache.remove()
            self.active = False


def is_needed(version: str | None = None) -> bool:
    """Whether a step of this release of torch slices meshes."""
    if version is None:
        import torch

        version = str(torch.__version__)
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) < NOT_NEEDED_FROM


class SliceCache:
    """The slices that were asked for last; one for all runs of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, Any], tuple[Any, Any]] = OrderedDict()
        self._original: Slice | None = None
        self._num_users = self._most = 0

    def install(self, most: int) -> None:
        """Change torch, unless another run of the process did."""
        from torch.distributed.device_mesh import DeviceMesh

        with self._lock:
            self._num_users += 1
            self._most = max(self._most, most)
            if self._num_users > 1:
                return
            original = self._original = DeviceMesh.__getitem__
            DeviceMesh.__getitem__ = self._make(original)  # type: ignore[method-assign]

    def remove(self) -> None:
        """Change it back once nobody wants it any more, and forget the slices."""
        from torch.distributed.device_mesh import DeviceMesh

        with self._lock:
            self._num_users -= 1
            if self._num_users:
                return
            assert self._original is not None
            DeviceMesh.__getitem__ = self._original  # type: ignore[assignment, method-assign]
            self._original, self._most = None, 0
            self._kept.clear()

    def _make(self, original: Slice) -> Slice:
        def get(mesh: Any, names: Any) -> Any:
            key = (id(mesh), tuple(names) if isinstance(names, list) else names)
            with self._lock:
                # The mesh is kept with its slice, so that its id is not given to another.
                found = self._kept.get(key)
                if found is not None:
                    self._kept.move_to_end(key)
                    return found[1]
            part = original(mesh, names)
            with self._lock:
                self._kept[key] = (mesh, part)
                while len(self._kept) > self._most:
                    self._kept.popitem(last=False)
            return part

        return get

    def __len__(self) -> int:
        return len(self._kept)


_cache = SliceCache()
