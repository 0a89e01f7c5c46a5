"""The command line from text to a trained model: prepare, check, train, generate, eval."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.cli.main import VERBS, main
from headway.testing import assert_no_import, tiny_text_files

ROOT = Path(__file__).resolve().parents[2]

RUN = """\
model: {vocab_size: 258, hidden_size: 32, num_layers: 2, num_heads: 4, max_seq_len: 64,
        eos_token_id: 256}
tokenizer: bytes
data:
  train:
    class_path: TokenDataset
    init_args: {paths: train.hwt, sequence_length: 32}
  eval:
    class_path: TextDataset
    init_args: {files: held-out.txt, sequence_length: 32}
args:
  output_dir: out
  seed: 1
  use_cpu: true
  max_steps: 30
  learning_rate: 1.0e-2
  per_device_train_batch_size: 8
  logging_steps: 10
  eval_strategy: steps
  eval_steps: 15
  save_steps: 15
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, a token file, a run file and what training it left."""
    folder = tmp_path_factory.mktemp("cli")
    files = tiny_text_files(folder / "text", num_files=4)
    files[-1].rename(folder / "held-out.txt")
    (folder / "run.yaml").write_text(RUN)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["data", "prepare", "text", "-o", "train.hwt"]) == 0
        assert main(["train", "run.yaml"]) == 0
    return folder


@pytest.fixture
def here(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained)
    return trained


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """Run a command with --json and read what it prints, which must be JSON and nothing else."""
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_training_leaves_checkpoints_logs_and_a_snapshot(here: Path) -> None:
    names = {path.name for path in (here / "out").iterdir()}
    assert {"checkpoint-15", "checkpoint-30", "trainer_logs.jsonl", "run"} <= names
    records = [json.loads(line) for line in (here / "out/trainer_logs.jsonl").open()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[-1] < losses[0]
    stored = json.loads((here / "out/checkpoint-30/run/config.json").read_text())
    assert stored["args"]["max_steps"] == 30


def test_train_says_where_the_result_is_and_results_go_to_stdout(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "run.yaml", "--args.output_dir=other", "--args.max_steps=2"]) == 0
    captured = capsys.readouterr()
    assert "checkpoint: " in captured.out and "other/checkpoint-2" in captured.out
    assert "headway generate other" in captured.out
    assert "loss" not in captured.out.replace("mean loss", "")
    assert "step 2/2" in captured.err


def test_quiet_training_says_nothing_on_stderr(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--args.output_dir=quiet", "--args.max_steps=1"]
    assert main(["train", "run.yaml", "-q", *words]) == 0
    assert capsys.readouterr().err == ""


def test_a_second_run_goes_on_and_no_resume_does_not(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "run.yaml", "--args.output_dir=again", "--args.save_steps=2"]
    assert main([*words, "--args.stop_at=2"]) == 0
    assert "stopped at step 2 by stop_at" in capsys.readouterr().out
    assert main([*words, "--args.max_steps=4"]) == 0
    captured = capsys.readouterr()
    assert "resuming from" in captured.err and "start_step: 2" in captured.err
    log = here / "again" / "trainer_logs.jsonl"
    before = log.read_text()
    assert '"summary"' in before.splitlines()[-1]
    assert main([*words, "--args.max_steps=4"]) == 0
    assert "nothing left to do" in capsys.readouterr().out
    assert log.read_text() == before, "the log of a complete run keeps its summary"
    assert main([*words, "--no-resume"]) == 2
    assert "overwrite_output_dir" in capsys.readouterr().err
    checkpoint = str(here / "again" / "checkpoint-2")
    assert main([*words, "--args.max_steps=3", "--resume", checkpoint]) == 0
    assert "checkpoint-2" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["out", "out/checkpoint-15", "model"])
def test_generate_from_every_kind_of_folder(
    folder: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if folder == "model":
        from headway.data import ByteTokenizer
        from headway.models import load_pretrained, save_pretrained

        model = load_pretrained(here / "out/checkpoint-30")
        save_pretrained(model, here / "run2/model", tokenizer=ByteTokenizer())
        folder = "run2"
    words = ["generate", folder, "--prompt", "the boat ", "--max-new-tokens=12", "--seed=3"]
    first = ask(capsys, *words)
    assert first["text"].startswith("the boat ") and len(first["new_tokens"]) <= 12
    assert ask(capsys, *words) == first
    assert main(words) == 0
    assert capsys.readouterr().out == first["text"] + "\n"


def test_generate_ends_where_the_model_or_the_tokenizer_says(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from headway.data import ByteTokenizer
    from headway.models import load_pretrained, save_pretrained

    words = ["--prompt", "the boat ", "--max-new-tokens=12", "--greedy"]
    free = ask(capsys, "generate", "out/checkpoint-30", *words)["new_tokens"]
    assert len(free) == 12
    model = load_pretrained(here / "out/checkpoint-30")
    model.config.eos_token_id = [255, free[3]]
    save_pretrained(model, here / "two_ends", tokenizer=ByteTokenizer())
    ended = ask(capsys, "generate", "two_ends", *words)["new_tokens"]
    assert ended == free[: free.index(free[3]) + 1]


def test_greedy_is_one_answer_and_sampling_is_not(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "out", "--prompt", "a", "--max-new-tokens=16"]
    greedy = {ask(capsys, *words, "--greedy")["text"] for _ in range(2)}
    drawn = {ask(capsys, *words, f"--seed={seed}")["text"] for seed in range(4)}
    assert len(greedy) == 1 and len(drawn) > 1


def test_generate_refuses_a_prompt_that_leaves_no_room(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "out", "--prompt", "x" * 60, "--max-new-tokens=10"]) == 2
    assert "max_seq_len=64" in capsys.readouterr().err


def test_eval_gives_the_loss_by_hand(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from headway.models import load_pretrained

    facts = ask(capsys, "eval", "out", "--data", "held-out.txt", "--sequence-length=32")
    raw = (here / "held-out.txt").read_bytes()
    model = load_pretrained(here / "out/checkpoint-30").eval()
    ids = torch.tensor([*raw, 256])
    total, count = 0.0, 0
    with torch.no_grad():
        for piece in ids.split(32):
            logits = model(piece[None]).logits[0, :-1]
            total += torch.nn.functional.cross_entropy(logits, piece[1:], reduction="sum").item()
            count += len(piece) - 1
    assert facts["loss"] == pytest.approx(total / count, rel=1e-5)
    assert facts["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
    per_byte = total / count / math.log(2) * len(ids) / len(raw)
    assert facts["bits_per_byte"] == pytest.approx(per_byte, rel=1e-5)
    assert facts["bits_per_byte"] < 7


def test_eval_agrees_between_text_and_token_files(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-q", "data", "prepare", "held-out.txt", "-o", "held-out.hwt"]) == 0
    from_text = ask(capsys, "eval", "out", "--data", "held-out.txt")
    from_tokens = ask(capsys, "eval", "out", "--data", "held-out.hwt")
    for name in ("loss", "bits_per_byte", "tokens"):
        assert from_text[name] == pytest.approx(from_tokens[name])
    part = ask(capsys, "eval", "out", "--data", "held-out.hwt", "--max-batches=1")
    assert part["loss"] != from_tokens["loss"]


def test_eval_scores_tasks(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = {"prompt": "1", "choices": ["0", "x"], "answer": 0}
    (here / "mine.jsonl").write_text(json.dumps(line))
    facts = ask(capsys, "eval", "out", "--tasks", "mine.jsonl", "opposites")
    assert "loss" not in facts and facts["tasks"]["mine (accuracy)"] in (0, 1)
    assert 0 <= facts["tasks"]["opposites (length-normalized accuracy)"] <= 1
    both = ask(capsys, "eval", "out", "--data", "held-out.txt", "--tasks", "mine.jsonl")
    assert both["loss"] > 0
    assert both["tasks"].items() <= facts["tasks"].items()


def test_eval_reads_jsonl(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (here / "held-out.txt").read_text()
    (here / "held-out.jsonl").write_text(json.dumps({"text": text}) + "\n")
    facts = ask(capsys, "eval", "out", "--data", "held-out.jsonl")
    assert facts["loss"] == pytest.approx(
        ask(capsys, "eval", "out", "--data", "held-out.txt")["loss"]
    )


def test_inspect_tells_what_prepare_wrote(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = ask(capsys, "data", "inspect", "train.hwt", "--verify")
    texts = [path.read_bytes() for path in sorted((here / "text").iterdir())]
    assert facts["num_documents"] == len(texts)
    assert facts["num_tokens"] == sum(map(len, texts)) + len(texts)
    assert facts["samples"][0]["text"].encode() in texts[0]
    assert main(["data", "inspect", "train.hwt"]) == 0
    assert "tokens" in capsys.readouterr().out


def test_check_tells_the_run_without_doing_it(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["check", "run.yaml", "--args.output_dir=unborn", "--args.max_steps=40"]
    facts = ask(capsys, *words)
    assert facts["steps"] == 40 and facts["tokens_per_step"] == 8 * 32
    epochs, rest = divmod(40, facts["steps_per_epoch"])
    samples = epochs * facts["train_samples"] + rest * 8  # the last step of an epoch is smaller
    assert facts["tokens"] == pytest.approx(samples * 32, rel=0.01)
    weights = (here / "out/checkpoint-30").glob("model-*.safetensors")
    assert facts["memory"]["weights_bytes"] == pytest.approx(
        sum(path.stat().st_size for path in weights), rel=0.05
    )
    written = [*(here / "out/checkpoint-30").glob("*.safetensors")]
    assert facts["checkpoint_bytes"] == pytest.approx(
        sum(path.stat().st_size for path in written), rel=0.05
    )
    assert facts["memory"]["total_bytes"] > facts["memory"]["weights_bytes"]
    first = (here / "text/text-0.txt").read_text()
    assert first.startswith(facts["first_sample"]["text"])
    assert not (here / "unborn").exists()
    assert main(words) == 0
    assert "40 (" in capsys.readouterr().out


def test_check_allocates_no_weights(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Two thousand billion parameters: only the meta device has room for them.
    words = ["--model.hidden_size=65536", "--model.num_layers=48", "--model.num_heads=64"]
    facts = ask(capsys, "check", "run.yaml", *words)
    assert facts["parameters"] > 10**12
    assert facts["checkpoint_bytes"] == pytest.approx(facts["parameters"] * 12, rel=0.01)


def test_check_counts_any_optimizer_and_any_model(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = ask(capsys, "check", "run.yaml", "--optimizer=SGD")
    assert facts["memory"]["optimizer_bytes"] == 0
    (here / "own_model.py").write_text(
        "import torch\n"
        "class Own(torch.nn.Module):\n"
        "    def __init__(self, width: int = 4):\n"
        "        super().__init__()\n"
        "        self.table = torch.nn.Embedding(258, width)\n"
        "        self.head = torch.nn.Linear(width, 258)\n"
        "    def forward(self, input_ids):\n"
        "        return self.head(self.table(input_ids))\n"
    )
    words = ["--model={class_path: own_model.Own, init_args: {width: 8}}"]
    facts = ask(capsys, "check", "run.yaml", *words)
    assert facts["parameters"] == 258 * 8 * 2 + 258
    assert facts["memory"]["activations_bytes"] is None
    words += ["--args.output_dir=own", "--args.max_steps=2", "--args.save_steps=2"]
    assert main(["-q", "train", "run.yaml", *words]) == 0
    loaded = ask(capsys, "generate", "own", "--prompt=ab", "--max-new-tokens=4", "--seed=1")
    assert len(loaded["new_tokens"]) <= 4


def test_check_agrees_with_the_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = ask(capsys, "check", "run.yaml", "--args.train_for=1 epochs", "--args.max_steps=-1")
    assert facts["steps"] == facts["steps_per_epoch"]
    words = ["--args.train_for=1 epochs", "--args.max_steps=-1", "--args.output_dir=epoch"]
    assert main(["train", "run.yaml", *words]) == 0
    assert f"trained {facts['steps']} steps" in capsys.readouterr().out


def test_doctor_tells_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    facts = ask(capsys, "doctor")
    assert facts["packages"]["torch"] == torch.__version__ and facts["problems"] == []
    assert main(["doctor"]) == 0
    assert "ready to train" in capsys.readouterr().out


def test_doctor_finds_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["doctor"]) == 1
    assert "unset WORLD_SIZE" in capsys.readouterr().out


def test_an_error_that_is_not_the_users_shows_its_traceback(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def explode(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("headway.data.text.inspect_tokens", explode)
    assert main(["data", "inspect", "train.hwt"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_told_without_a_traceback(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "run.yaml", "--args.output_dir=hurt", "--args.max_steps=2"]
    assert main(["-q", *words]) == 0
    shard = next((here / "hurt/checkpoint-2").glob("model-*.safetensors"))
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    capsys.readouterr()
    resume = ["--args.max_steps=3", "--resume", str(shard.parent)]
    assert main([*words[:-1], *resume]) == 1
    err = capsys.readouterr().err
    assert "Traceback" not in err and shard.name in err and "error: " in err
    assert main(["generate", "hurt", "--prompt", "a"]) == 1
    err = capsys.readouterr().err
    assert shard.name in err and "which are whole: headway checkpoint verify " in err


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_recipe_checks(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    facts = ask(capsys, "check", str(path))
    assert facts["steps"] and facts["tokens"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["decoder-124m-1gpu", "decoder-1b-h200"])
def test_a_recipe_for_a_gpu_trains_small(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All its options go together, in another size and without the compiler's kernels."""
    monkeypatch.chdir(tmp_path)
    shape = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48}
    shape |= {"num_kv_heads": 2, "vocab_size": 96, "max_seq_len": 32}
    words = [f"--model.{key}={value}" for key, value in shape.items()]
    words += [f"--data.train.init_args.{key}=32" for key in ("sequence_length", "vocab_size")]
    # Two micro-batches a step in both.
    batch = 2 * 32 * (32 if "124m" in name else 8)
    words += [f"--args.global_batch_tokens={batch}", f"--args.train_for={2 * batch} tokens"]
    words += ["--args.warmup_steps=1", "--args.torch_compile_backend=eager"]
    assert main(["-q", "train", str(ROOT / f"recipes/{name}.yaml"), *words]) == 0
    facts = ask(capsys, "check", str(ROOT / f"recipes/{name}.yaml"), *words)
    assert facts["steps"] == 2
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "checkpoint-2").is_dir()


# Without torch.


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        *([verb, "--help"] for verb in VERBS),
        ["explain", "max_steps"],
        ["explain", "save_every", "--json"],
        ["schema"],
    ],
    ids=" ".join,
)
def test_answers_without_torch(words: list[str], tmp_path: Path) -> None:
    done = assert_no_import(["headway", *words], cwd=tmp_path)
    assert done.stdout and not done.stderr
    assert not list(tmp_path.iterdir())


def test_the_data_verb_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    words = ["headway", "data", "prepare", "a.txt", "-o", "a.hwt", "--json"]
    done = assert_no_import(words, cwd=tmp_path)
    assert json.loads(done.stdout)["num_tokens"] == 5


def test_the_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert "model" in json.loads(capsys.readouterr().out)["properties"]


def test_without_a_verb_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(verb in out for verb in VERBS)


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "--prompt", "a", "--greedy", "--max-new-tokens=1"],
        ["eval", "--data", "train.hwt"],
    ],
)
def test_a_changed_weight_is_found_before_a_model_is_used(
    words: list[str], here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoint-30"
    shutil.copytree(here / "out/checkpoint-30", folder)
    assert main([words[0], str(folder), *words[1:]]) == 0
    file = next(folder.glob("model-*.safetensors"))
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)
    capsys.readouterr()
    assert main([words[0], str(folder), *words[1:]]) == 1
    captured = capsys.readouterr()
    assert file.name in captured.err and "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("model.hidden_size=64", "model: .*hidden_size was 32 and is now 64"),
        ("args.optim=sgd", "optimizer: .*args.optim was 'adamw' and is now 'sgd'"),
    ],
)
def test_a_checkpoint_of_another_model_or_optimizer_is_the_users_mistake(
    change: str, told: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted((here / "out").rglob("*"))
    assert main(["train", "run.yaml", f"--{change}"]) == 2
    captured = capsys.readouterr()
    assert re.search(told, captured.err), captured.err
    assert "args.output_dir (now 'out')" in captured.err and "Traceback" not in captured.err
    assert sorted((here / "out").rglob("*")) == before


def test_train_prints_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--args.output_dir=json", "--args.max_steps=2"]
    result = ask(capsys, "train", "run.yaml", *words)
    assert result["steps"] == 2 and result["interrupted_by"] is None
    assert Path(result["checkpoint"]).name == "checkpoint-2" and result["output_dir"] == "json"
    assert result["loss"] == pytest.approx(result["metrics"]["train_loss"])


def test_generate_without_a_temperature_names_its_own_option(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "out", "--prompt", "a", "--temperature=0", "--max-new-tokens=1"]
    assert main(words) == 2
    captured = capsys.readouterr()
    assert "--greedy" in captured.err and "do_sample" not in captured.err
    assert main([*words, "--greedy"]) == 0


def test_a_seed_that_no_generator_takes_and_data_without_text_are_told(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "out", "--prompt", "a", "--max-new-tokens=1", f"--seed={2**64}"]) == 2
    assert f"--seed: must lie in [-2^63, 2^64 - 1], got {2**64}" in capsys.readouterr().err
    assert main(["eval", "out", "--data", "held-out.txt", "--max-batches=1"]) == 0
    assert "seed" not in capsys.readouterr().err  # nothing of an evaluation is drawn
    (here / "nothing.txt").write_text("")
    assert main(["eval", "out", "--data", "nothing.txt"]) == 2
    assert "--data: there is no text in nothing.txt" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_named_with_its_option(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = "--data.train={class_path: TextDataset, init_args: {files: no, sequence_length: 8}}"
    assert main(["check", "run.yaml", data]) == 2
    assert "files: no does not exist" in capsys.readouterr().err
    assert main(["eval", "out", "--data", "no"]) == 2
    assert "--data: no does not exist" in capsys.readouterr().err
    assert main(["generate", "outt", "--prompt", "a"]) == 2
    assert "DIR: outt does not exist; did you mean 'out'?" in capsys.readouterr().err
    assert main(["generate", "s3://bucket/run", "--prompt", "a"]) == 2
    assert "DIR: s3://bucket/run is an address; fetch" in capsys.readouterr().err


def test_a_closed_stdout_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert main(["explain", "max_steps"]) == 0
