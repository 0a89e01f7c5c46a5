"""Where to cut a row of layers so that the dearest stage is as cheap as possible.

Owns: the cut as a pure function of costs. Does not own: what a layer costs (models/split.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MOST_IMBALANCE = 1.15
"""How much dearer than the mean the dearest stage may be before a warning says so."""


@dataclass(frozen=True)
class Cut:
    """The layers of each stage, and what the stages cost."""

    spans: tuple[range, ...]
    costs: tuple[float, ...]

    @property
    def imbalance(self) -> float:
        """Cost of the dearest stage over the mean cost."""
        mean = sum(self.costs) / len(self.costs)
        return max(self.costs) / mean if mean else 1.0

    def describe(self) -> str:
        """The stages with their layers and shares of the cost."""
        whole = sum(self.costs) or 1.0
        return "; ".join(
            f"stage {number}: {_spell(span)} ({cost / whole:.1%})"
            for number, (span, cost) in enumerate(zip(self.spans, self.costs))
        )


def _spell(span: range) -> str:
    if not span:
        return "no layer"
    return f"layers {span.start}-{span.stop - 1}" if len(span) > 1 else f"layer {span.start}"


def cut_layers(
    costs: Sequence[float], num_stages: int, *, before: float = 0.0, after: float = 0.0
) -> Cut:
    """Cut a row of layers into stages; `before` belongs to the first one, `after` to the last.

    The dearest stage is as cheap as it can be, and the others are as equal as that leaves them.
    Every stage has a layer, but the last may have none, where `after` is as dear as a stage.
    """
    assert 1 <= num_stages <= len(costs), "checked by the splitter"
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def price(stage: int, start: int, stop: int) -> float:
        total = sums[stop] - sums[start]
        return total + before * (stage == 0) + after * (stage == num_stages - 1)

    _, dearest = _best_cut(len(costs), num_stages, price, max)
    limit = dearest * (1 + 1e-9)

    def unevenness(stage: int, start: int, stop: int) -> float:
        own = price(stage, start, stop)
        return own * own if own <= limit else math.inf

    stops, _ = _best_cut(len(costs), num_stages, unevenness, lambda one, rest: one + rest)
    spans = tuple(range(start, stop) for start, stop in zip([0, *stops], stops))
    return Cut(spans, tuple(price(n, span.start, span.stop) for n, span in enumerate(spans)))


def _best_cut(
    num_layers: int,
    num_stages: int,
    price: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
) -> tuple[list[int], float]:
    """Where each stage stops so that the joined price of all stages is least, and that price."""
    last = num_stages - 1
    best = [price(last, start, num_layers) for start in range(num_layers + 1)]
    choices: list[list[int]] = []
    for stage in range(last - 1, -1, -1):
        now, chosen = [math.inf] * (num_layers + 1), [num_layers] * (num_layers + 1)
        for start in range(num_layers):
            for stop in range(start + 1, num_layers + 1):
                total = join(price(stage, start, stop), best[stop])
                if total < now[start]:
                    now[start], chosen[start] = total, stop
        best = now
        choices.append(chosen)
    stops, start = [], 0
    for chosen in reversed(choices):
        start = chosen[start]
        stops.append(start)
    return [*stops, num_layers], best[0]
