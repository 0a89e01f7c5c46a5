"""What training leaves behind, however it ends: numbers of its own, and its checkpoints.

Owns: numbers in a file that outlive the process, how a run ended, and what a killed process may
not leave. Does not own: who kills it (kills.py, rank_kills.py, rank_faults.py).
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.checkpoint import verify
from headway.checkpoint.manifest import committed

_START = {
    "step": -1,
    "in_save": 0,
    "saved": -1,
    "trained": 0,
    "begun": -1,
    "struck_ns": 0,
    "finished": 0,
    "met": 0,
}
_PLACES = {name: number for number, name in enumerate(_START)}


class Shared:
    """Numbers that a child leaves behind however it ends."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        size = 8 * len(_START)
        if create:
            path.write_bytes(struct.pack(f"<{len(_START)}q", *_START.values()))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)

    def put(self, name: str, value: int) -> None:
        """Set one of the numbers."""
        struct.pack_into("<q", self._map, 8 * _PLACES[name], value)

    def begin_save(self, step: int) -> None:
        """Note the save that is being written from now on; `in_save` is 0 again when it is over."""
        # In this order: a kill between the two must not leave a save that is begun and over.
        self.put("in_save", 1)
        self.put("begun", step)

    def get(self, name: str) -> int:
        """`step` (the last finished), `in_save` (whether one was being written), `begun` and
        `saved` (the last save begun and announced), `trained` (steps done), `struck_ns` (when the
        fault was put, by the monotonic clock), `finished` (whether training returned), `met`
        (whether it found the other ranks)."""
        value: int = struct.unpack_from("<q", self._map, 8 * _PLACES[name])[0]
        return value


@dataclass(frozen=True)
class Ending:
    """What a finished run left: losses of all steps, digests of weights and optimizer."""

    losses: tuple[tuple[int, float], ...]
    digests: tuple[tuple[str, str], ...]


def read_ending(root: Path) -> Ending:
    """How the run that saved here last ended."""
    newest = committed(root)[-1]
    state = json.loads((newest.path / "trainer_state.json").read_text())
    losses = tuple((e["step"], e["loss"]) for e in state["log_history"] if "loss" in e)
    files = newest.manifest.files.items()
    tensors = sorted((n, r.digest) for n, r in files if n.endswith(".safetensors"))
    return Ending(losses, tuple(tensors))


def newest_step(root: Path) -> int:
    """The step of the newest committed checkpoint; 0: there is none."""
    return max((c.step for c in committed(root)), default=0)


def find_loss(
    root: Path, numbers: Sequence[Shared], newest_before: int, save_steps: int
) -> str | None:
    """What is wrong with the directory that a killed process, or several, left, if anything."""
    listed = committed(root)
    problems = [line for checkpoint in listed for line in verify(checkpoint.path)]
    if problems:
        return f"corrupt: {'; '.join(problems)}"
    newest = newest_step(root)
    if newest < newest_before:
        return f"the newest was of step {newest_before}, now of {newest}"
    for own in numbers:
        step, saved = own.get("step"), own.get("saved")
        if newest < saved:
            return f"the save of step {saved} was announced, but the newest is of step {newest}"
        # Only the save under way may be lost.
        due = own.get("begun") - save_steps * own.get("in_save")
        if newest < due:
            return f"the save of step {due} was begun and over, but the newest is of step {newest}"
        if step - newest > 2 * save_steps:
            return f"step {step} was done, but the newest checkpoint is of step {newest}"
    return None
