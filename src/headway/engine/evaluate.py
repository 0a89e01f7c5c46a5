"""Evaluation and prediction: one pass over data without gradients.

Owns the averages: sums over targets and their count, joined over ranks, divided once. Does not own
when an evaluation happens, nor what is done with its result.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headway.data.loader import WindowLoader
from headway.engine.events import EventBus
from headway.errors import ConfigError, naming
from headway.strategies.base import Strategy
from headway.strategies.objective import Objective


@dataclass
class EvalResult:
    """Averages of a pass and, when asked for, what the model gave."""

    metrics: dict[str, float]
    logits: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients inside; afterwards each module is in the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(modes[0][1])  # for models that do more in it than set the flag
        for module, was_training in modes:
            module.training = was_training


def run_evaluation(
    strategy: Strategy,
    objective: Objective,
    loader: WindowLoader,
    bus: EventBus,
    *,
    max_steps: int = -1,
    prefix: str = "eval",
    keep_outputs: bool = False,
    preprocess_logits: Callable[[Tensor, Tensor | None], Tensor] | None = None,
    must_end: Callable[[], bool] | None = None,
) -> EvalResult | None:
    """One pass over the data (at most `max_steps` batches of it when that is positive).

    Of outputs that are kept, `preprocess_logits` makes what is wanted of a batch's logits and
    labels, while they are on the device.

    `must_end` is asked before every batch; once it says so the pass ends and gives None, since an
    average over a part is not the metric.
    """
    device = strategy.device
    sums = torch.zeros(2, dtype=_widest(device), device=device)  # loss, targets
    num_batches, num_samples, started_s = 0, 0, time.monotonic()
    result = EvalResult({})
    for window in strategy.feed(loader, training=False):
        if 0 <= max_steps <= num_batches:
            break
        if must_end is not None and must_end():
            return None
        step = strategy.eval_forward(window.micro_batches[0], objective, with_logits=keep_outputs)
        num_batches += 1
        num_samples += (window.totals or window).num_samples
        if step.loss_sum is not None and not window.num_fillers:
            sums[0] += step.loss_sum
            sums[1] += step.num_targets
        if keep_outputs and not window.num_fillers:
            _keep(result, step.logits, step.labels, preprocess_logits)
        bus.fire("on_prediction_step")
    if num_batches == 0:
        raise ConfigError(
            f"{prefix}_dataset yields no batch: per_device_eval_batch_size="
            f"{bus.args.per_device_eval_batch_size}, max_eval_steps={max_steps}, "
            f"dataloader_drop_last={bus.args.dataloader_drop_last}"
        )
    loss_sum, num_targets = strategy.reduce(sums, "sum").tolist()
    seconds = max(time.monotonic() - started_s, 1e-9)
    if num_targets:
        result.metrics[f"{prefix}_loss"] = loss_sum / num_targets
        result.metrics[f"{prefix}_perplexity"] = _exp(loss_sum / num_targets)
    result.metrics |= {
        f"{prefix}_runtime": seconds,
        f"{prefix}_samples_per_second": num_samples / seconds,
        f"{prefix}_steps_per_second": num_batches / seconds,
    }
    return result


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _keep(
    result: EvalResult,
    logits: Any,
    labels: Any,
    preprocess: Callable[[Tensor, Tensor | None], Tensor] | None,
) -> None:
    if isinstance(logits, Tensor):
        kept = logits.detach()
        if preprocess is not None:
            with naming("preprocess_logits_for_metrics"):
                kept = preprocess(kept, labels)
        if not isinstance(kept, Tensor):
            raise ConfigError(
                f"preprocess_logits_for_metrics returned {type(kept).__name__}; allowed: a tensor"
            )
        # numpy has no bfloat16.
        result.logits.append(kept.float().cpu() if kept.is_floating_point() else kept.cpu())
    if isinstance(labels, Tensor):
        result.labels.append(labels.detach().cpu())
