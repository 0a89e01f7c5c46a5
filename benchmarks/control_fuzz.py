"""Fuzzed requests, and a flood of them, at a control server beside training.

Sends at least 100,000 requests, mutated from valid ones by grammar and by byte or garbage, to a
server in a process that trains; then floods a server with all its limits and compares the steps of
flooded stretches with those of quiet ones in between. Each run adds to the file of its day.

    python benchmarks/control_fuzz.py [--requests 100000] [--seed 1] [--pairs 20] [--stretch-s 4]

Exit code 1 if anything was accepted, crashed, leaked or grew that must not.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from proof_records import add_record, describe_machine, find_commit, run_proof

from headway.testing.proofs.control_fuzz import measure_flood, prove_control_fuzz

HERE = Path(__file__).resolve().parent
WANTED = """\
Wanted: 100,000 requests without an effect that nobody may have, without a crash, with less than
10 MB of growth after the first tenth, and with steps that take no more than 1 % longer in a flood.
The fuzz lifts the server's limits per second, the flood does not. The sender runs on the same
machine; the thread that trains is kept on a core that the sender does not use. `server` is what
all other threads of the training process used of a core in the flood: unlike the ratio of step
times, it hardly depends on what else the machine does.
"""


def write_report(records: list[dict[str, Any]], path: Path, date: str) -> None:
    lines = [f"# A control server under fuzz and flood, {date}", ""]
    lines += ["Made by `make test-fuzz` (`benchmarks/control_fuzz.py`).", "", WANTED]
    lines += [
        "## Fuzz",
        "",
        "| seed | commit | seconds | failures | counts |",
        "|---|---|---|---|---|",
    ]
    for r in records:
        if fuzz := r.get("fuzz"):
            counts = ", ".join(f"{k} {v:,}" for k, v in fuzz["counts"].items() if k != "failures")
            row = [r["seed"], r["commit"], fuzz["seconds"], len(fuzz["failures"]), counts]
            lines.append("| " + " | ".join(map(str, row)) + " |")
            lines += [f"\nFailed: {line}\n".replace("|", "/") for line in fuzz["failures"]]
    lines += ["", "## Flood", ""]
    lines.append(
        "| seed | commit | pairs | step time flooded / quiet: median (25 %, 75 %) | server | "
        "requests sent | owner's wait: median, longest | growth | load of the machine |"
    )
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for r in records:
        if flood := r.get("flood"):
            ratios = sorted(flood["ratios"])
            low, high = ratios[len(ratios) // 4], ratios[(3 * len(ratios)) // 4]
            waits = flood["answer_s"]
            row = [
                r["seed"],
                r["commit"],
                len(ratios),
                f"{flood['median_ratio']:.3f} ({low:.3f}, {high:.3f})",
                f"{flood['server_share']:.2%} of a core",
                f"{flood['num_requests']:,}",
                f"{waits[0]:.2f} s, {waits[1]:.2f} s",
                f"{flood['growth_bytes'] >> 10:,} KiB",
                f"{flood['load']:.1f} on {os.cpu_count()} cores",
            ]
            lines.append("| " + " | ".join(map(str, row)) + " |")
    lines += ["", describe_machine()]
    notes = [r["note"] for r in records if r.get("note")]
    lines += ["", *(f"- {note}" for note in notes)] if notes else []
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--stretch-s", type=float, default=4.0)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    date = datetime.date.today().isoformat()
    log = options.results / f"control-fuzz-{date}.jsonl"
    commit = find_commit(("src/headway/control", "src/headway/testing"))
    record: dict[str, Any] = {"seed": options.seed, "commit": commit}
    if options.requests:
        act = partial(prove_control_fuzz, options.requests, options.seed)
        record["fuzz"] = run_proof(act, seed=options.seed, commit=commit)
    if options.pairs:
        flood = measure_flood(options.seed, num_pairs=options.pairs, stretch_s=options.stretch_s)
        record["flood"] = vars(flood)
        print(record["flood"], flush=True)
    write_report(add_record(log, record), log.with_suffix(".md"), date)
    return int(bool(record.get("fuzz", {}).get("failures")))


if __name__ == "__main__":
    sys.exit(main())
