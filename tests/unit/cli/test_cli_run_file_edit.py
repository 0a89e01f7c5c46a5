"""Options are set in a run file by changing single lines."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from headway.cli.run_file_edit import set_options
from headway.errors import ConfigError

FILE = """\
# A run.
model:
  vocab_size: 258   # bytes and two more

args:
  output_dir: out   # never made
  learning_rate: 1.0e-4  # to be found

  # the length
  max_steps: 10
data: {train: null}  # none
"""


def edit(text: str, tmp_path: Path, **values: Any) -> str:
    path = tmp_path / "run.yaml"
    path.write_bytes(text.encode())
    set_options(path, {f"args.{name}": value for name, value in values.items()})
    return path.read_bytes().decode()


def test_a_value_is_replaced_and_every_other_byte_stays(tmp_path: Path) -> None:
    assert edit(FILE, tmp_path, learning_rate=0.00377) == FILE.replace("1.0e-4", "0.00377")


def test_several_values_at_once(tmp_path: Path) -> None:
    edited = edit(FILE, tmp_path, max_steps=7, learning_rate=5e-05)
    assert edited == FILE.replace("1.0e-4", "5e-05").replace("max_steps: 10", "max_steps: 7")


def test_a_new_key_goes_below_the_others(tmp_path: Path) -> None:
    edited = edit(FILE, tmp_path, warmup_steps=3)
    assert edited == FILE.replace("  max_steps: 10\n", "  max_steps: 10\n  warmup_steps: 3\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: {a: 1}\n", "model: {a: 1}\nargs:\n  max_steps: 7\n"),
        ("model: {a: 1}", "model: {a: 1}\nargs:\n  max_steps: 7\n"),
        ("args:\n  max_steps:\nb: 1\n", "args:\n  max_steps: 7\nb: 1\n"),
        ("args: {max_steps: 5, seed: 1}\n", "args: {max_steps: 7, seed: 1}\n"),
        ("args:\r\n  seed: 1\r\n", "args:\r\n  seed: 1\r\n  max_steps: 7\r\n"),
        ("args:\n    a: 1 # one\n\nb: 2\n", "args:\n    a: 1 # one\n    max_steps: 7\n\nb: 2\n"),
        ("args:\n  'max_steps': '5'\n", "args:\n  'max_steps': 7\n"),
        ("args:\n  a:\n  - 1\n  - {b: 2}\n", "args:\n  a:\n  - 1\n  - {b: 2}\n  max_steps: 7\n"),
    ],
)  # fmt: skip
def test_layouts(text: str, expected: str, tmp_path: Path) -> None:
    assert edit(text, tmp_path, max_steps=7) == expected


@pytest.mark.parametrize(
    "text",
    [
        "args: {seed: 1}\n",  # one line holds it all
        "args:\n",  # nothing below which to write
        "base: &b\n  max_steps: 5\nargs: *b\n",  # the value belongs to two places
        "args: |\n  max_steps: 5\n",
        "args:\n  max_steps: >\n    5\n",
    ],
)
def test_what_cannot_be_done_cleanly_is_refused_and_nothing_changes(
    text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"run.yaml cannot be changed.*args.max_steps: 7"):
        edit(text, tmp_path, max_steps=7)
    assert (tmp_path / "run.yaml").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_mode_and_links_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "real.yaml", tmp_path / "link.yaml"
    path.write_text(FILE)
    path.chmod(0o640)
    link.symlink_to(path)
    set_options(link, {"args.max_steps": 7})
    assert link.is_symlink() and "max_steps: 7" in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
