"""How long a run is and how often things are due, worked out from arguments and data.

Owns the arithmetic between samples, micro-batches, optimizer steps, epochs and tokens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headway.args import TrainingArguments
from headway.config.batch import derive_accumulation
from headway.config.duration import Duration
from headway.config.rules import default_of
from headway.data.loader import WindowLoader
from headway.engine.state import TrainerState
from headway.engine.triggers import Length, Trigger

logger = logging.getLogger(__name__)


@dataclass
class RunPlan:
    """What the loop is given: length, cadence, and the figures a schedule or a bar needs."""

    steps_per_epoch: int
    max_steps: int | None
    """Optimizer steps of the whole run; None when only tokens or time bound it."""
    expected_steps: int | None
    """`max_steps`, or what a token budget comes to when every sample has one length."""
    length: Length
    log_trigger: Trigger
    eval_trigger: Trigger
    save_trigger: Trigger
    tokens_per_step: int | None = None
    """Tokens of a full optimizer step, where every sample has one length."""
    expected_tokens: int | None = None
    """Tokens of the whole run: the budget, or what the expected steps come to."""
    epochs: float | None = None
    """The run's length, where it is given in epochs."""

    def change_length(self, max_steps: int, loader: WindowLoader) -> None:
        """Have the run end after other steps than planned; only where it counts steps."""
        self.max_steps = self.expected_steps = max_steps
        self.length.change(max_steps)
        self.epochs = None
        if self.expected_tokens is not None and self.tokens_per_step is not None:
            self.expected_tokens = _count_tokens(
                loader, max_steps, self.steps_per_epoch, self.tokens_per_step
            )

    def describe(self, state: TrainerState, args: TrainingArguments) -> None:
        """Show the plan in the state, in the terms Hugging Face's callbacks read."""
        state.max_steps = self.expected_steps or 0
        if self.expected_steps is None:
            state.num_train_epochs = args.num_train_epochs
        elif self.epochs is not None:
            # Not by the steps: those before a resume may have had another size.
            state.num_train_epochs = math.ceil(self.epochs)
        else:
            state.num_train_epochs = math.ceil(self.expected_steps / self.steps_per_epoch)
        state.logging_steps = self.log_trigger.period_steps
        state.eval_steps = self.eval_trigger.period_steps
        state.save_steps = self.save_trigger.period_steps
        state.train_batch_size = args.per_device_train_batch_size
        state.max_eval_steps = args.max_eval_steps


@dataclass(frozen=True)
class Progress:
    """Where a run stood when it was saved."""

    global_step: int
    raw_epoch: int
    epoch_start_step: int
    samples_per_step: int


def sample_length(dataset: Any) -> int | None:
    """Tokens in every sample, where the dataset fixes it."""
    length = getattr(dataset, "sequence_length", None)
    return length if isinstance(length, int) else None


def mean_tokens(dataset: Any) -> float | None:
    """Tokens of a sample on average, padding left out, where the dataset can tell."""
    length, own = sample_length(dataset), getattr(dataset, "num_tokens", None)
    if length is None or not isinstance(own, int) or not has_length(dataset) or not len(dataset):
        return length
    return min(float(length), own / len(dataset))


def has_length(dataset: Any) -> bool:
    """Whether a dataset can tell how many samples (or batches) it has."""
    try:
        len(dataset)
    except (TypeError, NotImplementedError, AttributeError):
        return False
    return True


def accumulation_steps(args: TrainingArguments, world_size: int, dataset: Any) -> int:
    """Micro-batches per optimizer step, given or derived from a global batch."""
    return derive_accumulation(args, world_size=world_size, sequence_length=sample_length(dataset))


def plan_run(
    args: TrainingArguments,
    loader: WindowLoader,
    world_size: int,
    longest: Callable[[int], int] = int,
    *,
    checkpointed: bool = False,
    done: Progress | None = None,
) -> RunPlan:
    """Work out a run's length and cadence; where a callback saves (`checkpointed`), only that.

    `done` is where a resumed run stands: epochs that are left may have another number of steps.

    `longest` gives the largest of the ranks' values: their own streams may differ in length, and
    an epoch is over when the last one is.
    """
    own_steps = loader.num_windows or 0
    steps_per_epoch = longest(own_steps) if loader.is_sharded else own_steps
    steps_per_epoch = steps_per_epoch or args.epoch_train_steps
    train_for = Duration.parse(args.train_for) if args.train_for is not None else None
    stop_at = Duration.parse(args.stop_at) if args.stop_at is not None else None
    epochs = _epochs(args, train_for)
    max_steps = _max_steps(args, train_for, epochs, steps_per_epoch, loader, done)
    if epochs is not None and not has_length(loader.dataset):
        train_for = Duration.epochs(epochs)  # nobody knows when that is
        if args.epoch_train_steps == default_of(args, "epoch_train_steps"):
            logger.warning(
                "train_dataset does not tell its length: epoch_train_steps=%d is taken for it, by "
                "the learning-rate schedule too. Set max_steps, or epoch_train_steps",
                args.epoch_train_steps,
            )
    elif max_steps is not None:
        train_for = None
    expected, tokens = max_steps, None
    step_tokens = _step_tokens(args, loader, world_size)
    if train_for is not None and train_for.unit == "tokens":
        tokens = int(train_for.value)
        if step_tokens is not None:
            expected = _count_steps(loader, tokens, steps_per_epoch, step_tokens)
    elif expected is not None and step_tokens is not None:
        tokens = _count_tokens(loader, expected, steps_per_epoch, step_tokens)
    return RunPlan(
        steps_per_epoch=steps_per_epoch,
        max_steps=max_steps,
        expected_steps=expected,
        length=Length(max_steps, train_for, stop_at),
        log_trigger=_trigger(
            args.logging_strategy,
            args.logging_steps,
            args.log_every,
            first_step=args.logging_first_step,
        ),
        eval_trigger=_trigger(
            args.eval_strategy, args.eval_steps, args.eval_every, delay=args.eval_delay
        ),
        save_trigger=(
            Trigger("no", 0)
            if checkpointed
            else _trigger(args.save_strategy, args.save_steps, args.save_every)
        ),
        tokens_per_step=step_tokens,
        expected_tokens=tokens,
        epochs=epochs,
    )


def _step_tokens(args: TrainingArguments, loader: WindowLoader, world_size: int) -> int | None:
    length = mean_tokens(loader.dataset)
    if length is None:
        return None
    rows = args.per_device_train_batch_size * loader.deal.accumulation * world_size
    if loader.num_samples:
        rows = min(rows, loader.deal.usable(loader.num_samples))
    return max(1, round(rows * length))


def _count_steps(
    loader: WindowLoader, num_tokens: int, steps_per_epoch: int, step_tokens: int
) -> int:
    """Steps in which so many tokens are read; the last step of an epoch may be a smaller one."""
    if loader.num_samples is None:
        return math.ceil(num_tokens / step_tokens)
    length = mean_tokens(loader.dataset)
    assert length is not None, "a step has a known number of tokens only then"
    epoch_tokens = max(1, round(loader.deal.usable(loader.num_samples) * length))
    epochs, rest = divmod(num_tokens, epoch_tokens)
    return epochs * steps_per_epoch + min(steps_per_epoch, math.ceil(rest / step_tokens))


def _count_tokens(
    loader: WindowLoader, num_steps: int, steps_per_epoch: int, step_tokens: int
) -> int:
    """Tokens of so many steps; the last step of an epoch may be a smaller one."""
    if loader.num_samples is None:
        return num_steps * step_tokens
    length = mean_tokens(loader.dataset)
    assert length is not None, "a step has a known number of tokens only then"
    epochs, rest = divmod(num_steps, steps_per_epoch)
    return round(epochs * loader.deal.usable(loader.num_samples) * length) + rest * step_tokens


def _epochs(args: TrainingArguments, train_for: Duration | None) -> float | None:
    """The epochs that a run is to have, where nothing else says how long it is."""
    if train_for is not None:
        return train_for.value if train_for.unit == "epochs" else None
    return args.num_train_epochs if args.max_steps <= 0 else None


def _max_steps(
    args: TrainingArguments,
    train_for: Duration | None,
    epochs: float | None,
    steps_per_epoch: int,
    loader: WindowLoader,
    done: Progress | None,
) -> int | None:
    if epochs is None:
        if train_for is not None:
            return int(train_for.value) if train_for.unit == "steps" else None
        return args.max_steps
    window, samples = loader.deal.window_samples, loader.num_samples
    if done is None or done.samples_per_step == window or not samples:
        return math.ceil(epochs * steps_per_epoch)
    # Steps that are done had another size: what is left of the epochs counts, not their number.
    usable = loader.deal.usable(samples)
    in_epoch = (done.global_step - done.epoch_start_step) * done.samples_per_step
    left_here = max(0, usable - in_epoch)
    later = epochs - done.raw_epoch - 1
    if later < 0:  # the run ends within this epoch
        left_here, later = max(0, left_here + math.floor(later * usable)), 0
    return done.global_step + math.ceil(left_here / window) + math.ceil(later * steps_per_epoch)


def _trigger(
    strategy: str,
    steps: int,
    every: str | int | None,
    *,
    delay: float = 0,
    first_step: bool = False,
) -> Trigger:
    duration = Duration.parse(every) if every is not None else None
    return Trigger(strategy, steps, duration, delay=delay, first_step=first_step)
