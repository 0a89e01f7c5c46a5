"""What all ranks say to each other on the host: one decision, small values, equal facts.

Owns: collectives of a few bytes over a gloo group. Does not own: tensors of training
(strategies/), nor what is decided (engine/).

Values travel as JSON, never as pickles: a rank runs nothing that another rank sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from headway.dist.watch import Watch

_SHOWN_CHARACTERS = 80


class CommonMistake(ConfigError):
    """A mistake that all ranks found together: every one of them has these same words for it."""


def agree_bits(value: int, group: ProcessGroup | None = None) -> int:
    """The bitwise or over all ranks; every rank must call it. Bits 0 to 62."""
    import torch
    from torch import distributed

    bits, watch = torch.tensor([value], dtype=torch.int64), _watch()
    if watch is not None:
        watch.come()
    distributed.all_reduce(bits, distributed.ReduceOp.BOR, group=_host(group))
    if watch is not None:
        watch.go_on()
    return int(bits.item())


def exchange(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Every rank's value (anything JSON has), in rank order; every rank must call it."""
    import torch
    from torch import distributed

    group = _host(group)
    num_ranks = distributed.get_world_size(group)
    body = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(num_ranks)]
    distributed.all_gather(sizes, torch.tensor([body.numel()]), group=group)
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
    padded[: body.numel()] = body
    gathered = [torch.empty_like(padded) for _ in range(num_ranks)]
    distributed.all_gather(gathered, padded, group=group)
    return [json.loads(text[: int(size)].numpy().tobytes()) for text, size in zip(gathered, sizes)]


def require_equal(facts: Mapping[str, str], group: ProcessGroup | None = None) -> None:
    """Refuse to go on when a fact differs between ranks: the same error on every one of them."""
    from torch import distributed

    if group is None and not (distributed.is_available() and distributed.is_initialized()):
        return
    problems = find_differences(exchange(dict(facts), group))
    if problems:
        raise CommonMistake(problems)


def find_differences(said: list[dict[str, str]]) -> list[str]:
    """One problem per fact that is not the same on all ranks, with who has what.

    Of facts that are whole JSON objects, such as a configuration, the keys that differ are named.
    """
    problems = []
    for fact in dict.fromkeys(name for facts in said for name in facts):
        values = [facts.get(fact) for facts in said]
        if len(set(values)) == 1:
            continue
        opened = [_leaves(value) for value in values]
        if all(opened):
            problems += find_differences(opened)
            continue
        holders: dict[str | None, list[int]] = {}
        for rank, value in enumerate(values):
            holders.setdefault(value, []).append(rank)
        told = "; ".join(
            f"{'not given' if value is None else _shorten(value)} on {spell_ranks(ranks)}"
            for value, ranks in holders.items()
        )
        problems.append(f"{fact}: differs between ranks: {told}; it must be the same on all")
    return problems


def _leaves(text: str | None) -> dict[str, str]:
    """The single values of a JSON object by dotted key; nothing where the text is not one."""
    try:
        value = json.loads(text or "")
    except ValueError:
        return {}
    leaves: dict[str, str] = {}

    def open_up(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                open_up(f"{prefix}.{key}" if prefix else key, inner)
        else:
            leaves[prefix] = json.dumps(value)

    if isinstance(value, dict):
        open_up("", value)
    return leaves


def spell_ranks(ranks: list[int]) -> str:
    """'rank 3', 'ranks 0, 2, 3'; a long list is cut."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" * (len(ranks) > 8))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"


def _shorten(value: str) -> str:
    return value if len(value) <= _SHOWN_CHARACTERS else f"{value[:_SHOWN_CHARACTERS]}..."


def _watch() -> Watch | None:
    from headway.dist.group import current_watch

    return current_watch()


def _host(group: ProcessGroup | None) -> ProcessGroup:
    if group is not None:
        return group
    from headway.dist.group import host_group

    return host_group()
