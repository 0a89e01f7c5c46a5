"""The torch scheduler that follows a curve per param group, in steps or in tokens.

Owns: the state that a checkpoint holds, the comparison with it at load, and xaytune's
`create_scheduler`. Does not own the curves (schedules.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from headway.optim.schedule_change import tell_changes
from headway.optim.schedules import ScheduleSpec
from headway.optim.warmup import resolve_warmup_steps

logger = logging.getLogger(__name__)

_STATE = ("last_epoch", "_step_count", "base_lrs", "_last_lr")


class CurveLR(LambdaLR):
    """Gives each param group the rate of its schedule.

    `tokens_seen` tells the tokens of the run so far; a schedule in tokens goes by what they grew
    since the last `mark`, so that it can be left behind, or restored, on its own.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        specs: Sequence[ScheduleSpec],
        *,
        tokens_seen: Callable[[], int] | None = None,
    ) -> None:
        groups = optimizer.param_groups
        assert len(specs) == len(groups), "one schedule for each param group"
        self.specs = list(specs)
        self.changes: list[str] = []
        """What was not as in the state last loaded, in words."""
        self.rate_factor = 1.0
        """What all rates are multiplied by, whatever the curve; see `multiply_rates`."""
        self.drawn_for = [float(group.get("initial_lr", group["lr"])) for group in groups]
        """The base rates that floors given as rates (`min_lr`) are set against. A run whose rates
        were scaled has other base rates, and its floors were scaled with them."""
        self._tokens_seen = tokens_seen
        self._tokens = 0
        self._tokens_mark = 0
        self.mark()
        super().__init__(optimizer, self._draw())

    @property
    def unit(self) -> str:
        """What the schedules count."""
        return self.specs[0].unit

    @property
    def progress(self) -> int:
        """How far it is: updates done, or tokens seen."""
        return self._tokens if self.unit == "tokens" else self.last_epoch

    def mark(self) -> None:
        """Take the run's count of tokens as it stands; to be called when it was restored."""
        if self._tokens_seen is not None:
            self._tokens_mark = int(self._tokens_seen())

    def step(self, epoch: int | None = None) -> None:
        """Go to the rate of the next update."""
        before = self._tokens_mark
        self.mark()
        self._tokens += self._tokens_mark - before
        super().step(epoch)

    def get_lr(self) -> list[float | Tensor]:
        """The rates at the current progress."""
        return [
            base * curve(self.progress) * self.rate_factor
            for base, curve in zip(self.base_lrs, self.lr_lambdas)
        ]

    def multiply_rates(self, factor: float) -> None:
        """From the next update on: the rates of the schedule times `factor`; base rates stay.

        Not in addition to an earlier factor but in its place.
        """
        if factor == self.rate_factor:
            return
        self.rate_factor = factor
        self._set_rates(self.get_lr())

    def redraw(self, specs: Sequence[ScheduleSpec]) -> None:
        """From the next update on: the rates of these schedules, at the progress so far."""
        self.specs = list(specs)
        self.lr_lambdas = self._draw()
        self._set_rates(self.get_lr())

    def _draw(self) -> list[Any]:
        return [spec.draw(base) for spec, base in zip(self.specs, self.drawn_for)]

    def state_dict(self) -> dict[str, Any]:
        """Where it is, and what schedule that was."""
        state = {key: getattr(self, key) for key in _STATE}
        # As LambdaLR has it, so that other tools can load the state into theirs.
        state["lr_lambdas"] = [None] * len(self.specs)
        if self._tokens_seen is not None:
            state["tokens"] = self._tokens
        if self.rate_factor != 1.0:
            state["rate_factor"] = self.rate_factor
        if self.drawn_for != [float(base) for base in self.base_lrs]:
            state["drawn_for"] = self.drawn_for
        state["schedule"] = {
            "unit": self.unit,
            "groups": [
                {"group": name, **spec.describe()} for name, spec in zip(self._names(), self.specs)
            ],
        }
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state. A schedule other than the saved one is told, and from the next
        update on the rates are those of the present one."""
        for key in _STATE:
            if key in state_dict:
                setattr(self, key, state_dict[key])
        knows_tokens = "tokens" in state_dict
        self._tokens = int(state_dict.get("tokens", 0))
        self.rate_factor = float(state_dict.get("rate_factor", 1.0))
        self.drawn_for = [float(base) for base in state_dict.get("drawn_for", self.base_lrs)]
        self.lr_lambdas = self._draw()
        self.changes = []
        if self.unit == "tokens" and not knows_tokens:
            return
        rates = self.get_lr()
        self.changes = tell_changes(
            state_dict.get("schedule"),
            self.specs,
            self._names(),
            progress=self.progress,
            before=[float(rate) for rate in self._last_lr],
            after=[float(rate) for rate in rates],
        )
        if not self.changes:
            return
        for line in self.changes:
            logger.warning("%s", line)
        self._set_rates(rates)

    def _set_rates(self, rates: Sequence[float | Tensor]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(float(rate))
            else:
                group["lr"] = rate
        self._last_lr = list(rates)

    def _names(self) -> list[str]:
        return [
            str(group.get("group_name", number))
            for number, group in enumerate(self.optimizer.param_groups)
        ]


def create_scheduler(
    optimizer: Optimizer, scheduler_type: str, total_steps: int, warmup_steps: int
) -> LambdaLR:
    """A schedule of a name over the optimizer, in steps, with the options it has by default."""
    warmup = resolve_warmup_steps(warmup_steps, 0.0, total_steps)
    spec = ScheduleSpec(scheduler_type, total_steps, warmup)
    return CurveLR(optimizer, [spec] * len(optimizer.param_groups))
