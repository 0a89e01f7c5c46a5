"""What a rollback is to be: which checkpoint, which data, which learning rate.

Owns: the request, and what the requests of several ranks come to. Does not own: when ranks agree
that there is one (loop), nor carrying it out (trainers).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from headway.engine.state import TrainerControl


@dataclass(frozen=True)
class RollbackRequest:
    """Where to return to, and what is to be different from then on."""

    skip_data: bool = False
    """Do not read again what was read since the checkpoint."""
    before_step: int | None = None
    """The newest checkpoint of this step or an earlier one; None: the newest of all."""
    rate_factor: float | None = None
    """What base learning rates are multiplied by."""

    @classmethod
    def take(cls, control: TrainerControl, *, skip_data: bool) -> RollbackRequest:
        """What this rank's callbacks asked for, lowered as it is read."""
        request = cls(skip_data, control.rollback_before_step, control.rollback_rate_factor)
        control.rollback_skip_data = False
        control.rollback_before_step = control.rollback_rate_factor = None
        return request

    @classmethod
    def join(cls, requests: Iterable[dict[str, Any]]) -> RollbackRequest:
        """One for all ranks: of several wishes the most careful."""
        asked = list(requests)
        steps = [one["before_step"] for one in asked if one["before_step"] is not None]
        factors = [one["rate_factor"] for one in asked if one["rate_factor"] is not None]
        return cls(
            any(one["skip_data"] for one in asked),
            min(steps, default=None),
            min(factors, default=None),
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def changes_the_run(self) -> bool:
        """Whether what follows is not what the checkpoint would lead to again."""
        return self.skip_data or self.before_step is not None or self.rate_factor is not None
