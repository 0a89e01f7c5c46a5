"""Proof that the logs of a run hold each step exactly once, however often the run was killed.

Owns: a run that is killed and resumed again and again, the places of the kills, and the count of
steps that a reader of each log finds. Does not own: the processes (forkserver.py), the logs.

A kill comes at a random moment from outside, or from inside in the middle of a write to a log, so
that half a record is what the file ends with.
"""

from __future__ import annotations

import importlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.testing.forkserver import ForkServer
from headway.testing.proofs.outcome import Outcome, memory_folder

SAVE_STEPS = 3


@dataclass(frozen=True)
class LogSink:
    """A log to be proven: how a child makes its callbacks, and how its steps are read."""

    name: str
    make: str
    """`module:function` that takes the run's folder and returns a list of callbacks."""
    read_steps: Callable[[Path], list[int]]
    """Takes the output directory; returns every training step that a reader of the log sees."""
    file_suffix: str = ""
    """Files whose writes a kill may tear end so; empty: none."""


def make_json_loggers(folder: str) -> list[Any]:
    from headway.callbacks import JsonLogger

    return [JsonLogger(), JsonLogger(format="array")]


def read_json_steps(name: str) -> Callable[[Path], list[int]]:
    """Reads the training steps of one of JsonLogger's files."""

    def read(output_dir: Path) -> list[int]:
        from headway.callbacks.log.json_reader import read_json_log

        path = output_dir / name
        records = read_json_log(path) if path.exists() else []
        return [record["global_step"] for record in records if record["type"] == "train"]

    return read


_JSON_MAKER = f"{__name__}:make_json_loggers"
JSON_SINKS = (
    LogSink("lines", _JSON_MAKER, read_json_steps("trainer_logs.jsonl"), ".jsonl"),
    LogSink("array", _JSON_MAKER, read_json_steps("trainer_logs.json"), ".json"),
)


def train_child(
    folder: str, makers: Sequence[str], suffixes: Sequence[str], tear_at: int, max_steps: int
) -> None:
    """A child: trains on from what is there; with `tear_at` it dies inside that write to a log."""
    from headway.testing.trainer import tiny_trainer

    if tear_at:
        _die_in_write(tear_at, tuple(suffixes))
    callbacks: list[Any] = []
    for maker in makers:
        module, _, name = maker.partition(":")
        callbacks += getattr(importlib.import_module(module), name)(folder)
    tiny_trainer(
        folder,
        callbacks,
        num_samples=16,
        max_steps=max_steps,
        save_strategy="steps",
        save_steps=SAVE_STEPS,
        save_total_limit=2,
        resume_from_checkpoint=True,
    ).train()


def _die_in_write(number: int, suffixes: tuple[str, ...]) -> None:
    """Let the given write to a log get half of its bytes out, and kill this process."""
    write, count = os.write, 0

    def torn(file: int, data: Any) -> int:
        nonlocal count
        if os.readlink(f"/proc/self/fd/{file}").endswith(suffixes):
            count += 1
            if count == number:
                write(file, bytes(data)[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
        return write(file, data)

    os.write = torn


def prove_log_kills(num_kills: int, seed: int, sinks: Sequence[LogSink] = JSON_SINKS) -> Outcome:
    """One run that is killed `num_kills` times and then let go to its end.

    The run gets longer with every kill, so that there is always something left to train.
    """
    outcome = Outcome("kills of a run that logs", seed)
    chance = random.Random(seed)
    makers = list(dict.fromkeys(sink.make for sink in sinks))
    suffixes = [sink.file_suffix for sink in sinks if sink.file_suffix]
    with memory_folder() as folder, ForkServer(log=folder / "log") as server:
        child = {"folder": str(folder / "run"), "makers": makers, "suffixes": suffixes}
        (folder / "run").mkdir()
        window_s = _time_start(server, folder, makers)
        max_steps, output_dir = 20, folder / "run/out"
        while outcome.counts["kills"] < num_kills and not outcome.failures:
            tears = bool(suffixes) and chance.random() < 0.5
            tear_at = chance.randint(1, 20 * len(suffixes)) if tears else 0
            server.start(f"{__name__}:train_child", **child, tear_at=tear_at, max_steps=max_steps)
            if not tears:
                time.sleep(chance.random() * window_s)
                server.kill()
            _judge(server.wait(), outcome, folder / "log")
            outcome.counts["kills inside a write"] += tears
            reached = max(max(sink.read_steps(output_dir), default=0) for sink in sinks)
            max_steps = max(max_steps, reached + 20)
            _find_doubles(output_dir, sinks, outcome)
        server.start(f"{__name__}:train_child", **child, tear_at=0, max_steps=max_steps)
        code = server.wait()
        if code:
            outcome.fail(
                f"the last child ended with {code}: {(folder / 'log').read_text()[-2000:]}"
            )
        for sink in sinks:
            if sink.read_steps(output_dir) != list(range(1, max_steps + 1)):
                steps = sink.read_steps(output_dir)
                outcome.fail(f"{sink.name}: the steps of 1 to {max_steps} are {steps}")
        outcome.counts["steps"] = max_steps
    return outcome


def _judge(code: int, outcome: Outcome, log: Path) -> None:
    if code == -signal.SIGKILL:
        outcome.counts["kills"] += 1
    elif code:
        outcome.fail(f"a child ended with {code}: {log.read_text()[-2000:]}")


def _find_doubles(output_dir: Path, sinks: Sequence[LogSink], outcome: Outcome) -> None:
    """Also right after a kill no step may be there twice, nor may one be missing in between."""
    for sink in sinks:
        steps = sink.read_steps(output_dir)
        if steps != list(range(1, len(steps) + 1)):
            doubles = [step for step, times in Counter(steps).items() if times > 1]
            outcome.fail(f"{sink.name}: after a kill the steps are {steps}; double: {doubles}")


def _time_start(server: ForkServer, folder: Path, makers: list[str]) -> float:
    """How long a child takes for its start and the steps of a few saves."""
    (folder / "timed").mkdir()
    began = time.monotonic()
    server.start(
        f"{__name__}:train_child", folder=str(folder / "timed"), makers=makers, suffixes=[],
        tear_at=0, max_steps=5 * SAVE_STEPS,
    )  # fmt: skip
    if server.wait():
        raise RuntimeError(f"a run ended badly: {(folder / 'log').read_text()[-2000:]}")
    return time.monotonic() - began
