"""Quantization-aware training: what the layers compute, which they are, what a run keeps."""

from __future__ import annotations

import logging

import pytest
import torch
from changed_layers import check_training, check_without_values, layers_of_class
from torch import Tensor, nn

pytest.importorskip("torchao")

from headway.args import HEAD_LAYERS
from headway.config.rules_values import QAT_RECIPES
from headway.errors import ConfigError
from headway.precision import qat
from headway.precision.recipes import RECIPES, find_recipe
from headway.testing import tiny_decoder, tiny_trainer

# Recipe and the group size under which the tiny model has layers that fit.
SIZES = {
    "int8-dynamic-act-int4-weight": None,
    "int4-weight-only": 32,
    "float8-dynamic-act-float8-weight": None,
}


def fake_layers(model: nn.Module) -> list[str]:
    return layers_of_class(model, "FakeQuantizedLinear")


def on_the_grid(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """The nearest of 16 values, evenly spaced around 0, for each group along a row.

    And which lie beyond the largest of the 16, or so close that rounding decides.
    """
    groups = weight.detach().reshape(weight.shape[0], -1, group_size)
    scale = groups.abs().amax(-1, keepdim=True) / 7.5
    steps = groups / scale
    found = (steps.round().clamp(-8, 7) * scale).reshape(weight.shape)
    return found, (steps > 7.49).reshape(weight.shape)


def test_recipes_are_those_of_the_option():
    assert sorted(RECIPES) == sorted(QAT_RECIPES) == sorted(SIZES)
    assert {name: r.group_size for name, r in RECIPES.items()} == {
        "int8-dynamic-act-int4-weight": 32,
        "int4-weight-only": 128,
        "float8-dynamic-act-float8-weight": None,
    }


def test_weights_that_would_stand_still_at_the_ends_of_the_grid_are_told(monkeypatch, caplog):
    """torch 2.14 changed the gradient of clamp at its bounds, on which torchao relies."""
    monkeypatch.setattr(torch.Tensor, "clamp", lambda x, low, high: x * 0)
    with torch.device("meta"), caplog.at_level(logging.WARNING):
        qat.prepare(nn.Sequential(nn.Linear(64, 8)), "int4-weight-only", group_size=32)
    assert "weights at the ends of their grid have no gradient" in caplog.text


@pytest.mark.skipif(qat._bounds_stop_gradients(), reason="this torch lets no gradient through")
def test_int4_weights_compute_on_their_grid_and_learn_as_whole_ones(caplog):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8))
    weight, bias = model[0].weight, model[0].bias
    x = torch.randn(3, 5, 64)
    qat.prepare(model, "int4-weight-only", group_size=32)
    assert "no gradient" not in caplog.text
    out = model(x)
    rounded, beyond = on_the_grid(weight, 32)
    rounded.requires_grad_()
    by_hand = nn.functional.linear(x, rounded, bias)
    assert torch.allclose(out, by_hand, atol=1e-5)
    assert not torch.allclose(out, nn.functional.linear(x, weight, bias), atol=1e-3)
    out.square().sum().backward()
    by_hand.square().sum().backward()
    assert torch.allclose(weight.grad[~beyond], rounded.grad[~beyond], rtol=1e-4, atol=1e-4)
    assert beyond.sum() <= weight.numel() / 32, "one in each group"


@pytest.mark.parametrize("recipe", SIZES)
def test_every_recipe_trains_and_leaves_names_and_dtypes(recipe):
    check_training(
        lambda model: qat.prepare(model, recipe, group_size=SIZES[recipe], exclude=HEAD_LAYERS),
        "FakeQuantizedLinear",
    )


def test_layers_that_do_not_fit_are_skipped_and_listed(caplog):
    caplog.set_level(logging.INFO)
    model = tiny_decoder(intermediate_size=96)
    qat.prepare(model, "int4-weight-only", group_size=96, exclude=HEAD_LAYERS)
    assert fake_layers(model) == [f"model.layers.{n}.mlp.down_proj" for n in range(2)]
    assert "groups of 96): converted 2/15 Linear layers" in caplog.text
    assert "its input is no multiple of the group size 96" in caplog.text
    assert "lm_head (named by qat_exclude)" in caplog.text


def test_a_tied_head_stays_whole_even_if_it_is_not_excluded(caplog):
    caplog.set_level(logging.INFO)
    model = tiny_decoder(tie_embeddings=True)
    qat.prepare(model, "int8-dynamic-act-int4-weight")
    assert "lm_head" not in fake_layers(model) and len(fake_layers(model)) == 14
    assert "lm_head (its weight is also another layer's)" in caplog.text


def test_nothing_that_fits_is_an_error_with_the_reason():
    with pytest.raises(ConfigError, match=r"none of the 15 .* multiple of the group size 128"):
        qat.prepare(tiny_decoder(), "int4-weight-only", exclude=HEAD_LAYERS)
    with pytest.raises(ConfigError, match="did you mean 'int4-weight-only'"):
        qat.prepare(tiny_decoder(), "int4-weights-only")
    with pytest.raises(ConfigError, match="one scale for each row"):
        find_recipe("float8-dynamic-act-float8-weight").resolve_group_size(32)


def test_a_model_without_values_keeps_ties_and_frozen_weights():
    recipe = "int8-dynamic-act-int4-weight"
    check_without_values(lambda model: qat.prepare(model, recipe, exclude=HEAD_LAYERS))


def test_a_run_trains_on_the_grid_and_its_checkpoints_are_plain(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 4}
    trainer = tiny_trainer(
        tmp_path, qat_recipe="int4-weight-only", qat_group_size=32, qat_exclude=["head"], **settings
    )
    trainer.train()
    assert "QAT (int4-weight-only, groups of 32): converted 14/15 Linear layers" in caplog.text
    seen = trainer.evaluate()["eval_loss"]
    # The same weights, whole, are another model.
    plain = tiny_trainer(tmp_path, max_steps=4)
    plain.load_checkpoint()
    assert fake_layers(plain.model) == []
    assert plain.evaluate()["eval_loss"] != seen
    # And a plain run can go on from it.
    plain = tiny_trainer(tmp_path, max_steps=6)
    assert plain.train().global_step == 6


def test_layers_that_do_more_or_stand_in_several_places_stay_as_they_are(caplog):
    model = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("plain", "hooked", "patched", "a")})
    model["b"] = model["a"]
    model["hooked"].register_forward_hook(lambda layer, given, made: made + 1)
    model["patched"].forward = lambda x: x
    with caplog.at_level(logging.INFO):
        qat.prepare(model, "int8-dynamic-act-int4-weight")
    assert fake_layers(model) == ["plain"]
    assert model["a"] is model["b"]
    assert "with a hook, or a forward of its own" in caplog.text
    assert "one layer in several places" in caplog.text
