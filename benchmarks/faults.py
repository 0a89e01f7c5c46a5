"""Proofs that checkpoints cannot be lost, with the numbers to show for it.

Breaks saves at every operation, kills training, flips bits and fills disks, makes ranks fail and
kills their launcher, and judges what is left as the next start would. Results accumulate: each run
adds to the file of its day, with command, seed, counts and commit, and its totals are made anew. A
`note` added to a record of the .jsonl file keeps its run in the list and out of the totals.

    python benchmarks/faults.py [--only crashes ranks kills flips damage errors training full_disk
                                        rank_faults rank_kills launcher retention]
                                [--seed 1] [--scale 1.0] [--limit-s 3600]

`--scale 0.01` is a quick look; 1 is the full size. Exit code 1 if anything failed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from proof_records import add_record, describe, describe_machine, find_commit, run_proof

from headway.testing.proofs.crashes import prove_crash_points
from headway.testing.proofs.damage import prove_damage, prove_flips
from headway.testing.proofs.errors import fill_disk, prove_io_errors, prove_training_errors
from headway.testing.proofs.kills import prove_kills
from headway.testing.proofs.launcher_faults import prove_launcher_faults
from headway.testing.proofs.outcome import Outcome
from headway.testing.proofs.rank_faults import prove_rank_faults
from headway.testing.proofs.rank_kills import prove_rank_kills
from headway.testing.proofs.ranks import prove_rank_crash_points

HERE = Path(__file__).resolve().parent
SOURCES = ("src", "benchmarks/faults.py")
FULL = {
    "crashes": 10_000,
    "ranks": 4_000,
    "kills": 1_000,
    "flips": 0,
    "damage": 8,
    "errors": 600,
    "training": 100,
    "full_disk": 1,
    "rank_faults": 200,
    "rank_kills": 150,
    "launcher": 21,
    "retention": 100_000,
}
WANTED = """\
| proof | wanted |
|---|---|
| crash points | 10,000: the old or the new checkpoint, whole; nothing to be done by hand |
| kills of training | 1,000, 40 % inside a save: none corrupt, none lost beyond one interval |
| bit flips | 100,000, and coarser damage: all detected, the file named, the older one taken |
| I/O errors | 500: the old one intact, the error raised, nothing half-written |
| faults of one rank | 200: all end within 10 s (30 s if frozen), name it, go on as undisturbed |
| kills of ranks | one or all, inside saves: none corrupt, none lost beyond one interval |
| histories of what is kept | 100,000: newest, best and pinned never deleted, the limit holds |
| faults under the launcher | restarts end as undisturbed; nobody survives it by more than 10 s |
"""


def prove_full_disk(seed: int) -> Outcome:
    """Fill a file system of 2 MB in memory; root alone may mount one."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder]
        if subprocess.run(command, capture_output=True).returncode:
            outcome = Outcome("a full disk", seed)
            outcome.counts["skipped: mounting is not allowed here"] = 1
            return outcome
        try:
            return fill_disk(Path(folder), seed)
        finally:
            subprocess.run(["umount", folder], check=True)


def prove_retention(num_histories: int, seed: int) -> Outcome:
    """The property test of what is kept and deleted, over so many random histories."""
    outcome = Outcome("histories of what is kept", seed)
    outcome.counts["histories"] = num_histories
    test = "tests/unit/checkpoint/test_checkpoint_retention.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-k", "random_histories", "--timeout", "1800", test],
        cwd=HERE.parent,
        env={**os.environ, "HEADWAY_RETENTION_HISTORIES": str(num_histories)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        outcome.counts["failures"] = 1
        outcome.failures.append(done.stdout[-2000:] + done.stderr[-2000:])
    return outcome


def prove(name: str, size: int, seed: int, scale: float, limit_s: float) -> Outcome:
    proofs: dict[str, Callable[[], Outcome]] = {
        "crashes": lambda: prove_crash_points(size, seed),
        "ranks": lambda: prove_rank_crash_points(size, seed),
        "kills": lambda: prove_kills(size, seed, limit_s=limit_s),
        "flips": lambda: prove_flips(None if scale >= 1 else int(120_000 * scale), seed),
        "damage": lambda: prove_damage(size, seed),
        "errors": lambda: prove_io_errors(size, seed),
        "training": lambda: prove_training_errors(size, seed),
        "full_disk": lambda: prove_full_disk(seed),
        "rank_faults": lambda: prove_rank_faults(size, seed),
        "rank_kills": lambda: prove_rank_kills(size, seed),
        "launcher": lambda: prove_launcher_faults(size, seed),
        "retention": lambda: prove_retention(size, seed),
    }
    return proofs[name]()


def write_report(records: list[dict[str, Any]], path: Path, date: str) -> None:
    """The page of a day, from all its records."""
    totals: dict[str, Counter[str]] = {}
    for record in records:
        if record.get("note"):  # a run that led to a change and was made again after it
            continue
        total = totals.setdefault(record["proof"], Counter())
        for name, number in record["counts"].items():
            most = name.startswith(("most", "bits"))
            total[name] = max(total[name], number) if most else total[name] + number
    lines = [f"# Checkpoints under faults, {date}", ""]
    lines += ["Made by `make test-faults` (`benchmarks/faults.py`); runs of the day add up.", ""]
    lines += [WANTED, "## Totals of the day", ""]
    for proof, total in totals.items():
        lines.append(f"- **{proof}**: failures {total['failures']}; " + describe(dict(total)))
    lines += ["", "## Runs", "", "| proof | command | seed | commit | seconds | counts |"]
    lines.append("|---|---|---|---|---|---|")
    for r in records:
        counts = describe(r["counts"])
        counts += f" ({r['note']})" if r.get("note") else ""
        row = [r["proof"], f"`{r['command']}`", r["seed"], r["commit"], r["seconds"], counts]
        lines.append("| " + " | ".join(map(str, row)) + " |")
    failures = [(r, line) for r in records for line in r["failures"]]
    if failures:
        lines += ["", "## Failures", ""]
        lines += [f"- {r['commit']}, {line}".replace("\n", " ") for r, line in failures]
    lines += ["", f"{describe_machine()} torch {torch.__version__}."]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=FULL, default=list(FULL))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--limit-s", type=float, default=3600.0, help="for the kills")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    date = datetime.date.today().isoformat()
    log = options.results / f"faults-{date}.jsonl"
    commit = find_commit(SOURCES)
    failed = False
    for name in options.only:
        size = max(1, int(FULL[name] * options.scale))
        act = partial(prove, name, size, options.seed, options.scale, options.limit_s)
        record = run_proof(act, seed=options.seed, commit=commit)
        write_report(add_record(log, record), log.with_suffix(".md"), date)
        failed |= bool(record["failures"])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
