"""What is told about options and runs: explain, schema, the reference page, the snapshot."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from headway.args import TrainingArguments
from headway.cli import explain, schema
from headway.config import Component, RunConfig, take_snapshot, write_snapshot
from headway.config.json_schema import run_schema
from headway.config.reference import render_options
from headway.config.snapshot import redact, redact_command
from headway.errors import ConfigError

ROOT = Path(__file__).parents[3]


def run_verb(verb, *words):
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return verb.run(parser.parse_args(words))


@pytest.mark.parametrize(
    ("option", "parts"),
    [
        ("max_steps", ["type     int", "default  -1", "MinimalTrainingArguments", "   4  "]),
        ("args.mixed_precision", ["   5  ", "BaseTrainingArguments"]),
        ("args.report_to", ["list of str or str", "  H53  "]),
        ("args.seed", ["type     int"]),
        ("ddp.bucket_cap_mb", ["int or None", "DDPArguments", "default  None"]),
        ("dispatch_batches", ["DDPTrainingArguments, FSDP2TrainingArguments"]),
        ("data.train", ["DataConfig"]),
        ("model", ["(required)"]),
        ("model.num_layers", ["decoder blocks", "type     int", "DecoderConfig"]),
        ("model.init_args.num_kv_heads", ["int or None", "default  None", "grouped-query"]),
    ],
)
def test_explain(capsys, option, parts):
    assert run_verb(explain, option) == 0
    text = capsys.readouterr().out
    for part in parts:
        assert part in text
    assert run_verb(explain, option, "--json") == 0
    assert json.loads(capsys.readouterr().out)["meaning"]


def test_explain_unknown():
    with pytest.raises(ConfigError, match="did you mean 'max_steps'"):
        run_verb(explain, "max_stepz")


def test_schema(capsys):
    assert run_verb(schema) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(json.dumps(run_schema()))
    assert printed["$schema"].endswith("2020-12/schema")
    assert printed["required"] == ["model"] and printed["additionalProperties"] is False
    arguments = printed["$defs"]["TrainingArguments"]["properties"]
    assert arguments["learning_rate"]["default"] == 5e-5
    assert arguments["learning_rate"]["type"] == "number"
    assert arguments["max_grad_norm"]["type"] == ["number", "null"]
    assert arguments["eval_strategy"]["enum"] == ["epoch", "no", "steps"]
    assert all(entry["description"] for entry in arguments.values())
    assert set(arguments) == set(TrainingArguments().to_dict())


def test_the_reference_page_is_current():
    assert (ROOT / "docs" / "options.md").read_text() == render_options(), (
        "write it anew: python -m headway.config.reference > docs/options.md"
    )


def test_snapshot(tmp_path):
    model = Component("Decoder", {"vocab_size": 8, "hub_token": "hf_secret", "eos_token": "</s>"})
    run = RunConfig(model=model, args=TrainingArguments(output_dir=str(tmp_path)))
    facts = take_snapshot(run, run.args, ["headway", "train", "--x.api_key=abc"])
    write_snapshot(tmp_path, facts)
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert stored == facts["config"] and environment["versions"] == facts["versions"]
    assert stored["model"]["init_args"] == {
        "vocab_size": 8,
        "hub_token": "<redacted>",
        "eos_token": "</s>",
    }
    assert stored["args"]["output_dir"] == str(tmp_path)
    assert environment["command"] == ["headway", "train", "--x.api_key=<redacted>"]
    assert environment["versions"]["torch"] and environment["hardware"]["num_cpus"] >= 1
    assert [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")] == []


def test_git_state(tmp_path):
    from headway.config.snapshot import git_state

    assert git_state(tmp_path) is None
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    (tmp_path / "file").write_text("1")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    assert git_state(tmp_path)["dirty"] is False
    (tmp_path / "file").write_text("2")
    state = git_state(tmp_path)
    assert state["dirty"] is True and len(state["commit"]) == 40


def test_arguments_hide_secrets_and_nothing_else():
    args = TrainingArguments(global_batch_tokens=512, run_name="a")
    assert args.to_dict()["global_batch_tokens"] == 512


def test_redaction():
    given = {
        "global_batch_tokens": 5,
        "tokenizer": "bytes",
        "secrets": ["a"],
        "url": "s3://u:p@h/x",
        "credentials": {"user": "a"},
        "callbacks": {
            "slack_webhook": {"class_path": "A", "init_args": {"webhook_url": "b", "name": "c"}}
        },
    }
    assert redact(given) == {
        "global_batch_tokens": 5,
        "tokenizer": "bytes",
        "secrets": ["<redacted>"],
        "url": "s3://***@h/x",
        "credentials": {"user": "<redacted>"},
        "callbacks": {  # a component's name is the user's, and hides nothing in it
            "slack_webhook": {
                "class_path": "A",
                "init_args": {"webhook_url": "<redacted>", "name": "c"},
            }
        },
    }
    assert redact_command(["--token", "abc", "x=1"]) == ["--token", "<redacted>", "x=1"]


NO_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise AssertionError("torch was imported")

sys.meta_path.insert(0, Refuse())
"""


def test_nothing_here_imports_torch(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "model: {vocab_size: 8, hidden_size: 16, num_layers: 1, num_heads: 2}\n"
        "data: {train: {class_path: TokenDataset, init_args: {pths: x}}}\n"
        "callbacks: [ProgressCallback]\n"
        "args: {max_stepz: 1}\n"
    )
    script = NO_TORCH + (
        "import argparse, pathlib\n"
        "import headway.config as config, headway.args\n"
        "[getattr(config, name) for name in config.__all__]\n"
        "from headway.cli import explain, schema\n"
        "schema.run(argparse.Namespace())\n"
        "explain.run(argparse.Namespace(option='seed', json=False))\n"
        "try:\n"
        "    config.load_run('run.yaml')\n"
        "except ValueError as error:\n"
        "    print('PROBLEMS', len(error.problems), error)\n"
        "config.write_snapshot('.', config.take_snapshot(None, headway.args.TrainingArguments()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "PROBLEMS 3" in done.stdout, done.stdout[-2000:]
