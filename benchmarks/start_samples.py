"""Where the main thread of a command is, looked at fifty times a second, as a tree of calls.

    python benchmarks/start_samples.py SAMPLES.json headway's words ...

runs the command in this process with a thread beside it that notes the stack of the main one, and
writes what it saw. `call_tree` makes the tree of it (used by cold_start.py). Time in which nothing
could look, since one call kept the interpreter to itself, counts for the stack seen right after.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from types import FrameType

INTERVAL_S = 0.02
# What only passes calls on.
_PLUMBING = ("importlib", "runpy", "contextlib", "functools", "__main__", "threading")


class Sampler:
    """Notes the stack of the main thread until it is told to stop."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._samples: list[tuple[float, float, list[int]]] = []
        self._done = threading.Event()
        self._main = threading.main_thread().ident
        self._thread = threading.Thread(target=self._look, name="start-samples", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, path: Path) -> None:
        """Write frames by number and, for each sample, when it was, its seconds and its stack."""
        self._done.set()
        self._thread.join()
        path.write_text(json.dumps({"frames": list(self._numbers), "samples": self._samples}))

    def _look(self) -> None:
        last_s = time.time()
        while not self._done.wait(INTERVAL_S):
            frame = sys._current_frames().get(self._main or 0)
            now_s = time.time()
            self._samples.append((now_s, now_s - last_s, self._stack(frame)))
            last_s = now_s

    def _stack(self, frame: FrameType | None) -> list[int]:
        numbers: list[int] = []
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            if not module.startswith(_PLUMBING):
                name = frame.f_code.co_qualname
                text = f"import {module}" if name == "<module>" else f"{module}.{name}"
                numbers.append(self._numbers.setdefault(text, len(self._numbers)))
            frame = frame.f_back
        return numbers[::-1]


class _Node:
    def __init__(self) -> None:
        self.seconds = 0.0
        self.below: dict[int, _Node] = {}


def call_tree(path: Path, until_s: float, least_s: float = 0.1) -> str:
    """The calls that took `least_s` or more before the wall-clock time `until_s`.

    Of calls one below the other that took the same time the innermost is shown; those of Headway
    all are.
    """
    found = json.loads(path.read_text())
    frames, root = found["frames"], _Node()
    for when_s, seconds, stack in found["samples"]:
        if when_s > until_s:
            break
        node = root
        node.seconds += seconds
        for number in stack:
            node = node.below.setdefault(number, _Node())
            node.seconds += seconds
    lines = [f"{root.seconds:7.2f} s in all"]
    _show(root, frames, least_s, 1, lines)
    return "\n".join(lines)


def _show(node: _Node, frames: list[str], least_s: float, depth: int, lines: list[str]) -> None:
    for number, child in sorted(node.below.items(), key=lambda one: -one[1].seconds):
        if child.seconds < least_s:
            return
        inner = max((one.seconds for one in child.below.values()), default=0.0)
        passes_on = child.seconds - inner < least_s and not frames[number].startswith("headway.")
        if not passes_on:
            lines.append(f"{child.seconds:7.2f} {'  ' * depth}{frames[number]}")
        _show(child, frames, least_s, depth + (not passes_on), lines)


def main() -> int:
    path, *words = sys.argv[1:]
    sampler = Sampler()
    sampler.start()
    sys.argv = ["headway", *words]
    try:
        from headway.cli.main import main as headway

        return headway(words)
    finally:
        sampler.stop(Path(path))


if __name__ == "__main__":
    sys.exit(main())
