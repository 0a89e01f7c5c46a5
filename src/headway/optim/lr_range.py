"""The learning-rate range test: one step at each rate, from a small one to a large one.

Owns: which rates are tried, the running mean of the losses, when to stop. Does not own: what a step
is (the caller's `step(lr) -> loss`), which rate to choose afterwards (lr_suggest).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from headway.errors import ConfigError

Step = Callable[[float], float]


@dataclass(frozen=True)
class RangeOptions:
    """How a range test goes."""

    start_lr: float = 1e-7
    end_lr: float = 1.0
    num_iterations: int = 100
    smoothing_factor: float = 0.05
    """Weight of the newest loss in the running mean; 1 takes each loss as it is."""
    divergence_threshold: float = 4.0
    """The test ends when the running mean is so many times its best."""

    def __post_init__(self) -> None:
        problems = []
        if not (math.isfinite(self.start_lr) and self.start_lr > 0):
            problems.append(f"start_lr: {self.start_lr!r} given; allowed: a number above 0")
        elif not (math.isfinite(self.end_lr) and self.end_lr > self.start_lr):
            problems.append(
                f"end_lr: {self.end_lr!r} given; allowed: a number above start_lr={self.start_lr!r}"
            )
        if self.num_iterations < 3:
            problems.append(f"num_iterations: {self.num_iterations!r} given; allowed: 3 and up")
        if not 0 < self.smoothing_factor <= 1:
            problems.append(
                f"smoothing_factor: {self.smoothing_factor!r} given; allowed: above 0, at most 1 "
                "(the weight of the newest loss)"
            )
        if not self.divergence_threshold > 1:
            problems.append(
                f"divergence_threshold: {self.divergence_threshold!r} given; allowed: above 1"
            )
        if problems:
            raise ConfigError(problems)

    def rates(self) -> list[float]:
        """The rates to try: equal steps in the logarithm, both ends included."""
        last = self.num_iterations - 1
        ratio = self.end_lr / self.start_lr
        inner = [self.start_lr * ratio ** (number / last) for number in range(last)]
        return [*inner, self.end_lr]


@dataclass
class RangeTest:
    """What one test measured."""

    lrs: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    smoothed: list[float] = field(default_factory=list)
    """Running mean of the losses, without the pull of its first value."""
    stopped: str | None = None
    """Why it ended before `end_lr`: "diverged", or "nonfinite"; None where it did not."""
    stopped_lr: float | None = None
    """The rate at which it ended early."""


class RunningMean:
    """An exponential mean that is right from its first value on."""

    def __init__(self, weight: float) -> None:
        self._weight, self._sum, self._total_weight = weight, 0.0, 0.0

    def add(self, value: float) -> float:
        """The mean with a value more. Early values count by the weight they really have."""
        keep = 1.0 - self._weight
        self._sum = keep * self._sum + self._weight * value
        self._total_weight = keep * self._total_weight + self._weight
        return self._sum / self._total_weight


def run_range_test(
    step: Step, options: RangeOptions, agree: Callable[[bool], bool] = bool
) -> RangeTest:
    """Call `step` with growing rates until the end, or until the loss runs away.

    `step` returns the loss before the update that it makes. `agree` makes one decision of those of
    several ranks: it is asked after every step whether any of them wants to stop.
    """
    test, mean, best = RangeTest(), RunningMean(options.smoothing_factor), math.inf
    for lr in options.rates():
        loss = step(lr)
        stopped = None if math.isfinite(loss) else "nonfinite"
        if stopped is None:
            smoothed = mean.add(loss)
            best = min(best, smoothed)
            test.lrs.append(lr)
            test.losses.append(loss)
            test.smoothed.append(smoothed)
            if smoothed > _limit(best, test.smoothed[0], options.divergence_threshold):
                stopped = "diverged"
        if agree(stopped is not None):
            test.stopped, test.stopped_lr = stopped or "nonfinite", lr
            break
    return test


def _limit(best: float, first: float, threshold: float) -> float:
    """Beyond this a loss has run away: `threshold` times the best one.

    Around zero and below, where a multiple says nothing, a part of the fall so far is the measure.
    """
    return best + (threshold - 1) * max(abs(best), (first - best) / 10)
