"""Commands that tests start as real processes, and what such runs leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PROGRAM = str(Path(sys.executable).with_name("headway"))
TRAIN = (PROGRAM, "train", "run.yaml")

# For the modules of callbacks that tests write.
HOLD = '''\
import os, select, sys

def hold():
    """Say so, and wait until somebody writes to the gate."""
    print("holding", file=sys.stderr, flush=True)
    # Not a blocking open: a signal that comes right before one is noticed only after it.
    gate, said = os.open("gate", os.O_RDONLY | os.O_NONBLOCK), b""
    while True:
        if select.select([gate], [], [], 0.05)[0]:
            try:
                part = os.read(gate, 100)
            except BlockingIOError:
                continue
            if said and not part:
                break
            said += part
    os.close(gate)
'''


@contextmanager
def started(
    *command: str,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    ask: bool = True,
) -> Iterator[subprocess.Popen[str]]:
    """A command in a session of its own, of which nothing is left at the end.

    `ask`: it is asked to end before it is killed, so that it can end what it started.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, **(environ or {})},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if ask:
            process.terminate()
        else:
            process.kill()
        try:
            process.communicate(timeout=60)
        finally:
            process.kill()


def wait_for(process: subprocess.Popen[str], words: str) -> None:
    """Read what a process says until the words come."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if words in line:
            return
    raise AssertionError(f"{words!r} did not come:\n{''.join(lines)}")


def checkpoints(folder: Path) -> list[int]:
    """Steps of the checkpoints of a run into `out`."""
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("out/checkpoint-*"))


def losses(output_dir: Path) -> dict[int, float]:
    """By step; where a step was taken again after a restart, the last one."""
    found = {}
    for line in (output_dir / "trainer_logs.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "loss" in record:
            found[record["global_step"]] = record["loss"]
    return found


def errors(err: str) -> list[str]:
    """The lines in which a command says what is wrong."""
    return [line for line in err.splitlines() if line.startswith("error: ")]
