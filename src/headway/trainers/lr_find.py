"""What a trainer offers to find a learning rate: the range test under its own strategy.

Owns: `Trainer.lr_find`, and that a run after it is the run it would have been without. Does not
own: the test and the choice (optim/), the copies that are put back (optim/preserved.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from headway.data.loader import WindowLoader
from headway.dist.agreement import exchange
from headway.dist.failure import guard_run
from headway.dist.seed import derive_seed, seed_all
from headway.engine.counts import count_window
from headway.errors import ConfigError
from headway.optim.build import build_optimizer
from headway.optim.lr_finder import (
    LRFinderResult,
    Rates,
    check_num_seeds,
    check_rereadable,
    leading_rate,
    preserve_reading,
)
from headway.optim.lr_range import RangeOptions, run_range_test
from headway.optim.preserved import preserve, put_back_randomness, take_randomness
from headway.strategies.torch_settings import torch_settings

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from headway.args import TrainingArguments
    from headway.data.windows import Window
    from headway.engine.events import EventBus
    from headway.engine.state import TrainerState
    from headway.strategies.base import Strategy
    from headway.strategies.objective import Objective
    from headway.strategies.source import ModelSource


class LearningRateFinding:
    """The part of a trainer that tries learning rates."""

    args: TrainingArguments
    bus: EventBus
    env: Any
    state: TrainerState
    model: nn.Module | None
    optimizer: Optimizer | None
    lr_scheduler: LRScheduler | None
    strategy: Strategy | None
    train_dataset: Any
    _objective: Objective | None
    _optimizer_factory: Any
    _optimizer_cls_and_kwargs: Any
    _optimizer_groups: Any
    _make_strategy: Callable[[], Strategy]

    def _prepare_model(self) -> None:
        raise NotImplementedError

    def _loader(self, dataset: Any, option: str, *, training: bool = False) -> WindowLoader:
        raise NotImplementedError

    def _require_same(self, config: dict[str, Any]) -> None:
        raise NotImplementedError

    def lr_find(
        self,
        *,
        start_lr: float = 1e-7,
        end_lr: float = 1.0,
        num_iterations: int = 100,
        smoothing_factor: float = 0.05,
        divergence_threshold: float = 4.0,
        num_seeds: int = 1,
    ) -> LRFinderResult:
        """Try learning rates from the current weights, one optimizer step each, and suggest one.

        Everything is as in training: optimizer, precision, accumulation, clipping, strategy and
        data. Afterwards, also after an error, all is as it was, bit for bit, and no callback has
        heard of it. It can be called before a run, in one (from a callback) and after one. With
        `num_seeds` the test is repeated with other orders of the data. Every rank must call it,
        and every rank gets the same result.
        """
        options = RangeOptions(
            start_lr, end_lr, num_iterations, smoothing_factor, divergence_threshold
        )
        check_num_seeds(num_seeds)
        if self.train_dataset is None:
            raise ConfigError("lr_find() needs train_dataset")
        check_rereadable(self.train_dataset, "train_dataset")
        if self.args.strategy_name == "accelerate":
            raise ConfigError(
                "lr_find: with trainer 'accelerate' parts of the state are kept by accelerate and "
                "DeepSpeed, where they cannot be put back; search with trainer 'ddp' or 'fsdp2'"
            )
        with guard_run(), torch_settings(self.args):
            self._require_same({**asdict(options), "num_seeds": num_seeds})
            with self._prepared_for_trials():
                return self._find(options, num_seeds)

    def _find(self, options: RangeOptions, num_seeds: int) -> LRFinderResult:
        strategy, model = self.strategy, self.model
        assert strategy is not None and model is not None
        optimizer = self.optimizer or self._build_trial_optimizer(model)
        own = [part.stateful for part in strategy.state_components()]
        others = own if strategy.loss_scale is None else [strategy.loss_scale, *own]
        runs = []
        with preserve(model, optimizer, others) as kept, self._preserved_data():
            for number in range(num_seeds):
                kept.restore()
                # In a run modes are as its callbacks want them.
                if self.optimizer is None or not model.training:
                    model.train()
                for parameter in model.parameters():
                    parameter.grad = None
                seed = derive_seed(self.state.seed or 0, number)
                seed_all(derive_seed(seed, self.env.rank))
                windows = self._trial_windows(number)
                runs.append(
                    run_range_test(
                        self._trial_step(optimizer, windows),
                        options,
                        lambda stop: bool(strategy.agree(int(stop))),
                    )
                )
                windows.close()
        return LRFinderResult.of_runs(runs)

    def _trial_step(
        self, optimizer: Optimizer, windows: Iterator[Window]
    ) -> Callable[[float], float]:
        """One optimizer step at a given rate, as the loop takes it, without its events."""
        strategy, objective = self.strategy, self._objective
        assert strategy is not None and objective is not None
        rates = Rates(optimizer, self._agree_on_rate(optimizer))

        def step(lr: float) -> float:
            window = next(windows)
            # Before the backward: an optimizer may step in it.
            rates.set(lr)
            totals = count_window(window, strategy, objective, changed=False)
            num_targets = totals.num_target_tokens
            if isinstance(num_targets, int):
                num_targets = max(1, num_targets)
            loss = strategy.forward_backward(window, objective, num_targets, _tell_nobody)
            norm = strategy.clip(self.args.max_grad_norm)
            strategy.apply(optimizer, loss, norm)
            total = strategy.reduce(loss.float(), "sum").item()
            if strategy.loss_scale is None and not math.isfinite(norm.item()):
                return math.nan
            return float(total)

        return step

    def _agree_on_rate(self, optimizer: Optimizer) -> float:
        """The rate that all others keep their ratio to: ranks may have different param groups."""
        own = leading_rate(optimizer)
        found = [own] if self.env.world_size == 1 else exchange(list(own))
        return float(next((rate for of_muon, rate in found if of_muon), found[0][1]))

    def _build_trial_optimizer(self, model: nn.Module) -> Optimizer:
        """The run's optimizer, for a trial before there is a run."""
        strategy = self.strategy
        assert strategy is not None
        optimizer = build_optimizer(
            model,
            self.args,
            factory=self._optimizer_factory,
            cls_and_kwargs=self._optimizer_cls_and_kwargs,
            groups=self._optimizer_groups,
        )
        if strategy.adopt is not None:  # the run's own optimizer takes its place later
            strategy.adopt(optimizer)
        return optimizer

    # Data

    def _trial_windows(self, number: int) -> Generator[Window]:
        """Windows without end: pass after pass over the data, each in an order of its own."""
        assert self.strategy is not None
        in_run = self.bus.kwargs.get("train_dataloader")
        order = 0
        while True:
            loader = self._loader(self.train_dataset, "train_dataset", training=True)
            # A dataset that is told its epoch must not be told another one than in the run.
            loader.epoch = 0 if in_run is None else in_run.epoch
            if number or order:
                loader.seed = derive_seed(derive_seed(loader.seed, number), order)
            empty, order = True, order + 1
            try:
                for window in self.strategy.feed(loader):
                    empty = False
                    yield window
            finally:
                loader.close()
            if empty:
                raise ConfigError("train_dataset: a whole epoch yields no batch")

    @contextmanager
    def _preserved_data(self) -> Iterator[None]:
        """Reading for a trial leaves the data where it stands."""
        in_run = self.bus.kwargs.get("train_dataloader")
        if isinstance(in_run, WindowLoader) and in_run.kind != "map":
            state = in_run.state_dict()
            try:
                yield
            finally:
                in_run.load_state_dict(state)
        elif isinstance(in_run, WindowLoader):
            yield
        else:
            with preserve_reading(self.train_dataset):
                yield

    # Before a run

    @contextmanager
    def _prepared_for_trials(self) -> Iterator[None]:
        """The model built and placed, if it is not yet; the trainer is then left as it was."""
        if self.strategy is not None:
            yield
            return
        before, model, kwargs = take_randomness(), self.model, dict(self.bus.kwargs)
        with ExitStack() as stack:
            stack.callback(put_back_randomness, before)
            self._prepare_model()
            built = take_randomness()
            stack.callback(self._set_aside, built, model, kwargs)
            yield

    def _set_aside(
        self, built: dict[str, Any], given: nn.Module | None, kwargs: dict[str, Any]
    ) -> None:
        """Go back to a trainer without a model; who next needs one gets the one that was built.

        With it come the generators as building it left them, which a run begins with.
        """
        strategy, model, seed = self.strategy, self.model, self.state.seed
        assert strategy is not None and model is not None

        def setup(source: ModelSource) -> nn.Module:
            del strategy.setup  # type: ignore[misc]
            if self.state.seed == seed:
                put_back_randomness(built)
            return model

        def hand_out() -> Strategy:
            del self._make_strategy
            strategy.setup = setup  # type: ignore[method-assign]
            return strategy

        self._make_strategy = hand_out
        self.strategy, self.model, self._objective = None, given, None
        self.bus.kwargs.clear()
        self.bus.kwargs.update(kwargs)


def _tell_nobody(event: str) -> None:
    """No callback hears of a trial."""
