"""The choice of the device a process computes on.

Owns: which kinds of device there are, which card belongs to which rank.
Does not own: the rank facts themselves (env.py), nor moving tensors (strategies/).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from headway.errors import ConfigError, nearest

if TYPE_CHECKING:
    import torch

    from headway.dist.env import DistributedEnvInterface

_DEVICE = re.compile(r"(cpu|cuda|mps)(?::(\d+))?")


def get_device_type() -> str:
    """The best kind of device of this machine: 'cuda', 'mps' or 'cpu'."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def get_device(local_rank: int = 0, *, device_type: str | None = None) -> torch.device:
    """The device of a local rank: on CUDA card number `local_rank`, else the only device."""
    import torch

    kind = device_type or get_device_type()
    if kind not in ("cuda", "mps", "cpu"):
        raise ConfigError(_refuse(kind, "no such kind of device"))
    if kind != "cuda":
        return torch.device(kind)
    num_cards = torch.cuda.device_count()
    if num_cards == 1:
        # A launcher that binds one card to each task shows every rank its own as card 0.
        return torch.device("cuda", 0)
    if local_rank >= num_cards:
        reason = (
            f"local rank {local_rank} has no card of its own: fewer GPUs than ranks; start at most "
            f"{num_cards} on this machine (--nproc), or set args.use_cpu"
        )
        raise ConfigError(_refuse("cuda", reason))
    return torch.device("cuda", local_rank)


def resolve_device(
    device: str | None = None,
    use_cpu: bool = False,
    env: DistributedEnvInterface | None = None,
) -> torch.device:
    """The device to compute on. `use_cpu` wins; None means the best there is.

    'cuda' means the card of the rank; 'cuda:1' means that card, and is refused when several
    ranks of one machine would share it.
    """
    import torch

    if use_cpu:
        return torch.device("cpu")
    local_rank = env.local_rank if env is not None else 0
    if device is None:
        return get_device(local_rank)
    match = _DEVICE.fullmatch(device)
    if match is None:
        raise ConfigError(_refuse(device, "not understood"))
    kind, index = match[1], match[2]
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(_refuse(device, "there is no CUDA device"))
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(_refuse(device, "there is no MPS device"))
    if index is None:
        return get_device(local_rank, device_type=kind)
    if int(index) >= (torch.cuda.device_count() if kind == "cuda" else 1):
        raise ConfigError(_refuse(device, "there is no device of that number"))
    if kind == "cuda" and getattr(env, "local_world_size", 1) > 1 and int(index) != local_rank:
        raise ConfigError(
            f"device: {device!r} was given to local rank {local_rank}; with several ranks on one "
            "machine each takes its own card: write 'cuda'"
        )
    return torch.device(kind, int(index)) if kind == "cuda" else torch.device(kind)


def _refuse(device: str, reason: str) -> str:
    available = _available()
    hint = nearest(device, available)
    did_you_mean = f"; did you mean {hint!r}?" if hint and hint != device else "."
    return f"device: {device!r}: {reason}{did_you_mean} Available here: {', '.join(available)}"


def _available() -> list[str]:
    import torch

    names = ["cpu"]
    if torch.backends.mps.is_available():
        names.append("mps")
    num_cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_cards:
        names += ["cuda", *(f"cuda:{index}" for index in range(num_cards))]
    return names
