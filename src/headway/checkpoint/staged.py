"""A checkpoint as plain host data: what this rank has to write, independent of the live objects.

Owns: the types. Does not own: how the data gets here (staging.py) or to the disk (writer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from headway.checkpoint.component import SharingPattern


@dataclass
class TensorSlice:
    """A rectangular part of a tensor that several ranks hold together."""

    tensor: Tensor
    shape: tuple[int, ...]
    """Shape of the whole."""
    offsets: tuple[int, ...]
    """Where the part begins, per dimension."""


@dataclass
class StagedTree:
    """A state as a JSON value and the tensors it refers to: `<stem>.json`, `<stem>.safetensors`."""

    stem: str
    encoded: Any
    tensors: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class StagedShards:
    """Named tensors, of which every rank brings what it holds: `<prefix>-0000k-of-0000n`."""

    prefix: str
    tensors: dict[str, Tensor | TensorSlice]
    aliases: dict[str, str] = field(default_factory=dict)


@dataclass
class StagedComponent:
    """One entry of the manifest, with the part of it that this rank brings."""

    key: str
    pattern: SharingPattern
    metadata: dict[str, Any] = field(default_factory=dict)
    shards: StagedShards | None = None
    trees: list[StagedTree] = field(default_factory=list)
    """Written by this rank."""
    texts: dict[str, bytes] = field(default_factory=dict)
    """Whole files, written by this rank."""
    optimizer: dict[str, Any] | None = None
    """The JSON part of an optimizer's state; rank 0 joins those of all ranks."""
    follows_steps: bool = False
    """Whether nothing but an optimizer step leads to a change of its tensors."""


@dataclass
class StagedCheckpoint:
    """Everything that one rank writes in one save."""

    components: list[StagedComponent] = field(default_factory=list)
    trees: list[StagedTree] = field(default_factory=list)
    texts: dict[str, bytes] = field(default_factory=dict)
    extra_state: list[str] = field(default_factory=list)
    """Names of the modules' extra state that this rank has; rank 0 writes its own."""
    wait: Callable[[], None] = lambda: None
    """Returns when the copy of every tensor is complete; to be called before reading any."""

    def tensor_slots(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Every place that holds a tensor, as a dict and a key in it."""
        for tree in self.trees:
            yield from ((tree.tensors, name) for name in tree.tensors)
        for component in self.components:
            if component.shards is not None:
                yield from ((component.shards.tensors, name) for name in component.shards.tensors)
            for tree in component.trees:
                yield from ((tree.tensors, name) for name in tree.tensors)


@dataclass
class PendingSave:
    """A save whose state has been copied and is yet to be written."""

    staged: StagedCheckpoint
    step: int
    kind: str
    metrics: dict[str, Any] | None
    metric: float | None
    metadata: dict[str, Any]
    before_commit: Callable[[Path], None] | None
    name: str
    """Of the directory to be."""
