"""What the training loop is made of, put together by the trainer.

Owns: the list of parts and of what the loop asks of the trainer. Does not own: any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from headway.args import TrainingArguments
from headway.checkpoint.background import BackgroundSaver
from headway.data.loader import WindowLoader
from headway.dist.channel import RankChannel
from headway.engine.bookkeeping import Bookkeeping
from headway.engine.cancel import CancelRequests
from headway.engine.commands import CommandRelay
from headway.engine.events import EventBus
from headway.engine.metrics import MetricBuffer
from headway.engine.rollback import RollbackRequest
from headway.engine.state import TrainerState
from headway.engine.timing import LoopTiming
from headway.engine.triggers import Length, Trigger
from headway.strategies.base import Strategy
from headway.strategies.objective import Objective


@dataclass
class LoopParts:
    """Everything the loop works with, put together by the trainer."""

    args: TrainingArguments
    state: TrainerState
    bus: EventBus
    strategy: Strategy
    objective: Objective
    optimizer: Optimizer
    scheduler: LRScheduler | None
    loader: WindowLoader
    metrics: MetricBuffer
    length: Length
    log_trigger: Trigger
    eval_trigger: Trigger
    save_trigger: Trigger
    steps_per_epoch: int
    flops_per_token: float
    log: Callable[[dict[str, Any]], None]
    """Deliver the record of a step, after `on_log_step`."""
    evaluate: Callable[[Callable[[], bool]], dict[str, float] | None]
    """Evaluate unless the argument, asked between batches, says to end: then None."""
    save: Callable[[dict[str, float] | None, str], None]
    """Save the current step with its metrics, if it was evaluated, to stay for a lifetime."""
    saves: BackgroundSaver
    deliver_save: Callable[[], None]
    """Announce the save that has ended; raises what it failed with."""
    rollback: Callable[[RollbackRequest], None]
    save_at_start: Callable[[str], None]
    """Keep the state before the first step; it is written once a step went well."""
    on_first_step: Callable[[], None]
    """Called once, when the first step went well."""
    rescue: Callable[[str], None]
    """Save the current step after an error, unless it is saved already; told with the reason."""
    cancel: CancelRequests
    bookkeeping: Bookkeeping
    timing: LoopTiming
    commands: CommandRelay
    channel: RankChannel | None = None
    """On which ranks join metrics; None where there is one rank only."""
    checkpointed: bool = False
    """A callback decides when to save: the run's end is saved too, for good if it is complete."""
    relieve: Callable[[], Any] = bool
    """Between steps: give device memory back where there is too little."""
