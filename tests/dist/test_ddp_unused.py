"""DDP and parameters that take no part in the loss: the error names the option that helps."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch import distributed as dist

from headway.args import DDPArguments, DDPTrainingArguments
from headway.data.windows import Window
from headway.dist.group import DistributedContext
from headway.errors import ConfigError
from headway.strategies.ddp import DistributedDataParallelStrategy
from headway.strategies.objective import Objective
from headway.strategies.source import ModelSource
from headway.testing import run_ranks


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Embedding(5, 5), nn.Linear(5, 5)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.used(input_ids)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def take_steps(find_unused: bool) -> str:
    args = DDPTrainingArguments(ddp=DDPArguments(find_unused_parameters=find_unused))
    context = DistributedContext(dist.get_rank(), dist.get_world_size(), backend="gloo")
    strategy = DistributedDataParallelStrategy(context, torch.device("cpu"), args)
    model = strategy.setup(ModelSource(model=Idle()))
    ids = torch.ones(1, 4, dtype=torch.long)
    window = Window([{"input_ids": ids, "labels": ids}], 4, 4, 1)
    try:
        for _ in range(3):
            strategy.forward_backward(window, Objective(model), 8, lambda name: None)
    except ConfigError as error:
        return str(error)
    return ""


def test_unused_parameters_are_told_with_the_option_that_helps() -> None:
    for told in run_ranks(take_steps, 2, False, timeout_s=120):
        assert told.startswith("ddp.find_unused_parameters: False given"), told
        assert "(idle.weight, idle.bias)" in told, told
    assert run_ranks(take_steps, 2, True, timeout_s=120) == ["", ""]
