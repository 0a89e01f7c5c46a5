"""FP8 training on a CPU, where torchao computes all recipes: arithmetic, layers, limits."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_layers import check_training, check_without_values, layers_of_class
from torch import Tensor, nn

pytest.importorskip("torchao")

from headway import Trainer, TrainingArguments
from headway.args import HEAD_LAYERS, PipelineTrainingArguments
from headway.checkpoint.tensors import read_shards
from headway.data.collate import PadCollator
from headway.data.loader import WindowLoader
from headway.errors import ConfigError
from headway.precision import fp8
from headway.testing import tiny_dataset, tiny_decoder, tiny_trainer
from headway.trainers.plan import plan_run
from headway.trainers.preflight import check_fp8_tokens

CPU = torch.device("cpu")
E4M3_MAX = 448.0


@pytest.fixture
def anywhere():
    with fp8.on_any_device():
        yield


def fp8_layers(model: nn.Module) -> list[str]:
    return layers_of_class(model, "Float8Linear")


def in_eight_bits(tensor: Tensor) -> Tensor:
    """The nearest FP8 values under one scale for the whole tensor."""
    scale = E4M3_MAX / tensor.abs().max()
    scaled = (tensor * scale).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).float() / scale


def test_tensorwise_computes_with_values_of_eight_bits(anywhere):
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 32, bias=False))
    x, plain = torch.randn(5, 16, 64), layer[0].weight
    with torch.no_grad():
        whole = layer(x)
        by_hand = in_eight_bits(x) @ in_eight_bits(plain).T
    fp8.convert(layer, "tensorwise", 16, CPU)
    out = layer(x)
    assert torch.allclose(out, by_hand, atol=1e-4)
    assert not torch.allclose(out, whole, atol=1e-4)
    out.sum().backward()
    assert plain.grad is not None and layer[0].weight is plain


@pytest.mark.parametrize("recipe", fp8.RECIPES)
def test_every_recipe_trains_and_leaves_names_and_dtypes(recipe, anywhere):
    def change(model: nn.Module) -> None:
        assert fp8.convert(model, recipe, 16, CPU, exclude=HEAD_LAYERS) is model

    check_training(change, "Float8Linear")


def test_the_head_stays_out_unless_asked_for(anywhere, caplog):
    caplog.set_level(logging.INFO)
    model = fp8.convert(tiny_decoder(vocab_size=256), "tensorwise", 16, CPU, exclude=HEAD_LAYERS)
    assert "lm_head" not in fp8_layers(model)
    assert "converted 14/15 Linear layers; as they were: lm_head (named by fp8_exclude)" in (
        caplog.text
    )
    model = fp8.convert(tiny_decoder(vocab_size=256), "tensorwise", 16, CPU)
    assert "lm_head" in fp8_layers(model)


def test_layers_that_are_not_aligned_stay_and_are_told(anywhere, caplog):
    caplog.set_level(logging.INFO)
    model = tiny_decoder(intermediate_size=72)
    fp8.convert(model, "tensorwise", 16, CPU, exclude=HEAD_LAYERS)
    assert not any("mlp" in name for name in fp8_layers(model))
    assert "converted 8/15 Linear layers" in caplog.text
    assert "no multiple of fp8_dim_alignment=16" in caplog.text
    model = tiny_decoder(intermediate_size=72)
    fp8.convert(model, "tensorwise", 0, CPU, exclude=HEAD_LAYERS)
    assert sum("mlp" in name for name in fp8_layers(model)) == 6


def test_nothing_to_convert_is_an_error_with_the_reason(anywhere):
    with pytest.raises(ConfigError, match=r"none of the 15 .*fp8_dim_alignment=1024"):
        fp8.convert(tiny_decoder(), "rowwise", 1024, CPU, exclude=HEAD_LAYERS)
    with pytest.raises(ConfigError, match=r"none of the 15 .*named by fp8_exclude"):
        fp8.convert(tiny_decoder(), "rowwise", 16, CPU, exclude=["."])
    with pytest.raises(ConfigError, match="has no linear layer"):
        fp8.convert(nn.Sequential(nn.Embedding(4, 4)), "rowwise", 16, CPU)
    # A stage of a pipeline may hold nothing but the head.
    stage = nn.ModuleDict({"lm_head": nn.Linear(32, 32)})
    fp8.convert(stage, "rowwise", 16, CPU, exclude=HEAD_LAYERS, is_part=True)
    assert fp8_layers(stage) == []


def test_a_pattern_that_matches_nothing_is_told_with_the_nearest_name(anywhere, caplog):
    exclude = [*HEAD_LAYERS, "layers.0.mlp.up_prj"]
    model = fp8.convert(tiny_decoder(), "tensorwise", 16, CPU, exclude=exclude)
    assert "'layers.0.mlp.up_prj' matches no linear layer; the nearest name is" in caplog.text
    assert "embed_out" not in caplog.text, "the usual names of heads are not all expected"
    caplog.clear()
    fp8.convert(tiny_decoder(), "tensorwise", 16, CPU, exclude=["mlp"])
    assert "matches no" not in caplog.text and len(fp8_layers(model)) == 14


def test_layers_with_a_class_of_their_own_keep_it(anywhere):
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(nn.Linear(32, 32), Doubled(32, 32))
    fp8.convert(model, "tensorwise", 16, CPU)
    assert fp8_layers(model) == ["0"] and type(model[1]) is Doubled
    fp8.convert(model, "rowwise", 16, CPU)  # again, by a second run with the same model
    assert fp8_layers(model) == ["0"]


def test_a_model_without_values_can_be_converted(anywhere):
    check_without_values(lambda model: fp8.convert(model, "rowwise", 16, CPU, exclude=HEAD_LAYERS))


# -- limits -----------------------------------------------------------------------------------


def test_a_cpu_is_refused_before_a_model_is_built(tmp_path):
    def model_init() -> nn.Module:
        pytest.fail("the model was built")

    with pytest.raises(ConfigError, match=r"fp8_recipe='rowwise' needs .* 8\.9 .* is on cpu"):
        Trainer(
            args=TrainingArguments(output_dir=str(tmp_path), use_cpu=True, fp8_recipe="rowwise"),
            model_init=model_init,
            train_dataset=tiny_dataset(4),
        ).train()


def test_a_device_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    with pytest.raises(ConfigError, match=r"A100 \(cuda:1\) has 8\.0.*bf16"):
        fp8.check("tensorwise", torch.device("cuda:1"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    fp8.check("tensorwise", torch.device("cuda:1"))


def test_a_version_that_fails_is_refused(monkeypatch, anywhere):
    monkeypatch.setattr(fp8, "torchao_version", lambda: "0.16.0")
    with pytest.raises(ConfigError, match=r"rowwise_with_gw_hp.* fails in torchao 0\.16\.0"):
        fp8.check("rowwise_with_gw_hp", CPU)
    fp8.check("rowwise", CPU)


def test_an_unknown_recipe_has_a_nearest_name(anywhere):
    with pytest.raises(ConfigError, match="did you mean 'tensorwise'"):
        fp8.check("tensorwize", CPU)


def check_tokens(
    length: int | None,
    collate: Any = None,
    *,
    num_samples: int = 8,
    device: str = "cuda",
    cls: type[TrainingArguments] = TrainingArguments,
    **arguments: Any,
) -> None:
    args = cls(**{"fp8_recipe": "rowwise", "per_device_train_batch_size": 2, **arguments})
    data: Any = [{"input_ids": [1] * n} for n in range(1, num_samples + 1)]
    if length is not None:
        data = tiny_dataset(num_samples, sequence_length=length)
    size, drop_last = args.per_device_train_batch_size, args.dataloader_drop_last
    loader = WindowLoader(data, batch_size=size, drop_last=drop_last)
    check_fp8_tokens(args, loader, collate, plan_run(args, loader, 1), torch.device(device))


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_a_number_of_tokens_that_the_device_cannot_take_is_refused(recipe):
    with pytest.raises(ConfigError, match=r"2 samples of 12 tokens are 24\. Change per_device"):
        check_tokens(12, fp8_recipe=recipe)


def test_tokens_are_counted_as_the_batches_will_be(caplog):
    check_tokens(8)
    check_tokens(12, fp8_recipe="rowwise_with_gw_hp")
    check_tokens(12, device="cpu")
    check_tokens(12, per_device_train_batch_size=4)
    check_tokens(12, PadCollator(pad_to_multiple_of=8))
    with pytest.raises(ConfigError, match="the last one of an epoch has 1 samples of 8 tokens"):
        check_tokens(8, num_samples=9)
    check_tokens(8, num_samples=9, dataloader_drop_last=True)
    check_tokens(8, num_samples=9, max_steps=4)
    sizes = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    pieces: dict[str, Any] = {"cls": PipelineTrainingArguments, **sizes}
    with pytest.raises(ConfigError, match="4 samples of 8 tokens are 8 in each of 4 parts"):
        check_tokens(8, **pieces)
    check_tokens(16, num_samples=9, **pieces)
    check_tokens(None, PadCollator(pad_to_multiple_of=32))
    assert not caplog.records
    check_tokens(None)
    assert "needs a multiple of 16 tokens in a micro-batch" in caplog.text
    assert "does not tell its length; PadCollator(pad_to_multiple_of=16)" in caplog.text


# -- runs -------------------------------------------------------------------------------------


def train(folder: Path, recipe: str | None, **arguments: Any) -> Any:
    trainer = tiny_trainer(
        folder, save_strategy="steps", save_steps=4, fp8_recipe=recipe, **arguments
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize(("first", "second"), [("tensorwise", None), (None, "rowwise")])
def test_runs_with_and_without_fp8_exchange_checkpoints(first, second, tmp_path, anywhere):
    train(tmp_path, first, max_steps=4)
    saved = read_shards(tmp_path / "out" / "checkpoint-4", "model")
    moments = read_shards(tmp_path / "out" / "checkpoint-4", "optimizer")
    plain = tiny_decoder().state_dict()
    assert {n: (t.dtype, t.shape) for n, t in saved.items()} == {
        n: (t.dtype, t.shape) for n, t in plain.items()
    }
    assert {t.dtype for n, t in moments.items() if "exp_avg" in n} == {torch.float32}
    trainer = train(tmp_path, second, max_steps=8)
    assert trainer.state.global_step == 8
    assert bool(fp8_layers(trainer.model)) == (second is not None)
    again = read_shards(tmp_path / "out" / "checkpoint-8", "model")
    assert again.keys() == saved.keys()


def test_a_run_logs_what_it_converted_and_differs_from_a_plain_one(tmp_path, anywhere, caplog):
    caplog.set_level(logging.INFO)
    losses = {}
    for recipe in (None, "tensorwise"):
        trainer = tiny_trainer(
            tmp_path / str(recipe), max_steps=3, fp8_recipe=recipe, fp8_exclude=["lm_head", "mlp"]
        )
        losses[recipe] = trainer.train().training_loss
    assert "FP8 (tensorwise): converted 8/15 Linear layers" in caplog.text
    assert losses[None] != losses["tensorwise"]
    assert losses["tensorwise"] == pytest.approx(losses[None], rel=1e-2)
