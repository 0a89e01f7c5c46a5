"""The life of a run with some callbacks: it fails, is resumed and ends. On one process or ranks.

Owns: what is written down of such a life, so that tests can compare it with one without callbacks.
"""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import os
import random
import sys
import threading
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from callback_cases import CASES, Case, callback_classes

from headway import TrainerCallback
from headway.callbacks.profile import malloc_trace
from headway.config import load_run
from headway.dist import cleanup_distributed, init_distributed, watch
from headway.trainers.from_config import build_trainer

FAILS_AT, LAST_STEP = 3, 4
_CHECKPOINTS = "checkpoint-*"
# Lines of the engine about the failure, and of torch's profiler.
_OF_OTHERS = (
    "error: rank ",
    "the metrics of the last steps",
    "what is known of the failure is in",
    "USDT:",
)


class Fail(TrainerCallback):
    """A user's callback with a mistake in it."""

    def on_step_end(self, state: Any) -> None:
        if state.global_step == FAILS_AT:
            raise RuntimeError("power")


class Witness(TrainerCallback):
    """Sees what comes out of a run after all other callbacks have had their say."""

    priority = -1000

    def __init__(self) -> None:
        self.losses: list[tuple[int, str]] = []
        self.figures: set[str] = set()
        self.draws: dict[str, float] = {}

    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self.figures.update(metrics)
        if "train/CE loss" in metrics:
            self.losses.append((step, metrics["train/CE loss"].hex()))

    def on_log(self, logs: Mapping[str, Any]) -> None:
        self.figures.update(logs)

    def on_train_end(self) -> None:
        self.draws = {
            "torch": torch.rand(1).item(),
            "numpy": float(np.random.rand()),
            "python": random.random(),
        }


@dataclass
class Life:
    """What was seen of a run that failed and of its resume; the same without callbacks is right."""

    outcomes: list[str | None] = field(default_factory=list)
    disabled: dict[str, str] = field(default_factory=dict)
    losses: list[tuple[int, str]] = field(default_factory=list)
    weights: str = ""
    draws: dict[str, float] = field(default_factory=dict)
    """What each generator gave after the last step."""
    figures: set[str] = field(default_factory=set)
    states: dict[str, Any] = field(default_factory=dict)
    leaks: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    """All that lies in the output folder in the end."""
    written: set[str] = field(default_factory=set)
    """What this process opened for writing there, checkpoints apart."""
    connected: int = 0
    said: list[str] = field(default_factory=list)
    console: list[str] = field(default_factory=list)

    def has_file(self, pattern: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern.replace("**/", "*")) for name in self.files)


def run_file(folder: Path, callbacks: Any, trainer: str = "single", **args: Any) -> Path:
    """Write a run file; its run takes four steps, with evaluations and checkpoints at every two."""
    data = {"sequence_length": 8, "vocab_size": 258}
    content = {
        "model": {
            "vocab_size": 258,
            "hidden_size": 16,
            "num_layers": 1,
            "num_heads": 2,
            "max_seq_len": 64,
        },
        "tokenizer": "bytes",
        "trainer": trainer,
        "data": {
            name: {"class_path": "SyntheticDataset", "init_args": {"num_samples": n, **data}}
            for name, n in (("train", 64), ("eval", 4))
        },
        "default_callbacks": False,
        "callbacks": callbacks,
        "args": {
            "output_dir": str(folder / "out"),
            "use_cpu": True,
            "seed": 0,
            "max_steps": LAST_STEP,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_strategy": "steps",
            "save_steps": 2,
            **args,
        },
    }
    path = folder / f"run-{os.environ.get('RANK', 0)}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def component(name: str, url: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """A callback as a run file has it."""
    arguments = CASES[name].arguments(url, folder / "out")
    return {"class_path": name, "init_args": {**arguments, **changes}}


def group_of(name: str) -> str:
    """The room of a callback, such as log or watch."""
    return callback_classes()[name].__module__.split(".")[2]


def life_of(name: str) -> str:
    """The group whose life a callback shares; what changes a run has a life of its own."""
    return name if CASES[name].changes_run else group_of(name)


def live(folder: Path, names: Sequence[str], url: str, trainer: str = "single") -> Life:
    """Train until a user's callback fails, then resume and come to the end."""
    life = Life()
    folder.mkdir(parents=True, exist_ok=True)
    listed = [component(name, url, folder) for name in names]
    # Services of other packages live as long as the process; ranks talk to each other.
    strict = trainer == "single" and not any(_has_service(CASES[name]) for name in names)
    with _watch_process(folder / "out", life, strict=strict):
        first = build_trainer(load_run(run_file(folder, listed, trainer)))
        try:
            _train(first, life, [Fail()])
        except RuntimeError as error:
            if not str(error).endswith("power"):
                raise
        if trainer != "single":  # else the watch over the ranks would end them for the failure
            cleanup_distributed()
            init_distributed(use_cpu=True)
        by_name = {name: component(name, url, folder) for name in names}
        second = build_trainer(load_run(run_file(folder, by_name, trainer)))
        _train(second, life, [], resume_from_checkpoint=True)
    life.files = [
        str(path.relative_to(folder / "out"))
        for path in sorted((folder / "out").rglob("*"))
        if path.is_file()
    ]
    life.weights = digest(second.model)
    life.states = second.bus.state_dict()
    return life


def _has_service(case: Case) -> bool:
    return case.posts or case.package not in (None, "tensorboard")


def _train(trainer: Any, life: Life, others: Sequence[Any], **options: Any) -> None:
    witness = Witness()
    for callback in (*others, witness):
        trainer.add_callback(callback)
    try:
        trainer.train(**options)
    finally:
        life.outcomes.append(trainer.state.outcome)
        life.disabled.update(trainer.bus.disabled)
        life.losses += witness.losses
        life.draws |= witness.draws
        life.figures |= witness.figures
        life.leaks += [f"hook on {place}" for place in _hooks(trainer.model)]


def digest(model: torch.nn.Module) -> str:
    """All weights, bit by bit."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def _hooks(model: torch.nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            if vars(module).get(kind):
                yield f"{name}.{kind}"
    for name, parameter in model.named_parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if getattr(parameter, kind, None):
                yield f"{name}.{kind}"


# The process around a run

_watched: list[tuple[Path, Life]] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _watched:
        return
    folder, life = _watched[-1]
    if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
        writes = isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        path = os.path.abspath(os.fsdecode(args[0]))
        if writes and path.startswith(f"{folder}{os.sep}"):
            name = os.path.relpath(path, folder)
            if not fnmatch.fnmatch(name, f"{_CHECKPOINTS}*"):
                life.written.add(name)
    elif event == "socket.connect":
        life.connected += 1


def watch_writes() -> None:
    """See which files this process opens for writing from now on; it cannot be undone."""
    sys.addaudithook(_audit)


class _Listening(logging.Handler):
    def __init__(self, life: Life) -> None:
        super().__init__(logging.INFO)
        self.life = life

    def emit(self, record: logging.LogRecord) -> None:
        self.life.said.append(record.getMessage())


@contextmanager
def _watch_process(folder: Path, life: Life, *, strict: bool) -> Iterator[None]:
    logger = logging.getLogger("headway.callbacks")
    level, listening = logger.level, _Listening(life)
    before = _process(folder)
    logger.setLevel(logging.INFO)
    logger.addHandler(listening)
    _watched.append((folder, life))
    try:
        yield
    finally:
        _watched.pop()
        logger.removeHandler(listening)
        logger.setLevel(level)
    for what, now in _process(folder).items():
        new = [entry for entry in now if entry not in before[what]]
        if not strict:
            new = [entry for entry in new if "headway" in entry or str(folder) in entry]
        life.leaks += [f"{what}: {entry}" for entry in new]


def _process(folder: Path) -> dict[str, list[str]]:
    """What a process holds that a run could leave behind."""
    return {
        "thread": [thread.name for thread in threading.enumerate()],
        "file": list(_open_files()),
        "handler": [repr(handler) for handler in logging.getLogger().handlers],
        "stream": [f"stdout {id(sys.stdout)}", f"stderr {id(sys.stderr)}"],
        # Where ending it can crash the process it goes on, and is no leak.
        "tracing": ["headway tracemalloc"] * (tracemalloc.is_tracing() and malloc_trace._CAN_STOP),
        "profiler": ["headway profiler"] * torch._C._autograd._profiler_enabled(),
    }


def _open_files() -> Iterator[str]:
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if not target.startswith(("/proc", "/dev", "pipe:", "anon_inode", sys.prefix)):
            yield target


# On ranks


def live_on_rank(folder: str, groups: Mapping[str, Sequence[str]], url: str) -> dict[str, Life]:
    """Every group's life on this rank, by the group's name."""
    # Here life goes on after a failure: however slow the machine is, the process is not ended.
    watch.GRACE_S = watch.LAST_S = 120.0
    rank = init_distributed(use_cpu=True).rank
    watch_writes()
    lives = {}
    for group, names in groups.items():
        console = Path(folder, f"console-{group}-{rank}.txt")
        try:
            with _console_to(console):
                lives[group] = live(Path(folder, group), names, url, "ddp")
        except BaseException as error:
            error.add_note(f"with the callbacks of {group!r}: {', '.join(names)}")
            raise
        told = console.read_text().splitlines()
        lives[group].console = [line for line in told if not line.startswith(_OF_OTHERS)]
    return lives


@contextmanager
def _console_to(path: Path) -> Iterator[None]:
    """All that the process prints goes to a file, whoever prints it."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, saved in zip((1, 2), kept, strict=True):
            os.dup2(saved, number)
            os.close(saved)
