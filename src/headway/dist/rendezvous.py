"""How the ranks of one run find each other: the meeting place, and one round of greetings there.

Owns: the address of the store (launcher's variables, or derived from Slurm's), connections to it,
and the round that sets this attempt apart from earlier ones on the same store.
Does not own: process groups (group.py).

A launcher that restarts a run keeps its store, and with it every key of the attempt before; its
count of restarts differs between machines when one of them is replaced. So the round does not rest
on it: rank 0 draws a name, and only who answers to that name, and is answered, is in.
"""

from __future__ import annotations

import datetime
import json
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.dist.agreement import spell_ranks
from headway.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_ASK_AGAIN_S = 0.02
_READ_S = 10.0
# Below the range that systems hand out by themselves, above the well-known ones.
_PORTS = range(15000, 30000)

# The store of a run without a launcher's: it lives in rank 0, for as long as that process does.
_hosted: dict[int, Any] = {}


class RendezvousError(RuntimeError):
    """The ranks did not find each other; the message names who was missing."""


@dataclass(frozen=True)
class Endpoint:
    """Where the store listens, and who holds it."""

    host: str
    port: int
    in_launcher: bool = False

    @property
    def keeper(self) -> str:
        return "the launcher" if self.in_launcher else "rank 0"

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def find_endpoint(environ: Mapping[str, str]) -> Endpoint:
    """The meeting place: MASTER_ADDR and MASTER_PORT, or what follows from a Slurm job."""
    host = environ.get("MASTER_ADDR", "").strip()
    port = environ.get("MASTER_PORT", "").strip()
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or ""
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or ""
    problems = []
    if not host:
        host = first_host(nodes)
        if not host:
            problems.append(
                "MASTER_ADDR: not set, and there is no SLURM_JOB_NODELIST to take it from; start "
                "with a launcher (headway train --nproc, torchrun), or set it to rank 0's host"
            )
    if not port and job.isdigit():
        step = environ.get("SLURM_STEP_ID", "")
        number = int(job) + (int(step) if step.isdigit() else 0)
        port = str(_PORTS[number % len(_PORTS)])
    if not port:
        problems.append(
            "MASTER_PORT: not set, and there is no SLURM_JOB_ID to derive it from; start with a "
            "launcher, or set it to a free port of rank 0's host"
        )
    elif not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        problems.append(f"MASTER_PORT: {port!r} is not a port; allowed: 1 to 65535")
    if problems:
        raise ConfigError(problems)
    return Endpoint(host, int(port), environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: 'gpu[03-06,9],login' gives 'gpu03'."""
    match = re.match(r"\s*([^\[\],\s]+)(?:\[([^\],-]+)[^\]]*\]([^\[\],\s]*))?", nodes)
    if match is None:
        return ""
    head, number, tail = match.groups()
    return f"{head}{number or ''}{tail or ''}"


def connect(endpoint: Endpoint, rank: int, timeout_s: float) -> Any:
    """A connection of its own to the store; rank 0 opens the store where no launcher did."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    limit = datetime.timedelta(seconds=timeout_s)
    if rank == 0 and not endpoint.in_launcher and endpoint.port not in _hosted:
        try:
            _hosted[endpoint.port] = TCPStore(
                endpoint.host,
                endpoint.port,
                is_master=True,
                wait_for_workers=False,
                multi_tenant=True,
                timeout=limit,
            )
        except RuntimeError as error:
            raise ConfigError(
                f"MASTER_PORT: rank 0 cannot listen at {endpoint} ({_first_line(error)}); choose "
                "another port"
            ) from error
    try:
        return TCPStore(
            endpoint.host, endpoint.port, is_master=False, wait_for_workers=False, timeout=limit
        )
    except RuntimeError as error:
        raise RendezvousError(
            f"rank {rank} cannot reach {endpoint.keeper} at {endpoint} (MASTER_ADDR, MASTER_PORT) "
            f"within {timeout_s:g} s: {_first_line(error)}"
        ) from error


def meet(
    store: Store, rank: int, world_size: int, greeting: dict[str, Any], timeout_s: float
) -> tuple[str, list[dict[str, Any]]]:
    """Wait for all ranks of this attempt: the name of the round, and everyone's greeting."""
    if rank == 0:
        return _receive(store, world_size, greeting, timeout_s)
    return _attend(store, rank, greeting, timeout_s)


def _receive(
    store: Store, world_size: int, greeting: dict[str, Any], timeout_s: float
) -> tuple[str, list[dict[str, Any]]]:
    name = uuid.uuid4().hex
    store.set("headway/round", name)
    deadline = time.monotonic() + timeout_s
    said = [greeting]
    for other in range(1, world_size):
        key = f"headway/{name}/here/{other}"
        while not store.check([key]):
            if time.monotonic() > deadline:
                missing = [
                    number
                    for number in range(other, world_size)
                    if not store.check([f"headway/{name}/here/{number}"])
                ]
                raise RendezvousError(
                    f"{spell_ranks(missing)} of {world_size} did not come to the rendezvous "
                    f"within {timeout_s:g} s"
                )
            time.sleep(_ASK_AGAIN_S)
        said.append(json.loads(store.get(key)))
    store.set(f"headway/{name}/members", json.dumps(said))
    for other in range(1, world_size):
        store.set(f"headway/{name}/go/{other}", said[other]["nonce"])
    # Rank 0 may keep the store, and end because of what was said: not before all have read it.
    deadline = time.monotonic() + _READ_S
    read = [f"headway/{name}/read/{other}" for other in range(1, world_size)]
    while read and not store.check(read) and time.monotonic() < deadline:
        time.sleep(_ASK_AGAIN_S)
    return name, said


def _attend(
    store: Store, rank: int, greeting: dict[str, Any], timeout_s: float
) -> tuple[str, list[dict[str, Any]]]:
    deadline = time.monotonic() + timeout_s
    nonce, greeted = uuid.uuid4().hex, ""
    mine = json.dumps({**greeting, "nonce": nonce})
    while time.monotonic() < deadline:
        # The name may be that of an earlier attempt, until rank 0 of this one has drawn its own.
        if store.check(["headway/round"]):
            name = store.get("headway/round").decode()
            if name != greeted:
                store.set(f"headway/{name}/here/{rank}", mine)
                greeted = name
            go = f"headway/{name}/go/{rank}"
            if store.check([go]) and store.get(go).decode() == nonce:
                said = json.loads(store.get(f"headway/{name}/members"))
                store.set(f"headway/{name}/read/{rank}", "")
                return name, said
        time.sleep(_ASK_AGAIN_S)
    raise RendezvousError(
        f"rank {rank} waited {timeout_s:g} s at the rendezvous; rank 0, or another rank, did not "
        "come"
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
