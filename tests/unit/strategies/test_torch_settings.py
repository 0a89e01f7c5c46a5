"""torch's process-wide settings: as asked inside, as before afterwards, whatever happened."""

from __future__ import annotations

import logging

import pytest
import torch
import torch._dynamo
import torch._functorch.config
from torch import nn

from headway import TrainingArguments
from headway.errors import ConfigError
from headway.strategies.torch_settings import check_attention, torch_settings
from headway.testing import tiny_decoder, tiny_trainer


def read():
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "detect_anomaly": torch.is_anomaly_enabled(),
        "dynamo_recompile_limit": torch._dynamo.config.recompile_limit,
        "activation_memory_budget": torch._functorch.config.activation_memory_budget,
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
    }


OPTIONS = {
    "float32_matmul_precision": "medium",
    "detect_anomaly": True,
    "dynamo_recompile_limit": 3,
    "activation_memory_budget": 0.25,
    "sdpa_backend": ["math"],
}
# For its budget; nothing of the tests here compiles.
ARGUMENTS = {**OPTIONS, "torch_compile": True, "torch_compile_backend": "eager"}


def test_settings_hold_inside_and_not_after(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), **ARGUMENTS)
    before = read()
    with torch_settings(args):
        inside = read()
    assert inside | OPTIONS | {"sdpa_backend": None} == inside | {"sdpa_backend": None}
    assert inside["math"] and not (inside["flash"] or inside["efficient"] or inside["cudnn"])
    assert read() == before
    with pytest.raises(RuntimeError, match="on purpose"), torch_settings(args):
        raise RuntimeError("on purpose")
    assert read() == before


def test_nothing_is_touched_where_nothing_is_asked_for(tmp_path):
    torch.set_float32_matmul_precision("high")
    try:
        with torch_settings(TrainingArguments(output_dir=str(tmp_path))):
            assert read()["float32_matmul_precision"] == "high"
        args = TrainingArguments(output_dir=str(tmp_path), float32_matmul_precision="medium")
        with torch_settings(args):
            assert read()["float32_matmul_precision"] == "medium"
        assert read()["float32_matmul_precision"] == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_run_is_inside_and_leaves_nothing_behind(tmp_path):
    from headway import TrainerCallback

    seen = {}

    class Look(TrainerCallback):
        def __init__(self, fails=False):
            self.fails = fails

        def on_step_end(self):
            seen["train"] = read()
            if self.fails:
                raise RuntimeError("on purpose")

        def on_prediction_step(self):
            seen["evaluate"] = read()

    options = {"float32_matmul_precision": "high", "detect_anomaly": True, "sdpa_backend": "math"}
    before = read()
    trainer = tiny_trainer(tmp_path / "a", [Look()], max_steps=1, **options)
    trainer.train()
    assert read() == before
    trainer.evaluate()
    assert read() == before
    for where in ("train", "evaluate"):
        assert seen[where]["float32_matmul_precision"] == "high"
        assert seen[where]["detect_anomaly"] and not seen[where]["flash"]
    with pytest.raises(RuntimeError, match="on purpose"):
        tiny_trainer(tmp_path / "b", [Look(fails=True)], max_steps=1, **options).train()
    assert read() == before


def test_anomaly_detection_names_the_culprit(tmp_path):
    class Bad(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(258))

        def forward(self, input_ids, labels):
            # The gradient of a root at 0 is infinite; times 0 it is no number.
            return {"loss": (self.weight[input_ids] * 0).sqrt().sum()}

    trainer = tiny_trainer(tmp_path, max_steps=1, detect_anomaly=True)
    trainer.model_init = Bad
    with pytest.raises(RuntimeError, match="returned nan values"):
        trainer.train()
    assert not torch.is_anomaly_enabled()


@pytest.mark.parametrize("backend", ["efficient", "cudnn", ["cudnn", "efficient"]])
def test_a_backend_that_cannot_run_here_is_refused_at_the_start(tmp_path, backend):
    trainer = tiny_trainer(tmp_path, max_steps=1, sdpa_backend=backend)
    with pytest.raises(ConfigError, match=r"cannot run on cpu in float32.*what can: flash, math"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("options", [
    {"sdpa_backend": "math"},
    {"sdpa_backend": ["cudnn", "flash"]},
    {"sdpa_backend": ["math", "flash"], "sdpa_set_priority": True},
])  # fmt: skip
def test_backends_that_can(tmp_path, options):
    trainer = tiny_trainer(tmp_path, max_steps=1, **options)
    trainer.train()
    assert trainer.state.global_step == 1


def test_backends_reach_the_decoders_attention(tmp_path):
    model = tiny_decoder().eval()
    ids = torch.arange(8).view(1, 8)
    args = TrainingArguments(output_dir=str(tmp_path), sdpa_backend="math")
    with torch_settings(args), torch.profiler.profile() as profile:
        model(ids)
    names = {event.key for event in profile.key_averages()}
    assert any("attention_math" in name for name in names)
    assert not any("flash_attention" in name for name in names)


def test_a_kernel_missed_in_the_middle_is_told_by_the_options_name(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), sdpa_backend="efficient")
    told = pytest.raises(ConfigError, match="sdpa_backend='efficient': none of these kernels")
    with told, torch_settings(args):
        tiny_decoder()(torch.arange(8).view(1, 8))
    with pytest.raises(RuntimeError, match="another error"), torch_settings(args):
        raise RuntimeError("another error")


def test_nothing_is_tried_without_the_option(tmp_path):
    def refuse():
        raise AssertionError

    args = TrainingArguments(output_dir=str(tmp_path))
    check_attention(args, tiny_decoder(), torch.device("cpu"), refuse)


def test_the_slow_measurement_of_budgets_is_told(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PARTITIONER_MEMORY_BUDGET_PARETO", "1")
    with caplog.at_level(logging.WARNING):
        with torch_settings(TrainingArguments(output_dir=str(tmp_path))):
            pass
        assert not caplog.text
        with torch_settings(TrainingArguments(output_dir=str(tmp_path), torch_compile=True)):
            pass
    assert "PARTITIONER_MEMORY_BUDGET_PARETO is set" in caplog.text
