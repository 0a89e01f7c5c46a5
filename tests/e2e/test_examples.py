"""Every example runs as it stands, in an empty folder, without a network."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TIMEOUT_S = 110
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.ENCODING,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def run_example(path: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, str(path)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def count_code_lines(path: Path) -> int:
    """Lines that hold code: no blank ones, no comments, no docstring of the module."""
    with tokenize.open(path) as source:
        lines = {
            number
            for token in tokenize.generate_tokens(source.readline)
            if token.type not in _NO_CODE
            for number in range(token.start[0], token.end[0] + 1)
        }
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if ast.get_docstring(tree) is not None:
        docstring = tree.body[0]
        assert docstring.end_lineno is not None
        lines -= set(range(docstring.lineno, docstring.end_lineno + 1))
    return len(lines)


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path: Path, tmp_path: Path) -> None:
    done = run_example(path, tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_transformers_model_trains_in_eight_lines(tmp_path: Path) -> None:
    path = ROOT / "examples" / "train_transformers.py"
    assert count_code_lines(path) <= 8
    done = run_example(path, tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    loss = float(done.stdout.partition("mean loss ")[2].partition(",")[0])
    assert loss < 3.0, "an untrained model of 64 tokens has 4.16"
    saved = sorted((tmp_path / "llama").glob("checkpoint-*/model*.safetensors"))
    assert saved, "the run left no weights"


def test_code_lines_are_counted_without_comments_and_docstring(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text('"""Two\nlines."""\n\n# comment\nx = 1  # one\ny = (\n    2\n)\n')
    assert count_code_lines(path) == 4
