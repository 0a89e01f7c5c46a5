"""The processes that save and load one checkpoint together, and how they talk about it.

Owns: `Ranks` (who this process is, small JSON messages, votes, tensors from rank to rank), its
single-process form and the one over torch.distributed. Does not own: what is said (writer.py,
replication.py, manager.py) or the process groups of training (dist/).

Messages go over a gloo group of their own, so that they may be sent from a background thread
while training uses its groups. They form a star around rank 0, link by link, so that a rank that
is gone can be named, and the others still learn of it.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from headway.checkpoint.component import SharingPattern, StateComponent
from headway.errors import ConfigError, unknown


@dataclass(frozen=True)
class Group:
    """The process group of one name that this rank belongs to."""

    number: int
    """Its place among all groups of that name, ordered by their lowest rank."""
    members: tuple[int, ...]
    all_members: tuple[tuple[int, ...], ...]
    """The members of every group of that name."""


class Ranks(ABC):
    """One rank's view of all of them."""

    rank: int
    world_size: int
    nodes: tuple[int, ...]
    """The node of every rank."""
    groups: Mapping[str, Group]
    each_node: bool = False
    """Whether every node keeps a checkpoint of its own; only where they share no storage."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which knows of all."""
        return self.rank == 0

    @property
    def leader(self) -> int:
        """The rank that commits what this one takes part in."""
        return self.nodes.index(self.node) if self.each_node else 0

    @property
    def leads(self) -> bool:
        """Whether this rank commits: rank 0, or the first one of each node."""
        return self.rank == self.leader

    @property
    def share_of_files(self) -> tuple[int, int]:
        """Which files this rank reads where all are read together: the first, and every n-th."""
        if not self.each_node:
            return self.rank, self.world_size
        return self.nodes[: self.rank].count(self.node), self.num_on_node

    @property
    def node(self) -> int:
        """The node this rank runs on."""
        return self.nodes[self.rank]

    @property
    def num_on_node(self) -> int:
        """How many ranks run on this rank's node."""
        return self.nodes.count(self.node)

    def topology(self) -> dict[str, Any]:
        """What the manifest records about the ranks."""
        facts: dict[str, Any] = {"world_size": self.world_size}
        if self.world_size > 1:
            facts["nodes"] = list(self.nodes)
            facts["groups"] = {
                name: [list(members) for members in group.all_members]
                for name, group in sorted(self.groups.items())
            }
        return facts

    def group_of(self, component: StateComponent) -> Group:
        """The group of a PER_GROUP component."""
        name = component.process_group_name or ""
        if name not in self.groups:
            raise ConfigError(
                f"component {component.key!r}: " + unknown("process group", name, self.groups)
            )
        return self.groups[name]

    def writes(self, component: StateComponent) -> bool:
        """Whether this rank writes a file of the component."""
        match component.sharing_pattern:
            case SharingPattern.GLOBAL | SharingPattern.REPLICATED:
                return self.rank == 0
            case SharingPattern.PER_NODE:
                return self.rank == self.nodes.index(self.node)
            case SharingPattern.PER_GROUP:
                return self.rank == self.group_of(component).members[0]
            case _:
                return True

    @abstractmethod
    def exchange(self, value: Any) -> list[Any]:
        """The JSON values of all ranks, in rank order, on every rank."""

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """The JSON values of all ranks on rank 0; an empty list elsewhere."""

    @abstractmethod
    def share(self, value: Any) -> Any:
        """Rank 0's JSON value on every rank."""

    @abstractmethod
    def vote(self, error: BaseException | None, what: str) -> None:
        """Return if no rank brings an error; else raise on every rank, naming who failed."""

    @abstractmethod
    def swap(self, outgoing: list[tuple[int, Tensor]], incoming: list[tuple[int, Tensor]]) -> None:
        """Send host tensors to ranks and fill others from ranks, all at once.

        Between two ranks the tensors arrive in the order in which they were sent.
        """

    @abstractmethod
    def spread(self, tensor: Tensor) -> None:
        """Fill a host tensor with rank 0's values on every rank."""

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """What happens inside succeeds on every rank, or an error is raised on every rank."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
        self.vote(error, what)


class SoloRanks(Ranks):
    """A process on its own."""

    rank = 0
    world_size = 1
    nodes = (0,)

    def __init__(self) -> None:
        self.groups = {}

    def exchange(self, value: Any) -> list[Any]:
        return [value]

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def share(self, value: Any) -> Any:
        return value

    def vote(self, error: BaseException | None, what: str) -> None:
        if error is not None:
            raise error

    def swap(self, outgoing: list[tuple[int, Tensor]], incoming: list[tuple[int, Tensor]]) -> None:
        assert not outgoing and not incoming, "there is nobody to swap with"

    def spread(self, tensor: Tensor) -> None:
        pass
