"""Checkpoints of which every node keeps a copy of its own, on storage that the nodes do not share.

Owns: telling shared storage from storage apart, carrying files to the nodes that did not write
them, finding a checkpoint that all nodes have. Does not own: the commit (manager.py, manifest.py).

No node commits before every node has all files, digested and synced, and the same manifest. The
renames that follow are the nodes' own: a failure between them leaves the new checkpoint on some
nodes only. So what counts for a resume is what all nodes have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.manifest import CommittedCheckpoint, verify
from headway.checkpoint.owner import new_nonce
from headway.checkpoint.ranks import Ranks
from headway.checkpoint.search import Search, choose_unread
from headway.checkpoint.storage import DigestWriter, FileRecord, Storage
from headway.dist.agreement import CommonMistake

CHUNK_BYTES = 16 * 2**20
"""What travels of one file in one round."""

Chunk = tuple[str, int, int]
"""Of a file: its name, an offset, a number of bytes."""


def require_apart(ranks: Ranks, folder: Path) -> None:
    """Refuse nodes that see each other's files where `folder` is or will be; nothing stays there.

    Numbers of devices and inodes would not tell: machines set up from one image have the same.
    """
    nonce = ranks.share(new_nonce() if ranks.is_main else None)
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    probes = {node: there / f".headway-node-{node}-{nonce}" for node in set(ranks.nodes)}
    own = probes[ranks.node]
    try:
        with ranks.together("looking whether nodes share storage"):
            if ranks.leads:
                own.touch()
        with ranks.together("looking whether nodes share storage"):
            # By name: a listing of a network's directory may be an old one.
            seen = [node for node, probe in sorted(probes.items()) if probe.exists()]
        together = next((nodes for nodes in ranks.exchange(seen) if len(nodes) > 1), None)
    finally:
        if ranks.leads:
            own.unlink(missing_ok=True)
    if together is not None:
        raise CommonMistake(
            f"save_on_each_node: nodes {', '.join(map(str, together))} share the storage of "
            f"output_dir ({folder}), where each would write the same files; set it to False"
        )


def copy_to_nodes(
    ranks: Ranks,
    written: Sequence[Mapping[str, Any]],
    storage: Storage,
    directory: Path,
    digest: str,
) -> None:
    """Bring the files that each rank wrote, with their records, to the nodes of all others.

    Every rank takes part in every round to the end, also after an error of its own: the others
    count on what it sends.
    """
    plans = [_cut(files) for files in written]
    inbox, failed = _Inbox(storage, directory, digest), list[Exception]()
    with ranks.together("copying files between nodes"):
        for number in range(max(map(len, plans))):
            chunks = {owner: plan[number] for owner, plan in enumerate(plans) if number < len(plan)}
            arrivals = {
                owner: torch.empty(chunk[2], dtype=torch.uint8)
                for owner, chunk in chunks.items()
                if ranks.leads and ranks.nodes[owner] != ranks.node
            }
            try:
                outgoing = _send_out(ranks, directory, chunks.get(ranks.rank), failed)
                ranks.swap(outgoing, list(arrivals.items()))
                for owner, body in arrivals.items() if not failed else ():
                    name = chunks[owner][0]
                    inbox.take(chunks[owner], body, FileRecord(*written[owner][name]))
            except Exception as error:
                failed.append(error)
        inbox.close()
        if failed:
            raise failed[0]


def _send_out(
    ranks: Ranks, directory: Path, chunk: Chunk | None, failed: list[Exception]
) -> list[tuple[int, Tensor]]:
    """What the first ranks of the other nodes get of a chunk."""
    if chunk is None:
        return []
    leaders = sorted({ranks.nodes.index(node) for node in ranks.nodes if node != ranks.node})
    body = _read(directory, chunk, failed)
    return [(leader, body) for leader in leaders]


def _cut(files: Mapping[str, Any]) -> list[Chunk]:
    chunks: list[Chunk] = []
    for name, record in sorted(files.items()):
        size = FileRecord(*record).size
        starts = range(0, size, CHUNK_BYTES) if size else [0]
        chunks += [(name, start, min(CHUNK_BYTES, size - start)) for start in starts]
    return chunks


def _read(directory: Path, chunk: Chunk, failed: list[Exception]) -> Tensor:
    name, start, num_bytes = chunk
    body = torch.zeros(num_bytes, dtype=torch.uint8)
    try:
        with open(directory / name, "rb") as file:
            file.seek(start)
            view = body.numpy().data
            while view.nbytes:
                count = file.readinto(view)  # type: ignore[attr-defined]
                if not count:
                    raise CheckpointError(f"{directory / name} is shorter than it was written")
                view = view[count:]
    except (OSError, CheckpointError) as error:
        failed.append(error)
    return body


class _Inbox:
    """Files that arrive piece by piece, several at a time."""

    def __init__(self, storage: Storage, directory: Path, digest: str) -> None:
        self._storage, self._directory, self._digest = storage, directory, digest
        self._open: dict[str, DigestWriter] = {}

    def take(self, chunk: Chunk, body: Tensor, wanted: FileRecord) -> None:
        name, start, num_bytes = chunk
        if start == 0:
            path = self._directory / name
            self._open[name] = DigestWriter(self._storage, path, self._digest)
        self._open[name].write(body.numpy().data)
        if start + num_bytes == wanted.size:
            writer = self._open.pop(name)
            writer.__exit__(None, None, None)
            if writer.record != wanted:
                raise CheckpointError(f"{name} arrived from another node with other bytes")

    def close(self) -> None:
        """Give up what has not arrived whole."""
        for writer in self._open.values():
            with contextlib.suppress(OSError):
                writer.__exit__(CheckpointError, None, None)


def find_common(
    ranks: Ranks,
    storage: Storage,
    listed: Sequence[CommittedCheckpoint],
    suspects: Collection[str] | None = None,
) -> Search:
    """The newest training checkpoint that is whole on every node; the same on all ranks.

    `suspects` as for `find_newest_whole`.

    Where nodes have checkpoints and none is on all of them, that is an error: a run that began
    again beside them would look like one that goes on.
    """
    own = [[c.path.name, c.manifest.digest, c.save_counter] for c in listed if c.kind == "training"]
    told = ranks.exchange(own if ranks.leads else None)
    by_node = {
        ranks.nodes[rank]: {name: (digest, counter) for name, digest, counter in one}
        for rank, one in enumerate(told)
        if one is not None
    }
    first = by_node[ranks.nodes[0]]
    common = [
        name for name in first if all(have.get(name) == first[name] for have in by_node.values())
    ]
    newest = max((first[name][1] for name in common), default=0)
    lacking = [
        f"{storage.root / name}: not on node {', '.join(map(str, others))}, or another one there"
        for node, have in sorted(by_node.items())
        for name, known in have.items()
        if known[1] > newest
        and (others := [n for n, there in by_node.items() if there.get(name) != known])
    ]
    if not common and any(by_node.values()):
        raise CheckpointError(
            "\n".join(["save_on_each_node: no checkpoint is on every node", *lacking])
            + "\ncopy one to the nodes that lack it, or start afresh"
        )
    problems, damaged = lacking, set[str]()
    for name in sorted(common, key=lambda name: -first[name][1]):
        own_copy = next((c for c in listed if c.path.name == name), None)
        told = ranks.exchange(_check(ranks, own_copy, suspects))
        wrong = [line for lines in told for line in lines]
        if not wrong:
            return Search(storage.root / name, problems, damaged)
        problems = [*problems, *wrong]
        damaged.add(name)
    return Search(None, problems, damaged)


def _check(
    ranks: Ranks, checkpoint: CommittedCheckpoint | None, suspects: Collection[str] | None
) -> list[str]:
    if not ranks.leads:
        return []
    assert checkpoint is not None, "it is on every node"
    try:
        found = verify(checkpoint.path, unread=choose_unread(checkpoint, suspects))
        return [f"node {ranks.node}: {line}" for line in found]
    except (OSError, CheckpointError) as error:
        return [f"node {ranks.node}: {checkpoint.path}: {error}"]


def require_same(ranks: Ranks, values: Any, what: str) -> None:
    """Refuse to go on where the nodes differ in something."""
    told = [one for rank, one in enumerate(ranks.exchange(values)) if _leads(ranks, rank)]
    if any(one != told[0] for one in told):
        raise CheckpointError(f"the nodes differ in {what}")


def _leads(ranks: Ranks, rank: int) -> bool:
    return ranks.nodes.index(ranks.nodes[rank]) == rank
