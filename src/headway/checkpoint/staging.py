"""The copy of the live state that a save works on.

Owns: `HostBuffers` (host memory allocated once and used again for every save) and `Stager`, which
takes from the live objects what this rank writes. Does not own: the types (staged.py), writing.

Memory is given to a process page by page as it is first used, and locking pages takes as long
again: several seconds for a large state. `HostBuffers` does both before the first copy, in a thread
if asked to.

On the CPU the copy is complete when `stage` returns. On CUDA it runs on a side stream: forward
and backward go on, and only the optimizer step has to wait (side_copy.py). What a
forward may change (buffers, state of components) is copied on the stream of the forward instead,
so that the order of the stream protects it.
"""

from __future__ import annotations

import ctypes
import logging
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.checkpoint.component import SharingPattern, StateComponent, file_stem
from headway.checkpoint.contents import (
    EVAL_METRICS_NAME,
    MODEL_EXTRA_STEM,
    RUN_CONFIG_NAME,
    TRAINER_STATE_NAME,
    TRAINER_STATE_STEM,
    CheckpointContents,
    plain_json,
)
from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.jsonfile import is_long
from headway.checkpoint.manifest import finite_or_text
from headway.checkpoint.model import ModelTensors, collect_model
from headway.checkpoint.optimizer import expected_state_bytes, named_params, split_optimizer
from headway.checkpoint.packed import ALIGN_BYTES, aligned, cut_up, packed_bytes
from headway.checkpoint.parameter_state import ParameterState
from headway.checkpoint.ranks import Ranks
from headway.checkpoint.records import RecordTexts, refuse_tensors
from headway.checkpoint.sharding import as_slice
from headway.checkpoint.side_copy import SideCopy
from headway.checkpoint.staged import (
    StagedCheckpoint,
    StagedComponent,
    StagedShards,
    StagedTree,
    TensorSlice,
)
from headway.checkpoint.storage import check_name, is_plain_file, list_files
from headway.checkpoint.tensors import spec_of
from headway.checkpoint.tree import has_plain_keys, split_tree
from headway.errors import ConfigError

_MOST_SLACK = 1.05
# Room for what components add after the start, as a part of the whole.
_GROWTH = 100
# Between two of these, bringing memory in can be given up.
_CHUNK_BYTES = 1 << 28

logger = logging.getLogger(__name__)


class HostBuffers:
    """One stretch of host memory, page-locked if `pinned`, reused from save to save."""

    def __init__(self, *, pinned: bool = False) -> None:
        self.pinned = pinned
        self.spare_bytes = 0
        """Room that may stay unused, since what is copied will need it at times."""
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._release: Callable[[], Any] = lambda: None
        self._is_ready = True
        self._thread: threading.Thread | None = None
        self._given_up = threading.Event()
        self._error: BaseException | None = None

    @property
    def capacity_bytes(self) -> int:
        """Host memory held."""
        return self._slab.numel()

    def reserve(self, size: int) -> None:
        """Have room for `size` bytes, and for not much more; `make_ready` brings its pages in."""
        most = max(_MOST_SLACK * (size + self.spare_bytes), size + ALIGN_BYTES)
        if size <= self.capacity_bytes <= most:
            return
        self.give_up()
        # The old memory goes first: the two together would be twice the state.
        self._release()
        self._release = lambda: None
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._slab = torch.empty(size, dtype=torch.uint8)
        self._is_ready = size == 0

    def make_ready(self, *, wait: bool = True) -> None:
        """Take the page faults, and lock the pages, now rather than in the first copy.

        With `wait=False` a thread does it, and `take` waits for that.
        """
        if wait:
            self._join()
        if self._is_ready or self._thread is not None:
            return
        if wait:
            self._slab.zero_()
            self._finish()
            return
        self._given_up.clear()
        # A new thread has the first device, and would make a context there.
        device = torch.cuda.current_device() if self.pinned else None
        # Not a daemon: the interpreter would take the driver down under it.
        self._thread = threading.Thread(
            target=self._make_ready_slowly,
            args=(device,),
            name="headway-save-memory",
            daemon=False,
        )
        self._thread.start()

    def give_up(self) -> None:
        """Let a thread that makes the memory ready end before it is done."""
        self._given_up.set()
        self._join()

    def _join(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _make_ready_slowly(self, device: int | None) -> None:
        # Zeros by ctypes, which takes one core; torch would take those of the training. All of
        # them before pages are locked: while the driver does that, it may hold up launches.
        start, size = self._slab.data_ptr(), self.capacity_bytes
        try:
            for offset in range(0, size, _CHUNK_BYTES):
                if self._given_up.is_set():
                    return
                ctypes.memset(start + offset, 0, min(_CHUNK_BYTES, size - offset))
            with torch.cuda.device(device) if device is not None else nullcontext():
                self._finish()
        except BaseException as error:
            self._error = error

    def _finish(self) -> None:
        if self.pinned:
            self._lock_pages()
        self._is_ready = True

    def _lock_pages(self) -> None:
        # Not by pin_memory(): torch rounds page-locked memory up to a power of two.
        runtime, pointer = torch.cuda.cudart(), self._slab.data_ptr()
        device, codes = torch.cuda.current_device(), []

        def register() -> None:
            with torch.cuda.device(device):
                codes.append(int(runtime.cudaHostRegister(pointer, self.capacity_bytes, 0)))

        # CUDA keeps a failure for the thread that met it, where a later launch would be blamed.
        thread = threading.Thread(target=register, name="headway-page-lock")
        thread.start()
        thread.join()
        if codes != [0]:
            logger.warning(
                "could not page-lock %d bytes of host memory; saves will hold up training longer",
                self.capacity_bytes,
            )
            return
        self._release = weakref.finalize(self._slab, runtime.cudaHostUnregister, pointer)

    def take(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Room for a contiguous copy of each tensor, the values not yet copied.

        What was taken before is given up: its memory is used again.
        """
        wanted = list(tensors)
        self.reserve(packed_bytes(wanted))
        self.make_ready()
        return cut_up(self._slab, wanted)


class Stager:
    """Makes staged checkpoints of live contents, one at a time."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._buffers: HostBuffers | None = None
        self._side_copy = SideCopy()
        self._tokenizer: tuple[Any, dict[str, bytes]] | None = None
        self._records: dict[str, RecordTexts] = {}
        """By the key of a long list in the trainer's state: its history."""

    @property
    def host_bytes(self) -> int:
        """Host memory held for copies."""
        return self._buffers.capacity_bytes if self._buffers else 0

    def reserve(self, contents: CheckpointContents, *, ready: bool = True) -> None:
        """Allocate the host memory for `contents`, so that the first save need not.

        Optimizer state that does not exist yet is estimated from the class; if the estimate is
        wrong, the first save allocates again. With `ready=False` only the size is found out and
        addresses are taken; `make_ready` does the rest. What no save could store is an error.
        """
        staged = StagedCheckpoint()
        model = collect_model(contents.model)
        if contents.stores_model:
            staged.components.append(self._take_model(contents, model))
        staged.components += [self._take_component(c) for c in contents.components]
        tensors = []
        for slots, name in staged.tensor_slots():
            tensors.append(_values_of(_part_of(slots[name])))
            spec_of(tensors[-1], name)  # not after hours, at the first save
        size = packed_bytes(tensors)
        if contents.optimizer is not None:
            named_params(contents.optimizer, model.names_by_id())  # likewise
            size += expected_state_bytes(contents.optimizer, aligned)
        buffers = self._make_buffers(tensors)
        buffers.spare_bytes = sum(
            c.stateful.expected_growth_bytes(aligned)
            for c in contents.components
            if isinstance(c.stateful, ParameterState)
        )
        size += buffers.spare_bytes
        buffers.reserve(size + size // _GROWTH)
        if ready:
            buffers.make_ready()

    def make_ready(self) -> None:
        """Let a thread bring in the memory that is reserved; the next save waits for it."""
        if self._buffers is not None:
            self._buffers.make_ready(wait=False)

    def close(self) -> None:
        """Let that thread end, done or not; a later save makes up for it."""
        if self._buffers is not None:
            self._buffers.give_up()

    def stage(
        self, contents: CheckpointContents, metrics: Mapping[str, Any] | None = None
    ) -> StagedCheckpoint:
        """Copy what this rank writes; the previous staged checkpoint is no longer valid."""
        contents.check_keys()
        staged = StagedCheckpoint()
        model = collect_model(contents.model)
        if contents.stores_model:
            staged.extra_state = sorted(model.extra)
            staged.components.append(self._take_model(contents, model))
        if contents.optimizer is not None:
            staged.components.append(_take_optimizer(contents.optimizer, model))
        staged.components += [self._take_component(c) for c in contents.components]
        if self._ranks.is_main:
            self._take_texts(staged, contents, metrics)
        self._copy(staged, _changed_by_step_only(staged, contents.optimizer))
        return staged

    def wait_before_update(self) -> None:
        """Make the current CUDA stream wait for a copy that still reads live tensors, if any."""
        self._side_copy.wait_before_update()

    # -- what to copy -----------------------------------------------------------------------

    def _take_model(self, contents: CheckpointContents, model: ModelTensors) -> StagedComponent:
        component = StagedComponent("model", SharingPattern.GLOBAL)
        component.shards = StagedShards("model", dict(model.stored), dict(model.aliases))
        if not self._ranks.is_main:
            return component
        if model.extra:
            encoded, tensors = split_tree(model.extra, what="extra state of the model")
            component.trees.append(StagedTree(MODEL_EXTRA_STEM, encoded, tensors))
        for name, config in (
            ("config.json", contents.model_config),
            ("generation_config.json", contents.generation_config),
        ):
            if config is not None:
                component.texts[name] = plain_json(config, name)
        return component

    def _take_component(self, component: StateComponent) -> StagedComponent:
        key, pattern = component.key, component.sharing_pattern
        plain_json(component.metadata, f"the metadata of component {key!r}")
        staged = StagedComponent(key, pattern, dict(component.metadata))
        staged.follows_steps = isinstance(component.stateful, ParameterState)
        ranks = self._ranks
        if not ranks.writes(component):
            return staged
        state = component.stateful.state_dict()
        if pattern is SharingPattern.SHARDED:
            staged.shards = StagedShards(file_stem(component), _named_tensors(key, state))
            return staged
        group = ranks.group_of(component).number if pattern is SharingPattern.PER_GROUP else 0
        stem = file_stem(component, rank=ranks.rank, node=ranks.node, group=group)
        encoded, tensors = split_tree(state, what=f"state of {key!r}")
        staged.trees.append(StagedTree(stem, encoded, tensors))
        return staged

    def _take_texts(
        self,
        staged: StagedCheckpoint,
        contents: CheckpointContents,
        metrics: Mapping[str, Any] | None,
    ) -> None:
        staged.trees.append(StagedTree(TRAINER_STATE_STEM, self._encode_trainer_state(contents)))
        if contents.run_config is not None:
            text = plain_json(contents.run_config, "the run configuration")
            staged.texts[RUN_CONFIG_NAME] = text
        staged.texts.update(contents.run_files)
        if metrics is not None:
            finite = {key: finite_or_text(value) for key, value in metrics.items()}
            staged.texts[EVAL_METRICS_NAME] = plain_json(finite, "the evaluation metrics")
        if contents.save_tokenizer is not None:
            staged.texts.update(self._tokenizer_files(contents.save_tokenizer))

    def _encode_trainer_state(self, contents: CheckpointContents) -> Any:
        what, state = "trainer state", contents.trainer_state
        lists = {key: item for key, item in state.items() if is_long(item)}
        if not has_plain_keys(state):
            lists = {}
        rest = {key: item for key, item in state.items() if key not in lists}
        encoded, tensors = split_tree(rest, what=what)
        refuse_tensors(tensors, what, TRAINER_STATE_NAME)
        for key, records in lists.items():
            if key not in self._records:
                self._records[key] = RecordTexts(what, key, TRAINER_STATE_NAME)
            encoded[key] = self._records[key].take(records)
        return encoded

    def _tokenizer_files(self, save: Callable[[str], Any]) -> dict[str, bytes]:
        # Kept: writing a large vocabulary out takes longer than copying the state.
        if self._tokenizer is None or self._tokenizer[0] != save:
            with tempfile.TemporaryDirectory(prefix="headway-tokenizer-") as folder:
                save(folder)
                files = {}
                for name in list_files(Path(folder)):
                    if not is_plain_file(Path(folder), check_name(name)):
                        raise CheckpointError(f"the tokenizer's {name} is not a regular file")
                    files[name] = Path(folder, name).read_bytes()
            self._tokenizer = (save, files)
        return self._tokenizer[1]

    # -- copying ----------------------------------------------------------------------------

    def _make_buffers(self, tensors: Iterable[Any]) -> HostBuffers:
        on_device = any(isinstance(t, Tensor) and t.is_cuda for t in tensors)
        if self._buffers is None or (on_device and not self._buffers.pinned):
            self._buffers = HostBuffers(pinned=on_device)
        return self._buffers

    @torch.no_grad()
    def _copy(self, staged: StagedCheckpoint, late: set[int]) -> None:
        """Put a host copy in the place of every live tensor."""
        slots = list(staged.tensor_slots())
        held = [slots_of[name] for slots_of, name in slots]
        parts = [_part_of(value) for value in held]
        sources = [_values_of(part) for part in parts]
        # A save that failed has not waited for its copy, which goes to the same host memory.
        self._side_copy.finish()
        copies = self._make_buffers(sources).take(sources)
        on_side: list[tuple[Tensor, Tensor]] = []
        for (values, name), value, part, source, copy in zip(slots, held, parts, sources, copies):
            values[name] = copy
            if isinstance(part, TensorSlice):
                values[name] = TensorSlice(copy, part.shape, part.offsets)
            if source.is_cuda and id(value) in late:
                on_side.append((copy, source))
            else:
                copy.copy_(source, non_blocking=source.is_cuda)
        if any(source.is_cuda for source in sources):
            staged.wait = self._side_copy.start(on_side, self._buffers)


def _part_of(held: Tensor | TensorSlice) -> Tensor | TensorSlice:
    return held if isinstance(held, TensorSlice) else as_slice(held)


def _values_of(held: Tensor | TensorSlice) -> Tensor:
    return held.tensor if isinstance(held, TensorSlice) else held


def _take_optimizer(optimizer: torch.optim.Optimizer, model: ModelTensors) -> StagedComponent:
    encoded, tensors = split_optimizer(optimizer, model.names_by_id())
    return StagedComponent(
        "optimizer",
        SharingPattern.GLOBAL,
        shards=StagedShards("optimizer", dict(tensors)),
        optimizer=encoded,
    )


def _changed_by_step_only(
    staged: StagedCheckpoint, optimizer: torch.optim.Optimizer | None
) -> set[int]:
    """Tensors that nothing changes before the next optimizer step, by `id`.

    Parameters that no optimizer has may be a forward's to write to, such as an encoder that follows
    another one, and `.data` leaves no trace of that.
    """
    if optimizer is None:
        return set()
    stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
    found: set[int] = set()
    for component in staged.components:
        if component.shards is None:
            continue
        ids = {id(tensor) for tensor in component.shards.tensors.values()}
        if component.key == "optimizer" or component.follows_steps:
            found |= ids
        elif component.key == "model":
            found |= ids & stepped
    return found


def _named_tensors(key: str, state: Any) -> dict[str, Tensor | TensorSlice]:
    if not isinstance(state, Mapping):
        raise ConfigError(
            f"component {key!r} is SHARDED: its state must be a dict of tensors by name, not a "
            f"{type(state).__name__}"
        )
    for name, value in state.items():
        if not isinstance(value, Tensor | TensorSlice):
            raise ConfigError(
                f"component {key!r} is SHARDED: {name} is a {type(value).__name__}; only tensors "
                "by name can be dealt to ranks"
            )
    return dict(state)
