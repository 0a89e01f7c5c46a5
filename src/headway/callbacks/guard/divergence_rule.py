"""When a curve has diverged: a smoothed value too far from its best, several times in a row.

Owns: the average, the best of it, the limits and the counting. Does not own: where values come
from, values that are not finite, or what follows (divergence.py, recovery.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Averages of larger values are not finite.
_LARGEST = 1e300


class DivergenceRule:
    """Takes one value after the other and says whether the curve has diverged.

    The average is exponential, each value with weight `smoothing`, corrected for its start: while
    few values are there, they count alike. It is bad where it lies `threshold` or more on the wrong
    side of its best, or so far that `relative_threshold - 1` times the best's size is lost;
    `patience` bad ones in a row are a divergence. The first `warmup` values, and `cooldown` values
    after a divergence, are not judged.
    """

    def __init__(
        self,
        *,
        smoothing: float,
        threshold: float | None,
        relative_threshold: float | None,
        patience: int,
        warmup: int,
        cooldown: int,
        greater_is_better: bool,
    ) -> None:
        self._smoothing, self._patience, self._warmup = smoothing, patience, warmup
        self._threshold, self._relative_threshold = threshold, relative_threshold
        self._cooldown = cooldown
        self._sign = -1.0 if greater_is_better else 1.0
        self.smoothed: float | None = None
        self.best: float | None = None
        self.observation_count = 0
        self.consecutive_above = 0
        self.cooldown_left = 0
        self.is_calm = True
        """Whether the last value gave no reason to suspect the state that it was measured on."""

    def observe(self, value: float) -> bool:
        """Take a finite value; returns whether the curve has diverged."""
        value = max(-_LARGEST, min(_LARGEST, value))
        self.observation_count += 1
        if self.smoothed is None or self.best is None:
            self.smoothed = self.best = value
            return False
        self.smoothed += self._weight() * (value - self.smoothed)
        if self._loss_against(self.best, self.smoothed) < 0:
            self.best = self.smoothed
        limit = self._limit()
        excess = self._loss_against(self.best, self.smoothed)
        # Stricter than the limit: the average comes after what went wrong.
        self.is_calm = excess < limit / 2 and self.is_near_best(value)
        if self.observation_count <= self._warmup:
            return False
        if self.cooldown_left > 0:
            self.cooldown_left -= 1
            return False
        self.consecutive_above = self.consecutive_above + 1 if excess >= limit else 0
        return self.consecutive_above >= self._patience

    def is_near_best(self, value: float) -> bool:
        """Whether a single value, not smoothed, is within the limit; it is not counted."""
        return self.best is None or self._loss_against(self.best, value) < self._limit()

    def settle(self) -> None:
        """A divergence was acted on: the same one is not told again."""
        self.consecutive_above = 0
        self.cooldown_left = self._cooldown

    def describe(self) -> str:
        """The last judgement in words."""
        limits = []
        if self._threshold is not None:
            limits.append(f"threshold={self._threshold:g}")
        if self._relative_threshold is not None:
            limits.append(f"relative_threshold={self._relative_threshold:g}")
        return f"smoothed {self.smoothed:.6g}, best {self.best:.6g} ({', '.join(limits)})"

    def _weight(self) -> float:
        if self._smoothing == 1:
            return 1.0
        return self._smoothing / -math.expm1(self.observation_count * math.log1p(-self._smoothing))

    def _loss_against(self, best: float, value: float) -> float:
        """How much worse a value is than the best; negative where it is better."""
        return self._sign * (value - best)

    def _limit(self) -> float:
        assert self.best is not None
        limit = math.inf if self._threshold is None else self._threshold
        if self._relative_threshold is not None and self.best != 0:
            limit = min(limit, (self._relative_threshold - 1) * abs(self.best))
        return limit

    def state_dict(self) -> dict[str, Any]:
        return {
            "smoothed_loss": self.smoothed,
            "best_smoothed_loss": self.best,
            "observation_count": self.observation_count,
            "consecutive_above": self.consecutive_above,
            "cooldown_left": self.cooldown_left,
            "is_calm": self.is_calm,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What is missing, or is not finite, starts anew."""
        self.smoothed = _finite(state.get("smoothed_loss"))
        self.best = _finite(state.get("best_smoothed_loss"))
        if self.smoothed is None or self.best is None:
            self.smoothed = self.best = None
            state = {}
        self.observation_count = int(state.get("observation_count") or 0)
        # At the limit already, as another trainer's state may be: what it meant was acted on.
        above = int(state.get("consecutive_above") or 0)
        self.consecutive_above = 0 if above >= self._patience else above
        self.cooldown_left = int(state.get("cooldown_left") or 0)
        self.is_calm = bool(state.get("is_calm", True))


def _finite(given: Any) -> float | None:
    number = isinstance(given, int | float) and not isinstance(given, bool)
    return float(given) if number and math.isfinite(given) else None
