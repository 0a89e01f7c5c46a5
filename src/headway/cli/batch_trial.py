"""One trial of `headway batch-find`, in a process of its own.

Owns: starting the process, its limit on memory, telling apart how it ended. Does not own: what is
trained in it (trainers/batch_find.py).

A trial may run out of memory in any way: with an error, in a crash, or killed by the system. None
of them is felt outside of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cli.lr_find import in_run_file_terms
from headway.cli.messages import spell_bytes
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.config.schema import RunConfig
    from headway.trainers.batch_find import Trial

_REPORT, _NO_MEMORY, _NO_ROOM, _OUTPUT = "report.json", "no-memory", "no-room", "output.txt"
_UNITS = {"": 1, **{u: 1000**n for n, u in enumerate("kmgt", 1)}}
_SIGNALS = re.compile(r"\bSIG(?:KILL|SEGV|ABRT|BUS|FPE|ILL)\b")
_SHOWN_LINES = 12
_STOP_LIMIT_S = 20.0


class TrialError(RuntimeError):
    """A trial failed for another reason than memory."""

    def __init__(self, size: int, output: str, code: int) -> None:
        super().__init__(
            f"a trial with {size} samples per device failed (exit code {code}), and not for want "
            "of memory"
        )
        self.output = output


class NoRoomError(RuntimeError):
    """A limit on memory that a process exceeds before it has a model."""

    def __init__(self, limit_bytes: int, taken_bytes: int) -> None:
        super().__init__(
            f"not even 1 sample per device can train: a rank may take {spell_bytes(limit_bytes)} "
            f"(--memory-limit), and takes {spell_bytes(taken_bytes)} before it builds the model"
        )


@dataclass(frozen=True)
class TrialPlan:
    """What all trials of a search have in common."""

    config: str
    overrides: list[str]
    nproc: int | None
    samples: int
    """Samples of an optimizer step on one device."""
    steps: int
    memory_limit_bytes: int | None
    accumulates: bool = True
    """Whether a step may have several micro-batches."""

    def run(self, size: int, *, must_work: bool) -> Trial:
        """Try a size. A mistake in the run file is raised where the size is not to blame for it."""
        with tempfile.TemporaryDirectory(prefix="headway-batch-") as folder:
            code = _run(self._command(size, folder), Path(folder, _OUTPUT))
            self._check_room(Path(folder))
            return _judge(size, Path(folder), code, must_work=must_work)

    def _check_room(self, folder: Path) -> None:
        taken = [int(path.read_text()) for path in folder.glob(f"{_NO_ROOM}*")]
        if taken:
            assert self.memory_limit_bytes is not None
            raise NoRoomError(self.memory_limit_bytes, max(taken))

    def accumulation_of(self, size: int) -> int:
        """Micro-batches of a step of the trial: two stand for any larger number."""
        return 2 if self.accumulates and size < self.samples else 1

    def _command(self, size: int, folder: str) -> list[str]:
        words = [
            sys.executable, "-m", "headway", "batch-find", self.config, "--quiet",
            "--trial", folder, "--trial-size", str(size),
            "--trial-accumulation", str(self.accumulation_of(size)),
            "--steps", str(self.steps),
        ]  # fmt: skip
        if self.memory_limit_bytes is not None:
            words += ["--memory-limit", str(self.memory_limit_bytes)]
        if self.nproc is not None:
            words += ["--nproc", str(self.nproc)]
        return words + self.overrides


def add_trial_arguments(parser: argparse.ArgumentParser) -> None:
    """What the finder says to a trial."""
    parser.add_argument("--trial", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--trial-size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--trial-accumulation", type=int, help=argparse.SUPPRESS)


def parse_bytes(text: str) -> int:
    """A size such as 2GiB, 500MB or a number of bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", text.strip().lower())
    if found is None:
        raise ConfigError(
            f"--memory-limit: {text!r} given; allowed: a size such as 2GiB, 800MiB or 4GB"
        )
    number, unit, binary = found.groups()
    factor = 1024 ** ("kmgt".index(unit) + 1) if unit and binary else _UNITS[unit]
    return int(float(number) * factor)


def _run(command: list[str], output: Path) -> int:
    """Run a command to its end, whatever that is; it goes with this process."""
    with output.open("wb") as file:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            # Ctrl-C in a terminal goes to everyone there; this process passes it on.
            start_new_session=True,
        )
        try:
            return child.wait()
        finally:
            if child.returncode is None:
                _stop(child)


def _stop(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(_STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _judge(size: int, folder: Path, code: int, *, must_work: bool) -> Trial:
    """What a trial that has ended says about its size."""
    from headway.trainers.batch_find import Trial

    report = folder / _REPORT
    if code == 0 and report.is_file():
        return Trial(size, True, **json.loads(report.read_text(encoding="utf-8")))
    output = (folder / _OUTPUT).read_text(encoding="utf-8", errors="replace")
    if code in (130, 143, -signal.SIGINT, -signal.SIGTERM):
        raise KeyboardInterrupt
    if list(folder.glob(f"{_NO_MEMORY}*")):
        return Trial(size, False, reason="out of memory")
    if code < 0:
        return Trial(size, False, reason=f"ended by {signal.Signals(-code).name}")
    crash = _SIGNALS.search(output)
    if crash is not None and "Traceback" not in output:
        return Trial(size, False, reason=f"a rank was ended by {crash[0]}")
    said = [line[7:] for line in output.splitlines() if line.startswith("error: ")]
    mistakes = [in_run_file_terms(line) for line in said]
    if must_work:
        if code == 2:
            raise ConfigError(mistakes or [f"a trial ended with exit code 2: {output[-500:]}"])
        raise TrialError(size, "\n".join(output.splitlines()[-_SHOWN_LINES:]), code)
    last = (mistakes or output.strip().splitlines() or [f"exit code {code}"])[-1]
    return Trial(size, False, reason=last)


# In the process of a trial


def run_here(options: argparse.Namespace) -> int:
    """Be a trial: on every rank of it."""
    limit = None if options.memory_limit is None else parse_bytes(options.memory_limit)
    from headway.cli.rank import group_options, run_as_rank
    from headway.config.load import load_run

    def load() -> tuple[RunConfig, dict[str, Any]]:
        from headway.trainers.batch_find import prepare_trial

        run = load_run(options.config, options.overrides)
        place = str(Path(options.trial, "out"))
        trial = prepare_trial(run, options.trial_size, options.trial_accumulation, place)
        return trial, group_options(run.args)

    return run_as_rank(load, lambda run: _measure(options, run, limit))


def _measure(options: argparse.Namespace, run: RunConfig, limit: int | None) -> int:
    from headway.dist.env import detect_env
    from headway.trainers import from_config  # noqa: F401  what a trial needs to have any room
    from headway.trainers.batch_find import is_out_of_memory, run_trial

    env = detect_env(use_cpu=run.args.use_cpu, device=run.args.device)
    taken = taken_bytes(env.device)
    if limit is not None and taken is not None and taken >= limit:
        Path(options.trial, f"{_NO_ROOM}-{env.rank}").write_text(str(taken))
        return 1
    try:
        with limited_memory(limit, env.device):
            facts = run_trial(run, options.steps)
    except BaseException as error:
        if is_out_of_memory(error):
            Path(options.trial, f"{_NO_MEMORY}-{env.rank}").touch()
        raise
    if env.rank == 0:
        Path(options.trial, _REPORT).write_text(json.dumps(facts), encoding="utf-8")
    return 0


def taken_bytes(device: str) -> int | None:
    """What a limit on this process's memory would count already; None where that is not told."""
    if device.startswith("cuda"):
        return 0
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:")), None)


@contextmanager
def limited_memory(limit_bytes: int | None, device: str) -> Iterator[None]:
    """Let this process have no more memory than so much: of its GPU, or of the host.

    Afterwards it may have more again: telling what went wrong needs some, too.
    """
    if limit_bytes is None:
        yield
    elif device.startswith("cuda"):
        import torch

        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
        yield
    else:
        import resource

        # What the process may write to: mapped files, such as the libraries, do not count.
        before = resource.getrlimit(resource.RLIMIT_DATA)
        least = limit_bytes if before[1] == resource.RLIM_INFINITY else min(limit_bytes, before[1])
        resource.setrlimit(resource.RLIMIT_DATA, (least, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)
