"""Proofs that a DiLoCo server refuses what is hostile and survives being killed.

    python benchmarks/diloco_faults.py [--only hostile server_kills server_kills_async
                                               worker_kills training_kills outages]
                                       [--seed 1] [--scale 1.0]

`--scale 0.01` is a quick look; 1 is the full size. Results add to
`benchmarks/results/diloco-faults-<date>.md`. Exit code 1 if anything failed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from proof_records import add_record, describe, describe_machine, find_commit, run_proof

from headway.testing.proofs.diloco_hostile import prove_hostile
from headway.testing.proofs.diloco_outages import prove_outages
from headway.testing.proofs.diloco_server_kills import prove_server_kills
from headway.testing.proofs.diloco_training_kills import prove_training_kills
from headway.testing.proofs.diloco_worker_kills import prove_worker_kills
from headway.testing.proofs.outcome import Outcome

HERE = Path(__file__).resolve().parent
SOURCES = ("src/headway/diloco", "src/headway/control")
PROOFS: dict[str, tuple[int, Callable[[int, int], Outcome]]] = {
    "hostile": (10_000, prove_hostile),
    "server_kills": (100, prove_server_kills),
    "server_kills_async": (50, lambda size, seed: prove_server_kills(size, seed, mode="async")),
    "worker_kills": (200, prove_worker_kills),
    "training_kills": (200, prove_training_kills),
    "outages": (100, prove_outages),
}
WANTED = """\
| proof | wanted |
|---|---|
| hostile requests | 10,000: all refused with 4xx and a reason, nothing that counts changed |
| kills of the server | 100, at every phase of a round: no committed round lost, nothing applied \
twice, the state bit-equal to a replay of the ledger |
| kills of workers | 200, at every place of an exchange: the same |
| kills of workers that train | 200 of `headway diloco worker`, at moments chosen by chance: the \
same, and a round within a heartbeat (1 s) plus one second of the return |
| kills of the server under workers that train | 100, at moments chosen by chance: the same, from \
the restart on |
"""


def write_report(records: list[dict[str, Any]], path: Path, date: str) -> None:
    """The page of a day, from all its records."""
    lines = [
        f"# A DiLoCo server under faults, {date}",
        "",
        "Made by `make test-diloco`.",
        "",
        WANTED,
    ]
    lines += ["| proof | command | seed | commit | seconds | failures | counts |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for r in records:
        row = [r["proof"], f"`{r['command']}`", r["seed"], r["commit"], r["seconds"]]
        row += [len(r["failures"]), describe(r["counts"])]
        lines.append("| " + " | ".join(map(str, row)) + " |")
    lines += [f"\n- FAILED {r['proof']}: {line}" for r in records for line in r["failures"]]
    lines += ["", f"{describe_machine()} torch {torch.__version__}."]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PROOFS, default=list(PROOFS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    date = datetime.date.today().isoformat()
    log = options.results / f"diloco-faults-{date}.jsonl"
    failed = False
    for name in options.only:
        full, prove = PROOFS[name]
        act = partial(prove, max(1, int(full * options.scale)), options.seed)
        record = run_proof(act, seed=options.seed, commit=find_commit(SOURCES))
        write_report(add_record(log, record), log.with_suffix(".md"), date)
        failed |= bool(record["failures"])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
