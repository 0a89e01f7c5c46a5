"""The largest batch per device that trains: the search, one trial of it, and what follows from it.

Owns: which sizes are tried, what a trial runs, how accumulation changes so that the size of an
optimizer step stays. Does not own: the processes that trials run in (cli/batch_find.py).
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from headway.config.arguments import find_problems
from headway.config.schema import RunConfig
from headway.data.kinds import classify
from headway.engine.events import TrainerCallback
from headway.errors import ConfigError
from headway.trainers.plan import accumulation_steps, has_length

if TYPE_CHECKING:
    from headway.trainers.trainer import Trainer

_MOST_SEARCHED_SAMPLES = 4096
_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "bad_alloc",
    "not enough memory",
    "could not create a memory",
    "could not create a primitive",
    "cublas_status_alloc_failed",
    "failed to allocate",
    # Of a library that cannot be loaded, and of a thread without a stack.
    "failed to map segment",
    "can't start new thread",
)


@dataclass(frozen=True)
class Trial:
    """What became of one size."""

    size: int
    fits: bool
    tokens_per_s: float | None = None
    """Tokens per second over all ranks."""
    peak_bytes: int | None = None
    """The most memory that a rank used at once."""
    reason: str | None = None
    """Why it does not fit."""


@dataclass(frozen=True)
class Fit:
    """A batch per device and the accumulation that goes with it."""

    size: int
    accumulation: int


def search(try_size: Callable[[int], Trial], start: int, most: int, unit: int = 1) -> list[Trial]:
    """Try sizes until the largest that fits is known: doubling (or halving), then bisection.

    Sizes are multiples of `unit` up to `most`. The trials come in the order in which they were
    made; if none fits, not even the smallest size does.
    """
    trials: list[Trial] = []

    def fits(number: int) -> bool:
        trials.append(try_size(number * unit))
        return trials[-1].fits

    last = most // unit
    number = max(1, min(start // unit, last))
    if fits(number):
        good, bad = number, None
        while good < last and bad is None:
            number = min(2 * good, last)
            if fits(number):
                good = number
            else:
                bad = number
        if bad is None:
            return trials
    else:
        good, bad = 0, number
        while good == 0 and bad > 1:
            number = bad // 2
            if fits(number):
                good = number
            else:
                bad = number
        if good == 0:
            return trials
    while bad - good > 1:
        number = (good + bad) // 2
        if fits(number):
            good = number
        else:
            bad = number
    return trials


def fit_global_batch(
    samples_per_device: int, largest: int, unit: int = 1, *, accumulates: bool = True
) -> Fit | None:
    """The largest size up to `largest` that keeps the samples of a step; None if there is none.

    Of a run that must not accumulate (`accumulates`) the samples of a step are one batch.
    """
    least = 1 if accumulates else samples_per_device
    for size in range(min(largest, samples_per_device), least - 1, -1):
        if samples_per_device % size == 0 and size % unit == 0:
            return Fit(size, samples_per_device // size)
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or what caused it, says that there is no memory left."""
    seen: BaseException | None = error
    while seen is not None:
        kind = type(seen).__name__
        if isinstance(seen, MemoryError) or kind in ("OutOfMemoryError", "_ArrayMemoryError"):
            return True
        text = str(seen).lower()
        told = isinstance(seen, RuntimeError | OSError | ImportError)
        if told and any(words in text for words in _OUT_OF_MEMORY):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


# One trial


class Longest:
    """Data whose every sample is the longest one of some other data."""

    is_deterministic = True

    def __init__(self, dataset: Any, num_samples: int) -> None:
        self._sample, self._num_samples = _find_longest(dataset), num_samples
        for name in ("sequence_length", "mask_documents"):
            if hasattr(dataset, name):
                setattr(self, name, getattr(dataset, name))

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, number: int) -> Any:
        return copy.copy(self._sample)


def _find_longest(dataset: Any) -> Any:
    samples: Iterable[Any]
    if classify(dataset) == "map":
        length = len(dataset)
        # Of data with one length any sample will do; else look at some all over it.
        fixed = isinstance(getattr(dataset, "sequence_length", None), int)
        step = max(1, length // _MOST_SEARCHED_SAMPLES)
        samples = (dataset[n] for n in range(0, 1 if fixed else length, step))
    else:
        samples = islice(dataset, _MOST_SEARCHED_SAMPLES)
    longest = max(samples, key=_size_of, default=None)
    if longest is None:
        raise ConfigError("data.train: it holds no sample")
    return longest


def _size_of(sample: Any) -> int:
    if isinstance(sample, dict):
        return max(map(_size_of, sample.values()), default=0)
    if isinstance(sample, tuple):
        return max(map(_size_of, sample), default=0)
    numel = getattr(sample, "numel", None)
    if callable(numel):
        return int(numel())
    try:
        return len(sample)
    except TypeError:
        return 0


def samples_per_device(run: RunConfig, dataset: Any, world_size: int) -> int:
    """Samples of one optimizer step on one device, as the run has them."""
    args = run.args
    return args.per_device_train_batch_size * accumulation_steps(args, world_size, dataset)


def why_not_accumulate(run: RunConfig) -> str | None:
    """What forbids the run several micro-batches in a step, in the words of the rules."""
    args = copy.copy(run.args)
    args.gradient_accumulation_steps = 2
    args.global_batch_size = args.global_batch_tokens = None
    return "; ".join(problem.message for problem in find_problems(args)) or None


def check_searchable(dataset: Any) -> None:
    """Refuse data that makes its own batches."""
    if classify(dataset) == "batches":
        raise ConfigError(
            f"data.train: a {type(dataset).__name__} makes its own batches, so that "
            "args.per_device_train_batch_size has no effect on them"
        )


def prepare_trial(run: RunConfig, size: int, accumulation: int, output_dir: str) -> RunConfig:
    """The run with another batch, which writes nothing but to `output_dir`.

    Gradients of one micro-batch are kept while another is computed: an accumulation of 2 needs as
    much memory as any larger one.
    """
    args = replace(
        run.args,
        output_dir=output_dir,
        checkpoint_address=None,
        logging_dir=None,
        per_device_train_batch_size=size,
        per_device_eval_batch_size=size,
        gradient_accumulation_steps=accumulation,
        global_batch_size=None,
        global_batch_tokens=None,
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="no",
        eval_on_save=False,
        eval_on_start=False,
        load_best_model_at_end=False,
        preserve_best_model=False,
        save_on_error=False,
        stop_at=None,
    )
    data = replace(run.data, eval=None)
    return replace(run, args=args, data=data, callbacks=[], default_callbacks=False)


def run_trial(run: RunConfig, num_steps: int) -> dict[str, Any]:
    """Train for a few steps with a run that `prepare_trial` made; its speed and memory.

    Every rank must call it.
    """
    from headway.trainers.from_config import build_trainer

    trainer = build_trainer(run)
    check_searchable(trainer.train_dataset)
    clock = _Clock(num_steps)
    trainer.add_callback(clock)
    args = run.args
    needed = args.per_device_train_batch_size * args.gradient_accumulation_steps
    needed *= trainer.env.world_size * num_steps
    real = trainer.train_dataset
    length = len(real) if has_length(real) else 0
    trainer.train_dataset = Longest(real, max(length, needed))
    trainer.train(resume_from_checkpoint=False)
    return {"tokens_per_s": clock.tokens_per_s, "peak_bytes": _peak_bytes(trainer)}


class _Clock(TrainerCallback):
    """Times the steps of a trial and ends it."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._marks: list[tuple[float, int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, trainer: Any, **more: Any) -> None:
        if trainer.strategy.device.type == "cuda":
            import torch

            torch.cuda.synchronize(trainer.strategy.device)
        self._marks.append((time.perf_counter(), state.num_input_tokens_seen))
        if len(self._marks) >= self._num_steps:
            control.should_training_stop = True

    @property
    def tokens_per_s(self) -> float | None:
        """By the median step; the first one, which sets things up, does not count."""
        steps = list(zip(self._marks, self._marks[1:]))
        if not steps:
            return None
        return statistics.median((b[1] - a[1]) / max(b[0] - a[0], 1e-9) for a, b in steps)


def _peak_bytes(trainer: Trainer) -> int:
    """The most memory that any rank used."""
    import torch

    assert trainer.strategy is not None
    device = trainer.strategy.device
    if device.type == "cuda":
        own = torch.cuda.max_memory_reserved(device)
    else:
        import resource

        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        own *= 1 if sys.platform == "darwin" else 1024
    return int(trainer.strategy.reduce(torch.tensor(float(own)), "max").item())
