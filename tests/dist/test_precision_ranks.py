"""FP8 and quantization-aware training under every strategy: the same losses as on one device."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchao")

from headway import (
    AccelTrainer,
    AccelTrainingArguments,
    DDPTrainer,
    DDPTrainingArguments,
    FSDP2Trainer,
    FSDP2TrainingArguments,
    PipelineTrainer,
    PipelineTrainingArguments,
    Trainer,
    TrainingArguments,
)
from headway.checkpoint import load_checkpoint
from headway.checkpoint.tensors import read_shards
from headway.cli.main import main
from headway.dist import init_distributed
from headway.errors import ConfigError
from headway.precision import fp8, quantized
from headway.testing import run_ranks, tiny_dataset, tiny_decoder

pytestmark = pytest.mark.timeout(240)

INT8 = "int8-dynamic-act-int4-weight"
CLASSES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "single": (Trainer, TrainingArguments, {}),
    "ddp": (DDPTrainer, DDPTrainingArguments, {}),
    "fsdp2": (FSDP2Trainer, FSDP2TrainingArguments, {}),
    "pipeline": (PipelineTrainer, PipelineTrainingArguments, {"n_microbatches": 2}),
    "accelerate": (AccelTrainer, AccelTrainingArguments, {}),
}
PRECISIONS = {
    "qat": ({"qat_recipe": INT8}, "FakeQuantizedLinear"),
    "fp8": ({"fp8_recipe": "rowwise_with_gw_hp"}, "Float8Linear"),
}
PLAIN: tuple[dict[str, Any], str] = ({}, "Linear")
# The forward is the same; a difference of one bit in a gradient may then move a weight to its
# neighbour on the grid.
AT_FIRST, LATER = 2e-6, 2e-3


@dataclass
class Outcome:
    losses: list[float]
    num_layers: int
    eval_loss: float
    names: list[str] = field(default_factory=list)


def run(strategy: str, precision: str, folder: str) -> Outcome:
    trainer_class, arguments_class, options = CLASSES[strategy]
    arguments, layer = PRECISIONS.get(precision, PLAIN)
    given: dict[str, Any] = {}
    if strategy == "accelerate":
        from accelerate import Accelerator

        given["accelerator"] = Accelerator(cpu=True)
    size = 4 if strategy in ("ddp", "fsdp2", "accelerate") else 8
    with fp8.on_any_device():
        trainer = trainer_class(
            args=arguments_class(
                output_dir=f"{folder}/{strategy}-{precision}",
                max_steps=4,
                per_device_train_batch_size=size,
                per_device_eval_batch_size=size,
                learning_rate=1e-2,
                adam_epsilon=1e-5,
                save_strategy="steps",
                save_steps=4,
                logging_steps=1,
                seed=1,
                use_cpu=True,
                **options,
                **arguments,
            ),
            model_init=tiny_decoder,
            train_dataset=tiny_dataset(sequence_length=16),
            eval_dataset=tiny_dataset(8, sequence_length=16, seed=1),
            default_callbacks=False,
            **given,
        )
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    assert trainer.strategy is not None
    parts = trainer.strategy.unwrap()
    classes = [m for m in parts.modules() if layer in {c.__name__ for c in type(m).__mro__}]
    return Outcome(losses, len(classes), loss)


def run_on_ranks(strategy: str, folder: str) -> dict[str, Outcome]:
    init_distributed(use_cpu=True)
    names = ["qat"] if strategy == "accelerate" else list(PRECISIONS)
    return {name: run(strategy, name, folder) for name in names}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, Outcome]:
    folder = str(tmp_path_factory.mktemp("alone"))
    return {name: run("single", name, folder) for name in (*PRECISIONS, "plain")}


@pytest.mark.parametrize("strategy", [name for name in CLASSES if name != "single"])
def test_ranks_train_as_one_device(strategy, alone, tmp_path):
    if strategy == "accelerate":
        pytest.importorskip("accelerate")
    by_rank = run_ranks(run_on_ranks, 2, strategy, str(tmp_path), timeout_s=200)
    for name in by_rank[0]:
        wanted = alone[name]
        assert wanted.losses[0] != pytest.approx(alone["plain"].losses[0], rel=AT_FIRST)
        for found in by_rank:
            assert found[name].losses[0] == pytest.approx(wanted.losses[0], rel=AT_FIRST)
            assert found[name].losses == pytest.approx(wanted.losses, rel=LATER)
            assert found[name].eval_loss == pytest.approx(wanted.eval_loss, rel=LATER)
        layers = [found[name].num_layers for found in by_rank]
        # The tiny model has two blocks of seven layers each.
        assert layers == ([7, 7] if strategy == "pipeline" else [14, 14])
        _check_saved(tmp_path / f"{strategy}-{name}", name)


def _check_saved(run_folder: Path, precision: str) -> None:
    """What ranks saved is what a plain model stores, and goes on on one device."""
    saved = read_shards(run_folder / "checkpoint-4", "model")
    plain = tiny_decoder().state_dict()
    assert {n: (t.dtype, t.shape) for n, t in saved.items()} == {
        n: (t.dtype, t.shape) for n, t in plain.items()
    }
    trainer = Trainer(
        args=TrainingArguments(
            output_dir=str(run_folder),
            max_steps=5,
            per_device_train_batch_size=8,
            save_strategy="no",
            use_cpu=True,
        ),
        model_init=tiny_decoder,
        train_dataset=tiny_dataset(sequence_length=16),
        default_callbacks=False,
    )
    assert trainer.train().global_step == 5
    if precision == "qat":
        target = run_folder / "low-bit"
        assert main(["finalize", str(run_folder), str(target), "--quantize", INT8]) == 0
        model = tiny_decoder()
        load_checkpoint(target, model)
        assert len(quantized.quantized_names(model)) == 14


def test_fp8_is_refused_with_an_accelerator_by_name():
    with pytest.raises(ConfigError, match="AORecipeKwargs"):
        AccelTrainingArguments(fp8_recipe="rowwise")


def train_through_accelerate(folder: str) -> tuple[int, list[float]]:
    from accelerate import Accelerator
    from accelerate.utils import AORecipeKwargs

    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])
    trainer = AccelTrainer(
        args=AccelTrainingArguments(
            output_dir=folder,
            max_steps=3,
            per_device_train_batch_size=8,
            save_strategy="no",
            logging_steps=1,
            seed=1,
            use_cpu=True,
        ),
        model_init=tiny_decoder,
        train_dataset=tiny_dataset(sequence_length=16),
        default_callbacks=False,
        accelerator=accelerator,
    )
    trainer.train()
    assert trainer.strategy is not None
    layers = [m for m in trainer.strategy.unwrap().modules() if type(m).__name__ == "Float8Linear"]
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    return len(layers), losses


def test_accelerates_own_fp8_trains(tmp_path):
    pytest.importorskip("accelerate")
    ((num_layers, losses),) = run_ranks(train_through_accelerate, 1, str(tmp_path), timeout_s=120)
    assert num_layers > 0 and torch.tensor(losses).isfinite().all()
