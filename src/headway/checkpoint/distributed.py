"""Ranks that talk over torch.distributed.

Owns: the gloo group that checkpoints have for themselves, and the messages on it. Does not own: the
process groups of training, which it only asks for their members.

Everything said is one round: each rank sends rank 0 a JSON value, rank 0 answers each. A rank that
cannot be reached is part of the answer, so that all others learn of it in the same round.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch import distributed as dist

from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.ranks import Group, Ranks
from headway.dist.env import detect_env
from headway.dist.limits import collective_limit

_Answer = Literal["all", "main", "none"]


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


class DistributedRanks(Ranks):
    """All ranks of the default process group; made by every rank at the same time.

    `groups` are the process groups by name that this rank belongs to (for PER_GROUP components).
    `node` is the number of this rank's machine, by default what the launcher says; `timeout_s` how
    long to wait for a rank that is alive, by default as long as in other collectives.
    """

    def __init__(
        self,
        groups: Mapping[str, dist.ProcessGroup] | None = None,
        *,
        node: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        limit = collective_limit()
        if timeout_s is not None:
            limit = datetime.timedelta(seconds=timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=limit)
        members = {
            name: dist.get_process_group_ranks(group) for name, group in (groups or {}).items()
        }
        own_node = detect_env(use_cpu=True).node_rank if node is None else node
        told = self.exchange([own_node, members])
        self.nodes = tuple(number for number, _ in told)
        self.groups = {}
        for name, own in members.items():
            distinct = sorted({tuple(said[name]) for _, said in told if name in said})
            self.groups[name] = Group(distinct.index(tuple(own)), tuple(own), tuple(distinct))

    # -- messages ---------------------------------------------------------------------------

    def exchange(self, value: Any) -> list[Any]:
        return self._agree(value, "all")

    def gather(self, value: Any) -> list[Any]:
        return self._agree(value, "none")

    def share(self, value: Any) -> Any:
        return self._agree(value, "main")[0]

    def vote(self, error: BaseException | None, what: str) -> None:
        try:
            said, lost = self._talk(None if error is None else _first_line(error), "all")
        except CheckpointError:
            if error is None:
                raise
            raise error from None  # what went wrong here came first
        if error is not None:
            raise error
        failed = {
            rank: f"rank {rank} failed while {what}: {text}"
            for rank, text in enumerate(said)
            if text is not None and str(rank) not in lost
        }
        told = list(failed.values())
        told += [f"rank {rank} was lost while {what}: {text}" for rank, text in lost.items()]
        if told:
            failure = CheckpointError("; ".join(told))
            failure.failed_rank = min(failed, default=None)
            raise failure

    def _agree(self, value: Any, answer: _Answer) -> list[Any]:
        values, lost = self._talk(value, answer)
        if lost:
            raise CheckpointError(
                "; ".join(f"rank {rank} was lost: {text}" for rank, text in lost.items())
            )
        return values

    def _talk(self, value: Any, answer: _Answer) -> tuple[list[Any], dict[str, str]]:
        """One round: the values that `answer` asks for, and what became of lost ranks."""
        if not self.is_main:
            self._send(0, json.dumps(value).encode())
            reply = json.loads(self._receive(0))
            # Equal values travel once: ranks that hold the same describe it in the same words.
            return [reply["distinct"][number] for number in reply["which"]], reply["lost"]
        texts, lost = [json.dumps(value)], {}
        for rank in range(1, self.world_size):
            try:
                texts.append(self._receive(rank).decode())
            except CheckpointError as error:
                texts.append("null")
                lost[str(rank)] = str(error)
        values = [json.loads(text) for text in texts]
        told = {"all": texts, "main": texts[:1], "none": []}[answer]
        numbers = {text: number for number, text in enumerate(dict.fromkeys(told))}
        reply = {
            "distinct": [json.loads(text) for text in numbers],
            "which": [numbers[text] for text in told],
            "lost": lost,
        }
        encoded = json.dumps(reply).encode()
        for rank in range(1, self.world_size):
            if str(rank) not in lost:
                # One lost only now is named in the next round, to all; here it would be to one.
                with contextlib.suppress(CheckpointError):
                    self._send(rank, encoded)
        return values, lost

    def _send(self, rank: int, data: bytes) -> None:
        body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        try:
            dist.send(torch.tensor([body.numel()]), rank, group=self._group)
            dist.send(body, rank, group=self._group)
        except RuntimeError as error:
            raise CheckpointError(f"no contact with rank {rank}: {_first_line(error)}") from error

    def _receive(self, rank: int) -> bytes:
        size = torch.zeros(1, dtype=torch.int64)
        try:
            dist.recv(size, rank, group=self._group)
            body = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(body, rank, group=self._group)
        except RuntimeError as error:
            raise CheckpointError(f"no contact with rank {rank}: {_first_line(error)}") from error
        return body.numpy().tobytes()

    # -- tensors ----------------------------------------------------------------------------

    def swap(self, outgoing: list[tuple[int, Tensor]], incoming: list[tuple[int, Tensor]]) -> None:
        # All are posted before any is waited for: no order of the ranks can block.
        works = [
            (rank, dist.irecv(_bytes_of(tensor), rank, group=self._group))
            for rank, tensor in incoming
            if tensor.numel()
        ]
        works += [
            (rank, dist.isend(_bytes_of(tensor), rank, group=self._group))
            for rank, tensor in outgoing
            if tensor.numel()
        ]
        for rank, work in works:
            try:
                if work is not None:
                    work.wait()
            except RuntimeError as error:
                raise CheckpointError(
                    f"no contact with rank {rank}: {_first_line(error)}"
                ) from error

    def spread(self, tensor: Tensor) -> None:
        try:
            dist.broadcast(_bytes_of(tensor), 0, group=self._group)
        except RuntimeError as error:
            raise CheckpointError(f"no contact with a rank: {_first_line(error)}") from error


def _bytes_of(tensor: Tensor) -> Tensor:
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8) if not flat.is_complex() else torch.view_as_real(flat).view(-1)
