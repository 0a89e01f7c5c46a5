"""Mistakes of somebody who steers a run for the first time: what is wrong, and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.cli.main import VERBS, main

RUN = """\
model: {vocab_size: 258, hidden_size: 16, num_layers: 1, num_heads: 2, max_seq_len: 32}
data:
  train:
    class_path: SyntheticDataset
    init_args: {num_samples: 100, sequence_length: 16, vocab_size: 258}
args: {output_dir: out, use_cpu: true, max_steps: 1}
callbacks:
  control: {class_path: TrainerControlCallback, init_args: {}}
"""
CONTROL = "--callbacks.control.init_args"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["job"], "required: {status,tail,save,stop"),
        (["job", "bogus"], "error: unknown command 'bogus'. Allowed: abort, "),
        (["job", "pause"], "JOB is missing, and no job is running"),
        (["job", "pause", "nosuch"], "there is no job 'nosuch'"),
        (["job", "set-lr", "nosuch"], "neither given of RATE and --scale; allowed: one of them"),
        (["job", "set-lr", "nosuch", "--scale", "0"], "scale must be a number above 0"),
        (["job", "set-lr", "nosuch", "1", "--scale", "2"], "both given of RATE and --scale"),
        (["job", "extend", "nosuch", "--by", "soon"], "by must be a whole number at least 1"),
        (["jobs", "--bogus"], "unknown argument '--bogus'"),
        (["dashboard", "nowhere"], "RUN_DIR: nowhere does not exist"),
        (["dashboard", "--port", "99999"], "--port: must be 0 to 65535, got 99999"),
        (["train", "run.yaml", f"{CONTROL}.port=99999"], "port: 99999 given; allowed: 0 (any"),
        (["train", "run.yaml", f"{CONTROL}.prot=1"], "did you mean 'port'?"),
        (
            ["train", "run.yaml", f"{CONTROL}.host=0.0.0.0", f"{CONTROL}.disable_auth=true"],
            "allowed: a token, or a loopback address such as 127.0.0.1",
        ),
    ],
)
def test_a_mistake_is_told_and_nothing_happens(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADWAY_JOBS_DIR", str(tmp_path / "jobs"))
    (tmp_path / "run.yaml").write_text(RUN)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert told in said and said.startswith("error: ") and "Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_the_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {verb} " in said for verb in VERBS)
    assert {"jobs", "job", "dashboard"} <= set(VERBS)
