"""What is faster on a GPU computes what the plain form does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headway import Trainer, TrainingArguments
from headway.models import Decoder, DecoderConfig
from headway.models.kernels.cross_entropy import can_use_kernel, cross_entropy_
from headway.models.kernels.linear import cast_again, weight_grad
from headway.models.kernels.scaling import scale_
from headway.testing import tiny_dataset

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("vocabulary", [50, 4096, 20000, 32768, 50257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_the_loss_kernel_equals_cross_entropy(
    vocabulary: int, dtype: torch.dtype, scale: float
) -> None:
    torch.manual_seed(0)
    logits = (scale * torch.randn(70, vocabulary, device="cuda")).to(dtype)
    labels = torch.randint(vocabulary, (70,), device="cuda")
    labels[3:9] = -100
    assert can_use_kernel(logits)
    wide = logits.double().requires_grad_()
    expected = F.cross_entropy(wide, labels, reduction="none")
    (wanted,) = torch.autograd.grad(expected.sum(), wide)
    alone = cross_entropy_(logits, labels, ignored=-100, with_grads=False)
    assert torch.equal(logits.double(), wide)
    losses = cross_entropy_(logits, labels, ignored=-100, with_grads=True)
    assert torch.equal(alone, losses)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    rtol = 1e-4 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(logits.double(), wanted, rtol=rtol, atol=1e-6)


def test_the_loss_kernel_lets_no_damage_pass() -> None:
    logits = torch.randn(4, 5000, device="cuda")
    logits[1, 4321] = float("nan")
    logits[2, 17] = float("inf")
    labels = torch.tensor([1, 2, 3, 4], device="cuda")
    damaged = logits.clone()
    losses = cross_entropy_(damaged, labels, ignored=-100, with_grads=True)
    assert losses.isfinite().tolist() == [True, False, False, True]
    assert damaged.isfinite().all(1).tolist() == [True, False, False, True]
    labels = torch.tensor([1, -1, 5000, 4999], device="cuda")
    rows = logits[:1].expand(4, -1)
    losses = cross_entropy_(rows, labels, ignored=-100, with_grads=False)
    assert losses.isfinite().tolist() == [True, False, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 77, 4096 * 1000 + 8])
def test_values_are_scaled_to_the_bit(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    values = torch.randn(size, device="cuda").to(dtype)
    factor = torch.tensor(0.1234567, device="cuda")
    wanted = (values.float() * factor).to(dtype)
    assert torch.equal(scale_(values, factor), wanted)


@pytest.mark.parametrize("rows", [(768, 128, 128), (2048, 2048), (100,), (3, 5, 7)])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_weights_are_cast_to_the_bit(rows: tuple[int, ...], given: torch.dtype) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(size, 256, device="cuda").to(given) for size in rows]
    wanted = torch.cat(weights).bfloat16()
    assert torch.equal(cast_again(weights, torch.bfloat16), wanted)


def test_gradients_of_weights_are_never_rounded_to_half_precision() -> None:
    """Which has 2,992 and 3,008, and nothing between them."""
    ones = torch.ones(3001, 16, device="cuda", dtype=torch.bfloat16)
    assert (weight_grad(ones, ones, torch.float32) == 3001).all()


@pytest.mark.parametrize("bias", [False, True])
def test_compiled_blocks_equal_eager_ones(bias: bool) -> None:
    """Among the rest: joined projections."""
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=512,
        hidden_size=256,
        num_layers=2,
        num_heads=8,
        num_kv_heads=2,
        max_seq_len=128,
        attention_bias=bias,
    )
    model = Decoder(config).cuda()
    ids = torch.randint(512, (4, 128), device="cuda")

    def grads_of() -> tuple[float, dict[str, torch.Tensor]]:
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(ids, ids).loss
        loss.backward()
        return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()}

    loss, grads = grads_of()
    for layer in model.model.layers:
        layer.compile(dynamic=False)
    compiled_loss, compiled_grads = grads_of()
    assert compiled_loss == pytest.approx(loss, rel=1e-3)
    for name, grad in grads.items():
        difference = (compiled_grads[name] - grad).norm() / grad.norm()
        assert difference < 0.02, (name, difference.item())


def kernels_of(run: Callable[[], object]) -> set[str]:
    """Names of the kernels that ran."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    return {event.name for event in profile.events()}


PACKED = DecoderConfig(
    vocab_size=512, hidden_size=256, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=256
)
Change = dict[str, torch.Tensor]


def packed_samples(*, ragged: bool = False) -> list[dict[str, torch.Tensor]]:
    """Documents of 50 tokens, one after the other; each counts up by a step of its own.

    A token that sees other documents is told another step.
    """
    samples = []
    for number in range(96):
        places = torch.arange(192 + 64 * (number % 2) * ragged)
        documents = places // 50
        positions = places - 50 * documents
        ids = (17 * number + 5 * documents + (1 + 3 * documents) * positions) % 512
        sample = {"input_ids": ids, "document_ids": documents, "position_ids": positions}
        samples.append({**sample, "labels": ids})
    return samples


def train_packed(
    folder: Path,
    *,
    attention: str = "auto",
    ragged: bool = False,
    compiled: bool = True,
    **options: Any,
) -> tuple[Change, Trainer]:
    """What a few steps on packed documents add to each weight.

    By plain descent: AdamW's first steps have one size whatever the gradient's is.
    """

    def new_model() -> Decoder:
        torch.manual_seed(0)
        return Decoder(replace(PACKED, attention=attention))

    trainer = Trainer(
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=3,
            per_device_train_batch_size=8,
            optim="sgd",
            learning_rate=0.1,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_steps=1,
            save_strategy="no",
            mixed_precision="bf16",
            seed=0,
            **({"torch_compile": True, "torch_compile_dynamic": ragged} if compiled else {}),
            **options,
        ),
        model_init=new_model,
        train_dataset=packed_samples(ragged=ragged),
        default_callbacks=False,
    )
    trainer.train()
    before = dict(new_model().named_parameters())
    after = trainer.model.named_parameters()
    return {name: (p.detach().cpu() - before[name]).detach() for name, p in after}, trainer


def farthest(found: Change, wanted: Change) -> tuple[float, str]:
    """The largest distance of a weight's change, as a share of that change, and whose it is."""
    assert found.keys() == wanted.keys()
    assert all(change.norm() > 0 for change in wanted.values())
    return max(
        (((found[name] - change).norm() / change.norm()).item(), name)
        for name, change in wanted.items()
    )


@pytest.mark.parametrize("ragged", [False, True])
def test_a_compiled_run_has_the_kernels_and_masks_by_block(tmp_path: Path, ragged: bool) -> None:
    """Of packed documents, under the trainer, with and without shapes that are known."""
    dense, _ = train_packed(tmp_path / "dense", attention="sdpa", ragged=ragged)
    by_block, trainer = train_packed(tmp_path / "by_block", ragged=ragged)
    assert farthest(by_block, dense) < (0.05, "")
    # The two share the kernels of heads, gates and loss; without compilation there are none.
    eager, _ = train_packed(tmp_path / "eager", ragged=ragged, compiled=False)
    assert farthest(by_block, eager) < (0.05, "")
    batch = {name: value[None].cuda() for name, value in packed_samples()[0].items()}

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            trainer.model(**batch).loss.backward()

    step()
    names = " ".join(kernels_of(step))
    made = ("swiglu_backward_rows", "turn_heads", "join_heads", "cross_entropy_rows")
    for kernel in (*made, "flex_attention"):
        assert kernel in names, kernel


RECOMPUTED = {"gradient_checkpointing": True}
OTHER_OPTIONS: dict[str, dict[str, Any]] = {
    "blocks recomputed": RECOMPUTED,
    "recomputed in part": {**RECOMPUTED, "gradient_checkpointing_policy": "selective"},
    "every second block": {**RECOMPUTED, "gradient_checkpointing_policy": "every_2"},
    "a budget": {"activation_memory_budget": 0.5},
    "compiled as a whole": {"torch_compile_scope": "model"},
    "graphs of the device": {"torch_compile_mode": "reduce-overhead"},
    "updated in the backward pass": {"fuse_optim_with_backward": True},
    "offloaded": {"enable_activation_offloading": True},
}


@pytest.fixture(scope="module")
def plain_change(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None], Change]:
    @functools.cache
    def change_of(recipe: str | None) -> Change:
        return train_packed(tmp_path_factory.mktemp("plain"), fp8_recipe=recipe)[0]

    return change_of


@pytest.mark.parametrize("recipe", [None, "tensorwise"])
@pytest.mark.parametrize("other", OTHER_OPTIONS)
def test_fast_paths_go_with_other_options(
    other: str,
    recipe: str | None,
    tmp_path: Path,
    plain_change: Callable[[str | None], Change],
) -> None:
    """Which change where things are computed and kept, and not what comes out."""
    if recipe is not None:
        pytest.importorskip("torchao")
        if torch.cuda.get_device_capability() < (8, 9):
            pytest.skip("needs compute capability 8.9")
    found, _ = train_packed(tmp_path, **OTHER_OPTIONS[other], fp8_recipe=recipe)
    # Two forms in eight bits are as far from each other as each is from the exact one.
    assert farthest(found, plain_change(recipe)) < (0.05 if recipe is None else 0.25, "")


def test_a_layer_with_a_hook_is_called_by_itself_in_a_compiled_block() -> None:
    config = DecoderConfig(vocab_size=64, hidden_size=64, num_layers=1, num_heads=2, max_seq_len=32)
    model = Decoder(config).cuda()
    attention = model.model.layers[0].self_attn
    attention.k_proj.register_forward_hook(lambda layer, given, made: made * 0)
    expected = model(torch.arange(32, device="cuda")[None]).logits
    model.model.layers[0].compile(dynamic=False)
    assert isinstance(attention.k_proj, nn.Linear)
    found = model(torch.arange(32, device="cuda")[None]).logits
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"torch_compile_scope": "blocks"},
        {"torch_compile_scope": "model", "torch_compile_full_graph": True},
        {"torch_compile_mode": "reduce-overhead", "torch_compile_dynamic": False},
    ],
    ids=["blocks", "model", "graphs of the device"],
)
def test_a_compiled_run_evaluates_as_an_eager_one(options: dict[str, Any], tmp_path: Path) -> None:
    """Without gradients the compiler makes other graphs; of the device, before training too."""
    config = DecoderConfig(
        vocab_size=512, hidden_size=256, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=64
    )

    def eval_losses(folder: str, **options: Any) -> list[float]:
        torch.manual_seed(0)
        data = tiny_dataset(64, sequence_length=64)
        trainer = Trainer(
            args=TrainingArguments(
                output_dir=str(tmp_path / folder), max_steps=4, per_device_train_batch_size=8,
                eval_strategy="steps", eval_steps=2, logging_steps=1, save_strategy="no",
                mixed_precision="bf16", seed=0, **options,
            ),
            model=Decoder(config),
            train_dataset=data,
            eval_dataset=data,
            default_callbacks=False,
        )  # fmt: skip
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        return [before, *(r["eval_loss"] for r in trainer.state.log_history if "eval_loss" in r)]

    plain = eval_losses("plain")
    compiled = eval_losses("compiled", torch_compile=True, **options)
    assert len(plain) >= 3
    assert compiled == pytest.approx(plain, rel=1e-2)
