"""`lr_find`: which learning rate suits a model, found by trying many on it.

Owns: the result, and the finder for a plain model and a loader. Does not own: the finder for every
strategy (trainers/lr_find.py), the test (lr_range), the choice (lr_suggest), pictures (lr_plot).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from headway.dist.seed import derive_seed, seed_all
from headway.errors import ConfigError
from headway.optim.lr_range import RangeOptions, RangeTest, run_range_test
from headway.optim.lr_suggest import Suggestions, suggest
from headway.optim.multi import GROUP_CLASS
from headway.optim.preserved import preserve

LossFunction = Callable[[nn.Module, Any, Any], Tensor]
OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]


@dataclass
class LRFinderResult:
    """What a search measured and what it comes to.

    Of several seeds `losses` are the mean at each rate that all of them reached.
    """

    lrs: list[float]
    """The rates that were tried."""
    losses: list[float]
    """The loss at each of them."""
    suggested_lr: float | None
    """A rate to begin with; None where the losses suggest none (`reason` says why)."""
    smoothed_losses: list[float] = field(default_factory=list)
    """The running mean of the losses, corrected for its first values."""
    suggestions: dict[str, float] = field(default_factory=dict)
    """Every rule's rate by the rule's name."""
    spread: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Lowest and highest rate of each rule over the seeds that suggest one."""
    reason: str | None = None
    """Why nothing is suggested."""
    runs: list[RangeTest] = field(default_factory=list)
    """The test of each seed."""

    @classmethod
    def of_runs(cls, runs: Sequence[RangeTest]) -> LRFinderResult:
        """The result of one test, or of several that differ in their seed."""
        length = min(len(run.lrs) for run in runs)
        lrs = runs[0].lrs[:length]
        losses = _mean([run.losses for run in runs], length)
        found = suggest(lrs, losses)
        if not length:
            found = Suggestions(reason=_say_not_finite(runs))
        each = [found] if len(runs) == 1 else [suggest(run.lrs, run.losses) for run in runs]
        return cls(
            lrs,
            losses,
            found.suggested_lr,
            _mean([run.smoothed for run in runs], length),
            found.by_rule,
            _spread(each),
            found.reason,
            list(runs),
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON."""
        return {
            "lrs": list(self.lrs),
            "losses": list(self.losses),
            "smoothed_losses": list(self.smoothed_losses),
            "suggested_lr": self.suggested_lr,
            "suggestions": dict(self.suggestions),
            "spread": {name: list(bounds) for name, bounds in self.spread.items()},
            "reason": self.reason,
            "runs": [vars(run) | {} for run in self.runs],
        }

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw loss over rate into a file: `.png` (matplotlib) or `.html` (plotly)."""
        from headway.optim.lr_plot import plot

        plot(self, path)


def _mean(curves: Sequence[Sequence[float]], length: int) -> list[float]:
    return [sum(curve[n] for curve in curves) / len(curves) for n in range(length)]


def _say_not_finite(runs: Sequence[RangeTest]) -> str:
    """Of tests of which one had not a single loss."""
    rate = next(run.stopped_lr for run in runs if not run.lrs)
    return (
        f"the loss is not finite at the smallest rate tried ({rate:.3g}), or its gradient is not; "
        "that is before any step, so no learning rate can help: look at the model, its precision "
        "and the data"
    )


def _spread(each: Sequence[Suggestions]) -> dict[str, tuple[float, float]]:
    rates: dict[str, list[float]] = {}
    for found in each:
        for name, rate in found.by_rule.items():
            rates.setdefault(name, []).append(rate)
    return {name: (min(values), max(values)) for name, values in rates.items()}


class Rates:
    """Sets the rate of an optimizer; its groups keep their ratio to the leading one."""

    def __init__(self, optimizer: Optimizer, leading: float | None = None) -> None:
        self._groups = optimizer.param_groups
        base = leading_rate(optimizer)[1] if leading is None else leading
        self._ratios = [_rate_of(group) / base if base else 1.0 for group in self._groups]

    def set(self, lr: float) -> None:
        for group, ratio in zip(self._groups, self._ratios):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr * ratio)
            else:
                group["lr"] = lr * ratio


def leading_rate(optimizer: Optimizer) -> tuple[bool, float]:
    """The rate that stands for an optimizer's: that of the first group, but of Muon's before those
    of the AdamW beside it. The first value says whether it is Muon's."""
    groups = optimizer.param_groups
    of_muon = [group for group in groups if group.get(GROUP_CLASS) == torch.optim.Muon.__name__]
    return bool(of_muon), _rate_of((of_muon or groups)[0])


def _rate_of(group: Mapping[str, Any]) -> float:
    return float(group.get("initial_lr", group["lr"]))


def lr_find(
    model: nn.Module,
    train_dataloader: Iterable[Any],
    *,
    start_lr: float = 1e-7,
    end_lr: float = 1.0,
    num_iterations: int = 100,
    smoothing_factor: float = 0.05,
    divergence_threshold: float = 4.0,
    loss_fn: LossFunction | None = None,
    optimizer_factory: OptimizerFactory = torch.optim.AdamW,
    max_grad_norm: float | None = None,
    device: torch.device | str | None = None,
    num_seeds: int = 1,
) -> LRFinderResult:
    """Try learning rates on a model, one step each, and suggest one; the model stays as it was.

    `loss_fn(model, batch, outputs)` gives the loss where the model's output does not. Weights,
    buffers, gradients, modes, global generators and the loader's own generators are put back bit
    for bit, also after an error. Batches go to `device`, by default where the model is. Where
    `optimizer_factory` makes groups of different rates, these keep their ratio to the first.
    """
    options = RangeOptions(start_lr, end_lr, num_iterations, smoothing_factor, divergence_threshold)
    check_num_seeds(num_seeds)
    check_rereadable(train_dataloader, "train_dataloader")
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError(
            f"model: {type(model).__name__} has no parameter that requires a gradient"
        )
    place = parameters[0].device if device is None else torch.device(device)
    runs: list[RangeTest] = []
    with preserve(model) as kept, preserve_reading(train_dataloader):
        for number in range(num_seeds):
            kept.restore()
            optimizer = optimizer_factory(parameters)
            model.train()
            model.zero_grad(set_to_none=True)
            seed_all(derive_seed(0, number))
            batches = (move(batch, place) for batch in _cycle(train_dataloader))
            step = _make_step(model, optimizer, batches, loss_fn, max_grad_norm)
            runs.append(run_range_test(step, options))
    return LRFinderResult.of_runs(runs)


def _make_step(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterator[Any],
    loss_fn: LossFunction | None,
    max_grad_norm: float | None,
) -> Callable[[float], float]:
    rates = Rates(optimizer)

    def step(lr: float) -> float:
        rates.set(lr)
        loss = _loss(model, next(batches), loss_fn)
        value = float(loss.detach())
        loss.backward()  # type: ignore[no-untyped-call]
        if max_grad_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value

    return step


def check_num_seeds(num_seeds: int) -> None:
    """Refuse a number of repetitions that is none."""
    if num_seeds < 1:
        raise ConfigError(f"num_seeds: {num_seeds!r} given; allowed: 1 and up")


def check_rereadable(data: Any, option: str) -> None:
    """Refuse data that can be read only once: what a trial reads would be lost to training."""
    if not hasattr(data, "__getitem__") and hasattr(data, "__next__"):
        raise ConfigError(
            f"{option}: a {type(data).__name__} can be read only once, and what a search for a "
            "learning rate reads would be missing in training; give a dataset or a loader that "
            "can be read again"
        )


@contextmanager
def preserve_reading(data: Any) -> Iterator[None]:
    """Undo what reading does to a loader or dataset: its own generators and, if any, its state."""
    generators = [(g, g.get_state()) for g in _find_generators(data)]
    has_state = all(callable(getattr(data, n, None)) for n in ("state_dict", "load_state_dict"))
    state = data.state_dict() if has_state else None
    try:
        yield
    finally:
        for generator, before in generators:
            generator.set_state(before)
        if has_state:
            data.load_state_dict(state)


def _find_generators(data: Any) -> list[torch.Generator]:
    batches = getattr(data, "batch_sampler", None)
    owners = (data, getattr(data, "sampler", None), batches, getattr(batches, "sampler", None))
    found = {id(g): g for owner in owners if (g := getattr(owner, "generator", None)) is not None}
    return [g for g in found.values() if isinstance(g, torch.Generator)]


def _cycle(loader: Iterable[Any]) -> Iterator[Any]:
    """Batches without end."""
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise ConfigError(
                f"train_dataloader: the {type(loader).__name__} yields no batch; a search for a "
                "learning rate needs at least one"
            )


def move(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [move(value, device) for value in batch]
    return batch


def _loss(model: nn.Module, batch: Any, loss_fn: LossFunction | None) -> Tensor:
    if isinstance(batch, Mapping):
        outputs = model(**batch)
    elif isinstance(batch, list) and len(batch) == 2:
        outputs = model(batch[0])
    else:
        outputs = model(batch)
    loss: Any
    if loss_fn is not None:
        loss = loss_fn(model, batch, outputs)
    elif isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    else:
        loss = getattr(outputs, "loss", outputs)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ConfigError(
            f"model: {type(model).__name__} gives no loss that is one number "
            f"(its output is a {type(outputs).__name__}); pass loss_fn(model, batch, outputs)"
        )
    return loss.reshape(())
