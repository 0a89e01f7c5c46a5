"""`headway check` finds what would stop `headway train`, also for models of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.cli.main import main
from headway.data.tokenizer import ByteTokenizer
from headway.data.tokens import TokenFileWriter

GOOD: dict[str, Any] = {
    "model": {"vocab_size": 258, "hidden_size": 16, "num_layers": 1, "num_heads": 2},
    "tokenizer": "bytes",
    "data": {
        "train": {
            "class_path": "SyntheticDataset",
            "init_args": {"num_samples": 8, "sequence_length": 16, "vocab_size": 258},
        }
    },
    "args": {"output_dir": "out", "max_steps": 2, "use_cpu": True, "save_strategy": "no"},
}
LLAMA = {
    "class_path": "transformers.LlamaForCausalLM",
    "init_args": {
        "config": {
            "class_path": "transformers.LlamaConfig",
            "init_args": {
                "vocab_size": 258,
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
            },
        }
    },
}
PARTS = """\
import torch
from torch import nn

from headway import CallbackConfig, TrainerCallback


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(258, 258)

    def forward(self, input_ids):
        return {"logits": self.table(input_ids)}


class NeedsValues(Head):
    def __init__(self):
        super().__init__()
        self.scale = self.table.weight.sum().item()


class LooksAtIds(Head):
    def forward(self, input_ids):
        return super().forward(input_ids if input_ids.max() > 3 else input_ids + 1)


class NoLoss(Head):
    def forward(self, input_ids):
        return {"hidden": self.table(input_ids)}


class Unbuildable(Head):
    def __init__(self):
        super().__init__()
        {}["width"]


class Misspelt(TrainerCallback):
    def on_step_ends(self, args, state, control): ...


class NeedsTrainer(CallbackConfig):
    def build(self, trainer):
        trainer.train_dataloader_of_a_run
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of the user's own, named so that no other test has imported it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"{tmp_path.name}.py").write_text(PARTS)
    return tmp_path


def write(here: Path, **changes: Any) -> str:
    text = json.dumps({**GOOD, **changes}).replace("PARTS.", f"{here.name}.")
    (here / "run.yaml").write_text(text)
    return "run.yaml"


def test_a_transformers_model_is_checked_and_trained(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    run = write(here, model=LLAMA)
    assert main(["check", run, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["model"] == "LlamaForCausalLM" and facts["not_built_on_meta"] is None
    assert main(["train", run, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["steps"] == 2 and 4 < result["loss"] < 7


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("intermediate_sise", 32, "did you mean 'intermediate_size'"),
        ("hidden_size", "wide", "hidden_size must be int, got 'wide'"),
        ("num_attention_heads", 3, "multiple of the number of attention heads"),
    ],
)
def test_a_mistake_in_a_transformers_config_is_told(
    name: str, value: Any, says: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    model = json.loads(json.dumps(LLAMA))
    model["init_args"]["config"]["init_args"][name] = value
    run = write(here, model=model)
    for verb in ("check", "train"):
        assert main([verb, run]) == 2
        captured = capsys.readouterr()
        assert says in captured.err and "Traceback" not in captured.err
    assert not (here / "out").exists()


MISTAKES: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("hook", {"callbacks": ["PARTS.Misspelt"]}, ("on_step_ends", "'on_step_end'")),
    ("loss", {"model": {"class_path": "PARTS.NoLoss"}}, ("NoLoss", "returns no loss")),
    ("constructor", {"model": {"class_path": "PARTS.Unbuildable"}}, ("model: ", "KeyError", ".py")),
    (
        "optimizer",
        {"optimizer": {"class_path": "AdamW", "init_args": {"lr": -1.0}}},
        ("optimizer: AdamW", "Invalid learning rate"),
    ),
    (
        "schedule",
        {"lr_scheduler": {"class_path": "ConstantLR", "init_args": {"factor": 5.0}}},
        ("lr_scheduler: ConstantLR", "factor"),
    ),
]


# What only this machine, or the model together with it, can tell.
REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    (
        {"torch_compile": True, "torch_compile_backend": "indutcor"},
        ("torch_compile_backend", "did you mean 'inductor'"),
    ),
    ({"fp8_recipe": "rowwise"}, ("fp8_recipe='rowwise' needs a CUDA device", "is on cpu")),
    (
        {"checkpoint_address": "memry://run"},
        ("checkpoint_address='memry://run' cannot be opened", "did you mean 'memory'"),
    ),
    ({"fused_loss": "liger"}, ("fused_loss='liger' needs",)),
    ({"sdpa_backend": "cudnn"}, ("sdpa_backend='cudnn' cannot run on cpu", "what can: ")),
    ({"qat_recipe": "int4-weight-only"}, ("qat_recipe", "no multiple of the group size 128")),
    (
        {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"context_fn": "a string"},
        },
        ("gradient_checkpointing_kwargs.context_fn", "got 'a string'"),
    ),
    (
        {"optim": "adamw_4bit", "optim_args": {"block_size": 7}},
        ("optim_args.block_size", "an even number", "got 7"),
    ),
]
MISTAKES += [(next(iter(args)), {"args": {**GOOD["args"], **args}}, says) for args, says in REFUSED]


def test_check_says_all_at_once_and_writes_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compatible = [(args, says) for args, says in REFUSED[:-1] if "fp8_recipe" not in args]
    together = {name: value for args, _ in compatible for name, value in args.items()}
    run = write(here, args={**GOOD["args"], **together})
    before = sorted(here.iterdir())
    assert main(["check", run]) == 2
    err = capsys.readouterr().err
    for _, says in compatible:
        assert all(words in err for words in says), says
    assert sorted(path for path in here.iterdir() if path.name != "__pycache__") == before


@pytest.mark.parametrize("verb", ["check", "train"])
@pytest.mark.parametrize(("name", "change", "says"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_check_and_train_refuse_the_same(
    name: str,
    change: dict[str, Any],
    says: tuple[str, ...],
    verb: str,
    here: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([verb, write(here, **change)]) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    for words in says:
        assert words in captured.err
    assert not (here / "out").exists()


def test_a_model_that_needs_values_is_built_on_the_cpu_and_check_says_so(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(here, model={"class_path": "PARTS.NeedsValues"})
    assert main(["check", run]) == 0
    out = capsys.readouterr().out
    assert "66,564" in out and "built on the CPU, not on meta" in out and "not tried" not in out


def test_a_forward_pass_that_needs_values_is_not_an_error(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(here, model={"class_path": "PARTS.LooksAtIds"})
    assert main(["check", run]) == 0
    assert "the forward pass was not tried" in capsys.readouterr().out


def test_the_parts_of_the_memory_estimate_are_all_shown(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(here)
    assert main(["check", run, "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    parts = {name: value for name, value in memory.items() if name != "total_bytes"}
    assert sum(parts.values()) >= memory["total_bytes"] > parts["fixed_bytes"] > 0
    assert main(["check", run]) == 0
    out = capsys.readouterr().out
    assert all(f"{name.removesuffix('_bytes')} " in out for name in parts)
    assert "forward pass" not in out


def test_what_compiled_blocks_do_not_keep_is_not_estimated(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def activations(*overrides: str) -> int:
        assert main(["check", write(here), "--json", *overrides]) == 0
        found: int = json.loads(capsys.readouterr().out)["memory"]["activations_bytes"]
        return found

    eager = activations()
    assert activations("--args.torch_compile=true") < 0.9 * eager
    other = ("--args.torch_compile=true", "--args.torch_compile_backend=aot_eager")
    assert activations(*other) == eager


def evaluators(**tasks: Any) -> dict[str, Any]:
    lm = {"eval_dataset": {"own": "own.hwt"}, "sequence_length": 16, "eval_interval": 1}
    return {
        "lm": {"class_path": "LMEvaluatorCallbackConfig", "init_args": lm},
        "tasks": {
            "class_path": "DownstreamEvaluatorCallbackConfig",
            "init_args": {"tasks": ["everyday"], "eval_interval": None, **tasks},
        },
        "later": {"class_path": "PARTS.NeedsTrainer"},
    }


def test_evaluators_of_a_run_file_are_built(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = ByteTokenizer()
    with TokenFileWriter("own.hwt", tokenizer=tokenizer) as writer:
        writer.add_document(tokenizer.encode("the tide turns from land. " * 4, True))
    assert main(["check", write(here, callbacks=evaluators())]) == 0
    Path("broken.jsonl").write_text("{}\n")
    run = write(here, callbacks=evaluators(tasks=["broken.jsonl"]))
    capsys.readouterr()
    assert main(["check", run]) == 2
    assert "broken.jsonl, line 1" in capsys.readouterr().err
    Path("own.hwt").unlink()
    assert main(["check", write(here, callbacks=evaluators())]) == 2
    assert "own.hwt" in capsys.readouterr().err


def test_of_data_smaller_than_a_batch_a_step_takes_all(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(here)
    told = []
    for batch in (8, 800):
        words = [run, "--json", f"--args.per_device_train_batch_size={batch}"]
        assert main(["check", *words]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert told[0] == told[1] and told[1]["samples_per_step"] == 8
    assert told[1]["tokens"] == 2 * 8 * 16


def test_data_that_do_not_fit_the_model_are_told_once(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {**GOOD["model"], "max_seq_len": 8}
    assert main(["check", write(here, model=model)]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert "data.train: " in told and "at most 8" in told
