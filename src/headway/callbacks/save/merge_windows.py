"""At which steps weights are averaged, as arithmetic on step numbers.

Owns: the windows of merge steps, what may be asked for, and two helpers to choose merge steps by a
schedule of learning rates. Does not own: the averaging (model_merge.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from headway.callbacks.watch.ranges import require_count
from headway.errors import ConfigError


@dataclass(frozen=True)
class Window:
    """The steps `first` to `last`, both included, after each of which the weights count."""

    first: int
    last: int


@dataclass(frozen=True)
class MergeSchedule:
    """Windows of `length` steps that end at the given steps, or at every `interval`-th."""

    length: int
    steps: tuple[int, ...] = ()
    interval: int | None = None

    def window_at(self, step: int) -> Window | None:
        """The window that a step lies in; there is at most one."""
        last = self._next_merge(step)
        if last is None or step <= last - self.length:
            return None
        return Window(last - self.length + 1, last)

    def _next_merge(self, step: int) -> int | None:
        if self.interval is not None:
            return -(-max(step, 1) // self.interval) * self.interval
        return next((merge for merge in self.steps if merge >= step), None)

    def beyond(self, max_steps: int) -> list[int]:
        """The merge steps that a run of that length does not reach."""
        if self.interval is not None:
            return [self.interval] if self.interval > max_steps else []
        return [step for step in self.steps if step > max_steps]


def make_schedule(
    merge_step: int | Sequence[int], merge_interval: int | None, merge_last_n_steps: int
) -> MergeSchedule:
    """The windows that are asked for; a `ConfigError` names what cannot be."""
    given: Any = merge_step
    listed = [given] if isinstance(given, int) else given
    is_list = isinstance(listed, Sequence) and not isinstance(listed, str | bytes)
    if not is_list or not all(_is_step(step) for step in listed):
        raise ConfigError(
            f"ModelMergeCallback: merge_step: {given!r} given; allowed: a whole number from 1 up, "
            "or a list of them"
        )
    try:
        require_count("merge_interval", merge_interval, least=1, optional=True)
        require_count("merge_last_n_steps", merge_last_n_steps, least=1)
    except ConfigError as error:
        raise ConfigError([f"ModelMergeCallback: {text}" for text in error.problems]) from None
    if bool(listed) == (merge_interval is not None):
        raise ConfigError(
            f"ModelMergeCallback: merge_step={given!r} and merge_interval={merge_interval!r} "
            "given; allowed: exactly one of the two"
        )
    steps = tuple(sorted(set(listed)))
    schedule = MergeSchedule(merge_last_n_steps, steps, merge_interval)
    _check_windows(schedule)
    return schedule


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_windows(schedule: MergeSchedule) -> None:
    length, interval = schedule.length, schedule.interval
    if interval is not None:
        if interval < length:
            raise ConfigError(
                f"ModelMergeCallback: merge_interval={interval} given with merge_last_n_steps="
                f"{length}: the windows of neighbouring merges overlap; allowed: a merge_interval "
                "from merge_last_n_steps up"
            )
        return
    if schedule.steps[0] < length:
        raise ConfigError(
            f"ModelMergeCallback: merge_step={schedule.steps[0]} given with merge_last_n_steps="
            f"{length}: so many steps do not come before it; allowed: merge steps from {length} up"
        )
    for earlier, later in zip(schedule.steps, schedule.steps[1:]):
        if later - earlier < length:
            raise ConfigError(
                f"ModelMergeCallback: merge_step: the windows of {earlier} and {later} overlap "
                f"with merge_last_n_steps={length}; allowed: merge steps at least {length} apart"
            )


def compute_merge_steps_from_decay_schedule(
    period_lengths: Sequence[int],
    tokens_per_step: int,
    decay: int | None = None,
    decay_fraction: float | None = None,
) -> list[int]:
    """The last step before the learning rate decays, in each period of a schedule.

    Periods follow each other; each is given by its length in tokens and ends with a decay of
    `decay` tokens, or of that fraction of it.
    """
    require_count("tokens_per_step", tokens_per_step, least=1)
    if (decay is None) == (decay_fraction is None):
        raise ConfigError(
            f"decay={decay!r} and decay_fraction={decay_fraction!r} given; allowed: exactly one"
        )
    require_count("decay", decay, least=0, optional=True)
    if decay_fraction is not None and not 0 <= decay_fraction <= 1:
        raise ConfigError(f"decay_fraction: {decay_fraction!r} given; allowed: from 0 to 1")
    steps, end_tokens = [], 0
    for length in period_lengths:
        require_count("period_lengths", length, least=1)
        end_tokens += length
        if decay is not None:
            decay_tokens = decay
        else:
            assert decay_fraction is not None
            decay_tokens = math.ceil(length * decay_fraction)
        if decay_tokens > length:
            raise ConfigError(f"decay: {decay!r} given, longer than a period of {length} tokens")
        steps.append((end_tokens - decay_tokens) // tokens_per_step)
    return steps


def compute_merge_window_starts(merge_steps: Iterable[int], merge_last_n_steps: int) -> list[int]:
    """The first step of each window; of windows that overlap, only that of the first.

    A checkpoint of such a step is one to begin the window anew from, with another setting or
    without the sums that later checkpoints hold.
    """
    require_count("merge_last_n_steps", merge_last_n_steps, least=1)
    starts: list[int] = []
    previous = None
    for step in sorted(set(merge_steps)):
        require_count("merge_steps", step, least=merge_last_n_steps)
        if previous is None or step - previous >= merge_last_n_steps:
            starts.append(step - merge_last_n_steps + 1)
        previous = step
    return starts
