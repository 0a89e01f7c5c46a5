"""FP8 training and float8 weights on a device that has them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch._inductor.config

pytest.importorskip("torchao")

from headway import Trainer, TrainingArguments
from headway.checkpoint import load_checkpoint
from headway.cli.main import main
from headway.errors import ConfigError
from headway.models import Decoder, load_causal_lm
from headway.precision import fp8, quantized
from headway.testing import tiny_dataset, tiny_decoder

pytestmark = pytest.mark.gpu

FLOAT8 = "float8-dynamic-act-float8-weight"
INT8 = "int8-dynamic-act-int4-weight"


def has_fp8() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


needs_fp8 = pytest.mark.skipif(not has_fp8(), reason="needs compute capability 8.9")


def make_model() -> Decoder:
    return tiny_decoder(vocab_size=512, hidden_size=128, intermediate_size=256)


def run(folder: Any, steps: int = 30, length: int = 64, **arguments: Any) -> Trainer:
    trainer = Trainer(
        args=TrainingArguments(
            output_dir=str(folder),
            **{
                "max_steps": steps,
                "per_device_train_batch_size": 8,
                "per_device_eval_batch_size": 8,
                "learning_rate": 3e-3,
                "logging_steps": 1,
                "save_strategy": "no",
                "seed": 0,
                **arguments,
            },
        ),
        model_init=make_model,
        train_dataset=tiny_dataset(256, sequence_length=length, vocab_size=512),
        eval_dataset=tiny_dataset(16, sequence_length=64, vocab_size=512, seed=1),
        default_callbacks=False,
    )
    trainer.train()
    return trainer


def losses(trainer: Trainer) -> list[float]:
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


@needs_fp8
@pytest.mark.parametrize("recipe", fp8.RECIPES)
@pytest.mark.parametrize("precision", ["bf16", None])
def test_every_recipe_trains_as_without(recipe, precision, tmp_path):
    plain = losses(run(tmp_path / "plain", mixed_precision=precision))
    eight = losses(run(tmp_path / "fp8", mixed_precision=precision, fp8_recipe=recipe))
    assert eight[-1] == pytest.approx(plain[-1], rel=0.1) and eight[-1] < eight[0] - 1
    assert eight[0] == pytest.approx(plain[0], rel=1e-2) and eight != plain


@needs_fp8
@pytest.mark.parametrize("recipe", fp8.RECIPES)
def test_compiled_blocks_train_alike(recipe, tmp_path):
    settings = {"mixed_precision": "bf16", "fp8_recipe": recipe}
    eager = losses(run(tmp_path / "eager", steps=10, **settings))
    compiled = losses(run(tmp_path / "compiled", steps=10, torch_compile=True, **settings))
    # A compiler rounds to eight bits elsewhere, and a step that climbs does so by another amount.
    assert compiled == pytest.approx(eager, rel=0.1)
    assert compiled[:2] == pytest.approx(eager[:2], rel=0.01)


@needs_fp8
@pytest.mark.parametrize("recipe", fp8.RECIPES)
@pytest.mark.parametrize("shape", [(256, 768, 512), (2048, 8192, 4096)], ids=["small", "large"])
def test_compiled_layers_compute_what_eager_ones_do(recipe, shape, monkeypatch):
    """Told to round where the others do, the compiler has to agree; bytes it turns, too."""
    width, ffn, num_tokens = shape
    monkeypatch.setattr(torch._inductor.config, "emulate_precision_casts", True)
    torch.compiler.reset()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, ffn, bias=False), torch.nn.Linear(ffn, width, bias=False)]
    model = torch.nn.Sequential(layers[0], torch.nn.SiLU(), layers[1]).cuda()
    fp8.convert(model, recipe, 16, torch.device("cuda"), exclude=[])
    x, grad = torch.randn(2, num_tokens, width, device="cuda")

    def made_by(run):
        model.zero_grad()
        given = x.clone().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16):
            out = run(given)
        out.backward(grad.to(out.dtype))
        return [out.detach(), given.grad, *(p.grad.clone() for p in model.parameters())]

    eager, compiled = made_by(model), made_by(torch.compile(model, dynamic=False))
    for one, other in zip(compiled, eager, strict=True):
        assert (one - other).float().norm() <= 1e-3 * other.float().norm()


@needs_fp8
def test_checkpoints_go_from_fp8_to_plain_and_back(tmp_path):
    saving = {"mixed_precision": "bf16", "save_strategy": "steps", "save_steps": 5}
    run(tmp_path, steps=5, fp8_recipe="rowwise", **saving)
    assert run(tmp_path, steps=10, **saving).state.global_step == 10
    assert run(tmp_path, steps=15, fp8_recipe="tensorwise", **saving).state.global_step == 15


@needs_fp8
@pytest.mark.parametrize("recipe", fp8.RECIPES)
def test_a_number_of_tokens_is_refused_exactly_where_the_device_fails(
    recipe, tmp_path, monkeypatch
):
    settings = {"mixed_precision": "bf16", "fp8_recipe": recipe, "steps": 2, "length": 63}
    if recipe == "rowwise_with_gw_hp":
        assert len(losses(run(tmp_path, **settings))) == 2
        return
    with pytest.raises(ConfigError, match="8 samples of 63 tokens are 504"):
        run(tmp_path, **settings)
    monkeypatch.setattr(fp8, "limits_tokens", lambda *_: False)
    with pytest.raises(RuntimeError):
        run(tmp_path, **settings)


def test_a_device_without_fp8_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 6))
    with pytest.raises(ConfigError, match=r"8\.9"):
        run(tmp_path, fp8_recipe="rowwise")


@needs_fp8
@pytest.mark.parametrize("recipe", [FLOAT8, INT8])
def test_a_low_bit_model_made_here_computes_what_training_saw(recipe, tmp_path, capsys):
    trainer = run(
        tmp_path / "run",
        default_dtype="bfloat16",
        qat_recipe=recipe,
        save_strategy="steps",
        save_steps=30,
    )
    seen = trainer.evaluate()["eval_loss"]
    target = tmp_path / "low"
    sizes = []
    for more in (["--dry-run"], []):
        words = ["finalize", str(tmp_path / "run"), str(target), "--quantize", recipe, "--json"]
        assert main([*words, *more]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["bytes"])
    assert sizes[0] == sizes[1], "a dry run tells the size"
    model = load_causal_lm(target)
    assert len(quantized.quantized_names(model)) == 14
    # The kernels add in another order than the fake-quantized layers do.
    assert _evaluate(model, tmp_path) == pytest.approx(seen, rel=2e-2)
    other = make_model().to("cuda", torch.bfloat16)
    load_checkpoint(target, other)
    assert other.model.layers[0].mlp.up_proj.weight.device.type == "cuda"
    assert _evaluate(other, tmp_path) == pytest.approx(seen, rel=2e-2)


def _evaluate(model: Any, folder: Any) -> float:
    trainer = Trainer(
        args=TrainingArguments(output_dir=str(folder / "eval"), per_device_eval_batch_size=8),
        model=model,
        eval_dataset=tiny_dataset(16, sequence_length=64, vocab_size=512, seed=1),
        default_callbacks=False,
    )
    loss: float = trainer.evaluate()["eval_loss"]
    return loss
