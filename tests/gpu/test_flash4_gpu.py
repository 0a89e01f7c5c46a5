"""FlashAttention 4 computes what SDPA does (`pip install 'headway[flash4]'`)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from headway import Trainer, TrainingArguments
from headway.models import Decoder, DecoderConfig
from headway.models.kernels import flash4
from headway.models.kernels.heads import project_heads
from headway.models.rope import RotaryTable
from headway.testing import tiny_dataset

pytestmark = pytest.mark.gpu

CONFIG = DecoderConfig(
    vocab_size=512, hidden_size=256, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=128
)


@pytest.fixture(autouse=True)
def package():
    pytest.importorskip("flash_attn.cute.interface")
    if torch.cuda.get_device_capability()[0] not in flash4.CAPABILITIES:
        pytest.skip("FlashAttention 4 has no kernels for this GPU")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("length", "heads", "kv_heads", "width"), [
    (1024, 12, 12, 64), (4096, 8, 2, 64), (1000, 4, 1, 128), (77, 4, 4, 32), (1, 2, 2, 64),
])  # fmt: skip
def test_the_operation_equals_sdpa(dtype, length, heads, kv_heads, width):
    torch.manual_seed(0)
    shapes = [(2, length, number, width) for number in (heads, kv_heads, kv_heads)]
    parts = [torch.randn(s, device="cuda", dtype=dtype, requires_grad=True) for s in shapes]
    wide = [part.detach().float().requires_grad_() for part in parts]
    found = flash4.attend_flash4(*parts)
    turned = [part.transpose(1, 2) for part in wide]
    wanted = F.scaled_dot_product_attention(*turned, is_causal=True, enable_gqa=True)
    grad = torch.randn_like(found)
    pairs = [(found, wanted.transpose(1, 2))]
    pairs += zip(
        torch.autograd.grad(found, parts, grad),
        torch.autograd.grad(wanted, wide, grad.float().transpose(1, 2)),
    )
    for one, other in pairs:
        assert one.shape == other.shape and one.dtype == dtype
        # Rounded in between: to the largest value, since many are sums of values near it. Of a
        # single position, gradients of queries and keys are nothing but that.
        assert (one.float() - other).abs().max() < 0.02 * other.abs().max() + 1e-5


@pytest.mark.parametrize(("length", "heads", "kv_heads", "width"), [
    (1024, 12, 12, 64), (4096, 8, 2, 64), (77, 4, 4, 32), (1, 2, 2, 64),
])  # fmt: skip
@pytest.mark.parametrize("bias", [False, True])
def test_parts_of_one_projection_are_taken_where_they_lie(length, heads, kv_heads, width, bias):
    torch.manual_seed(0)
    rope = RotaryTable(replace(CONFIG, max_seq_len=length, head_dim=width)).cuda()
    cos, sin = rope(length, 0, None, torch.bfloat16)
    x = torch.randn(2, length, 96, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights = [
        (torch.randn(number * width, 96, device="cuda") / 10).requires_grad_()
        for number in (heads, kv_heads, kv_heads)
    ]
    shift = torch.randn((heads + 2 * kv_heads) * width, device="cuda").bfloat16().requires_grad_()
    given = (x, weights, shift if bias else None, cos, sin, width)
    wrt = [x, *weights, *([shift] if bias else [])]
    found = flash4.project_and_attend_flash4(*given)
    parts = [part.transpose(1, 2) for part in project_heads(*given)]
    wanted = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
    wanted = wanted.transpose(1, 2)
    grad = torch.randn_like(found)
    pairs = [(found, wanted)]
    pairs += zip(torch.autograd.grad(found, wrt, grad), torch.autograd.grad(wanted, wrt, grad))
    for one, other in pairs:
        assert one.shape == other.shape and one.dtype == other.dtype
        assert (one.float() - other.float()).abs().max() < 0.02 * other.abs().max() + 1e-5


def change(folder, config=CONFIG, **options):
    """What a few steps of plain descent add to each weight."""

    def new_model():
        torch.manual_seed(0)
        return Decoder(config)

    trainer = Trainer(
        args=TrainingArguments(
            output_dir=str(folder), max_steps=3, per_device_train_batch_size=8, optim="sgd",
            learning_rate=0.1, lr_scheduler_type="constant", logging_steps=1, save_strategy="no",
            mixed_precision="bf16", seed=0, **options,
        ),
        model_init=new_model,
        train_dataset=tiny_dataset(64, sequence_length=128),
        default_callbacks=False,
    )  # fmt: skip
    first = {name: p.detach().clone() for name, p in new_model().named_parameters()}
    trainer.train()
    last = dict(trainer.model.named_parameters())
    return {name: last[name].detach().cpu() - value for name, value in first.items()}, trainer


@pytest.mark.parametrize("options", [
    {},
    {"torch_compile": True, "torch_compile_dynamic": False},
    {"torch_compile": True, "torch_compile_dynamic": True},
    {"torch_compile": True, "torch_compile_scope": "model"},
    {"torch_compile": True, "torch_compile_mode": "reduce-overhead",
     "torch_compile_dynamic": False},
    {"gradient_checkpointing": True},
    {"gradient_checkpointing": True, "gradient_checkpointing_policy": "selective"},
    {"torch_compile": True, "gradient_checkpointing": True,
     "gradient_checkpointing_policy": "selective"},
    {"enable_activation_offloading": True},
], ids=lambda options: "-".join(map(str, options.values())) or "eager")  # fmt: skip
def test_runs_train_alike(tmp_path, options):
    wanted, _ = change(tmp_path / "sdpa", **options)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found, trainer = change(tmp_path / "flash4", sdpa_backend="flash4", **options)
    names = {event.key for event in profile.key_averages()}
    assert any("flash4" in name for name in names)
    assert not any("scaled_dot_product" in name for name in names)
    for name, step in wanted.items():
        assert (found[name] - step).norm() < 0.03 * step.norm(), name
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] > 0


@pytest.mark.parametrize("compiled", [False, True])
def test_heads_with_norms(tmp_path, compiled):
    config = replace(CONFIG, qk_norm=True)
    wanted, _ = change(tmp_path / "sdpa", config, torch_compile=compiled)
    found, _ = change(tmp_path / "flash4", config, torch_compile=compiled, sdpa_backend="flash4")
    for name, step in wanted.items():
        assert (found[name] - step).norm() < 0.03 * step.norm(), name


def test_layers_in_eight_bits(tmp_path):
    pytest.importorskip("torchao")
    options = {"torch_compile": True, "fp8_recipe": "tensorwise"}
    wanted, _ = change(tmp_path / "sdpa", **options)
    found, _ = change(tmp_path / "flash4", sdpa_backend="flash4", **options)
    for name, step in wanted.items():
        assert (found[name] - step).norm() < 0.1 * step.norm(), name


def test_the_same_bits_where_they_are_asked_for():
    torch.manual_seed(0)
    shapes = [(2, 1024, number, 64) for number in (8, 2, 2)]
    parts = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes]
    grad = torch.randn_like(parts[0])

    def gradients():
        inputs = [part.detach().requires_grad_() for part in parts]
        return torch.autograd.grad(flash4.attend_flash4(*inputs), inputs, grad)

    torch.use_deterministic_algorithms(True)
    try:
        first = gradients()
        for _ in range(5):
            assert all(torch.equal(one, other) for one, other in zip(first, gradients()))
    finally:
        torch.use_deterministic_algorithms(False)


def test_generation_after_such_a_run(tmp_path):
    _, trainer = change(tmp_path, sdpa_backend="flash4")
    ids = torch.arange(8, device="cuda")[None]
    plain = Decoder(CONFIG).cuda()
    plain.load_state_dict(trainer.model.state_dict())
    with torch.autocast("cuda", torch.bfloat16):
        found = trainer.model.eval().generate(ids, max_new_tokens=8, do_sample=False)
        assert torch.equal(found, plain.eval().generate(ids, max_new_tokens=8, do_sample=False))
