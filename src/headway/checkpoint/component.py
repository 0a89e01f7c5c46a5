"""What a checkpoint holds besides weights: named stateful objects and how ranks share them.

Owns: `SharingPattern`, `StateComponent` and the file stem each pattern writes to.
Does not own: encoding of the state (tree.py) or the order of loading (reader.py).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable
from urllib.parse import quote

VALIDATION_LEVELS = ("none", "quick", "tensor", "full")


@runtime_checkable
class Stateful(Protocol):
    """Anything with `state_dict` and `load_state_dict`."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class SharingPattern(enum.Enum):
    """Who writes a component's state and who reads it."""

    GLOBAL = "global"
    """One copy for the whole job: rank 0 writes, every rank reads it."""
    PER_RANK = "per_rank"
    """Different on each rank: every rank writes and reads its own file."""
    REPLICATED = "replicated"
    """Equal everywhere: rank 0 writes, every rank reads it."""
    PER_GROUP = "per_group"
    """Equal inside a process group, different between groups."""
    PER_NODE = "per_node"
    """Local to a node."""
    SHARDED = "sharded"
    """Named tensors, each stored whole under its global name, written by whoever holds it."""


@dataclass
class StateComponent:
    """One entry of a checkpoint."""

    key: str
    """Unique name; the state goes to `state/<key>.json`."""
    stateful: Stateful
    """The live object: saved by `state_dict()`, restored by `load_state_dict()`."""
    sharing_pattern: SharingPattern
    process_group_name: str | None = None
    """The group of a PER_GROUP component."""
    required: bool = True
    """Whether a checkpoint without this component is an error at load."""
    validate_replication: bool = False
    """Whether to check, before a save, that a REPLICATED state is equal on all ranks."""
    validation_level: str = "tensor"
    """How thorough that check is: none, quick, tensor or full."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Recorded in the manifest as it is (JSON values)."""

    def __post_init__(self) -> None:
        if not self.key:
            raise ValueError("a StateComponent needs a key")
        if self.sharing_pattern is SharingPattern.PER_GROUP and not self.process_group_name:
            raise ValueError(f"component {self.key!r} is PER_GROUP and needs process_group_name")
        if self.validate_replication and self.sharing_pattern is not SharingPattern.REPLICATED:
            raise ValueError(
                f"component {self.key!r}: validate_replication needs REPLICATED, "
                f"not {self.sharing_pattern.name}"
            )
        if self.validation_level not in VALIDATION_LEVELS:
            raise ValueError(
                f"component {self.key!r}: validation_level {self.validation_level!r} is none of "
                f"{', '.join(VALIDATION_LEVELS)}"
            )


def file_stem(component: StateComponent, *, rank: int = 0, node: int = 0, group: int = 0) -> str:
    """The component's file, relative to the checkpoint and without its ending."""
    stem = f"state/{quote(component.key, safe='')}"
    match component.sharing_pattern:
        case SharingPattern.PER_RANK:
            return f"{stem}.rank{rank:05d}"
        case SharingPattern.PER_NODE:
            return f"{stem}.node{node:05d}"
        case SharingPattern.PER_GROUP:
            name = quote(component.process_group_name or "", safe="")
            return f"{stem}.group-{name}-{group:05d}"
        case _:
            return stem
