"""`headway demo`, shortened: what it shows, what it leaves, and that its commands work."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.cli.demo_corpus import find_sources, is_held_out
from headway.cli.main import main


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """The folder it was started in, its figures, and what went to stderr."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch, pytest.MonkeyPatch.context() as streams:
        import io

        patch.chdir(folder)
        out, err = io.StringIO(), io.StringIO()
        streams.setattr("sys.stdout", out)
        streams.setattr("sys.stderr", err)
        assert main(["demo", "--steps", "20", "--json"]) == 0, err.getvalue()
    return folder, json.loads(out.getvalue()), err.getvalue()


def test_it_learns_and_shows_it(demo: tuple[Path, dict[str, Any], str]) -> None:
    _, facts, err = demo
    assert facts["bits_per_byte_before"] == pytest.approx(8.0, abs=0.15)
    assert facts["bits_per_byte_after"] < 5
    assert facts["sample_before"].startswith("def ") and facts["sample_after"].startswith("def ")
    assert facts["sample_before"] != facts["sample_after"]
    assert "loss" in err and "lr" in err and "tok/s" in err and "ETA" in err


def test_transformers_gives_the_same_logits(demo: tuple[Path, dict[str, Any], str]) -> None:
    transformers = pytest.importorskip("transformers")
    from headway.models import load_pretrained

    folder = demo[0] / "headway-demo" / "model"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = load_pretrained(folder).eval()
    ids = torch.tensor([list(b"def main(argv):\n    return len(argv)\n")])
    with torch.no_grad():
        expected, got = theirs(ids).logits, ours(ids).logits
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer("def main")["input_ids"] == list(b"def main")


def test_the_commands_it_prints_work(
    demo: tuple[Path, dict[str, Any], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, facts, _ = demo
    monkeypatch.chdir(folder)
    commands = [shlex.split(line) for line in facts["next"]]
    assert [words[1] for words in commands] == ["generate", "eval", "check", "train"]
    for words in commands:
        short = ["--args.stop_at=2"] if words[1] == "train" else []
        assert words[0] == "headway"
        assert main([*words[1:], *short]) == 0, capsys.readouterr().err
    assert "bits per byte" in capsys.readouterr().out
    # The file it was trained from trains on.
    run_file = "headway-demo/demo.yaml"
    assert main(["train", run_file, "--args.max_steps=21", "--args.warmup_steps=1"]) == 0
    assert "start_step: 20" in capsys.readouterr().err


def test_a_second_demo_starts_afresh(
    demo: tuple[Path, dict[str, Any], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = demo[0]
    monkeypatch.chdir(folder)
    train, held_out = find_sources()
    few = (train[:5], [path for path in held_out if path.stat().st_size < 10_000])
    monkeypatch.setattr("headway.cli.demo.find_sources", lambda: few)
    (folder / "headway-demo" / "mine.txt").write_text("keep")
    assert main(["demo", "--steps", "4"]) == 0
    out = capsys.readouterr().out
    names = {path.name for path in (folder / "headway-demo").iterdir()}
    assert "checkpoint-4" in names and "checkpoint-20" not in names and "mine.txt" in names
    assert "8.0" in out and "4 steps" in out and "try next:" in out


def test_the_corpus_is_split_by_name() -> None:
    train, held_out = find_sources()
    assert len(train) > 100 and len(held_out) >= 5
    assert not set(train) & set(held_out)
    assert not any("site-packages" in path.parts or "test" in path.parts for path in train)
    assert is_held_out("a/b.py") == is_held_out("a/b.py")


def test_an_interpreter_without_sources_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no source files"):
        find_sources(tmp_path)
