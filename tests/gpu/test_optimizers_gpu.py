"""Optimizers on one CUDA device: what differs from the CPU."""

from __future__ import annotations

import gc
import math

import pytest
import torch

from headway import Trainer, TrainerCallback, TrainingArguments
from headway.models import Decoder, DecoderConfig
from headway.optim import stochastic_step
from headway.optim.stochastic_adamw import _update_plainly
from headway.testing import count_host_syncs, tiny_dataset, tiny_decoder

pytestmark = pytest.mark.gpu


def wide_decoder():
    return tiny_decoder(hidden_size=64, intermediate_size=128)


def run(folder, callbacks=(), model_init=wide_decoder, **arguments):
    settings = {
        "output_dir": str(folder),
        "max_steps": 50,
        "per_device_train_batch_size": 4,
        "logging_steps": 10,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "seed": 0,
        **arguments,
    }
    trainer = Trainer(
        args=TrainingArguments(**settings),
        model_init=model_init,
        train_dataset=tiny_dataset(256, sequence_length=32),
        callbacks=list(callbacks),
        default_callbacks=False,
    )
    trainer.train()
    return trainer


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.mark.parametrize("optim", ["adamw", "sgd", "muon", "adamw_bf16"])
def test_the_step_in_the_backward_pass_gives_the_same_bits(tmp_path, optim):
    options = {"optim": optim}
    if optim == "adamw_bf16":
        options["default_dtype"] = "bfloat16"
    plain = run(tmp_path / "plain", **options)
    fused = run(tmp_path / "fused", fuse_optim_with_backward=True, **options)
    assert torch.equal(weights(plain), weights(fused))
    assert torch.isfinite(weights(fused)).all()


@pytest.mark.parametrize("moments", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1,), (1025,), (300, 1000)])
def test_adamw_in_bfloat16_is_one_pass_and_its_update_the_plain_one(shape, moments):
    torch.manual_seed(0)
    weight, grad = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    mean, square = torch.randn(2, *shape, device="cuda").square().to(moments)
    settings = {"lr": 1e-2, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}
    exact = [t.float().clone() for t in (weight, grad, mean, square)]
    _update_plainly(*exact, seed=0, step=3, **settings)
    assert stochastic_step.fits(weight, grad, mean, square)
    with count_host_syncs() as syncs:
        stochastic_step.update_(weight, grad, mean, square, seed=2**32 - 1, step=3, **settings)
    assert syncs.count == 0, syncs.report()
    for found, wanted in zip((weight, mean, square), (exact[0], *exact[2:])):
        rounded = found.dtype == torch.bfloat16
        torch.testing.assert_close(
            found.float(), wanted, rtol=2**-7 if rounded else 1e-5, atol=1e-7
        )
    if weight.numel() > 1000:
        errors = weight.float() - exact[0]
        assert errors.mean().abs() < 0.2 * errors.abs().mean(), "up as much as down"


def test_it_waits_for_nothing_and_withholds_on_the_device(tmp_path):
    class Watch(TrainerCallback):
        """Counts syncs of steps 12 to 19, and gives one weight a gradient that is not finite."""

        def __init__(self):
            self.kept, self.found, self.poisoned = [], None, False

        def on_step_begin(self, state, model):
            norm = model.model.norm.weight
            if state.global_step == 2:
                self.hook = norm.register_hook(lambda grad: torch.full_like(grad, math.nan))
            if state.global_step == 3:
                self.hook.remove()
            self.kept.append((norm.detach().clone(), model.lm_head.weight.detach().clone()))

        def on_step_end(self, state):
            if state.global_step == 11:
                self.context = count_host_syncs()
                self.syncs = self.context.__enter__()
            if state.global_step == 19:
                self.context.__exit__(None, None, None)
                self.found = self.syncs.report(), self.syncs.count

    watch = Watch()
    run(tmp_path, [watch], max_steps=25, fuse_optim_with_backward=True, nonfinite_action="skip")
    report, number = watch.found
    assert number == 0, report
    (norm_2, head_2), (norm_3, head_3), (norm_4, _) = watch.kept[2:5]
    assert torch.equal(norm_2, norm_3) and not torch.equal(head_2, head_3)
    assert not torch.equal(norm_3, norm_4) and torch.isfinite(norm_4).all()


def test_gradients_are_never_all_there(tmp_path):
    config = DecoderConfig(
        vocab_size=258, hidden_size=1024, num_layers=8, num_heads=8, intermediate_size=4096
    )
    peaks = {}
    for fused in (False, True):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        trainer = run(
            tmp_path / str(fused),
            model_init=lambda: Decoder(config),
            max_steps=3,
            fuse_optim_with_backward=fused,
        )
        gradients = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
        peaks[fused] = max(
            record["peak_mem_allocated"][0]
            for record in trainer.state.log_history
            if "peak_mem_allocated" in record
        )
        del trainer
    assert peaks[False] - peaks[True] > 0.7 * gradients


@pytest.mark.parametrize(
    "options",
    [
        {"optim": "muon"},
        {"optim": "adamw_8bit"},
        {"optim": "adamw_4bit"},
        {"optim": "adamw_fp8"},
        {"optim": "adamw_bf16", "default_dtype": "bfloat16"},
        {"optim": "adamw", "fuse_optim_with_backward": True},
    ],
    ids=lambda options: options["optim"],
)
def test_resume_is_exact(tmp_path, options):
    options = {"max_steps": 12, "save_strategy": "steps", **options}
    whole = run(tmp_path / "whole", **options)
    run(tmp_path / "parts", stop_at=7, **options)
    resumed = run(tmp_path / "parts", **options)
    assert resumed.state.global_step == 12
    assert torch.equal(weights(whole), weights(resumed))


def test_muon_with_fp16(tmp_path):
    trainer = run(tmp_path, optim="muon", mixed_precision="fp16")
    losses = [r["loss"] for r in trainer.state.log_history if "loss" in r]
    assert losses[-1] < losses[0] - 1
