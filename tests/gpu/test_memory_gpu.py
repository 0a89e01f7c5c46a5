"""Memory options and compilation on one CUDA device: what a CPU cannot show."""

from __future__ import annotations

import gc

import pytest
import torch
from torch._dynamo.utils import counters

from headway import Trainer, TrainerCallback, TrainingArguments
from headway.data import SyntheticDataset
from headway.engine.cached_memory import CachedMemory
from headway.errors import ConfigError
from headway.models import Decoder, DecoderConfig
from headway.testing import count_host_syncs

pytestmark = pytest.mark.gpu

SHAPE = {"vocab_size": 1024, "hidden_size": 512, "num_layers": 8, "num_heads": 8, "num_kv_heads": 4}
BATCH, LENGTH = 8, 512
RECOMPUTE = {"gradient_checkpointing": True}
EXACT = {"sdpa_backend": "math"}
"""The backward of the fused attention kernels adds up in another order each time."""


def make(folder, max_steps=4, callbacks=(), shape=SHAPE, **arguments):
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "logging_steps": 1,
        "save_strategy": "no",
        "max_grad_norm": 1.0,
        "learning_rate": 1e-3,
        "mixed_precision": "bf16",
        "seed": 0,
        "max_steps": max_steps,
        **arguments,
    }
    return Trainer(
        args=TrainingArguments(**settings),
        model_init=lambda: Decoder(DecoderConfig(**{**shape, "max_seq_len": LENGTH})),
        train_dataset=SyntheticDataset(256, LENGTH, shape["vocab_size"], seed=0),
        eval_dataset=SyntheticDataset(8, LENGTH, shape["vocab_size"], seed=1),
        callbacks=list(callbacks),
        default_callbacks=False,
    )


def run(folder, **arguments):
    """(losses, peak bytes) of a short training."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    trainer = make(folder, **arguments)
    trainer.train()
    peaks = [r["peak_mem_allocated"][0] for r in trainer.state.log_history if "loss" in r]
    return [r["loss"] for r in trainer.state.log_history if "loss" in r], max(peaks)


@pytest.fixture
def plain(tmp_path):
    return run(tmp_path / "plain")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()


def test_recomputing_half_of_compiled_blocks_saves_half(tmp_path):
    compiled = {"torch_compile": True, "torch_compile_dynamic": False}
    _, most = run(tmp_path / "none", **compiled)
    _, least = run(tmp_path / "all", **compiled, **RECOMPUTE)
    half = {**RECOMPUTE, "gradient_checkpointing_policy": "every_2"}
    _, between = run(tmp_path / "half", **compiled, **half)
    assert least < 0.7 * most
    assert between - least < 0.65 * (most - least)


OPTIONS = {
    "every_2": {**RECOMPUTE, "gradient_checkpointing_policy": "every_2"},
    "selective": {**RECOMPUTE, "gradient_checkpointing_policy": "selective"},
    "block": RECOMPUTE,
    "offload": {"enable_activation_offloading": True},
    "offload and block": {**RECOMPUTE, "enable_activation_offloading": True},
    "offload and accumulation": {"enable_activation_offloading": True,
                                 "gradient_accumulation_steps": 2,
                                 "per_device_train_batch_size": BATCH // 2},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_less_memory_and_the_same_losses(tmp_path, plain, name):
    losses, peak = run(tmp_path / "other", **OPTIONS[name])
    expected, most = plain
    assert losses == pytest.approx(expected, rel=2e-3)
    assert peak < 0.95 * most


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_same_bits(tmp_path, dropout):
    shape = {**SHAPE, "dropout": dropout}
    expected, _ = run(tmp_path / "plain", shape=shape, **EXACT)
    again, _ = run(tmp_path / "again", shape=shape, **EXACT)
    assert again == expected, "this is to be had on this device"
    for name, options in OPTIONS.items():
        if "accumulation" not in name:
            losses, _ = run(tmp_path / name, shape=shape, **EXACT, **options)
            assert losses == expected, name


def test_offloading_waits_for_nothing_on_the_host(tmp_path):
    class Count(TrainerCallback):
        def on_step_end(self, state):
            if state.global_step == 3:
                self.context = count_host_syncs()
                self.syncs = self.context.__enter__()
            if state.global_step == 6:
                self.context.__exit__(None, None, None)

    count = Count()
    make(tmp_path, 8, [count], logging_steps=100, enable_activation_offloading=True).train()
    assert count.syncs.count == 0, count.syncs.report()


def test_copies_run_beside_the_computation(tmp_path):
    class Profile(TrainerCallback):
        def on_step_end(self, state):
            if state.global_step == 4:
                self.profile = torch.profiler.profile(
                    activities=[torch.profiler.ProfilerActivity.CUDA]
                )
                self.profile.__enter__()
            if state.global_step == 6:
                torch.cuda.synchronize()
                self.profile.__exit__(None, None, None)

    watch = Profile()
    # Large enough that neither the kernels nor the copies wait for the host to start them.
    large = {**SHAPE, "hidden_size": 2048, "num_heads": 16, "num_layers": 4}
    offload = {"enable_activation_offloading": True, "per_device_train_batch_size": 32}
    make(tmp_path, 8, [watch], large, logging_steps=100, **offload).train()
    kernels, copies = [], []
    for event in watch.profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            span = event.time_range.start, event.time_range.end
            is_copy = "Memcpy DtoH" in event.name or "Memcpy HtoD" in event.name
            (copies if is_copy else kernels).append(span)
    assert len(copies) > 50
    beside = length(kernels) + length(copies) - length(kernels + copies)
    # Which of the two is the shorter depends on the bus; most of it must hide behind the other.
    assert beside > 0.5 * min(length(kernels), length(copies))


def length(spans):
    """The time that is covered by at least one of the spans."""
    covered, reached = 0.0, 0.0
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def test_compiled_blocks_train_the_same(tmp_path, plain):
    losses, _ = run(tmp_path / "compiled", torch_compile=True)
    assert losses == pytest.approx(plain[0], rel=5e-3)
    assert counters["stats"]["unique_graphs"] == 2  # of all blocks, and of the norm behind them


@pytest.mark.parametrize(
    "options",
    [
        {"enable_activation_offloading": True},
        {**RECOMPUTE, "gradient_checkpointing_policy": "selective"},
        {**RECOMPUTE},
        {"activation_memory_budget": 0.3},
        {"torch_compile_mode": "reduce-overhead", "torch_compile_dynamic": False},
        {"torch_compile_scope": "model"},
    ],
)
def test_compilation_goes_with_the_other_options(tmp_path, plain, options):
    losses, _ = run(tmp_path / "compiled", torch_compile=True, **options)
    assert losses == pytest.approx(plain[0], rel=5e-3)


def test_a_budget_saves_memory(tmp_path):
    _, free = run(tmp_path / "free", torch_compile=True)
    _, tight = run(tmp_path / "tight", torch_compile=True, activation_memory_budget=0.1)
    assert tight < 0.9 * free


@pytest.mark.parametrize("backend", ["math", "efficient", "flash", "cudnn", ["cudnn", "flash"]])
def test_attention_backends(tmp_path, plain, backend):
    trainer = make(tmp_path / "other", 2, sdpa_backend=backend)
    try:
        trainer.train()
    except ConfigError as error:  # a device may lack one of them: then it is told at the start
        assert "cannot run on" in str(error) and trainer.state.global_step == 0
        assert backend in ("flash", "cudnn")
        return
    losses = [r["loss"] for r in trainer.state.log_history if "loss" in r]
    assert losses == pytest.approx(plain[0][:2], rel=5e-3)
    ids = torch.arange(8, device="cuda").view(1, 8)
    assert trainer.strategy.generate(ids, max_new_tokens=4).shape == (1, 12)


def test_flash_in_float32_is_refused_at_the_start(tmp_path):
    trainer = make(tmp_path, sdpa_backend="flash", mixed_precision="no")
    with pytest.raises(ConfigError, match=r"cannot run on cuda.* in float32"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_model_built_on_the_device(tmp_path):
    trainer = make(tmp_path, 2, construct_model_on="device")
    seen = []
    make_model = trainer.model_init

    def model_init():
        model = make_model()
        seen.append(next(model.parameters()).device.type)
        return model

    trainer.model_init = model_init
    trainer.train()
    assert seen == ["cuda"]


def test_a_checkpoint_fills_a_model_without_values(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2, "save_async": False, **EXACT}
    whole = make(tmp_path / "whole", 4, **saving)
    whole.train()
    make(tmp_path / "part", 4, stop_at=2, **saving).train()
    resumed = make(tmp_path / "part", 4, construct_model_on="meta", **saving)
    resumed.train()
    for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters()):
        assert torch.equal(mine, theirs)


def test_idle_memory_is_given_back():
    memory = CachedMemory(torch.device("cuda"), threshold=0.0)
    total = torch.cuda.get_device_properties(0).total_memory
    kept = torch.empty(1024, device="cuda")
    idle = torch.empty(int(0.15 * total), dtype=torch.uint8, device="cuda")
    del idle
    before = torch.cuda.memory_reserved()
    assert memory.relieve()
    assert torch.cuda.memory_reserved() < before - 0.1 * total
    assert kept.numel() == 1024 and not memory.relieve()


def test_settings_hold_on_the_device(tmp_path):
    seen = []

    class Look(TrainerCallback):
        def on_step_end(self):
            seen.append(torch.backends.cuda.matmul.allow_tf32)

    make(tmp_path, 1, [Look()], float32_matmul_precision="high").train()
    assert seen == [True] and torch.get_float32_matmul_precision() == "highest"
