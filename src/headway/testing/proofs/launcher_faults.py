"""Proof that `headway train --nproc` gets over the loss of a rank, and leaves nobody behind.

Owns: whole jobs under the launcher with a rank that fails, or with the launcher itself killed, and
what must hold afterwards. Does not own: ranks without a launcher (rank_faults.py, rank_kills.py).

Every start is a fresh command with its own torchrun and interpreters, which takes seconds.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headway.dist.processes import ProcessIdentity, identify, look_at
from headway.engine.events import TrainerCallback
from headway.testing.proofs.crashes import quiet
from headway.testing.proofs.outcome import Outcome, memory_folder
from headway.testing.proofs.rank_faults import LIMIT_S, is_late
from headway.testing.proofs.remains import Ending, Shared, find_loss, newest_step, read_ending

MAX_STEPS, SAVE_STEPS = 20, 3
FAULTS = ("kill", "launcher", "raise", "torchrun", "stop", "both", "alone")
"""`kill`, `raise`, `stop`: of a rank, with restarts; else who is killed: `both` are launcher and
torchrun, `alone` the same where there is a single rank, which has no other to miss it."""
_OF_A_RANK = ("kill", "raise", "stop")
_FROZEN_AFTER_S = 5.0
_START_LIMIT_S = 300.0
_DEED = "HEADWAY_PROOF_DEED"
_RUN = {
    "model": {
        "vocab_size": 258,
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "max_seq_len": 32,
    },
    "data": {
        "train": {
            "class_path": "SyntheticDataset",
            "init_args": {"num_samples": 100, "sequence_length": 16, "vocab_size": 258},
        }
    },
    "callbacks": [f"{__name__}.Deed"],
    "args": {
        "output_dir": "out",
        "seed": 1,
        "use_cpu": True,
        "max_steps": MAX_STEPS,
        "logging_steps": 1,
        "save_steps": SAVE_STEPS,
        "per_device_train_batch_size": 2,
    },
}


@dataclass(frozen=True)
class Order:
    """What goes wrong in a job."""

    action: str = "none"
    rank: int = 0
    step: int = 0
    num_attempts: int = 0
    """In so many attempts, from the first."""
    slow_s: float = 0.0
    """How long every step is held up, so that the job is still there when its launcher dies."""
    num_ranks: int = 2


class Deed(TrainerCallback):
    """On a rank: notes the process and its steps, and does what is ordered."""

    def __init__(self) -> None:
        self._order = Order(**json.loads(os.environ[_DEED]))
        self._attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self._rank = int(os.environ["RANK"])
        self._numbers = Shared(Path(f"numbers-{self._rank}"))

    def on_train_begin(self) -> None:
        processes = [asdict(identify()), asdict(identify(os.getppid()))]
        Path(f"process-{self._attempt}-{self._rank}").write_text(json.dumps(processes))

    def on_step_end(self, state: Any) -> None:
        order = self._order
        self._numbers.put("step", state.global_step)
        time.sleep(order.slow_s)
        due = self._rank == order.rank and state.global_step >= order.step
        if not due or self._attempt >= order.num_attempts:
            return
        # Later in every attempt, so that each gets further than the one before.
        if state.global_step < order.step + 4 * self._attempt:
            return
        if order.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif order.action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif order.action == "raise":
            raise ValueError("the labels do not fit")


@dataclass
class Launched:
    """One command, from its start to its end."""

    folder: Path
    process: subprocess.Popen[bytes]

    def wait(self, limit_s: float = _START_LIMIT_S) -> int | None:
        """Its exit code; None: it still runs."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None

    def said(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def ranks(self) -> list[tuple[ProcessIdentity, ProcessIdentity]]:
        """The ranks that came as far as training, each with the torchrun that started it."""
        found = []
        for path in sorted(self.folder.glob("process-*")):
            rank, torchrun = json.loads(path.read_text())
            found.append((ProcessIdentity.from_json(rank), ProcessIdentity.from_json(torchrun)))
        return found

    def await_step(self, step: int) -> bool:
        """Wait until every rank has done a step; False: the command ended before."""
        numbers = [Shared(path) for path in sorted(self.folder.glob("numbers-*"))]
        return _wait_until(
            lambda: all(own.get("step") >= step for own in numbers),
            _START_LIMIT_S,
            give_up=lambda: self.process.poll() is not None,
        )


def _wait_until(
    done: Callable[[], bool], limit_s: float, give_up: Callable[[], bool] = lambda: False
) -> bool:
    deadline = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline or give_up():
            return done()
        time.sleep(0.02)
    return True


@contextmanager
def launched(folder: Path, order: Order, trainer: str, *words: str) -> Iterator[Launched]:
    """`headway train` in a folder of its own; nothing is left of it at the end."""
    (folder / "run.yaml").write_text(json.dumps({**_RUN, "trainer": trainer}))
    for path in folder.glob("process-*"):
        path.unlink()
    for rank in range(order.num_ranks):
        Shared(folder / f"numbers-{rank}", create=True)
    environ = {
        **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
        _DEED: json.dumps(asdict(order)),
        "HEADWAY_FROZEN_AFTER_S": f"{_FROZEN_AFTER_S:g}",
        "OMP_NUM_THREADS": "1",
    }
    nproc = str(order.num_ranks)
    command = [sys.executable, "-m", "headway", "train", "run.yaml", "--nproc", nproc, *words]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environ, stdout=output, stderr=output, start_new_session=True
        )
    job = Launched(folder, process)
    try:
        yield job
    finally:
        process.kill()
        process.wait()
        for pair in job.ranks():
            for found in pair:
                if look_at(found) not in ("gone", None):
                    os.kill(found.pid, signal.SIGKILL)


@dataclass
class _Trial:
    folder: Path
    trainer: str
    order: Order
    outcome: Outcome
    seen: list[str] = field(default_factory=list)

    def run(self, fault: str, reference: Ending) -> str | None:
        """What was wrong, if anything."""
        problem = self._restart() if fault in _OF_A_RANK else self._orphan(fault)
        if problem is None and read_ending(self.folder / "out") != reference:
            problem = "ended differently from an undisturbed job"
        return f"{problem}: {self.seen[-1][-3000:]}" if problem else None

    def _restart(self) -> str | None:
        """A rank fails; with --max-restarts the job ends by itself as if nothing had been."""
        order = self.order
        with launched(self.folder, order, self.trainer, "--max-restarts", "3") as job:
            code = job.wait()
            self.seen.append(job.said())
            attempts = {path.name.split("-")[1] for path in self.folder.glob("process-*")}
        if code != 0:
            return f"the job ended with {code}"
        if len(attempts) != order.num_attempts + 1:
            return f"attempts {sorted(attempts)} instead of {order.num_attempts + 1}"
        if not re.search(f"error: rank {order.rank} of 2 (was lost|failed): ", self.seen[-1]):
            return "the rank that failed was not named"
        self.outcome.counts["restarts"] += order.num_attempts
        return None

    def _orphan(self, fault: str) -> str | None:
        """The launcher dies, or torchrun, or both: nobody survives, and the next start goes on."""
        with launched(self.folder, self.order, self.trainer) as job:
            if not job.await_step(self.order.step):
                self.seen.append(job.said())
                return f"the job ended with {job.wait(1)} before it could be disturbed"
            pairs = job.ranks()
            struck_s = time.monotonic()
            if fault != "torchrun":
                job.process.kill()
            if fault != "launcher":
                os.kill(pairs[0][1].pid, signal.SIGKILL)
            everyone = [found for pair in pairs for found in pair]
            gone = _wait_until(
                lambda: all(look_at(found) == "gone" for found in everyone), 3 * LIMIT_S
            )
            took_s = time.monotonic() - struck_s
            code = job.wait(3 * LIMIT_S)
            self.seen.append(job.said())
        if not gone:
            return f"processes were left {took_s:.0f} s after {fault} was killed"
        if is_late(took_s, LIMIT_S, self.outcome):
            return f"the last process was gone {took_s:.1f} s after {fault} was killed"
        most = f"most ms from the kill of {fault} to the last end"
        self.outcome.counts[most] = max(self.outcome.counts[most], int(1000 * took_s))
        if fault == "torchrun" and (code != 1 or "torchrun was ended by SIGKILL" not in job.said()):
            return f"the launcher ended with {code} and did not say why"
        return self._go_on()

    def _go_on(self) -> str | None:
        num_ranks = self.order.num_ranks
        numbers = [Shared(self.folder / f"numbers-{rank}") for rank in range(num_ranks)]
        problem = find_loss(self.folder / "out", numbers, 0, SAVE_STEPS)
        if problem:
            return problem
        newest = newest_step(self.folder / "out")
        with launched(self.folder, Order(num_ranks=num_ranks), self.trainer) as job:
            code = job.wait()
            self.seen.append(job.said())
        if code != 0:
            return f"the next start ended with {code}"
        if newest and f"(step {newest})" not in self.seen[-1]:
            return f"the next start did not go on from step {newest}"
        return None


def choose_order(fault: str, chance: random.Random) -> Order:
    """What goes wrong in a trial of this fault."""
    step, rank = chance.randint(1, 8), chance.randrange(2)
    if fault in _OF_A_RANK:
        return Order(fault, rank, step, num_attempts=chance.randint(1, 2))
    return Order(step=step, slow_s=0.3, num_ranks=1 if fault == "alone" else 2)


def prove_launcher_faults(
    num_trials: int, seed: int, *, faults: tuple[str, ...] = FAULTS, trainer: str | None = None
) -> Outcome:
    """So many jobs, each with one of the faults in turn."""
    outcome = Outcome("faults under the launcher", seed)
    references: dict[tuple[str, int], Ending] = {}
    with memory_folder() as folder, quiet():
        for number in range(num_trials):
            chance = random.Random(f"{seed}/{number}")
            fault = faults[number % len(faults)]
            name = trainer or chance.choice(("ddp", "fsdp2"))
            order = choose_order(fault, chance)
            kind = (name, order.num_ranks)
            if kind not in references:
                references[kind] = _run_undisturbed(folder / f"undisturbed-{kind}", *kind)
            place = folder / f"trial-{number}"
            place.mkdir()
            problem = _Trial(place, name, order, outcome).run(fault, references[kind])
            outcome.counts["trials"] += 1
            outcome.counts[f"{fault} {'of a rank' if fault in _OF_A_RANK else 'killed'}"] += 1
            if problem:
                outcome.fail(f"seed {seed}/{number}, {name}, {fault}, {order}: {problem}")
            shutil.rmtree(place)
    return outcome


def _run_undisturbed(folder: Path, trainer: str, num_ranks: int) -> Ending:
    folder.mkdir()
    with launched(folder, Order(num_ranks=num_ranks), trainer) as job:
        code = job.wait()
        if code != 0:
            raise RuntimeError(f"the undisturbed job ended with {code}: {job.said()[-3000:]}")
    ending = read_ending(folder / "out")
    assert len(ending.losses) == MAX_STEPS
    return ending
