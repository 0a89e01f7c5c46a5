"""What the scripts of long proofs share: the records of a day, and what a record says of itself."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headway.testing.proofs.outcome import Outcome

ROOT = Path(__file__).resolve().parent.parent


def find_commit(sources: Sequence[str]) -> str:
    """The commit, and whether those files differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", *sources)
    return git("rev-parse", "--short=12", "HEAD") + (" with changes" if changed else "")


def describe(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in counts.items() if number)


def describe_machine() -> str:
    return (
        f"Machine: {platform.platform()}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores."
    )


def add_record(log: Path, record: dict[str, Any]) -> list[dict[str, Any]]:
    """Add to the records of a day; returns all of them."""
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def run_proof(prove: Callable[[], Outcome], *, seed: int, commit: str) -> dict[str, Any]:
    """Run a proof, and tell of it; returns its record."""
    began = time.monotonic()
    outcome = prove()
    record = {
        "proof": outcome.name,
        "command": f"python benchmarks/{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}".strip(),
        "seed": seed,
        "commit": commit,
        "seconds": round(time.monotonic() - began),
        "counts": dict(outcome.counts),
        "failures": outcome.failures,
    }
    print(f"{outcome.name}: {describe(record['counts'])} ({record['seconds']} s)", flush=True)
    for line in outcome.failures:
        print(f"  FAILED {line}", flush=True)
    return record
