"""How named tensors are split into weight files, and how those files are called.

Owns: the plan and the names. Does not own: the bytes of a file or the index beside it.
"""

from __future__ import annotations

from collections.abc import Mapping


def plan_shards(sizes: Mapping[str, int], max_shard_bytes: int) -> list[list[str]]:
    """Names per file, by name; a file exceeds the limit only if one tensor alone does.

    `sizes` are bytes by tensor name; no tensors make no files.
    """
    shards: list[list[str]] = []
    room_bytes = 0
    for name in sorted(sizes):
        if not shards or sizes[name] > room_bytes:
            shards.append([])
            room_bytes = max_shard_bytes
        shards[-1].append(name)
        room_bytes -= sizes[name]
    return shards


def shard_name(number: int, count: int, prefix: str = "model") -> str:
    """The file name of shard `number` (from 1) of `count`."""
    return f"{prefix}-{number:05d}-of-{count:05d}.safetensors"


def index_name(prefix: str = "model") -> str:
    """The index file of a set of shards."""
    return f"{prefix}.safetensors.index.json"
