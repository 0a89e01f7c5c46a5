"""Nothing that a run holds grows with the steps it has done, but for its log."""

import gc
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headway import Trainer, TrainerCallback, TrainingArguments
from headway.testing import run_ranks

FIRST, LAST, LOG_STEPS = 500, 1500, 100
# A record is a dict of about a dozen numbers.
BLOCKS_PER_RECORD = 40
SLACK_OBJECTS, SLACK_BLOCKS = 30, 400


class Dot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.weight * x - 1).square().mean()}


class Inventory(TrainerCallback):
    """What there is at two steps; records a metric of its own in each step, as monitors do."""

    priority = -1000

    def __init__(self) -> None:
        self.objects: list[Counter[str]] = []
        self.blocks: list[int] = []
        self.lengths: list[dict[str, int]] = []
        self.num_names = 0

    def on_step_end(self, state: Any, trainer: Any) -> None:
        trainer.record_metric("own/number", float(state.global_step))
        if state.global_step not in (FIRST, LAST):
            return
        gc.collect()
        self.blocks.append(sys.getallocatedblocks())
        self.objects.append(Counter(type(one).__name__ for one in gc.get_objects()))
        self.num_names = len(trainer.metrics._reduce_types)
        self.lengths.append(
            {
                "metrics that wait": len(trainer.metrics.pending()),
                "handlers": sum(map(len, trainer.bus._handlers.values())),
                "work beside training": len(trainer.bookkeeping._operations),
            }
        )


@pytest.mark.timeout(200)
def test_objects_and_memory_do_not_grow_with_the_steps(tmp_path: Path) -> None:
    # In a process of its own: once something was compiled in one, torch adds to what is counted.
    run_ranks(check_growth, 1, tmp_path, backend=None, timeout_s=120)


def check_growth(tmp_path: Path) -> None:
    inventory = Inventory()
    Trainer(
        args=TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=2,
            max_steps=LAST,
            logging_steps=LOG_STEPS,
            save_strategy="no",
            use_cpu=True,
            seed=0,
        ),
        model=Dot(),
        # Epochs of 50 steps: what is made anew for each must go away too.
        train_dataset=[{"x": torch.tensor([1.0, 2.0])} for _ in range(100)],
        callbacks=[inventory],
    ).train()
    (before, after), records = inventory.objects, (LAST - FIRST) // LOG_STEPS
    grown = {name: more for name, more in (after - before).items() if more > SLACK_OBJECTS}
    assert not grown
    assert after.total() - before.total() < SLACK_OBJECTS + records
    blocks = inventory.blocks[1] - inventory.blocks[0]
    assert blocks < records * BLOCKS_PER_RECORD + SLACK_BLOCKS
    assert inventory.lengths[0] == inventory.lengths[1]
    assert inventory.num_names <= 2  # our own, and the garbage collector's
    lines = (tmp_path / "trainer_logs.jsonl").read_text().splitlines()
    assert len(lines) == 1 + LAST // LOG_STEPS + 1  # the start, the records, the summary
