"""Runs of the decoder over what its compiled blocks do on a GPU alone, against plain runs.

The kernels' operations are given a plain form for the CPU here (tests/unit/kernels has the kernels
themselves); the functions and graphs around them are those of a GPU: training, evaluation, frozen
layers, recomputation.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from headway import Trainer, TrainingArguments
from headway.models import Decoder, DecoderConfig, decoder, projections
from headway.models.attention import plan_attention
from headway.models.kernels.heads import split
from headway.models.rope import apply_rope
from headway.strategies.compilation import CompileOptions, compile_module
from headway.testing import tiny_dataset

CONFIG = DecoderConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=16
)
COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}


def project_heads(
    x: Tensor, weight: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, n: int, k: int
) -> Tensor:
    q, key, v = split(F.linear(x, weight, bias), n, k)
    return torch.cat([apply_rope(q, cos, sin), apply_rope(key, cos, sin), v], dim=2).flatten(2)


def join_heads(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat([apply_rope(q, cos, -sin), apply_rope(k, cos, -sin), v], dim=2).flatten(2)


def swiglu_backward(joined: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf = joined.detach().requires_grad_()
        gate, up = leaf.chunk(2, dim=-1)
        product = F.silu(gate) * up
        (grad_joined,) = torch.autograd.grad(product, leaf, grad)
    return grad_joined.contiguous(), product.detach()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Compiled blocks take their way on a GPU; how often each operation was called."""
    calls: Counter[str] = Counter()
    library = torch.library.Library("headway", "FRAGMENT")
    for plain in (project_heads, join_heads, swiglu_backward):

        def counted(*args: Any, plain: Any = plain) -> Any:
            calls[plain.__name__] += 1
            return plain(*args)

        library.impl(plain.__name__, counted, "CPU")
    monkeypatch.setattr(projections, "_has_kernels", lambda x: True)
    yield calls
    library._destroy()


def run(
    folder: Path, *, frozen: tuple[str, ...] = (), config: DecoderConfig = CONFIG, **options: Any
) -> tuple[dict[str, Tensor], list[float], Trainer]:
    """Weights after a few steps of plain descent, and the losses of evaluations."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Decoder(config)
    for name, weight in model.named_parameters():
        weight.requires_grad_(not any(part in name for part in frozen))
    data = tiny_dataset(20, sequence_length=16, vocab_size=64)
    trainer = Trainer(
        args=TrainingArguments(
            output_dir=str(folder), max_steps=2, per_device_train_batch_size=2, optim="sgd",
            learning_rate=0.5, lr_scheduler_type="constant", logging_steps=1, save_strategy="no",
            eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8, seed=0, use_cpu=True,
            **options,
        ),
        model=model,
        train_dataset=data,
        eval_dataset=data,
        default_callbacks=False,
    )  # fmt: skip
    trainer.train()
    losses = [r["eval_loss"] for r in trainer.state.log_history if "eval_loss" in r]
    return {n: w.detach().clone() for n, w in model.named_parameters()}, losses, trainer


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "as a whole": {"torch_compile_scope": "model"},
    "recomputed": {"gradient_checkpointing": True},
    "recomputed in part": {
        "gradient_checkpointing": True, "gradient_checkpointing_policy": "selective"
    },
    "frozen attention": {"frozen": ("self_attn",)},
    "frozen first block": {"frozen": ("layers.0.", "embed_tokens")},
    "only the head": {"frozen": ("model.",)},
    "one projection frozen": {"frozen": ("k_proj", "up_proj")},
    "biases": {"config": replace(CONFIG, attention_bias=True)},
    "norms of heads": {"config": replace(CONFIG, qk_norm=True)},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_run_on_that_way_is_the_plain_run(
    case: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    options = CASES[case]
    plain = {k: v for k, v in options.items() if not k.startswith(("torch_", "gradient_check"))}
    wanted, wanted_losses, _ = run(tmp_path / "plain", **plain)
    taken = request.getfixturevalue("taken")
    found, losses, trainer = run(tmp_path / "compiled", **{**COMPILED, **options})
    # At the least in each evaluation and, but where no block is trained, in each step back. Norms
    # stand between the product and the turn.
    assert taken["project_heads"] >= 2 * 2 * 3 or case == "norms of heads"
    assert (taken["swiglu_backward"] > 0) == (case != "only the head")
    assert len(losses) == 2
    assert losses == pytest.approx(wanted_losses, rel=1e-4)
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-3, atol=1e-5, msg=name)
    prompt = torch.arange(6)[None]
    assert trainer.model.generate(prompt, max_new_tokens=3, do_sample=False).shape == (1, 9)


def test_weights_of_several_dtypes_are_not_joined(taken: Counter[str]) -> None:
    """Each gradient is a sum in its own weight's dtype."""
    torch.compiler.reset()
    model = Decoder(CONFIG)
    model.model.layers[0].self_attn.q_proj.bfloat16()
    compile_module(model, CompileOptions(backend="aot_eager"))
    ids = torch.arange(16)[None]
    with torch.autocast("cpu", torch.bfloat16):
        model(ids, ids).loss.backward()
    assert taken["project_heads"] == 1  # of the other block


@pytest.mark.parametrize(
    "names",
    [
        ("self_attn.k_proj",),
        ("self_attn.o_proj",),
        ("mlp.up_proj",),
        ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    ],
    ids=["keys", "output", "up", "all of the MLP"],
)
def test_biases_are_not_lost(names: tuple[str, ...], taken: Counter[str]) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Decoder(CONFIG)
    for name in names:
        layer = model.model.layers[0].get_submodule(name)
        layer.bias = nn.Parameter(torch.randn(layer.out_features))
    ids = torch.arange(16)[None]

    def found() -> list[Tensor]:
        model.zero_grad()
        loss = model(ids, ids).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    plain = found()
    compile_module(model, CompileOptions(backend="aot_eager"))
    for mine, theirs in zip(found(), plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    assert taken["swiglu_backward"] >= 1  # of the other block, if not of both


def test_attention_on_a_gpu_is_planned_within_a_graph() -> None:
    """As `torch_compile_full_graph` wants it of a model that is compiled as a whole."""

    def planned(x: Tensor) -> Tensor:
        plan = plan_attention(
            CONFIG, seq_len=x.shape[0], past_len=0, device=torch.device("cuda", 0),
            dtype=torch.bfloat16, document_ids=None, attention_mask=None, cached=False,
        )  # fmt: skip
        assert plan.is_causal and plan.mask is None
        return x * 2 if plan.groups_heads else x

    torch.compiler.reset()
    grouped = torch.compile(planned, backend="eager", fullgraph=True)(torch.ones(16))
    assert bool((grouped == 2).all()) == torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.parametrize("dynamic", [False, True])
def test_sampling_makes_no_graphs(dynamic: bool) -> None:
    torch.compiler.reset()
    model = Decoder(CONFIG)
    options = CompileOptions(backend="aot_eager", dynamic=dynamic, full_graph=True)
    compile_module(model, options, device=torch.device("cuda"))
    ids = torch.arange(16)[None]
    model(ids, ids).loss.backward()
    counters.clear()
    for length in range(1, 12):
        model.generate(ids[:, :length], max_new_tokens=2, do_sample=False)
    assert counters["stats"]["unique_graphs"] == 0
    model(ids[:, :8], ids[:, :8]).loss.backward()
    assert counters["stats"]["unique_graphs"] > 0  # training goes on compiled, the norm as well


def test_blocks_that_draw_nothing_are_recomputed_without_random_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Saving those costs a wait for the device in every block."""
    states = []

    def noted(layer: Any, *given: Any, preserve_rng_state: bool, **options: Any) -> Any:
        states.append(preserve_rng_state)
        return layer(*given)

    monkeypatch.setattr(decoder, "recomputed", noted)
    ids = torch.arange(16)[None]
    for draws in ("nothing", "dropout", "what wraps a block"):
        torch.compiler.reset()
        model = Decoder(replace(CONFIG, dropout=0.5 * (draws == "dropout")))
        model.gradient_checkpointing_enable()
        compile_module(model, CompileOptions(backend="aot_eager"))
        if draws == "what wraps a block":
            layer = model.model.layers[0]
            layer.forward = with_dropout(layer.forward)
        model(ids, ids)
    assert states == [False] * 2 + [True] * 4


def with_dropout(plain: Any) -> Any:
    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return F.dropout(plain(*args, **kwargs), 0.5)

    return forward
