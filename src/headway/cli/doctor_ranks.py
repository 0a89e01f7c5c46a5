"""`headway doctor --nproc N`: whether ranks find each other here, and how fast they talk.

Owns: the ranks started for the check, what each of them measures, and what is wrong with it.
Does not own: the facts of one process (doctor.py), starting ranks (launch.py).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.dist.exits import FOLDER_VARIABLE, read_ends
from headway.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from headway.cli.launch import Ranks
    from headway.dist.group import DistributedContext

_REPORT = "doctor.json"
_STARTED = "HEADWAY_DOCTOR_STARTED"
_CPU = "HEADWAY_DOCTOR_CPU"
_LARGE_BYTES = {"cpu": 16 * 1024**2, "cuda": 256 * 1024**2}
_NUM_LARGE, _NUM_SMALL = 5, 50


def examine_ranks(ranks: Ranks, *, use_cpu: bool, quiet: bool) -> dict[str, Any]:
    """Start the ranks and bring their facts together, with `problems` among them."""
    from headway.cli.launch import supervise

    if ranks.smallest_world < 2:
        raise ConfigError(f"--nproc: {ranks.nproc} given; ranks that talk are 2 and up")
    command = ranks.command("headway.cli.doctor_ranks", [])
    with tempfile.TemporaryDirectory(prefix="headway-doctor-") as folder:
        variables = {_STARTED: repr(time.time()), _CPU: "1" if use_cpu else ""}
        code = supervise(command, ranks.nproc, folder, quiet, variables)
        report = Path(folder, _REPORT)
        if report.is_file() and code == 0:
            facts: dict[str, Any] = json.loads(report.read_text())
        else:
            facts = {"problems": _explain(folder, code, ranks)}
    facts["nproc"] = ranks.nproc
    return facts


def _explain(folder: str, code: int, ranks: Ranks) -> list[str]:
    if code == 0:
        return [] if ranks.num_nodes[1] > 1 else ["the ranks ended without a report"]
    reasons = [end.reason for end in read_ends(Path(folder)) if end.reason]
    what = reasons[0] if reasons else f"torchrun ended with exit code {code}; see above"
    return [f"{ranks.nproc} ranks did not come together: {what}"]


def print_ranks(facts: dict[str, Any]) -> None:
    """The facts as a table; their problems are printed with the others."""
    from headway.cli.messages import print_table, spell_bytes

    if "members" not in facts:
        return
    rows = [
        ("ranks", f"{len(facts['members'])} over {facts['backend']}, the same versions on all"),
        ("start", f"{facts['start_s']:.1f} s, of which rendezvous {facts['rendezvous_s']:.2f} s"),
        (
            "all-reduce",
            f"{spell_bytes(facts['bandwidth_bytes_per_s'])}/s "
            f"({spell_bytes(facts['message_bytes'])} a time)",
        ),
        ("latency", f"{facts['latency_s'] * 1e6:,.0f} microseconds for one number"),
    ]
    rows += [
        (f"rank {rank}", f"{member['device']} on {member['host']}")
        for rank, member in enumerate(facts["members"])
    ]
    print_table(rows, title="several processes")


def main() -> int:
    """What every rank of the check does."""
    import torch  # noqa: F401  its import is not the rendezvous

    from headway.cli.messages import logging_to_stderr
    from headway.cli.rank import run_as_rank

    options = {"use_cpu": bool(os.environ.get(_CPU))}
    began = time.monotonic()
    with logging_to_stderr(30):
        return run_as_rank(lambda: (began, options), _measure)


def _measure(began: float) -> int:
    from headway.dist.agreement import exchange
    from headway.dist.group import current_context, versions
    from headway.dist.processes import identify

    context = current_context()
    assert context is not None
    rendezvous_s = time.monotonic() - began
    start_s = time.time() - float(os.environ[_STARTED])
    kind = context.device.type
    message_bytes = _LARGE_BYTES.get(kind, _LARGE_BYTES["cpu"])
    large_s = _time_all_reduce(context, message_bytes // 4, _NUM_LARGE)
    small_s = _time_all_reduce(context, 1, _NUM_SMALL)
    own = {"device": _describe(context.device), "host": identify().host, **versions()}
    times = {"large_s": large_s, "small_s": small_s, "rendezvous_s": rendezvous_s}
    members = exchange({**own, **times})
    slowest_s = max(member["large_s"] for member in members)
    # Every rank sends and receives this much of the message in a ring.
    share = 2 * (context.world_size - 1) / context.world_size
    facts = {
        "backend": context.backend,
        "start_s": start_s,
        "rendezvous_s": max(member["rendezvous_s"] for member in members),
        "message_bytes": message_bytes,
        "bandwidth_bytes_per_s": message_bytes * share / slowest_s,
        "latency_s": max(member["small_s"] for member in members),
        "members": members,
        "problems": [],
    }
    return _write(facts) if context.is_main_process else 0


def _describe(device: torch.device) -> str:
    import torch

    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    return f"{device}{name}"


def _time_all_reduce(context: DistributedContext, num_values: int, num_rounds: int) -> float:
    """Median seconds of one all-reduce, checked against what it must give."""
    import torch
    from torch import distributed

    device, times = context.device, []
    for number in range(num_rounds + 1):
        values = torch.full((num_values,), float(context.rank), device=device)
        context.barrier()
        began = time.perf_counter()
        distributed.all_reduce(values)
        got = values[-1].item()  # waits for the device
        if number:  # the first sets up connections
            times.append(time.perf_counter() - began)
        want = sum(range(context.world_size))
        if got != want:
            raise RuntimeError(f"an all-reduce gave {got}, not {want}")
    return statistics.median(times)


def _write(facts: dict[str, Any]) -> int:
    Path(os.environ[FOLDER_VARIABLE], _REPORT).write_text(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
