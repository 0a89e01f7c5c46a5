"""HFConverterCallback: the folders it makes, what it refuses, what a failure leads to."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import TrainerCallback
from headway.callbacks import CheckpointerCallback, HFConverterCallback
from headway.callbacks.save.hf_converter_check import ConversionError, main, validate_folder
from headway.callbacks.save.hf_converter_folder import FolderPlan, is_made, make_folder
from headway.checkpoint import CheckpointError, read_manifest
from headway.data.tokenizer import ByteTokenizer
from headway.errors import ConfigError
from headway.testing import tiny_dataset, tiny_decoder, tiny_trainer

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: Any) -> Path:
    """A checkpoint with a tokenizer."""
    folder = tmp_path_factory.mktemp("source")
    trainer = tiny_trainer(folder, **SAVING)
    trainer.processing_class = ByteTokenizer()
    trainer.train()
    return folder / "out/checkpoint-2"


def logits_of(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(input_ids=ids).logits


def test_the_folder_of_the_last_checkpoint_gives_the_logits_of_the_model(tmp_path: Path) -> None:
    target = tmp_path / "model"
    callback = HFConverterCallback(output_folder=str(target), dtype="float32", validate=True)
    trainer = tiny_trainer(tmp_path, [callback], **SAVING)
    trainer.train()
    ids = tiny_dataset(2, sequence_length=8)[0]["input_ids"]
    ids = torch.as_tensor(ids).reshape(1, -1)
    trainer.model.eval()
    with torch.no_grad():
        own = trainer.model(input_ids=ids).logits
    assert torch.allclose(logits_of(target, ids), own, atol=1e-5, rtol=0)
    manifest = read_manifest(target)
    assert (manifest.kind, manifest.step) == ("export", 2)
    assert not (target / "trainer_state.json").exists()
    again = HFConverterCallback(output_folder=str(target), dtype="float32")
    tiny_trainer(tmp_path, [again], **{**SAVING, "max_steps": 4}).train(True)
    assert read_manifest(target).step == 4, "the folder of an earlier checkpoint stayed"


def test_dtype_tokenizer_and_length(checkpoint: Path, tmp_path: Path) -> None:
    folder = make_folder(checkpoint, tmp_path / "hf", FolderPlan("bfloat16"))
    assert is_made(checkpoint, folder, FolderPlan("bfloat16"))
    assert not is_made(checkpoint, folder, FolderPlan("float32"))
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert (folder / "tokenizer.json").is_file()
    from safetensors.torch import load_file

    found, stored = (
        load_file(place / "model-00001-of-00001.safetensors") for place in (folder, checkpoint)
    )
    assert set(found) == set(stored)
    for name, tensor in stored.items():
        assert torch.equal(found[name], tensor.to(torch.bfloat16))
    plan = FolderPlan(None, tokenizer_id=str(folder), max_sequence_length=16)
    folder = make_folder(checkpoint, tmp_path / "other", plan)
    config = json.loads((folder / "config.json").read_text())
    assert (config["dtype"], config["max_position_embeddings"]) == ("float32", 16)
    assert json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"] == 16


def test_each_permanent_checkpoint_and_what_an_earlier_run_left(tmp_path: Path) -> None:
    def run(num_steps: int, callback: Any) -> None:
        saving = CheckpointerCallback(2, 1, pre_train_checkpoint=False)
        tiny_trainer(tmp_path, [saving, callback], max_steps=num_steps).train(True)

    run(2, CheckpointerCallback(enabled=False))
    folders = tmp_path / "models"
    callback = HFConverterCallback(checkpoints="permanent", output_folder=str(folders))
    run(5, callback)
    assert sorted(path.name for path in folders.iterdir()) == [
        "checkpoint-2",
        "checkpoint-4",
        "checkpoint-5",
    ]


def test_the_best_one(tmp_path: Path) -> None:
    options = {"eval_on_save": True, "preserve_best_model": True, "best_model_metric": "loss"}
    trainer = tiny_trainer(
        tmp_path,
        [HFConverterCallback(checkpoints="best")],
        **{**SAVING, **options, "save_steps": 1, "max_steps": 3, "learning_rate": 0.01},
    )
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert read_manifest(f"{best}-hf").step == trainer.state.best_global_step
    assert [p.name for p in (tmp_path / "out").glob("*-hf")] == [f"{best.name}-hf"]


class Stop(TrainerCallback):
    def on_step_end(self, trainer: Any) -> None:
        trainer.cancel_run("no more")


def test_a_run_that_is_cut_short_makes_none(tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.INFO):
        tiny_trainer(tmp_path, [HFConverterCallback(), Stop()], **SAVING).train()
    assert not list((tmp_path / "out").glob("*-hf"))
    assert "the run is canceled: no folder is made" in caplog.text


# What goes wrong


def test_another_model_is_found_out(checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("transformers")
    folder = make_folder(checkpoint, tmp_path / "hf", FolderPlan("float32"))
    assert validate_folder(checkpoint, folder, "float32", device="cpu") < 1e-4
    from safetensors.torch import load_file, save_file

    weights = folder / "model-00001-of-00001.safetensors"
    changed = load_file(weights)
    changed["model.layers.0.mlp.down_proj.weight"] += 0.5
    save_file(changed, weights, metadata={"format": "pt"})
    with pytest.raises(ConversionError, match=r"their logits differ by .*allowed: 1e-04"):
        validate_folder(checkpoint, folder, "float32", device="cpu")
    assert main([str(checkpoint), str(folder), "--dtype", "float32"]) == 1
    assert "their logits differ by" in capsys.readouterr().err.splitlines()[-1]


def test_values_that_the_dtype_cannot_hold_are_told(checkpoint: Path, tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, **{**SAVING, "max_steps": 1, "save_steps": 1})
    trainer._prepare_model()
    with torch.no_grad():
        trainer.model.model.norm.weight[0] = 1e6
    trainer.train()
    plan = FolderPlan("float16")
    with pytest.raises(CheckpointError, match=r"'model.norm.weight' has values that float16"):
        make_folder(tmp_path / "out/checkpoint-1", tmp_path / "hf", plan)
    assert not list(tmp_path.glob("hf*"))


def test_a_failure_is_raised_at_the_end_and_hurts_no_training(
    tmp_path: Path, monkeypatch: Any
) -> None:
    def fail(*_: Any, **__: Any) -> Path:
        raise OSError("no space left")

    monkeypatch.setattr("headway.callbacks.save.hf_converter.make_folder", fail)
    saving = CheckpointerCallback(1, pre_train_checkpoint=False)
    trainer = tiny_trainer(
        tmp_path, [saving, HFConverterCallback(checkpoints="permanent")], max_steps=2
    )
    with pytest.raises(RuntimeError, match="checkpoint-1: OSError: no space left"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert (tmp_path / "out/checkpoint-2").is_dir()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dtype": "bfloat"}, "dtype: unknown dtype 'bfloat'; did you mean 'bfloat16'"),
        ({"checkpoints": "lst"}, "checkpoints: unknown choice 'lst'; did you mean 'last'"),
        ({"debug": True}, "debug=True needs validate=True"),
        ({"moe_capacity_factor": 1.5}, "moe_capacity_factor=1.5 has nothing to act on"),
        ({"max_sequence_length": 0}, "max_sequence_length"),
        ({"output_folder": ""}, "output_folder is ''"),
        ({"enabled": 1}, "enabled"),
    ],
)
def test_a_wrong_option_is_told(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        HFConverterCallback(**options)
    assert "HFConverterCallback: " in str(raised.value)


@pytest.mark.parametrize(
    ("options", "args", "told"),
    [
        ({}, {"save_strategy": "no"}, "saves no checkpoint to convert"),
        ({"checkpoints": "best"}, {}, "needs preserve_best_model=True"),
        ({"validate": True, "device": "cdua"}, {}, "device='cdua' is not here"),
        ({"tokenizer_id": "/nowhere/at-all"}, {}, "tokenizer_id"),
        ({"output_folder": "{there}"}, {}, "exists and is no folder of an earlier conversion"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_step(
    tmp_path: Path, options: dict[str, Any], args: dict[str, Any], told: str
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    given = {k: str(there) if v == "{there}" else v for k, v in options.items()}
    trainer = tiny_trainer(tmp_path, [HFConverterCallback(**given)], **{**SAVING, **args})
    with pytest.raises(ConfigError, match=told):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_model_without_a_configuration_is_refused(tmp_path: Path) -> None:
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny_decoder()

        def forward(self, **batch: Any) -> Any:
            return self.inner(**batch)

    trainer = tiny_trainer(tmp_path, [HFConverterCallback()], **SAVING)
    trainer.model_init = Plain
    with pytest.raises(ConfigError, match="Plain has no Hugging Face configuration"):
        trainer.train()
