"""Training as one of several ranks, with a fault in one of them: what a forked child does.

Owns: the small jobs, and where in them a fault may strike. Does not own: the processes
(forkedranks.py), choosing faults and judging what follows (rank_faults.py, rank_kills.py).
"""

from __future__ import annotations

import atexit
import errno
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from headway.checkpoint import CheckpointManager
from headway.dist import cleanup_distributed, init_distributed
from headway.engine.events import TrainerCallback
from headway.models.decoder import DecoderLayer
from headway.testing.faults import Fault, FaultyStorage
from headway.testing.proofs.remains import Shared
from headway.testing.tiny import tiny_dataset, tiny_decoder
from headway.trainers.parallel import DDPTrainer, FSDP2Trainer, PipelineTrainer

FUNCTION = f"{__name__}:train_rank"
PRELOAD = (
    "torch",
    __name__,
    "headway.cli.rank",
    "headway.strategies.ddp",
    "headway.strategies.fsdp2",
    "headway.strategies.pipeline.strategy",
)
MAX_STEPS, SAVE_STEPS = 12, 3
_BATCH, _NUM_SAMPLES, _LAYERS = 4, 10, 4
_CLASSES: dict[str, Any] = {"ddp": DDPTrainer, "fsdp2": FSDP2Trainer, "pipeline": PipelineTrainer}

EVENTS = (
    "on_init_end",
    "on_train_begin",
    "on_epoch_begin",
    "on_step_begin",
    "on_forward_backward_end",
    "on_gradients",
    "on_optimizer_step",
    "on_step_end",
    "on_log",
    "on_prediction_step",
    "on_evaluate",
    "on_save",
    "on_epoch_end",
)
ERRORS: tuple[Exception, ...] = (
    ValueError("the labels do not fit"),
    KeyError("text"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
    AssertionError(),
    MemoryError("no room for the batch"),
    # Of the user's own, to a server of data perhaps.
    ConnectionResetError(104, "Connection reset by peer"),
)


@dataclass(frozen=True)
class Variant:
    """A way of spreading the job over ranks."""

    num_ranks: int
    kind: str
    arguments: dict[str, Any] = field(default_factory=dict)
    shares: int = 0
    """Ranks, or groups of them, that read different data; 0: all ranks."""


VARIANTS = {
    "ddp2": Variant(2, "ddp"),
    "ddp2-own": Variant(2, "ddp", {"dispatch_batches": False}),
    "ddp4": Variant(4, "ddp"),
    "fsdp2": Variant(2, "fsdp2"),
    "fsdp2-own": Variant(2, "fsdp2", {"dispatch_batches": False}),
    "fsdp4": Variant(4, "fsdp2"),
    "pp2": Variant(2, "pipeline", {"pipe_schedule": "Schedule1F1B"}, shares=1),
    "pp4": Variant(4, "pipeline", {"pipe_schedule": "ScheduleGPipe"}, shares=1),
    "dp2pp2": Variant(4, "pipeline", {"pipeline_size": 2}, shares=2),
}


@dataclass(frozen=True)
class Plan:
    """One attempt at a job: how it is run, and what goes wrong in it."""

    variant: str
    save_async: bool = True
    life: str = "cleanup"
    """`cleanup`: a program that leaves its group in order; `bare`: one that does not; `command`:
    the verb of the command line."""
    max_steps: int = MAX_STEPS
    counts: tuple[int, ...] = ()
    """Samples of each rank, where each has a stream of its own."""
    action: str = "none"
    """`kill`, `stop` or `raise`; `kill_at_save`, `kill_all_at_save`: at an operation of a save."""
    rank: int = 0
    place: str = "on_step_begin"
    """An event; `dataset`, `forward`; `moment`: a random one, from another thread; `storage`: an
    operation of a save."""
    step: int = 0
    delay_s: float = 0.0
    error: int = 0
    operation: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def train_rank(environ: dict[str, str], folder: str, plan: dict[str, Any]) -> None:
    """A child: one rank of a job that resumes from what is there."""
    os.environ.update(environ)
    rank, place = int(environ["RANK"]), Path(folder)
    output = os.open(place / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    (place / f"pid-{rank}").write_text(str(os.getpid()))
    numbers = Shared(place / f"numbers-{rank}")
    given = Plan(**plan)
    culprit = Culprit(given, rank, numbers)
    _watch_saves(given, rank, numbers, place)

    def train() -> None:
        numbers.put("met", 1)
        trainer = _make_trainer(given, place, [_Reporter(numbers), culprit.callback()], culprit)
        trainer.train()
        numbers.put("finished", 1)

    _LIVES[given.life](train)


class Culprit:
    """The rank in which something goes wrong, once; on the others it does nothing."""

    def __init__(self, plan: Plan, rank: int, numbers: Shared) -> None:
        self._plan, self._numbers = plan, numbers
        self._armed = False
        self._waits = plan.rank == rank and plan.action in ("kill", "stop", "raise")

    def reach(self, place: str, step: int | None = None) -> None:
        """Strike if this is the place and the time has come."""
        plan = self._plan
        if not self._waits:
            return
        # Before the first step there is only one such moment.
        early = place == plan.place and place in ("on_init_end", "on_train_begin")
        self._armed = self._armed or early or (step is not None and step >= plan.step)
        if not self._armed:
            return
        if place == plan.place:
            self._waits = False
            self._strike()
        elif place == "on_step_begin" and plan.place == "moment":
            self._waits = False
            threading.Thread(target=self._strike_later, daemon=True).start()

    def _strike_later(self) -> None:
        time.sleep(self._plan.delay_s)
        self._strike()

    def _strike(self) -> None:
        if self._numbers.get("finished"):
            return
        self._numbers.put("struck_ns", time.monotonic_ns())
        if self._plan.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._plan.action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            raise ERRORS[self._plan.error]

    def callback(self) -> TrainerCallback:
        """Listens to the event that matters, and to those that count steps."""
        culprit = self

        def handler(event: str) -> Callable[..., None]:
            def handle(_: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                culprit.reach(event, state.global_step)

            return handle

        def begin(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for module in kwargs["model"].modules():
                if isinstance(module, DecoderLayer):
                    module.register_forward_pre_hook(lambda *_: culprit.reach("forward"))
            handler("on_train_begin")(self, args, state, control)

        events = {"on_step_begin", self._plan.place} & set(EVENTS)
        handlers: dict[str, Any] = {event: handler(event) for event in events}
        kind = type("CulpritCallback", (TrainerCallback,), {**handlers, "on_train_begin": begin})
        callback: TrainerCallback = kind()
        return callback


class _Reporter(TrainerCallback):
    def __init__(self, numbers: Shared) -> None:
        self._numbers = numbers

    def on_step_end(self, state: Any) -> None:
        self._numbers.put("step", state.global_step)
        self._numbers.put("trained", self._numbers.get("trained") + 1)

    def on_save(self, step: int) -> None:
        self._numbers.put("saved", step)

    def on_epoch_end(self, state: Any) -> None:
        print(f"epoch over at step {state.global_step}", flush=True)


class _Rows:
    """Samples by number; reading one is a place for a fault."""

    def __init__(self, num_samples: int, culprit: Culprit) -> None:
        self._samples = tiny_dataset(num_samples, sequence_length=8)
        self._culprit = culprit

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, number: int) -> Any:
        self._culprit.reach("dataset")
        return self._samples[number]


class _OwnShare(IterableDataset[Any]):
    """A stream of samples that no other rank has."""

    is_sharded = True

    def __init__(self, counts: tuple[int, ...], share: int) -> None:
        first = sum(counts[:share])
        self._samples = tiny_dataset(sum(counts), sequence_length=8)[first : first + counts[share]]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._samples)


def _make_trainer(plan: Plan, folder: Path, callbacks: list[Any], culprit: Culprit) -> Any:
    variant = VARIANTS[plan.variant]
    trainer_class = _CLASSES[variant.kind]
    shares = variant.shares or variant.num_ranks
    rank = int(os.environ["RANK"])
    settings = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": _BATCH // shares,
        "per_device_eval_batch_size": _BATCH // shares,
        "max_steps": plan.max_steps,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "steps",
        "save_steps": SAVE_STEPS,
        "save_async": plan.save_async,
        "save_total_limit": 2,
        "resume_from_checkpoint": True,
        "learning_rate": 3e-3,
        "seed": 0,
        "use_cpu": True,
        **variant.arguments,
    }
    if variant.kind == "pipeline":
        settings["n_microbatches"] = _BATCH // shares
    data: Any = _Rows(_NUM_SAMPLES, culprit)
    if plan.counts:
        data = _OwnShare(plan.counts, rank)
        settings["dispatch_batches"] = False
    return trainer_class(
        args=trainer_class.arguments_class.from_dict(settings),
        model_init=lambda: tiny_decoder(num_layers=_LAYERS, dropout=0.1),
        train_dataset=data,
        eval_dataset=tiny_dataset(5, sequence_length=8, seed=1),
        callbacks=callbacks,
        default_callbacks=False,
    )


def _watch_saves(plan: Plan, rank: int, numbers: Shared, folder: Path) -> None:
    """Note when a save is being written; put the fault of a plan into its storage."""
    init, write = CheckpointManager.__init__, CheckpointManager.write
    fault = None
    if plan.action.endswith("_at_save"):
        fault = Fault("kill", plan.operation, rank=plan.rank)
    elif plan.place == "storage" and plan.action != "none":
        fault = Fault("error", plan.operation, rank=plan.rank, errno=errno.ENOSPC)
    others = plan.action == "kill_all_at_save"

    def faulty(self: Any, output_dir: Any, **options: Any) -> None:
        storage = _KillingStorage(output_dir, fault, rank=rank)
        storage.prepare(folder, numbers, others)
        init(self, output_dir, **{**options, "storage": storage})

    def watched(self: Any, pending: Any) -> Any:
        numbers.begin_save(pending.step)
        path = write(self, pending)
        numbers.put("in_save", 0)
        return path

    CheckpointManager.__init__ = faulty  # type: ignore[method-assign]
    CheckpointManager.write = watched  # type: ignore[method-assign]


class _KillingStorage(FaultyStorage):
    """Notes the moment of its fault, and takes the other ranks along where it is to."""

    def prepare(self, folder: Path, numbers: Shared, others: bool) -> None:
        self._folder, self._numbers, self._others = folder, numbers, others

    def _strike(self, fault: Fault, path: str) -> None:
        self._numbers.put("struck_ns", time.monotonic_ns())
        for file in self._folder.glob("pid-*") if self._others else ():
            if int(file.read_text()) != os.getpid():
                os.kill(int(file.read_text()), signal.SIGKILL)
        super()._strike(fault, path)


# -- how a rank lives ---------------------------------------------------------------------------


def _live_orderly(train: Callable[[], None]) -> None:
    context = init_distributed(use_cpu=True)
    try:
        train()
    finally:
        cleanup_distributed(context)


def _live_bare(train: Callable[[], None]) -> None:
    """As an interpreter ends a program that knows of no groups."""
    code = 0
    try:
        init_distributed(use_cpu=True)
        train()
    except Exception as error:
        sys.last_value = error
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.exit(code)


def _live_as_command(train: Callable[[], None]) -> None:
    from headway.cli.rank import run_as_rank

    def work(job: Callable[[], None]) -> int:
        job()
        return 0

    sys.exit(run_as_rank(lambda: (train, {"use_cpu": True}), work))


_LIVES = {"cleanup": _live_orderly, "bare": _live_bare, "command": _live_as_command}
