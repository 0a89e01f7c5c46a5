"""Parameters that stand still for a part of the run.

Owns: which parameters are frozen at a step, and keeping updates from them under every strategy.
Does not own: the update itself (strategies, optimizers).

A parameter that belongs to the optimizer and has no gradient is passed over by every optimizer:
neither an update nor weight decay reaches it, its state stays as it is, and no norm counts it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from headway.callbacks.schedule.points import Point, is_reached, read_point
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError

logger = logging.getLogger(__name__)

_WHO = "FreezeCallback"


class FreezeCallback(TrainerCallback):
    """Freezes the parameters whose names match one of `patterns`, from `since` `until`.

    `patterns` are regular expressions searched in the names. `since` (0) and `until` (the end of
    the run) are points of it, such as 500, '500 steps', '1B tokens' or '0.5 epochs'. Parameters
    must be trainable when the run begins, so that the optimizer knows them.

    On one device a frozen parameter gets no gradient at all, which saves its computation. Under
    DDP, FSDP2, a pipeline and Accelerate gradients are made and reduced as before, and dropped
    before norms and updates: their wrappers count on them.
    """

    priority = 100  # on_gradients: before whoever looks at gradients

    def __init__(
        self, patterns: Sequence[str] | str, since: Point = 0, until: Point | None = None
    ) -> None:
        self.patterns = _read_patterns(patterns)
        self.since = read_point(f"{_WHO}: since", since)
        self.until = None if until is None else read_point(f"{_WHO}: until", until)
        if self.until is not None:
            comparable = self.until.unit == self.since.unit or not self.since.value
            if not self.until.value or (comparable and self.until.value <= self.since.value):
                raise ConfigError(
                    f"{_WHO}: until: {until!r} given; allowed: later than since={since!r}"
                )
        self._members: list[Any] = []
        self._by_flag = False
        self._is_frozen = False

    @property
    def is_frozen(self) -> bool:
        """Whether the parameters are frozen in the present step."""
        return self._is_frozen

    # Events

    def on_init_end(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        trainer: Any,
        model: Any,
    ) -> None:
        self._check_strategy(args, trainer.strategy)
        # Elsewhere wrappers wait for every gradient that they were made for.
        self._by_flag = trainer.strategy.name == "single"
        self._members = self._find(model)
        self._update(state, model)

    def on_step_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any
    ) -> None:
        self._update(state, model)

    def on_gradients(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        if self._is_frozen:
            for parameter in self._members:
                parameter.grad = None

    def on_close(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._let_go()

    # Work

    def _wanted(self, state: TrainerState) -> bool:
        ended = self.until is not None and is_reached(self.until, state)
        return is_reached(self.since, state) and not ended

    def _update(self, state: TrainerState, model: Any) -> None:
        wanted = self._wanted(state)
        if wanted == self._is_frozen:
            return
        if not wanted:
            self._let_go()
        else:
            from headway.optim.freezing import hold

            self._is_frozen = True
            for parameter in self._members:
                hold(parameter, self)
                parameter.requires_grad_(not self._by_flag)
            if self._by_flag and not any(p.requires_grad for p in model.parameters()):
                self._let_go()
                raise ConfigError(
                    f"{_WHO}: patterns: {self.patterns} given; with what else is frozen nothing "
                    "would be "
                    "left to train"
                )
        logger.info(
            "%s: %d parameter tensors %s after step %d",
            ", ".join(self.patterns),
            len(self._members),
            "frozen" if wanted else "trained again",
            state.global_step,
        )

    def _let_go(self) -> None:
        if not self._is_frozen:
            return
        from headway.optim.freezing import let_go

        self._is_frozen = False
        for parameter in self._members:
            if let_go(parameter, self):
                parameter.requires_grad_(True)

    def _check_strategy(self, args: Any, strategy: Any) -> None:
        if args.fuse_optim_with_backward and strategy.name != "single":
            raise ConfigError(
                f"{_WHO} cannot be used with fuse_optim_with_backward under {strategy.name}: "
                "updates are made before gradients can be dropped; switch one of them off"
            )
        accelerator = getattr(strategy, "accelerator", None)
        kind = str(getattr(accelerator, "distributed_type", ""))
        if "deepspeed" in kind.lower():
            raise ConfigError(
                f"{_WHO} cannot be used with DeepSpeed, which holds gradients and updates itself; "
                "set requires_grad=False in model_init, or choose FSDP2"
            )

    def _find(self, model: Any) -> list[Any]:
        """The parameters of this rank; a pattern must match something in the whole model."""
        from headway.checkpoint.model import clean_name
        from headway.optim.freezing import is_trained
        from headway.optim.kinds import all_names, parameter_kinds

        everywhere = sorted({clean_name(name) for name in parameter_kinds(model)})
        for pattern in self.patterns:
            if not any(re.search(pattern, name) for name in everywhere):
                raise ConfigError(
                    f"{_WHO}: patterns: {pattern!r} given; it matches no parameter; the nearest "
                    "are: "
                    f"{', '.join(_nearest(pattern, everywhere))}"
                )
        if all(any(re.search(p, name) for p in self.patterns) for name in everywhere):
            raise ConfigError(
                f"{_WHO}: patterns: {self.patterns} given; nothing would be left to train"
            )
        own = dict(model.named_parameters())
        found = []
        for first, names in all_names(model).items():
            cleaned = [clean_name(name) for name in names]
            if not any(re.search(p, name) for p in self.patterns for name in cleaned):
                continue
            parameter = own[first]
            if is_trained(parameter):
                found.append(parameter)
            elif self.until is not None:
                raise ConfigError(
                    f"{_WHO}: until: {str(self.until)!r} given, but {cleaned[0]} does not require "
                    "a "
                    "gradient and is not the optimizer's; make it trainable, and it is frozen "
                    "until then"
                )
        return found


def _read_patterns(given: Any) -> list[str]:
    patterns = [given] if isinstance(given, str) else given
    if not isinstance(patterns, Sequence) or not patterns:
        raise ConfigError(
            f"{_WHO}: patterns: {given!r} given; allowed: regular expressions, at least one"
        )
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise ConfigError(
                f"{_WHO}: patterns: {pattern!r} given; allowed: text that is not empty, a regular "
                "expression"
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"{_WHO}: patterns: {pattern!r} given, which is no regular expression: {error}"
            ) from error
    return list(patterns)


def _nearest(pattern: str, names: Sequence[str]) -> list[str]:
    """Parameter names that look most like what a pattern was to match."""
    from headway.optim.groups import closest_names

    return closest_names(pattern, list(names))
