"""Norms of every parameter, as a file for diagnosis and heat maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headway.callbacks.watch.norm_log import NormLogger
from headway.callbacks.watch.shards import Shards, measure_squares
from headway.callbacks.watch.spectral import SpectralNorms
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn


class ParameterNormLogger(NormLogger):
    """Writes `parameter_norms.jsonl`: per record the maps `norms` and `spectral_norms`.

    With `format="array"` it is `parameter_norms.json`, one JSON array.

    `log_norms`: the L2 norm of each parameter. `log_spectral_norms`: an estimate of its largest
    singular value by `power_iter_steps` steps of power iteration, twice as many the first time;
    `spectral_change` is the largest relative change that the last step made to any of them. Of
    parameters with fewer than two dimensions it is the largest element.

    A record is written at each evaluation (in a run without any: with each log record), or every
    `log_steps` steps. `include` are glob patterns of names. The numbers are of the whole
    parameters, wherever their parts are, and are read in one transfer.
    """

    LOG_FILENAME = "parameter_norms.jsonl"

    def __init__(
        self,
        log_norms: bool = True,
        log_spectral_norms: bool = True,
        power_iter_steps: int = 10,
        log_steps: int | None = None,
        include: Sequence[str] | str | None = None,
        format: str = "lines",
    ) -> None:
        super().__init__(log_steps, include, format)
        problems = [
            f"ParameterNormLogger.{option}: True or False, got {given!r}"
            for option, given in (
                ("log_norms", log_norms),
                ("log_spectral_norms", log_spectral_norms),
            )
            if not isinstance(given, bool)
        ]
        if not problems and not (log_norms or log_spectral_norms):
            problems.append(
                "ParameterNormLogger: log_norms and log_spectral_norms are both False, which "
                "leaves nothing to write; set one of them to True"
            )
        if (
            not isinstance(power_iter_steps, int)
            or isinstance(power_iter_steps, bool)
            or power_iter_steps < 1
        ):
            problems.append(
                f"ParameterNormLogger.power_iter_steps: {power_iter_steps!r} given; allowed: a "
                "whole number from 1 up"
            )
        if problems:
            raise ConfigError(problems)
        self.log_norms, self.log_spectral_norms = log_norms, log_spectral_norms
        self.power_iter_steps = power_iter_steps
        self._spectral = SpectralNorms(power_iter_steps)
        self._written_step = -1

    def _forget_run(self) -> None:
        self._spectral.load_state_dict({})

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, model: nn.Module
    ) -> None:
        self._written_step = -1
        shards = self.begin(args, model, state)
        if shards is not None and self.log_spectral_norms:
            self._spectral.begin(model, shards)

    def on_load(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._written_step = -1
        super().on_load(args, state, control)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "vectors": self._spectral.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._spectral.load_state_dict(state.get("vectors") or {})

    def write_norms(self, args: Any, state: TrainerState) -> None:
        if self._written_step == state.global_step:
            return
        self._written_step = state.global_step
        shards = self.shards
        assert shards is not None
        num_names = len(shards.names)
        num_sums = num_names if self.log_norms else 0
        num_maxima = num_names + 1 if self.log_spectral_norms else 0
        squares, largest = self.join(lambda: self._measure(shards), num_sums, num_maxima)
        data: dict[str, Any] = {}
        if self.log_norms:
            data["norms"] = {n: math.sqrt(square) for n, square in zip(shards.names, squares)}
        if self.log_spectral_norms:
            data["spectral_norms"] = dict(zip(shards.names, largest))
            data["spectral_change"] = largest[num_names]
        self.write(args, state, data)

    def _measure(self, shards: Shards) -> tuple[Tensor, Tensor]:
        import torch

        with torch.no_grad():
            spectral = torch.zeros(0)
            if self.log_spectral_norms:
                spectral = self._spectral.measure(len(shards.names))
            squares = torch.zeros(0, dtype=spectral.dtype, device=spectral.device)
            if self.log_norms:
                squares = measure_squares(shards)
        return squares, spectral
