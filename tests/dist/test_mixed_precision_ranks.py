"""Mixed precision on several ranks: one decision, and the numbers of one device."""

from __future__ import annotations

import math

import pytest
import torch

from headway import (
    DDPTrainer,
    DDPTrainingArguments,
    FSDP2Trainer,
    FSDP2TrainingArguments,
    PipelineTrainer,
    PipelineTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from headway.dist import init_distributed
from headway.testing import run_ranks, tiny_dataset, tiny_decoder

pytestmark = pytest.mark.timeout(180)

KINDS = {
    "single": (Trainer, TrainingArguments),
    "ddp": (DDPTrainer, DDPTrainingArguments),
    "fsdp2": (FSDP2Trainer, FSDP2TrainingArguments),
    "pipeline": (PipelineTrainer, PipelineTrainingArguments),
}


class Watch(TrainerCallback):
    def __init__(self, blow_up_on):
        self.blow_up_on = blow_up_on
        self.losses, self.norms, self.rates, self.scales = [], [], [], []

    def on_forward_backward_begin(self, state, trainer):
        # Only one rank's share of the gradient overflows, in the fourth step.
        self.factor = 1e37 if state.global_step == 3 else 1.0

    def on_step_end(self, trainer):
        self.rates.append(trainer.optimizer.param_groups[0]["lr"])
        scale = trainer.strategy.loss_scale
        self.scales.append(None if scale is None else scale.value)

    def on_metrics(self, metrics):
        if "optim/total grad norm" in metrics:
            self.losses.append(metrics["train/CE loss"])
            self.norms.append(metrics["optim/total grad norm"])


def blown_up(watch, rank):
    """A loss that blows up on one rank; on a single device that is the same for all."""

    def loss(outputs, labels, num_items_in_batch):
        from headway.models.loss import cross_entropy_sum

        factor = watch.factor if rank == watch.blow_up_on else 1.0
        return cross_entropy_sum(outputs.logits, labels) / num_items_in_batch * factor

    return loss


def train(kind, folder, precision, blow_up_on=None):
    trainer_class, arguments_class = KINDS[kind]
    num_ranks = 1 if kind == "single" else 2
    context = init_distributed() if num_ranks > 1 else None
    rank = 0 if context is None else context.rank
    shares = num_ranks if kind in ("ddp", "fsdp2") else 1
    watch = Watch(blow_up_on)
    trainer = trainer_class(
        args=arguments_class(
            output_dir=f"{folder}/{kind}-{precision}",
            max_steps=8,
            per_device_train_batch_size=8 // shares,
            per_device_eval_batch_size=8 // shares,
            learning_rate=1e-2,
            max_grad_norm=1.0,
            save_strategy="no",
            logging_steps=2,
            seed=1,
            use_cpu=True,
            mixed_precision=precision,
            **({"n_microbatches": 2} if kind == "pipeline" else {}),
        ),
        model_init=tiny_decoder,
        train_dataset=tiny_dataset(),
        eval_dataset=tiny_dataset(),
        callbacks=[watch],
        compute_loss_func=blown_up(watch, rank) if blow_up_on is not None else None,
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    prompt = torch.tensor([[1, 2, 3]])
    tokens = trainer.strategy.generate(prompt, max_new_tokens=2, do_sample=False)
    return watch.losses, watch.norms, watch.rates, watch.scales, loss, tuple(tokens.shape)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "pipeline"])
def test_bf16_on_ranks_is_bf16_on_one_device(tmp_path, kind):
    plain = train("single", tmp_path, None)
    alone = train("single", tmp_path, "bf16")
    for losses, norms, rates, _, loss, shape in run_ranks(train, 2, kind, tmp_path, "bf16"):
        assert losses == pytest.approx(alone[0], rel=2e-3)
        assert norms == pytest.approx(alone[1], rel=2e-2)
        assert rates == alone[2] and shape == (1, 5)
        assert loss == pytest.approx(alone[4], rel=2e-3)
    assert alone[0] != plain[0], "bf16 must differ from float32 to say anything"


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_an_overflow_on_one_rank_withholds_the_step_of_all(tmp_path, kind):
    first, second = run_ranks(train, 2, kind, tmp_path, "fp16", 1)
    assert str(first[1:4]) == str(second[1:4])  # a NaN equals none
    _, norms, rates, scales, _, _ = first
    assert [math.isfinite(norm) for norm in norms] == [True] * 3 + [False] + [True] * 4
    assert scales == [2.0**16] * 3 + [2.0**15] * 5
    assert rates[2] == rates[3] > rates[4], "the schedule stands still when a step is withheld"
