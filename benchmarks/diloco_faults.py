"""Proofs that a DiLoCo server refuses what is hostile and survives being killed.

    python benchmarks/diloco_faults.py [--only hostile server_kills server_kills_async
                                               worker_kills] [--seed 1] [--scale 1.0]

`--scale 0.01` is a quick look; 1 is the full size. Results add to
`benchmarks/results/diloco-faults-<date>.md`. Exit code 1 if anything failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from headway.testing.proofs.diloco_hostile import prove_hostile
from headway.testing.proofs.diloco_server_kills import prove_server_kills
from headway.testing.proofs.diloco_worker_kills import prove_worker_kills
from headway.testing.proofs.outcome import Outcome

HERE = Path(__file__).resolve().parent
PROOFS: dict[str, tuple[int, Callable[[int, int], Outcome]]] = {
    "hostile": (10_000, prove_hostile),
    "server_kills": (100, prove_server_kills),
    "server_kills_async": (50, lambda size, seed: prove_server_kills(size, seed, mode="async")),
    "worker_kills": (200, prove_worker_kills),
}
WANTED = """\
| proof | wanted |
|---|---|
| hostile requests | 10,000: all refused with 4xx and a reason, nothing that counts changed |
| kills of the server | 100, at every phase of a round: no committed round lost, nothing applied \
twice, the state bit-equal to a replay of the ledger |
| kills of workers | 200: the same |
"""


def find_commit() -> str:
    """The commit, and whether the code differs from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=HERE.parent, capture_output=True, text=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", "src/headway/diloco", "src/headway/control")
    return git("rev-parse", "--short=12", "HEAD") + (" with changes" if changed else "")


def describe(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in counts.items() if number)


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
    machine = f"Machine: {platform.platform()}, Python {platform.python_version()}, "
    lines += ["", f"{machine}torch {torch.__version__}, {os.cpu_count()} cores."]
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
        began = time.monotonic()
        outcome = prove(max(1, int(full * options.scale)), options.seed)
        record = {
            "proof": outcome.name,
            "command": f"python benchmarks/diloco_faults.py {shlex.join(sys.argv[1:])}".strip(),
            "seed": options.seed,
            "commit": find_commit(),
            "seconds": round(time.monotonic() - began),
            "counts": dict(outcome.counts),
            "failures": outcome.failures,
        }
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        write_report(records, log.with_suffix(".md"), date)
        print(f"{outcome.name}: {describe(record['counts'])} ({record['seconds']} s)", flush=True)
        for line in outcome.failures:
            print(f"  FAILED {line}", flush=True)
        failed |= bool(outcome.failures)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
