"""Norms and statistics on a CUDA device: what is read, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway import Trainer, TrainerCallback, TrainingArguments
from headway.callbacks import (
    GAPMonitorCallback,
    GradNormLogger,
    ParameterNormLogger,
    WeightNormLogger,
)
from headway.engine.state import TrainerControl, TrainerState
from headway.testing import count_host_syncs, tiny_dataset, tiny_decoder

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "logger", [GradNormLogger(), ParameterNormLogger(power_iter_steps=2), WeightNormLogger()]
)
def test_a_thousand_parameters_cost_one_sync(tmp_path: Path, logger: Any) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), eval_strategy="steps", eval_steps=2)
    state, control = TrainerState(global_step=1, eval_steps=2), TrainerControl()
    model = nn.ModuleList(nn.Linear(4, 3) for _ in range(500)).cuda()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    logger.on_train_begin(args, state, control, model)
    with count_host_syncs() as syncs:
        if isinstance(logger, GradNormLogger):
            logger.on_gradients(args, state, control)
        assert syncs.count == 0, syncs.report()
        state.global_step = 2
        if isinstance(logger, WeightNormLogger):
            logger.on_log_step(args, state, control, {})
        else:
            logger.on_evaluate(args, state, control)
    assert syncs.count == 1, syncs.report()
    logger.on_close(args, state, control)


def test_statistics_wait_for_nothing_between_logs(tmp_path: Path) -> None:
    class Count(TrainerCallback):
        def on_step_begin(self, state: TrainerState) -> None:
            if state.global_step == 2:
                self.context = count_host_syncs()
                self.syncs = self.context.__enter__()

        def on_step_end(self, state: TrainerState) -> None:
            if state.global_step == 4:
                self.context.__exit__(None, None, None)

    count = Count()
    trainer = Trainer(
        args=TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            logging_steps=5,
            max_steps=5,
            save_strategy="no",
            seed=0,
        ),
        model_init=tiny_decoder,
        train_dataset=tiny_dataset(32, sequence_length=32),
        callbacks=[GAPMonitorCallback(), count],
        default_callbacks=False,
    )
    trainer.train()
    assert count.syncs.count == 0, count.syncs.report()
