"""Weights in few bits: made, taken apart for a file, put together, and what is refused."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import nn

pytest.importorskip("torchao")

from headway.errors import ConfigError
from headway.precision import qat, quantized, torchao_package
from headway.precision.recipes import RECIPES

INT4 = [(RECIPES["int8-dynamic-act-int4-weight"], 32), (RECIPES["int4-weight-only"], 64)]


@pytest.mark.parametrize(("recipe", "group_size"), INT4, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_computes_as_it_was_trained_also_after_a_file(recipe, group_size, dtype):
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(128, 16, bias=False, dtype=dtype))
    weight, x = layer[0].weight.detach().clone(), torch.randn(2, 5, 128, dtype=dtype)
    qat.prepare(layer, recipe.name, group_size=group_size)
    trained = layer(x)
    found = quantized.quantize_weight(weight, recipe, group_size)
    assert quantized.is_quantized(found) and not quantized.is_quantized(weight)
    parts, metadata = quantized.take_apart({"a.weight": found, "b": torch.ones(3)})
    assert all(type(part) is torch.Tensor for part in parts.values())
    again = dict(quantized.Parts(metadata, "file").join_all(parts))
    assert list(again) == ["a.weight", "b"]
    assert torch.equal(nn.functional.linear(x, again["a.weight"]), trained)


def test_few_values_are_left():
    weight = torch.randn(4, 64)
    found = quantized.quantize_weight(weight, RECIPES["int4-weight-only"], 64)
    for row in found.dequantize():
        assert len(row.unique()) <= 16
    assert (found.dequantize() - weight).abs().max() < weight.abs().max() / 7


def apart():
    found = quantized.quantize_weight(torch.randn(4, 64), RECIPES["int4-weight-only"], 32)
    return quantized.take_apart({"a.weight": found})


def test_only_known_classes_are_put_together():
    _, metadata = apart()
    entry = {**json.loads(metadata["a.weight"]), "_type": "Popen"}
    with pytest.raises(quantized.QuantizedFormError, match=r"asks for a Popen as a\.weight"):
        quantized.Parts({**metadata, "a.weight": json.dumps(entry)}, "file")


@pytest.mark.parametrize("spoilt", ["[]", "{}", "7", '{"_type": "Float8Tensor"}'])
def test_a_description_that_makes_no_sense_is_refused(spoilt):
    _, metadata = apart()
    with pytest.raises(quantized.QuantizedFormError, match="file"):
        quantized.Parts({**metadata, "a.weight": spoilt}, "file")
    with pytest.raises(quantized.QuantizedFormError, match="file"):
        quantized.find_parts([{"tensor_names": "["}], "file")


def test_parts_that_are_missing_or_do_not_fit_are_named():
    parts, metadata = apart()
    described = quantized.Parts(metadata, "file")
    some = {name: part for name, part in parts.items() if "scale" not in name}
    with pytest.raises(quantized.QuantizedFormError, match=r"lacks a\._weight_scale"):
        described.join("a.weight", some)
    wrong = {**parts, "a._weight_scale": torch.ones(3, 3)}
    with pytest.raises(quantized.QuantizedFormError, match=r"parts of a\.weight do not fit"):
        described.join("a.weight", wrong)


def test_the_shape_of_a_weight_is_known_without_its_values():
    parts, metadata = apart()
    stored = {name: list(part.shape) for name, part in parts.items()}
    assert quantized.Parts(metadata, "file").shape_of("a.weight", stored) == [4, 64]
    entry = {"_type": "Int4Tensor", "_data": {"shape": [4, 64]}, "_tensor_data_names": ["qdata"]}
    packed = quantized.Parts({**metadata, "a.weight": json.dumps(entry)}, "file")
    assert packed.shape_of("a.weight", {"a._weight_qdata": [4, 32]}) == [4, 64]
    with pytest.raises(quantized.QuantizedFormError, match=r"lacks a\._weight_qdata"):
        quantized.Parts(metadata, "file").shape_of("a.weight", {})


def test_all_files_tell_of_quantized_weights_not_the_first_alone():
    _, metadata = apart()
    plain = {"format": "pt", "tensor_names": json.dumps(["b"]), "b": '{"_type": "Tensor"}'}
    found = quantized.find_parts([None, {"format": "pt"}, plain, metadata], "folder")
    assert found is not None and found.quantized == ["a.weight"]
    assert quantized.find_parts([None, {"format": "pt"}], "folder") is None


def test_a_quantized_model_cannot_be_trained():
    model = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 8))
    quantized.require_trainable(model)
    found = quantized.quantize_weight(model[0].weight.detach(), *INT4[1])
    model[0].weight = nn.Parameter(found, requires_grad=False)
    with pytest.raises(ConfigError, match=r"is quantized \(0.weight and 0 more"):
        quantized.require_trainable(model)


def test_float8_weights_need_a_device_that_has_them(monkeypatch):
    recipe = RECIPES["float8-dynamic-act-float8-weight"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"compute capability 8\.9"):
        quantized.check_machine(recipe)
    for recipe, _ in INT4:
        quantized.check_machine(recipe)


def test_weights_of_a_newer_torchao_are_told(caplog, monkeypatch):
    monkeypatch.setattr(quantized, "torchao_version", lambda: "0.18.1")
    for version, told in (("0.18.2", False), ("0.9.0", False), ("0.19.0", True), ("1.2", True)):
        caplog.clear()
        quantized.check_versions({"headway": {"torchao_version": version}}, "folder")
        assert (f"folder was quantized by torchao {version}" in caplog.text) == told


def test_without_torchao_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ConfigError, match=r"headway\[quant\]"):
        torchao_package.load_torchao("fp8_recipe")


def test_a_torchao_without_a_part_of_it_is_told_as_such():
    with pytest.raises(ConfigError, match=r"QAT needs another torchao .* no torchao\.magic"):
        torchao_package.load_torchao("QAT", "torchao.magic")


def test_moving_makes_a_tensor_of_its_own():
    found = quantized.quantize_weight(torch.randn(4, 64), *INT4[1])
    half = quantized.move(found, "cpu", torch.bfloat16)
    assert half.dtype == torch.bfloat16 and quantized.is_quantized(half)
    same = quantized.move(found, "cpu")
    assert torch.equal(same.dequantize(), found.dequantize())
    plain = torch.ones(2)
    assert quantized.move(plain, "cpu").data_ptr() != plain.data_ptr()
