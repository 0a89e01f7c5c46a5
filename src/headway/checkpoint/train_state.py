"""`TrainState`: progress in xaytune's spelling, saved and returned by its checkpoint functions.

Owns: the counters, the metrics and the request to stop. Does not own: who advances them (the
handlers' bridge in compat, or a training script of the user's own).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

_FIELDS = ("step", "epoch", "global_step", "num_epochs", "max_steps", "metrics", "should_stop")


class TrainState:
    """Progress of a run.

    `global_step` counts optimizer steps, `epoch` and `step` (the batch in the epoch) from 0.
    Beyond xaytune's fields: `last_checkpoint`, the folder saved last, and `exception`, which the
    handlers of `error` find set.
    """

    def __init__(
        self,
        step: int = 0,
        epoch: int = 0,
        global_step: int = 0,
        num_epochs: int = 0,
        max_steps: int = -1,
        metrics: dict[str, Any] | None = None,
        should_stop: bool = False,
    ) -> None:
        self.step = step
        self.epoch = epoch
        self.global_step = global_step
        self.num_epochs = num_epochs
        self.max_steps = max_steps
        self.should_stop = should_stop
        self.last_checkpoint: str | None = None
        self.exception: BaseException | None = None
        self._metrics: dict[str, Any] = {} if metrics is None else metrics
        self._on_device: dict[str, Any] = {}

    @property
    def metrics(self) -> dict[str, Any]:
        """Latest numbers by name: `loss`, `learning_rate`, `grad_norm`, `eval_...`.

        The step's loss is fetched from the device when this is read, and not otherwise.
        """
        if self._on_device:
            arrived, self._on_device = self._on_device, {}
            self._metrics.update({name: to_number(value) for name, value in arrived.items()})
        return self._metrics

    @metrics.setter
    def metrics(self, metrics: dict[str, Any]) -> None:
        self._metrics, self._on_device = metrics, {}

    def record(self, values: dict[str, Any]) -> None:
        """Put metrics in place without waiting for the device."""
        self._on_device.update(values)

    def stop_training(self) -> None:
        """End the run after the optimizer step in progress."""
        self.should_stop = True

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any]) -> Self:
        """The progress in a `trainer_state.json`, of these functions or of Headway's trainer."""
        given = {name: saved[name] for name in _FIELDS if saved.get(name) is not None}
        given["epoch"] = int(given.get("epoch", 0))
        given["should_stop"] = False
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """xaytune's fields, tensors as numbers."""
        plain = {name: getattr(self, name) for name in _FIELDS}
        plain["metrics"] = {name: to_number(value) for name, value in self.metrics.items()}
        return plain

    def __repr__(self) -> str:
        return f"TrainState({', '.join(f'{k}={v!r}' for k, v in self.to_dict().items())})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrainState) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]


def to_number(value: Any) -> Any:
    """A tensor of one value as a number, a larger one as lists; the rest as it is."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else value
