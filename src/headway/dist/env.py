"""The rank facts of this process, as the launcher left them in the environment.

Owns: reading and checking RANK, WORLD_SIZE and their kin (torchrun's names, then SLURM's), and how
patient ranks are with each other.
Does not own: process groups, and the choice of device (device.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from headway.dist.device import resolve_device
from headway.errors import ConfigError

if TYPE_CHECKING:
    import torch

FROZEN_AFTER_S = 20.0
"""A rank that gave no sign for so long counts as frozen; HEADWAY_FROZEN_AFTER_S, 0 = never."""
WAITING_AFTER_S = 60.0
"""How long nothing may move before it is said who is late; HEADWAY_WAITING_AFTER_S, 0 = never."""


@runtime_checkable
class DistributedEnvInterface(Protocol):
    """What a trainer asks of an injected environment; `DistributedEnv` is one."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def local_rank(self) -> int: ...

    @property
    def device(self) -> str | torch.device: ...


@dataclass(frozen=True)
class DistributedEnv:
    """Where this process stands: its rank among all, and its place on its machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    device: str = "cpu"

    @property
    def is_main_process(self) -> bool:
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        return self.world_size > 1


def detect_env(
    environ: Mapping[str, str] | None = None,
    *,
    use_cpu: bool = False,
    device: str | None = None,
) -> DistributedEnv:
    """Read the rank facts of this process from `environ` (default: `os.environ`).

    torchrun's variables win; SLURM's are read when RANK is absent and the process is one of
    several tasks; a process without either is alone. With `use_cpu` torch is not imported.
    """
    variables = _Variables(os.environ if environ is None else environ)
    if variables.has("RANK"):
        facts = _from_launcher(variables)
    elif (variables.get("SLURM_NTASKS") or 1) > 1 and variables.has("SLURM_PROCID"):
        facts = _from_slurm(variables)
    else:
        facts = DistributedEnv()
        if (variables.get("WORLD_SIZE") or 1) > 1:
            variables.problems.append(
                f"WORLD_SIZE: {variables.get('WORLD_SIZE')} processes are announced, but RANK is "
                "not set; start with a launcher (torchrun sets both), or unset WORLD_SIZE"
            )
    if variables.problems:
        raise ConfigError(variables.problems)
    name = "cpu" if use_cpu else str(resolve_device(device, use_cpu, facts))
    return replace(facts, device=name)


class _Variables:
    """Whole numbers out of the environment; what is wrong with them is collected."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.problems: list[str] = []

    def has(self, name: str) -> bool:
        # Launch scripts often export a variable empty to say "not set".
        return bool(self._environ.get(name, "").strip())

    def get(self, name: str) -> int | None:
        if not self.has(name):
            return None
        text = self._environ[name].strip()
        if text.isascii() and text.isdigit():
            return int(text)
        problem = f"{name}: {text!r} is not a whole number from 0 up"
        if problem not in self.problems:
            self.problems.append(problem)
        return None

    def check_below(self, name: str, value: int, limit_name: str, limit: int) -> None:
        if value >= limit:
            self.problems.append(
                f"{name}: {value} contradicts {limit_name}={limit}; allowed: 0 to {limit - 1}"
            )


def _from_launcher(variables: _Variables) -> DistributedEnv:
    rank = variables.get("RANK")
    world_size = variables.get("WORLD_SIZE")
    if not variables.has("WORLD_SIZE"):
        variables.problems.append("WORLD_SIZE: not set, although RANK is; set both, or neither")
    # Defaults for launchers that say no more: everything is on one machine.
    local_world_size = variables.get("LOCAL_WORLD_SIZE")
    local_rank = variables.get("LOCAL_RANK")
    node_rank = variables.get("GROUP_RANK")
    if variables.problems or rank is None or world_size is None:
        return DistributedEnv()
    return _checked(
        variables,
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        (rank, world_size, local_rank, local_world_size, node_rank),
    )


def _from_slurm(variables: _Variables) -> DistributedEnv:
    rank = variables.get("SLURM_PROCID")
    world_size = variables.get("SLURM_NTASKS")
    local_rank = variables.get("SLURM_LOCALID")
    local_world_size = variables.get("SLURM_NTASKS_PER_NODE")
    num_nodes = variables.get("SLURM_NNODES") or 1
    node_rank = variables.get("SLURM_NODEID")
    announced = variables.get("WORLD_SIZE")
    if announced is not None and announced != world_size:
        variables.problems.append(
            f"WORLD_SIZE: {announced} contradicts SLURM_NTASKS={world_size}; unset one of them"
        )
    if variables.problems or rank is None or world_size is None:
        return DistributedEnv()
    if local_world_size is None:
        local_world_size = -(-world_size // num_nodes)
    return _checked(
        variables,
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
        (rank, world_size, local_rank, local_world_size, node_rank),
    )


def _checked(
    variables: _Variables,
    names: tuple[str, str, str, str],
    given: tuple[int, int, int | None, int | None, int | None],
) -> DistributedEnv:
    rank, world_size, local_rank, local_world_size, node_rank = given
    for name, size in ((names[1], world_size), (names[3], local_world_size)):
        if size == 0:
            variables.problems.append(f"{name}: 0 processes cannot be; allowed: 1 and up")
            return DistributedEnv()
    variables.check_below(names[0], rank, names[1], world_size)
    if local_world_size is None:
        local_world_size = world_size
    elif local_world_size > world_size:
        variables.problems.append(
            f"{names[3]}: {local_world_size} contradicts {names[1]}={world_size}; "
            "a machine cannot hold more ranks than there are"
        )
    if local_rank is None:
        local_rank = rank % local_world_size
    variables.check_below(names[2], local_rank, names[3], local_world_size)
    if node_rank is None:
        node_rank = rank // local_world_size
    return DistributedEnv(rank, world_size, local_rank, local_world_size, node_rank)


def frozen_limit_s() -> float:
    """How long a rank may give no sign of life; 0 means for ever."""
    return _read_limit_s("HEADWAY_FROZEN_AFTER_S", FROZEN_AFTER_S)


def waiting_limit_s() -> float:
    """How long nothing may move before it is said who is late; 0 means for ever."""
    return _read_limit_s("HEADWAY_WAITING_AFTER_S", WAITING_AFTER_S)


def _read_limit_s(name: str, default_s: float) -> float:
    text = os.environ.get(name, "").strip()
    try:
        return max(0.0, float(text)) if text else default_s
    except ValueError:
        raise ConfigError(
            f"{name}: {text!r} is not a number of seconds; allowed: 0 (never) and up"
        ) from None
