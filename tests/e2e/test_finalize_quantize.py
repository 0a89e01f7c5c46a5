"""`headway finalize --quantize`: the low-bit folder, who reads it, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("torchao")

from headway import TrainingArguments
from headway.args import HEAD_LAYERS
from headway.checkpoint import CheckpointError, load_checkpoint
from headway.checkpoint.convert import read_source
from headway.checkpoint.errors import MisfitError
from headway.checkpoint.quantized import TrainedAs, plan_quantization, trained_as
from headway.cli.main import main
from headway.data.tokenizer import ByteTokenizer
from headway.errors import ConfigError
from headway.models import load_causal_lm
from headway.precision import qat, quantized
from headway.testing import tiny_dataset, tiny_decoder, tiny_trainer

INT8 = "int8-dynamic-act-int4-weight"
INT4 = "int4-weight-only"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, Any]:
    """A run that trained for a low-bit model, and the loss that it saw at its end."""
    folder = tmp_path_factory.mktemp("run")
    trainer = tiny_trainer(
        folder,
        num_samples=64,
        max_steps=40,
        save_strategy="steps",
        save_steps=40,
        learning_rate=2e-2,
        qat_recipe=INT4,
        qat_group_size=32,
    )
    trainer.processing_class = ByteTokenizer()
    trainer.train()
    return {"out": folder / "out", "loss": trainer.evaluate()["eval_loss"]}


@pytest.fixture(scope="module")
def folder(trained, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("quantized") / "model"
    assert main(["finalize", str(trained["out"]), str(target), "--quantize", INT4]) == 0
    return target


def loss_of(model: nn.Module, folder: Path) -> float:
    from headway import Trainer

    trainer = Trainer(
        args=TrainingArguments(
            output_dir=str(folder / "eval"), per_device_eval_batch_size=2, use_cpu=True
        ),
        model=model,
        eval_dataset=tiny_dataset(4, sequence_length=8, seed=1),
        default_callbacks=False,
    )
    loss: float = trainer.evaluate()["eval_loss"]
    return loss


def is_low_bit(model: Any) -> bool:
    return quantized.is_quantized(model.model.layers[1].mlp.down_proj.weight)


def test_the_low_bit_model_computes_what_training_saw(trained, folder, tmp_path):
    model = load_causal_lm(folder)
    assert is_low_bit(model) and not quantized.is_quantized(model.lm_head.weight)
    assert not model.model.layers[0].mlp.up_proj.weight.requires_grad
    assert model.lm_head.weight.requires_grad
    assert loss_of(model, tmp_path) == pytest.approx(trained["loss"], abs=1e-6)
    whole = load_causal_lm(trained["out"] / "checkpoint-40")
    assert abs(loss_of(whole, tmp_path) - trained["loss"]) > 1e-4, "the grid makes a difference"


def test_the_folder_is_small_plain_and_tells_what_it_is(trained, folder):
    files = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors.index.json", "tokenizer_config.json"} <= files
    assert not any(name.endswith((".bin", ".pt", ".pkl")) for name in files)
    block = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert block["quant_method"] == "torchao" and block["modules_to_not_convert"] == ["lm_head"]
    own = block["headway"]
    assert (own["recipe"], own["group_size"]) == (INT4, 32)
    assert own["layout"] == "IntxUnpackedToInt8Tensor" and own["torchao_version"]
    before = sum(p.stat().st_size for p in (trained["out"] / "checkpoint-40").glob("model-*"))
    assert sum(p.stat().st_size for p in folder.glob("model-*")) < 0.75 * before
    assert main(["checkpoint", "verify", str(folder)]) == 0


def test_inspect_counts_weights_and_not_their_parts(trained, folder, capsys):
    counts = []
    for path in (trained["out"] / "checkpoint-40", folder):
        assert main(["checkpoint", "inspect", str(path), "--json"]) == 0
        counts.append(json.loads(capsys.readouterr().out)["num_parameters"])
    assert counts == [sum(p.numel() for p in tiny_decoder().parameters())] * 2


def test_transformers_reads_it_without_headway(folder):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert is_low_bit(theirs)
    ids = torch.randint(0, 258, (2, 16))
    with torch.no_grad():
        ours = load_causal_lm(folder)(ids).logits
        assert torch.allclose(theirs(input_ids=ids).logits, ours, atol=1e-5)


def test_eval_and_generate_read_it(folder, trained, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the tide turns. " * 40)
    losses = {}
    for name, path in (("low", folder), ("whole", trained["out"] / "checkpoint-40")):
        words = ["eval", str(path), "--data", str(text), "--sequence-length", "32", "--json"]
        assert main([*words, "--device", "cpu"]) == 0
        losses[name] = json.loads(capsys.readouterr().out)["loss"]
    assert losses["low"] == pytest.approx(losses["whole"], rel=0.2)
    assert losses["low"] != losses["whole"]
    words = ["generate", str(folder), "--prompt", "the", "--greedy", "--max-new-tokens", "4"]
    assert main([*words, "--device", "cpu", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["new_tokens"]) == 4


# -- load_checkpoint --------------------------------------------------------------------------


def test_load_checkpoint_puts_low_bit_weights_into_a_model(folder):
    ids = torch.randint(0, 258, (2, 16))
    wanted = load_causal_lm(folder)(ids).logits
    model = tiny_decoder()
    head = model.lm_head.weight
    report = load_checkpoint(folder, model)
    assert report.missing_keys == [] and report.unexpected_keys == []
    assert is_low_bit(model) and torch.equal(model(ids).logits, wanted)
    assert model.lm_head.weight is head, "what can be copied is copied"
    half = tiny_decoder().to(torch.bfloat16)
    load_checkpoint(folder, half)
    assert half.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert half(ids).logits.dtype == torch.bfloat16


def test_load_checkpoint_fills_a_model_without_values(folder):
    ids = torch.randint(0, 258, (2, 16))
    with torch.device("meta"):
        model = tiny_decoder()
    with pytest.raises(MisfitError, match="assign=True"):
        load_checkpoint(folder, model)
    load_checkpoint(folder, model, assign=True)
    model.model.rotary_emb.to_empty(device="cpu")
    model.reset_buffers()
    assert torch.equal(model(ids).logits, load_causal_lm(folder)(ids).logits)
    # Once more into a model that is quantized already.
    load_checkpoint(folder, model, assign=True)
    assert is_low_bit(model)


def test_load_checkpoint_by_name_gives_whole_names(folder):
    name = "model.layers.0.mlp.up_proj.weight"
    assert set(load_checkpoint(folder)) == set(tiny_decoder().state_dict())
    found = load_checkpoint(folder, keys=[name])
    assert list(found) == [name] and quantized.is_quantized(found[name])


def test_a_model_that_would_round_twice_is_refused(folder):
    model = qat.prepare(tiny_decoder(), INT4, group_size=32, exclude=["lm_head"])
    with pytest.raises(MisfitError, match="belongs to a FakeQuantizedLinear here"):
        load_checkpoint(folder, model)


def test_parts_in_other_files_than_the_first_are_found(folder, tmp_path):
    """As tools with small shards write it: the first file holds nothing quantized."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    copy = tmp_path / "model"
    copy.mkdir()
    (source,) = folder.glob("model-*.safetensors")
    with safe_open(source, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    weight_map = {}
    for name in tensors:
        number = 1 if "_weight_" not in name else 2 + ("_scale" in name)
        weight_map[name] = f"model-{number:05d}-of-00003.safetensors"
    for number, told in ((1, {"format": "pt"}), (2, metadata), (3, {"format": "pt"})):
        own = f"model-{number:05d}-of-00003.safetensors"
        part = {n: t for n, t in tensors.items() if weight_map[n] == own}
        save_file(part, copy / own, metadata=told)
    index = {"metadata": {}, "weight_map": weight_map}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(folder / "config.json", copy)
    model, ids = tiny_decoder(), torch.randint(0, 258, (2, 16))
    load_checkpoint(copy, model)
    assert torch.equal(model(ids).logits, load_causal_lm(folder)(ids).logits)
    assert torch.equal(load_causal_lm(copy)(ids).logits, model(ids).logits)


# -- what the run told ------------------------------------------------------------------------


def test_another_recipe_than_that_of_training_is_told(trained, tmp_path, capsys):
    out = str(trained["out"])
    assert main(["finalize", out, str(tmp_path / "a"), "--quantize", INT8, "--json"]) == 0
    told = capsys.readouterr()
    assert INT8 in told.err and f"trained with qat_recipe='{INT4}'" in told.err
    assert json.loads(told.out)["quantized"]["trained_as"] == INT4
    words = ["finalize", out, str(tmp_path / "b"), "--quantize", INT4]
    assert main([*words, "--group-size", "16"]) == 0
    assert "--group-size 16, but the model was trained with qat_group_size=32" in (
        capsys.readouterr().err
    )
    assert main(["finalize", out, str(tmp_path / "c"), "--quantize", INT4]) == 0
    told = capsys.readouterr()
    assert "but the model was trained" not in told.err and "trained for it" in told.out


def test_layers_that_training_left_whole_stay_whole(trained):
    source = read_source(trained["out"] / "checkpoint-40")
    told = trained_as(trained["out"] / "checkpoint-40")
    assert told == TrainedAs(INT4, 32, HEAD_LAYERS)
    other = TrainedAs(INT4, 16, ("mlp", "lm_head"))
    plan = plan_quantization(source, tiny_decoder(), INT4, trained=other)
    assert plan.group_size == 16 and len(plan.choice.chosen) == 8
    plan = plan_quantization(source, tiny_decoder(), INT8, trained=other)
    assert plan.group_size == 32 and len(plan.choice.chosen) == 14, "told for another recipe"


def test_a_run_without_qat_is_rounded_after_training(tmp_path, capsys):
    trainer = tiny_trainer(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    words = ["finalize", str(tmp_path / "out"), str(tmp_path / "q"), "--quantize", INT8]
    assert main([*words, "--dtype", "bfloat16"]) == 0
    assert "14/15 linear layers" in (out := capsys.readouterr().out)
    assert "rounded after training" in out and "lm_head" in out
    model: Any = load_causal_lm(tmp_path / "q")
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16
    assert is_low_bit(model) and model(torch.zeros(1, 4, dtype=torch.long)).logits.isfinite().all()


def test_a_low_bit_head_is_evaluated_as_such(tmp_path):
    """Headway's decoder makes its loss of the head's weight; a head of few bits is called."""
    torch.manual_seed(0)
    trainer = tiny_trainer(
        tmp_path,
        max_steps=2,
        save_strategy="steps",
        save_steps=2,
        qat_recipe=INT8,
        qat_exclude=[],
    )
    trainer.train()
    seen = trainer.evaluate()["eval_loss"]
    assert type(trainer.model.lm_head).__name__ == "FakeQuantizedLinear"
    words = ["finalize", str(tmp_path / "out"), str(tmp_path / "q"), "--quantize", INT8]
    assert main(words) == 0
    model: Any = load_causal_lm(tmp_path / "q")
    assert quantized.is_quantized(model.lm_head.weight)
    assert loss_of(model, tmp_path) == pytest.approx(seen, abs=1e-6)
    ids = torch.randint(0, 258, (2, 16))
    out = model(ids, labels=ids, return_logits=True)
    by_hand = nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert torch.allclose(out.loss, by_hand, atol=1e-5)
    plain = load_causal_lm(tmp_path / "out" / "checkpoint-2")
    assert abs(plain(ids, labels=ids).loss - by_hand) > 1e-6


def test_layers_can_be_left_out(trained, tmp_path, capsys):
    words = ["finalize", str(trained["out"]), str(tmp_path / "q"), "--quantize", INT4]
    assert main([*words, "--exclude", "mlp", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["quantized"]
    assert len(facts["layers"]) == 8 and len(facts["excluded"]) == 7
    assert "lm_head" in facts["excluded"], "what stays whole by default stays so"
    model: Any = load_causal_lm(tmp_path / "q")
    assert not is_low_bit(model)
    assert quantized.is_quantized(model.model.layers[0].self_attn.q_proj.weight)


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("zzz", "they are called q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and 2 more"),
        ("up_prj", "the nearest name is up_proj"),
        ("layers.1.mlp.down_proyect", "the nearest name is model.layers.1.mlp.down_proj"),
    ],
)
def test_a_pattern_that_matches_nothing_is_told_and_uncovers_nothing(
    trained, tmp_path, capsys, pattern, hint
):
    words = ["finalize", str(trained["out"]), str(tmp_path / "q"), "--quantize", INT4, "--dry-run"]
    assert main([*words, "--exclude", pattern, "--json"]) == 0
    told = capsys.readouterr()
    assert f"--exclude: '{pattern}' matches no linear layer; {hint}" in told.err
    assert json.loads(told.out)["quantized"]["excluded"] == ["lm_head"]


def test_only_all_layers_takes_the_head_as_well(trained, tmp_path, capsys):
    words = ["finalize", str(trained["out"]), str(tmp_path / "q"), "--quantize", INT4, "--dry-run"]
    assert main([*words, "--all-layers", "--exclude", "mlp", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["quantized"]
    assert "lm_head" in facts["layers"] and len(facts["excluded"]) == 6


# -- refused before anything is written -------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--quantize", "int4-weight"], "did you mean 'int4-weight-only'"),
        (["--quantize", INT4, "--group-size", "128"], "none of the 15 linear layers"),
        (["--quantize", INT4, "--group-size", "1"], "2 weights or more"),
        (["--quantize", INT4, "--exclude", "(mlp"], "--exclude: '(mlp' is no regular"),
        (["--quantize", INT4, "--keep-optimizer"], "--keep-optimizer: the optimizer's state"),
        (["--quantize", INT4, "--dtype", "int8"], "unknown dtype 'int8'"),
        (["--group-size", "32"], "--group-size: needs --quantize"),
        (["--exclude", "mlp"], "--exclude: needs --quantize"),
        (["--all-layers"], "--all-layers: needs --quantize"),
    ],
)
def test_mistakes_are_told_and_nothing_is_written(trained, tmp_path, capsys, words, message):
    assert main(["finalize", str(trained["out"]), str(tmp_path / "q"), *words]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_float8_is_refused_on_a_machine_without_it(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = ["--quantize", "float8-dynamic-act-float8-weight"]
    assert main(["finalize", str(trained["out"]), str(tmp_path / "q"), *words]) == 2
    assert "compute capability 8.9" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [[], ["--quantize", INT4]])
def test_a_dry_run_writes_nothing(trained, tmp_path, capsys, words):
    target = tmp_path / "q"
    assert main(["finalize", str(trained["out"]), str(target), *words, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "would be written" in out and str(target) in out
    assert ("14/15 linear layers" in out) == bool(words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [[], ["--dtype", "bfloat16", "--exclude", "attn"]])
def test_a_dry_run_tells_the_size_that_it_will_be(trained, tmp_path, capsys, words):
    command = ["finalize", str(trained["out"]), str(tmp_path / "q"), "--quantize", INT4, "--json"]
    sizes = []
    for more in (["--dry-run"], []):
        assert main([*command, *words, *more]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["bytes"])
    (file,) = (tmp_path / "q").glob("model-*.safetensors")
    assert sizes[0] == sizes[1] and 0 < file.stat().st_size - sizes[1] < 20_000, "and its header"


# -- what a low-bit folder is not for ---------------------------------------------------------


def test_it_cannot_be_finalized_converted_or_resumed(folder, tmp_path, capsys):
    for words in (
        ["finalize", str(folder), str(tmp_path / "x")],
        ["finalize", str(folder), str(tmp_path / "x"), "--quantize", INT4],
        ["checkpoint", "convert", str(folder), str(tmp_path / "x"), "--to", "bin"],
    ):
        assert main(words) != 0
        assert "quantized" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    trainer = tiny_trainer(tmp_path, max_steps=1)
    with pytest.raises(ConfigError, match="its weights are quantized"):
        trainer.train(resume_from_checkpoint=str(folder))
    with pytest.raises(CheckpointError, match=r"load_checkpoint\(directory, module\)"):
        trainer._manager().load_model(tiny_decoder(), folder)


def test_it_cannot_be_trained(folder, tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=1)
    trainer.model, trainer.model_init = load_causal_lm(folder), None
    with pytest.raises(ConfigError, match="the model is quantized"):
        trainer.train()
    from headway.models.initial import blank_causal_lm

    with pytest.raises(ConfigError, match="cannot be trained; start from the checkpoint"):
        blank_causal_lm(folder)
