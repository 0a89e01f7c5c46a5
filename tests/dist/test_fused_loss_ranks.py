"""A loss made by the head, under every strategy."""

from __future__ import annotations

import logging
from functools import partial

import pytest

from headway import (
    DDPTrainer,
    DDPTrainingArguments,
    FSDP2Trainer,
    FSDP2TrainingArguments,
    PipelineTrainer,
    PipelineTrainingArguments,
    Trainer,
    TrainingArguments,
)
from headway.dist import init_distributed
from headway.models.fused_loss import chunked_loss
from headway.testing import run_ranks, tiny_dataset, tiny_decoder, tiny_llama

pytestmark = pytest.mark.timeout(180)

_PIPELINE = (PipelineTrainer, PipelineTrainingArguments)
_DDP = (DDPTrainer, DDPTrainingArguments)
JOBS = {
    "ddp": (*_DDP, {}),
    "ddp that looks for unused parameters": (*_DDP, {"ddp": {"find_unused_parameters": True}}),
    "fsdp2": (FSDP2Trainer, FSDP2TrainingArguments, {}),
    "pipeline": (*_PIPELINE, {"n_microbatches": 2}),
    "zero bubble": (
        *_PIPELINE,
        {"n_microbatches": 4, "pipe_schedule": "InterleavedZeroBubble"},
    ),
}
SLOW = pytest.mark.slow
MODELS = {
    "decoder": partial(tiny_decoder, num_layers=4),
    "llama": partial(tiny_llama, num_hidden_layers=4),
}


def run(trainer_class, arguments_class, options, folder, model, size, factory=None):
    trainer = trainer_class(
        args=arguments_class(
            output_dir=folder,
            max_steps=3,
            per_device_train_batch_size=size,
            per_device_eval_batch_size=size,
            learning_rate=1e-2,
            save_strategy="no",
            logging_steps=1,
            seed=1,
            use_cpu=True,
            **options,
        ),
        model_init=MODELS[model],
        train_dataset=tiny_dataset(),
        fused_loss_factory=factory,
    )
    trainer.train()
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def run_on_ranks(name, folder, model):
    context = init_distributed()
    calls, warnings = [], []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("headway.models.fused_loss").addHandler(handler)

    def factory(head):
        loss = chunked_loss(head)

        def counted(hidden, labels, num_items_in_batch):
            calls.append(hidden.shape)
            return loss(hidden, labels, num_items_in_batch)

        return counted

    trainer_class, arguments_class, options = JOBS[name]
    size = 8 // context.world_size if trainer_class is not PipelineTrainer else 8
    losses = run(trainer_class, arguments_class, options, folder, model, size, factory)
    return losses, len(calls), warnings


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=SLOW if n == "zero bubble" else ()) for n in JOBS]
)
def test_a_fused_loss_on_ranks_is_the_loss_of_one_device(tmp_path, name, model):
    alone = run(Trainer, TrainingArguments, {}, str(tmp_path / "alone"), model, 8)
    results = run_ranks(run_on_ranks, 2, name, str(tmp_path / "ranks"), model)
    for losses, _, _ in results:
        assert losses == pytest.approx(alone, rel=1e-5)
    calls = [count for _, count, _ in results]
    warnings = [text for _, _, texts in results for text in texts]
    if name == "zero bubble":
        assert calls == [0, 0]
        assert "zero-bubble" in warnings[0]
    else:
        assert sum(calls) > 0 and not warnings
