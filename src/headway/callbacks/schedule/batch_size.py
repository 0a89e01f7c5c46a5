"""The global batch as a function of progress, and the learning rate that goes with it.

Owns: which batch size is due, dealing it to ranks and micro-batches, the factor of the rates. Does
not own: the windows (data/loader.py) or the curve of the rates (optim/scheduler.py).
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from headway.callbacks.schedule.points import (
    Point,
    is_reached,
    read_point,
    require_known_end,
    run_unit,
)
from headway.callbacks.watch.ranges import require_flag
from headway.callbacks.watch.speed_monitor import SpeedMonitorCallback
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError, unknown

logger = logging.getLogger(__name__)

_WHO = "BatchSizeSchedulerCallback"
RULES = ("auto", "sqrt", "linear", "none")


class BatchSizeSchedulerCallback(TrainerCallback):
    """Trains with `batch_sizes[n]` samples in a step, over all ranks, from `schedule[n]` on.

    `schedule` names points of the run, all in steps, all in tokens or all in epochs; the first is
    0. A micro-batch never has more than per_device_train_batch_size samples: what is more is
    accumulated. `lr_scaling` says what the rates of the first batch size are multiplied by for
    another one: the root of the ratio (`sqrt`), the ratio (`linear`) or nothing (`none`); `auto` is
    `sqrt` for optimizers of the Adam family and refuses others.

    Batch size and factor follow from the run's progress, so a resume at any point, also past
    several entries, has those that are due there.
    """

    priority = 40  # before the speed monitor begins anew

    def __init__(
        self,
        batch_sizes: Sequence[int] = (),
        schedule: Sequence[Point] = (),
        enabled: bool = True,
        lr_scaling: str = "auto",
    ) -> None:
        require_flag(f"{_WHO}: enabled", enabled)
        if lr_scaling not in RULES:
            raise ConfigError(
                f"{_WHO}: lr_scaling: {lr_scaling!r} given; "
                + unknown("rule", str(lr_scaling), RULES)
            )
        self.batch_sizes = _read_sizes(batch_sizes)
        self.schedule = _read_schedule(schedule)
        if len(self.batch_sizes) != len(self.schedule):
            raise ConfigError(
                f"{_WHO}: schedule: {list(map(str, self.schedule))} given; allowed: one entry for "
                "each of "
                f"the {len(self.batch_sizes)} batch_sizes"
            )
        self.enabled = enabled and bool(self.batch_sizes)
        self.lr_scaling = lr_scaling
        self._rule = lr_scaling
        self._deals: dict[int, Any] = {}
        self._current: int | None = None
        self._of_step: int | None = None
        self._stored: int | None = None

    @property
    def batch_size(self) -> int | None:
        """Samples of the next step over all ranks; None before the run has begun."""
        return self._current

    def size_at(self, state: TrainerState) -> int:
        """The batch size that is due after what is done."""
        due = [
            size for size, point in zip(self.batch_sizes, self.schedule) if is_reached(point, state)
        ]
        return due[-1]

    def rate_factor(self, size: int) -> float:
        """What rates are multiplied by at a batch size."""
        ratio = size / self.batch_sizes[0]
        if self._rule == "none" or ratio == 1:
            return 1.0
        return ratio if self._rule == "linear" else math.sqrt(ratio)

    # Events

    def on_load(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        trainer: Any,
        train_dataloader: Any,
        optimizer: Any,
        lr_scheduler: Any,
    ) -> None:
        """A resume, before `on_init_end`, or a rollback."""
        if not self.enabled:
            return
        self._prepare(args, trainer, train_dataloader, optimizer, lr_scheduler)
        self._apply(self.size_at(state), trainer, train_dataloader, lr_scheduler, state)
        if self._stored not in (None, self._current):
            logger.warning(
                "a step takes %d samples by the present schedule of the batch size; it took %d "
                "where the checkpoint was made",
                self._current,
                self._stored,
            )
        self._stored = None

    def on_init_end(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        trainer: Any,
        train_dataloader: Any,
        optimizer: Any,
        lr_scheduler: Any,
    ) -> None:
        if not self.enabled:
            return
        self._prepare(args, trainer, train_dataloader, optimizer, lr_scheduler)
        self._apply(self.size_at(state), trainer, train_dataloader, lr_scheduler, state)
        self._of_step = self._current
        self._tell_small(args)

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._of_step = self._current

    def on_step_end(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        trainer: Any,
        train_dataloader: Any,
        lr_scheduler: Any,
    ) -> None:
        """After the step, before the next window is read and before a checkpoint is made."""
        if not self.enabled:
            return
        trainer.record_metric("train/global batch size", self._of_step)
        size = self.size_at(state)
        if size != self._current:
            self._apply(size, trainer, train_dataloader, lr_scheduler, state)

    # State

    def state_dict(self) -> dict[str, Any]:
        return {"version": 1, "batch_size": self._current}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        size = state.get("batch_size")
        self._stored = size if isinstance(size, int) else None
        self._current = self._stored if self._current is None else self._current

    # Work

    def _prepare(
        self, args: Any, trainer: Any, loader: Any, optimizer: Any, scheduler: Any
    ) -> None:
        """Everything that can be wrong, before anything is changed."""
        for name, other in trainer.callbacks.items():
            if other is not self and isinstance(other, type(self)) and other.enabled:
                raise ConfigError(
                    f"{_WHO}: two of them given (the other is {name!r}); allowed: one, as a step "
                    "has one batch size"
                )
        self._rule = _choose_rule(self.lr_scaling, optimizer)
        if self._rule != "none" and not hasattr(scheduler, "multiply_rates"):
            raise ConfigError(
                f"{_WHO}: lr_scaling: {self.lr_scaling!r} given; allowed with the scheduler "
                f"{type(scheduler).__name__}, whose rates are its own: 'none'"
            )
        if run_unit(args) == "epochs":
            raise ConfigError(
                f"{_WHO}: the length of the run is in epochs, whose number of steps depends on the "
                "batch size; give max_steps, or train_for in steps or tokens"
            )
        require_known_end(args, scheduler, _WHO)
        if loader.kind == "batches":
            raise ConfigError(
                f"{_WHO}: {type(loader.dataset).__name__} makes its own batches, whose size is not "
                "ours to change; give a dataset"
            )
        self._deals = {
            size: self._deal(args, loader, size) for size in dict.fromkeys(self.batch_sizes)
        }
        widest = max(self._deals.values(), key=lambda deal: deal.accumulation)
        if args.fuse_optim_with_backward and widest.accumulation > 1:
            raise ConfigError(
                f"{_WHO}: batch_sizes: {widest.window_samples} given; allowed with "
                f"fuse_optim_with_backward: up to {widest.world_size} ranks x "
                f"per_device_train_batch_size={args.per_device_train_batch_size} samples, which "
                "need no accumulation"
            )

    def _tell_small(self, args: Any) -> None:
        """A number of samples with few divisors makes many small micro-batches."""
        largest = args.per_device_train_batch_size
        for size, deal in self._deals.items():
            if deal.accumulation > 1 and deal.batch_size * 2 < largest:
                logger.warning(
                    "batch_sizes: %d makes %d micro-batches of %d samples; a multiple of %d makes "
                    "full ones of per_device_train_batch_size=%d",
                    size,
                    deal.accumulation,
                    deal.batch_size,
                    deal.world_size * largest,
                    largest,
                )

    def _deal(self, args: Any, loader: Any, size: int) -> Any:
        largest = args.per_device_train_batch_size
        try:
            deal = loader.deal.resized(size, largest)
        except ConfigError as error:
            raise ConfigError(f"{_WHO}: batch_sizes: {error}") from error
        if loader.kind != "map" and deal.batch_size != loader.deal.batch_size:
            whole = loader.deal.batch_size * loader.deal.world_size
            raise ConfigError(
                f"{_WHO}: batch_sizes: {size} given; allowed for a stream, which is cut into "
                "micro-batches "
                f"as it is read: multiples of {whole} (per_device_train_batch_size={largest} x "
                f"{loader.deal.world_size} ranks)"
            )
        return deal

    def _apply(
        self, size: int, trainer: Any, loader: Any, scheduler: Any, state: TrainerState
    ) -> None:
        """Nothing in here refuses anything: either all of it happens or none."""
        deal, factor = self._deals[size], self.rate_factor(size)
        if self._rule != "none":
            scheduler.multiply_rates(factor)
        changed = deal != loader.deal
        loader.group(deal)
        state.train_batch_size = deal.batch_size
        self._current = size
        if not changed:
            return
        logger.info(
            "batch of %d samples after step %d: %d micro-batches of %d on each of %d ranks; "
            "learning rates times %.6g",
            size,
            state.global_step,
            deal.accumulation,
            deal.batch_size,
            deal.world_size,
            factor,
        )
        for callback in trainer.callbacks.values():
            if isinstance(callback, SpeedMonitorCallback):
                callback.reset()


def _read_sizes(given: Any) -> list[int]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ConfigError(f"{_WHO}: batch_sizes: {given!r} given; allowed: a list of whole numbers")
    for size in given:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(
                f"{_WHO}: batch_sizes: {size!r} given; allowed: whole numbers from 1 up"
            )
    for before, after in itertools.pairwise(given):
        if before == after:
            raise ConfigError(
                f"{_WHO}: batch_sizes: {after} given twice in a row; allowed: a change at every "
                "entry"
            )
    return list(given)


def _read_schedule(given: Any) -> list[Any]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ConfigError(
            f"{_WHO}: schedule: {given!r} given; allowed: a list such as [0, '500 steps']"
        )
    points = [read_point(f"{_WHO}: schedule", entry) for entry in given]
    # A bare 0 begins a schedule in any unit.
    units = {point.unit for point in points if point.value} or {"steps"}
    if len(units) > 1:
        raise ConfigError(
            f"{_WHO}: schedule: {', '.join(map(repr, given))} given; allowed: all entries in one "
            "unit, "
            f"not in {' and '.join(sorted(units))}"
        )
    if points and points[0].value != 0:
        raise ConfigError(f"{_WHO}: schedule: {given[0]!r} given as the first entry; allowed: 0")
    for before, after in itertools.pairwise(points):
        if after.value <= before.value:
            raise ConfigError(
                f"{_WHO}: schedule: {str(after)!r} given after {str(before)!r}; allowed: each "
                "entry later "
                "than the one before"
            )
    return points


def _choose_rule(given: str, optimizer: Any) -> str:
    if given != "auto":
        return given
    others = sorted({name for name in _classes_of(optimizer) if "adam" not in name.lower()})
    if others:
        raise ConfigError(
            f"{_WHO}: lr_scaling: 'auto' given; allowed with {', '.join(others)}, which is not of "
            "the Adam "
            "family: 'sqrt', 'linear' or 'none'"
        )
    return "sqrt"


def _classes_of(optimizer: Any) -> set[str]:
    """The class of an optimizer; of a joined one those of its groups."""
    from headway.optim.multi import GROUP_CLASS

    own = type(optimizer).__name__
    return {str(group.get(GROUP_CLASS, own)) for group in optimizer.param_groups}
