"""Bad input, case by case: a clear error before the first step, exit code 2, nothing written.

Each case of the command line is a run file (or a command line) with one mistake and the words its
message must hold: the option or file, and where there is one the nearest right name.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import Trainer, TrainerCallback, TrainingArguments
from headway.cli.main import main
from headway.errors import ConfigError
from headway.testing import assert_no_import, tiny_dataset, tiny_decoder

GOOD: dict[str, Any] = {
    "model": {"vocab_size": 258, "hidden_size": 16, "num_layers": 1, "num_heads": 2},
    "tokenizer": "bytes",
    "data": {
        "train": {
            "class_path": "SyntheticDataset",
            "init_args": {"num_samples": 8, "sequence_length": 16, "vocab_size": 258},
        }
    },
    "args": {"output_dir": "out", "max_steps": 1, "use_cpu": True, "logging_steps": 1},
}


@dataclass
class Case:
    """One mistake: what is changed in the good run file, and what the error must say."""

    name: str
    change: dict[str, Any] = field(default_factory=dict)
    says: tuple[str, ...] = ()
    text: str | None = None
    """The run file's text instead of the good one with a change."""
    words: tuple[str, ...] = ()
    """Further words of the command line."""
    torch_free: bool = False


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both and "class_path" not in value else value
    return merged


def args(**given: Any) -> dict[str, Any]:
    return {"args": given}


def model(**given: Any) -> dict[str, Any]:
    return {"model": given}


def train(class_path: str, **init_args: Any) -> dict[str, Any]:
    return {"data": {"train": {"class_path": class_path, "init_args": init_args}}}


RUN_FILES = [
    # Unknown keys, with the nearest.
    Case("key", {"modle": {}}, ("modle", "did you mean 'model'"), torch_free=True),
    Case("key of args", args(max_step=3), ("max_step", "did you mean", "max_steps")),
    Case("args key at the top", {"max_steps": 3}, ("max_steps", "args.max_steps")),
    Case("key of data", {"data": {"trian": {}}}, ("data.trian", "'train'")),
    Case("key of the model", model(hidden_sise=8), ("hidden_sise", "hidden_size")),
    Case("argument of a dataset", train("SyntheticDataset", num_sample=3), ("num_sample",)),
    Case(
        "key of a component", {"optimizer": {"class_path": "SGD", "args": {}}}, ("optimizer.args",)
    ),
    Case("key of a group", {"optimizer_groups": {"a": {"regx": "x"}}}, ("regx", "regex")),
    # Wrong types.
    Case("text for a number", args(max_steps="many"), ("max_steps", "must be int", "'many'")),
    Case("quoted number", args(max_steps="3"), ("max_steps", "without quotes")),
    Case("fraction for a count", args(max_steps=1.5), ("max_steps", "must be int", "1.5")),
    Case("text for a switch", args(use_cpu="yes"), ("use_cpu", "must be bool", "'yes'")),
    Case("list for args", {"args": [1]}, ("args", "mapping")),
    Case("text for data", {"data": "train.hwt"}, ("data", "train.hwt")),
    Case("number for a tokenizer", {"tokenizer": 7}, ("tokenizer", "7")),
    Case("text for callbacks", {"callbacks": "all"}, ("callbacks", "'all'")),
    Case("model size as text", model(hidden_size="big"), ("hidden_size", "'big'")),
    Case("no model", {"model": None}, ("model", "missing")),
    # Values out of range.
    Case("negative batch", args(per_device_train_batch_size=-1), ("per_device_train_batch_size",)),
    Case("no accumulation", args(gradient_accumulation_steps=0), ("gradient_accumulation_steps",)),
    Case("steps of 0", args(save_steps=0), ("save_steps", "0")),
    Case("negative learning rate", args(learning_rate=-0.1), ("learning_rate",)),
    Case("beta of 1", args(adam_beta2=1.0), ("adam_beta2",)),
    Case("heads do not divide", model(num_heads=3), ("hidden_size", "num_heads")),
    Case("kv heads do not divide", model(num_kv_heads=3), ("num_kv_heads",)),
    Case("attention kernel", model(attention="sdap"), ("attention", "did you mean 'sdpa'")),
    Case("strategy", args(save_strategy="step"), ("save_strategy", "did you mean 'steps'")),
    Case("nonfinite action", args(nonfinite_action="skipp"), ("nonfinite_action", "'skip'")),
    Case("device", args(device="gpu", use_cpu=False), ("device", "gpu")),
    Case("dtype", args(default_dtype="float8"), ("default_dtype", "float8")),
    # Durations and schedules.
    Case("duration's unit", args(save_every="5 stepps"), ("save_every", "stepps", "step")),
    Case("bare 2B", {"args": {**GOOD["args"], "train_for": "2B"}}, ("train_for", "2B")),
    Case("duration of nothing", args(eval_every="0 steps"), ("eval_every",)),
    Case(
        "schedule", args(lr_scheduler_type="cosin"), ("lr_scheduler_type", "did you mean 'cosine'")
    ),
    Case(
        "option of a schedule",
        args(lr_scheduler_type="cosine", lr_scheduler_kwargs={"min_ration": 0.1}),
        ("lr_scheduler_kwargs", "min_ratio"),
    ),
    Case("warm-up longer than the run", args(warmup_steps=5), ("warmup_steps=5", "1 steps")),
    # Impossible combinations.
    Case(
        "two ways to set the batch",
        args(global_batch_size=8, global_batch_tokens=64),
        ("global_batch_size", "global_batch_tokens"),
    ),
    Case(
        "batch that does not divide",
        args(global_batch_size=7, per_device_train_batch_size=2),
        ("global_batch_size", "multiple of", "7"),
    ),
    Case("every and steps", args(save_every=5, save_steps=7), ("save_every", "save_steps")),
    Case("evaluation without data", args(eval_strategy="steps"), ("data.eval", "eval_strategy")),
    Case("best model without evaluation", args(load_best_model_at_end=True), ("eval_strategy",)),
    Case("pickled weights", args(save_safetensors=False), ("save_safetensors", "convert")),
    Case("unknown trainer", {"trainer": "dpp"}, ("trainer", "did you mean 'ddp'")),
    Case("pipeline of one", {"trainer": "pipeline"}, ("PipelineTrainer", "two ranks", "--nproc 2")),
    Case("unknown tracker", args(report_to=["wandbb"]), ("report_to", "did you mean 'wandb'")),
    # Components.
    Case("unknown class", train("TokenDatset"), ("TokenDatset", "did you mean 'TokenDataset'")),
    Case("unknown module", {"model": {"class_path": "no.such.Model"}}, ("no.such.Model",)),
    Case(
        "unknown name in a module",
        {"optimizer": {"class_path": "torch.optim.AdamWW"}},
        ("AdamWW", "did you mean 'AdamW'"),
    ),
    Case("no class path", {"optimizer": {"init_args": {"lr": 1}}}, ("optimizer", "class_path")),
    Case("required argument", train("TokenDataset", paths="x"), ("sequence_length",)),
    Case(
        "model that is no module", {"model": {"class_path": "json.JSONDecoder"}}, ("JSONDecoder",)
    ),
    Case(
        "misspelt callback",
        {"callbacks": ["ProgresCallback"]},
        ("did you mean 'ProgressCallback'",),
    ),
    Case(
        "broken pattern",
        {"optimizer_groups": {"a": {"regex": "(", "config": {}}}},
        ("optimizer_groups.a", "("),
    ),
    Case(
        "settings of a group",
        {"optimizer_groups": {"a": {"regex": "norm", "config": {"lr": "fast", "betas": [0.5]}}}},
        (
            "run.yaml:1: optimizer_groups.a.config.lr: must be a number, 0 or more, got 'fast'",
            "optimizer_groups.a.config.betas: must be a list of 2 numbers",
        ),
        torch_free=True,
    ),
    Case(
        "setting of a group that its optimizer has not",
        {"optimizer_groups": {"a": {"regex": "norm", "config": {"wieght_decay": 0.1}}}},
        ("optimizer_groups.a.config", "did you mean 'weight_decay'"),
    ),
    # Data.
    Case("no data", {"data": {"train": None}}, ("data.train", "missing")),
    Case(
        "missing token file", train("TokenDataset", paths="no.hwt", sequence_length=8), ("no.hwt",)
    ),
    Case("missing text", train("TextDataset", files="no.txt", sequence_length=8), ("no.txt",)),
    Case("empty text", train("TextDataset", texts=[], sequence_length=8), ("empty",)),
    Case("unknown packing", train("TextDataset", texts=["abc"], packing="gredy"), ("greedy",)),
    Case("unknown tokenizer", {"tokenizer": "byts"}, ("tokenizer", "bytes")),
    Case(
        "vocabulary too small",
        model(vocab_size=100),
        ("run.yaml:1: data.train: ", "token id 257", "vocab_size >= 258"),
    ),
    Case("sequence too long", model(max_seq_len=8), ("data.train: ", "16", "8")),
    Case("output below a file", args(output_dir="run.yaml/out"), ("output_dir", "run.yaml")),
    Case("checkpoint that is not there", words=("--resume", "no-such"), says=("no-such",)),
    # YAML and files.
    Case("not YAML", text="model: [1\nargs: {", says=("run.yaml", "not valid YAML")),
    Case("key given twice", text="model: {}\nmodel: {}\n", says=("run.yaml:2", "twice")),
    Case("empty file", text="", says=("run.yaml", "empty")),
    Case("a list", text="- 1\n", says=("run.yaml:1", "mapping")),
    Case("a tag", text="model: !!python/object:os.system {}\n", says=("run.yaml:1", "not allowed")),
    Case(
        "extends itself", text="extends: run.yaml\n", says=("extend", "run.yaml"), torch_free=True
    ),
    Case("extends nothing", text="extends: base.yaml\n", says=("run.yaml:1", "base.yaml")),
    # Overrides.
    Case("override of nothing", words=("--args.max_step=3",), says=("max_step", "max_steps")),
    Case(
        "overrides that exclude each other",
        words=("--args.global_batch_tokens=512", "--args.gradient_accumulation_steps=2"),
        says=("error: command line: args.global_batch_tokens: ", "give one of them"),
    ),
    Case(
        "override against the file",
        args(global_batch_size=7),
        ("error: command line: args.per_device_train_batch_size: global_batch_size must be",),
        words=("--args.per_device_train_batch_size=2",),
    ),
    Case("override without a value", words=("--args.max_steps",), says=("--args.max_steps",)),
    Case("override that is not YAML", words=("--args.run_name={a",), says=("--args.run_name",)),
    Case("unknown switch", words=("--resum",), says=("--resum", "did you mean --resume")),
]


def write_run(case: Case, folder: Path) -> Path:
    path = folder / "run.yaml"
    text = json.dumps(merge(GOOD, case.change)) if case.text is None else case.text
    path.write_text(text)  # JSON is YAML
    return path


def check_message(code: int, out: str, err: str, says: tuple[str, ...]) -> None:
    assert code == 2, err
    assert "Traceback" not in err + out
    lines = err.splitlines()
    assert any(line.startswith("error: ") for line in lines), err
    for words in says:
        assert words in err, f"{words!r} is not in:\n{err}"


@pytest.mark.parametrize("case", RUN_FILES, ids=lambda case: case.name)
def test_train_refuses(
    case: Case,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(case, tmp_path)
    code = main(["train", "run.yaml", *case.words])
    captured = capsys.readouterr()
    check_message(code, captured.out, captured.err, case.says)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.yaml"]


def test_there_are_many_cases() -> None:
    assert len(RUN_FILES) >= 60
    assert len({case.name for case in RUN_FILES}) == len(RUN_FILES)


def test_the_good_run_file_is_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Case("good"), tmp_path)
    assert main(["-q", "train", "run.yaml"]) == 0
    assert (tmp_path / "out" / "checkpoint-1").is_dir()


@pytest.mark.parametrize(
    "case", [case for case in RUN_FILES if case.torch_free], ids=lambda case: case.name
)
def test_a_configuration_error_needs_no_torch(case: Case, tmp_path: Path) -> None:
    path = write_run(case, tmp_path)
    done = assert_no_import(["headway", "train", str(path)], returncode=2)
    check_message(done.returncode, done.stdout, done.stderr, case.says)


def test_plain_values_are_checked_without_a_parser(tmp_path: Path) -> None:
    # It costs a third of the time in which a mistake is told.
    data = train("TextDataset", texts="abc", sequence_length=8, eos=False)
    path = write_run(Case("", {**data, **args(max_step=3)}), tmp_path)
    done = assert_no_import(["headway", "train", str(path)], "jsonargparse", returncode=2)
    check_message(done.returncode, done.stdout, done.stderr, ("max_step",))


def test_all_mistakes_are_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(
        Case("", {"modle": {}, "args": {"max_step": 3, "learning_rate": -1.0}, "trainer": "dpp"}),
        tmp_path,
    )
    assert main(["train", "run.yaml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and all(line.startswith("error: ") for line in lines)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (
            ["generate", "d", "--prompt=", "--temperature=0", "--top-k=-1", "--top-p=2",
             "--max-new-tokens=0", f"--seed={2**64}"],
            ("--prompt", "--max-new-tokens", "--temperature", "--top-k", "--top-p", "--seed"),
        ),
        (["finalize", "d", "e", "--dtype=int", "--group-size=8", "--all-layers"],
         ("--dtype", "--group-size", "--all-layers")),
        (["plot-lr", "run.yaml", "--nproc=0", "--steps=0", "--output=a.pdf"],
         ("--nproc", "--steps", "--output")),
        (["finalize", "d", "e", "--quantize=int", "--keep-optimizer"],
         ("--quantize", "--keep-optimizer")),
        (["bench", "--systems", "bar", "--steps=15", "--rounds=0", "--modes", "eagr"],
         ("--systems", "--steps", "--rounds", "--modes")),
    ],
)  # fmt: skip
def test_all_mistakes_of_options_are_told_at_once(
    words: list[str], names: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(names)
    for line, name in zip(lines, names):
        assert line.startswith("error: ") and name in line


# Other verbs.

COMMANDS: list[tuple[str, list[str], tuple[str, ...]]] = [
    ("unknown verb", ["trian"], ("trian", "did you mean 'train'")),
    ("no run file named", ["train"], ("CONFIG", "headway train --help")),
    ("run file missing", ["train", "no.yaml"], ("no.yaml", "no such file")),
    ("run file is a folder", ["check", "folder"], ("folder", "YAML file")),
    ("unknown option of the top", ["--verbos", "train"], ("--verbos",)),
    ("check of nothing", ["check", "no.yaml", "--json"], ("no.yaml",)),
    ("generate without a prompt", ["generate", "folder"], ("--prompt",)),
    ("generate, empty prompt", ["generate", "folder", "--prompt", ""], ("--prompt",)),
    ("generate from nowhere", ["generate", "no-dir", "--prompt", "a"], ("no-dir", "exist")),
    ("generate from a file", ["generate", "bad.hwt", "--prompt", "a"], ("bad.hwt", "file")),
    ("generate, no model", ["generate", "folder", "--prompt", "a"], ("folder", "no model")),
    ("generate, misspelt", ["generate", "d", "--prompt", "a", "--top_k=3"], ("--top-k",)),
    ("generate, text", ["generate", "d", "--prompt", "a", "--seed", "x"], ("--seed", "'x'")),
    ("eval without data", ["eval", "folder"], ("--data",)),
    ("eval from nowhere", ["eval", "no-dir", "--data", "text.txt"], ("no-dir",)),
    ("eval, batch of 0", ["eval", "d", "--data", "t", "--batch-size=0"], ("--batch-size",)),
    ("data without a verb", ["data"], ("prepare", "inspect")),
    ("data, unknown verb", ["data", "prepar"], ("prepar",)),
    ("prepare nothing", ["data", "prepare", "no.txt", "-o", "o.hwt"], ("no.txt", "exist")),
    ("prepare nowhere", ["data", "prepare", "text.txt"], ("-o", "--output")),
    ("prepare, tokenizer", ["data", "prepare", "text.txt", "-o", "o.hwt", "--tokenizer=byts"],
     ("byts", "bytes")),
    ("prepare, format", ["data", "prepare", "text.txt", "-o", "o.hwt", "--format=json"],
     ("format", "jsonl")),
    ("prepare, key", ["data", "prepare", "a.jsonl", "-o", "o.hwt", "--text-key=body"],
     ("a.jsonl:1", "body", "text")),
    ("prepare, not JSON", ["data", "prepare", "bad.jsonl", "-o", "o.hwt"], ("bad.jsonl:1",)),
    ("prepare, empty", ["data", "prepare", "empty.txt", "-o", "o.hwt"], ("empty",)),
    ("prepare below a file", ["data", "prepare", "text.txt", "-o", "text.txt/o.hwt"],
     ("text.txt",)),
    ("inspect nothing", ["data", "inspect", "no.hwt"], ("no.hwt", "exist")),
    ("inspect a broken file", ["data", "inspect", "bad.hwt"], ("bad.hwt",)),
    ("inspect a cut file", ["data", "inspect", "cut.hwt"], ("cut.hwt",)),
    ("explain nothing", ["explain", "max_stepz"], ("max_stepz", "max_steps")),
    ("demo of no steps", ["demo", "--steps=0"], ("--steps",)),
    ("demo in a folder of others", ["demo", "--output=folder", "--steps=1"], ("folder", "demo")),
    ("demo in a file", ["demo", "--output=text.txt", "--steps=1"], ("text.txt",)),
]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files the commands name, most of them unusable."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    (tmp_path / "text.txt").write_text("some text")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "bad.jsonl").write_text("{]\n")
    (tmp_path / "bad.hwt").write_bytes(b"no token file at all, only text")
    assert main(["-q", "data", "prepare", "text.txt", "-o", "good.hwt"]) == 0
    whole = (tmp_path / "good.hwt").read_bytes()
    (tmp_path / "cut.hwt").write_bytes(whole[:-20])
    return tmp_path


@pytest.mark.parametrize(("name", "words", "says"), COMMANDS, ids=[c[0] for c in COMMANDS])
def test_command_refuses(
    name: str,
    words: list[str],
    says: tuple[str, ...],
    place: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = sorted(path.relative_to(place) for path in place.rglob("*"))
    capsys.readouterr()
    code = main(words)
    captured = capsys.readouterr()
    check_message(code, captured.out, captured.err, says)
    assert captured.out == ""
    assert sorted(path.relative_to(place) for path in place.rglob("*")) == before


def test_a_damaged_token_file_is_found_by_its_digest(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = bytearray((place / "good.hwt").read_bytes())
    raw[4096] ^= 1  # the first token
    (place / "flip.hwt").write_bytes(raw)
    assert main(["data", "inspect", "flip.hwt", "--verify"]) == 2
    assert "flip.hwt" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["train", "check"])
def test_a_damaged_token_file_is_not_trained_on(
    verb: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = bytearray((place / "good.hwt").read_bytes())
    raw[4096] ^= 1
    (place / "flip.hwt").write_bytes(raw)
    write_run(Case("", train("TokenDataset", paths="flip.hwt", sequence_length=4)), place)
    before = sorted(place.rglob("*"))
    code = main([verb, "run.yaml"])
    captured = capsys.readouterr()
    check_message(code, captured.out, captured.err, ("data.train", "flip.hwt", "digest"))
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize("words", [["explain", "max_stepz"], ["trian"], ["train", "no.yaml"]])
def test_a_mistake_in_a_process_of_its_own(words: list[str], tmp_path: Path) -> None:
    done = assert_no_import(["headway", *words], returncode=2, cwd=tmp_path)
    check_message(done.returncode, done.stdout, done.stderr, (words[-1],))


def test_python_dash_m_is_the_same_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headway", "train", "no.yaml"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    check_message(done.returncode, done.stdout, done.stderr, ("no.yaml",))


# The Python API.


class NoLoss(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, Any]:
        return {"hidden": self.layer(input_ids[:, :2].float())}


class Misspelt(TrainerCallback):
    def on_step_ends(self, args: Any, state: Any, control: Any) -> None: ...


class Frozen(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.requires_grad_(False)


def trainer(folder: Path, **given: Any) -> Trainer:
    settings = {"output_dir": str(folder / "out"), "max_steps": 1, "use_cpu": True}
    settings |= given.pop("settings", {})
    given.setdefault("model", tiny_decoder())
    given.setdefault("train_dataset", tiny_dataset(4))
    return Trainer(args=settings, default_callbacks=False, **given)


def ids(*values: int) -> list[dict[str, list[int]]]:
    return [{"input_ids": list(values), "labels": list(values)}]


API: list[tuple[str, Callable[[Path], Any], tuple[str, ...]]] = [
    ("model without a loss", lambda p: trainer(p, model=NoLoss()).train(), ("NoLoss", "no loss")),
    ("misspelt hook", lambda p: trainer(p, callbacks=[Misspelt()]),
     ("on_step_ends", "'on_step_end'")),
    ("no model", lambda p: Trainer(args={"use_cpu": True}), ("model", "model_init")),
    ("no data", lambda p: trainer(p, train_dataset=None).train(), ("train_dataset",)),
    ("empty data", lambda p: trainer(p, train_dataset=[]).train(), ("empty",)),
    ("id above the vocabulary", lambda p: trainer(p, train_dataset=ids(1, 300)).train(),
     ("train_dataset", "300", "257")),
    ("negative id", lambda p: trainer(p, train_dataset=ids(1, -5)).train(), ("-5",)),
    ("sequence too long", lambda p: trainer(p, train_dataset=ids(*range(200))).train(),
     ("200", "128")),
    ("no evaluation data", lambda p: trainer(p, settings={"eval_strategy": "epoch"}).train(),
     ("eval_dataset",)),
    ("evaluate without data", lambda p: trainer(p).evaluate(), ("eval_dataset",)),
    ("unknown option", lambda p: trainer(p, settings={"max_stps": 1}), ("max_stps", "max_steps")),
    ("wrong type", lambda p: TrainingArguments(max_steps="3"), ("max_steps",)),
    ("model is no module", lambda p: trainer(p, model_init=dict, model=None).train(), ("dict",)),
    ("no gradient", lambda p: trainer(p, model=Frozen()).train(), ("Frozen", "gradient")),
    ("checkpoint elsewhere", lambda p: trainer(p).train(resume_from_checkpoint="nowhere"),
     ("nowhere",)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "act", "says"), API, ids=[case[0] for case in API])
def test_the_api_refuses(
    name: str, act: Callable[[Path], Any], says: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        act(tmp_path)
    for words in says:
        assert words in str(error.value)
    assert not list(tmp_path.glob("out/checkpoint-*"))
