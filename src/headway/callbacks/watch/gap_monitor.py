"""Statistics of gradients, activations and parameters, and dumps of raw gradients."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.callbacks.watch.activation_hooks import ActivationHooks, find_modules
from headway.callbacks.watch.gradient_dump import GradientDump
from headway.callbacks.watch.ranges import require_count, require_flag
from headway.callbacks.watch.shards import Shards, check_patterns, find_shards, matches
from headway.callbacks.watch.sharing import attempt
from headway.callbacks.watch.statistics import (
    ACTIVATION_GRADS,
    GRADS,
    PARAMS,
    Entry,
    StatisticsTable,
    drop_unseen,
    look_at_elements,
    scaled,
)
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

logger = logging.getLogger(__name__)

# They average over ranks a loss that was multiplied by their number.
_WEIGHTED_STRATEGIES = ("ddp", "accelerate")


class GAPMonitorCallback(TrainerCallback):
    """Records `gap/{params,grads,activations,activation_grads}/{name}/{max,mean,var}`.

    Measured every `interval` steps, before clipping and before the update, over all ranks. `max` is
    of absolute values. Of activations (what each module returns, or the first of several) `mean`
    and `var` are those of each instance, averaged over the batch. `include` are glob patterns of
    the names of parameters and modules: without them a model has thousands of these metrics.

    With `dump_gradients` the raw gradients of every `dump_gradients_step_interval`-th step from
    `dump_gradients_start_step` to `dump_gradients_end_step` (inclusive) are written below
    `<output_dir>/gradients/step<N>/`; `dump_gradients_save_first_n` keeps the first so many of
    each dimension.
    """

    priority = 10  # what it takes out of the metrics is out before sinks read them
    failure_policy = "disable"

    def __init__(
        self,
        enabled: bool = True,
        monitor: bool | None = None,
        interval: int = 1,
        dump_gradients: bool | None = None,
        dump_gradients_start_step: int = 0,
        dump_gradients_end_step: int | None = None,
        dump_gradients_step_interval: int = 1,
        dump_gradients_save_first_n: int | None = None,
        include: Sequence[str] | str | None = None,
    ) -> None:
        own = "GAPMonitorCallback."
        require_flag(own + "enabled", enabled)
        for option, flag in (("monitor", monitor), ("dump_gradients", dump_gradients)):
            if flag is not None:
                require_flag(own + option, flag)
        require_count(own + "interval", interval, least=1)
        first, last = dump_gradients_start_step, dump_gradients_end_step
        require_count(own + "dump_gradients_start_step", first)
        require_count(own + "dump_gradients_end_step", last, optional=True)
        if last is not None and last < first:
            raise ConfigError(
                f"{own}dump_gradients_end_step: {last} given; allowed: from "
                f"dump_gradients_start_step ({first}) up, or none"
            )
        every, first_n = dump_gradients_step_interval, dump_gradients_save_first_n
        require_count(own + "dump_gradients_step_interval", every, least=1)
        require_count(own + "dump_gradients_save_first_n", first_n, least=1, optional=True)
        if not enabled and (monitor or dump_gradients):
            raise ConfigError(
                f"GAPMonitorCallback: enabled=False cannot be used with monitor={monitor} and "
                f"dump_gradients={dump_gradients}; leave these out, or set enabled to True"
            )
        self.enabled = enabled
        self.monitor = enabled if monitor is None else monitor
        self.dump_gradients = bool(dump_gradients)
        if enabled and not (self.monitor or self.dump_gradients):
            raise ConfigError(
                "GAPMonitorCallback: monitor=False and dump_gradients=False leave nothing to do; "
                "set one of them to True, or enabled to False"
            )
        self.interval = interval
        self.dump_gradients_start_step, self.dump_gradients_end_step = first, last
        self.dump_gradients_step_interval = every
        self.dump_gradients_save_first_n = first_n
        self.include = check_patterns(own + "include", include)
        self._hooks = ActivationHooks()
        self._modules: dict[str, nn.Module] = {}
        self._shards: Shards | None = None
        self._table = StatisticsTable()
        self._dump: GradientDump | None = None
        self._figures: dict[str, Tensor] = {}
        self._failure: Exception | None = None

    # -- which steps ------------------------------------------------------------------------

    def _monitors(self, step: int) -> bool:
        return self._shards is not None and self.monitor and step % self.interval == 0

    def _dumps(self, step: int) -> bool:
        first, last = self.dump_gradients_start_step, self.dump_gradients_end_step
        if self._shards is None or self._dump is None or step < first:
            return False
        in_range = last is None or step <= last
        return in_range and (step - first) % self.dump_gradients_step_interval == 0

    # -- events -----------------------------------------------------------------------------

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, model: nn.Module
    ) -> None:
        self._hooks.detach()
        self._failure = None
        self._table, self._figures, self._shards, self._dump = StatisticsTable(), {}, None, None
        if not self.enabled:
            return
        if args.fuse_optim_with_backward:
            logger.warning(
                "GAPMonitorCallback does nothing: fuse_optim_with_backward uses up each gradient "
                "during the backward pass"
            )
            return
        self._shards = find_shards(
            model, self.include, observer="GAPMonitorCallback", may_be_none=self.monitor
        )
        if self.monitor:
            self._modules = find_modules(
                model,
                lambda name: matches(name, self.include),
                compiled=bool(args.torch_compile),
            )
        if self.dump_gradients:
            root = Path(args.output_dir) / "gradients"
            self._dump = GradientDump(root, self.dump_gradients_save_first_n)

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._figures = {}
        if self._monitors(state.global_step + 1):
            self._hooks.detach()  # of a step that was given up
            self._hooks.attach(self._modules)

    def on_forward_backward_begin(
        self, args: Any, state: TrainerState, control: TrainerControl
    ) -> None:
        self._hooks.listening = self._hooks.attached

    def on_forward_backward_end(
        self, args: Any, state: TrainerState, control: TrainerControl
    ) -> None:
        self._hooks.listening = False

    def on_gradients(
        self, args: Any, state: TrainerState, control: TrainerControl, trainer: Any
    ) -> None:
        self._hooks.detach()
        step, shards = state.global_step + 1, self._shards
        if shards is not None and self._monitors(step):
            look = attempt(lambda: self._look(shards, trainer.strategy))
            self._figures = self._table.join(look, trainer.strategy.reduce, trainer.strategy.device)
        if shards is not None and self._dump is not None and self._dumps(step):
            self._dump.write(shards, step, leads=state.is_world_process_zero)

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, trainer: Any
    ) -> None:
        figures, self._figures = self._figures, {}
        if not state.is_world_process_zero:  # joined over ranks already
            return
        try:
            for name, value in figures.items():
                trainer.record_metric(name, value, namespace="gap")
        except Exception as raised:
            self._failure = raised  # told where the other ranks can hear of it

    def on_metrics(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: dict[str, float]
    ) -> None:
        drop_unseen(metrics, "gap/")

    def on_close(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._hooks.detach()
        self._modules, self._figures, self._shards = {}, {}, None
        if self._dump is not None:
            self._dump.close()
            self._dump = None

    def _look(self, shards: Shards, strategy: Any) -> list[Entry]:
        """This rank's entries of the step under way."""
        import torch

        failure = self._hooks.error or self._failure
        if failure is not None:
            raise failure
        factor = 1.0
        if strategy.name in _WEIGHTED_STRATEGIES:
            factor /= strategy.context.world_size
        if strategy.loss_scale is not None:
            factor /= float(strategy.loss_scale.value)
        entries = [
            scaled(entry, factor) if entry.key[0] == ACTIVATION_GRADS else entry
            for entry in self._hooks.entries
        ]
        self._hooks.entries = []
        with torch.no_grad():
            for shard in shards.answered:
                if shard.parameter.numel() > 1:
                    entries.append(look_at_elements((PARAMS, shard.name), shard.local))
                    if shard.parameter.grad is not None:
                        entries.append(look_at_elements((GRADS, shard.name), shard.dense_gradient))
        return entries
