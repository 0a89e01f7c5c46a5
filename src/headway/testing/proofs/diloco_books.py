"""What the folder of a DiLoCo server must say of its rounds, whoever was killed meanwhile.

Owns: the checks on a ledger that kills of workers have in common. Does not own: who kills whom.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.diloco.ledger import LEDGER_NAME, replay
from headway.testing.proofs.outcome import Outcome


def check_ledger(run: Path, outcome: Outcome, state_hash: str | None = None) -> None:
    """No round missing, no submission twice, no worker twice in a round, and the replay of all
    bodies gives the state, bit for bit: the ledger's, and the one that the server has."""
    ledger = [json.loads(line) for line in (run / LEDGER_NAME).read_text().splitlines()]
    rounds = [record for record in ledger if record["kind"] == "round"]
    if [r["commit"] for r in rounds] != list(range(1, len(rounds) + 1)):
        outcome.fail(f"the rounds of the ledger are {[r['commit'] for r in rounds]}")
    parts = [(record["round_id"], part) for record in rounds for part in record["submissions"]]
    for what, keys in (
        ("a worker in one round", Counter((round_id, part["worker"]) for round_id, part in parts)),
        # By its numbers: what goes to another round says so in its header.
        ("an update", Counter((part["worker"], _numbers_of(run, part)) for _, part in parts)),
    ):
        if doubles := [key for key, times in keys.items() if times > 1]:
            outcome.fail(f"applied more than once, {what}: {doubles[:3]}")
    again = replay(run)
    for wanted in {rounds[-1]["state_hash"], state_hash or again.hash}:
        if again.hash != wanted:
            outcome.fail(f"the replay leads to {again.hash}, not {wanted}")
    outcome.counts["rounds"] += len(rounds)
    most = max(len(record["submissions"]) for record in rounds)
    outcome.counts["rounds with all"] += sum(len(r["submissions"]) == most for r in rounds)
    outcome.counts["submissions applied"] += len(parts)


def _numbers_of(run: Path, part: Mapping[str, Any]) -> tuple[str, ...]:
    """The digests of the tensors that a submission brought."""
    with (run / "submissions" / part["file"]).open("rb") as file:
        length = int.from_bytes(file.read(10)[6:], "little")
        return tuple(tensor["digest"] for tensor in json.loads(file.read(length))["tensors"])
