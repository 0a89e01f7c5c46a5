"""JSON files of a checkpoint: what is written is read again, and can be looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headway.checkpoint.jsonfile import encode_json, read_json

HISTORY = [{"loss": 1 / (n + 1), "text": 'a "quoted"\nline', "step": n} for n in range(500)]


@pytest.mark.parametrize(
    "value",
    [
        {"log_history": HISTORY},
        {"a": {"b": [1, {"c": "x\ny"}]}, "log_history": HISTORY, "none": None, "empty": []},
        {"log_history": HISTORY[:3], "é": "ü\u2028"},
        HISTORY,
        [],
    ],
)
def test_what_is_written_is_read_again(tmp_path: Path, value: object) -> None:
    text = encode_json(value, "state.json")
    (tmp_path / "state.json").write_bytes(text)
    assert read_json(tmp_path / "state.json") == value == json.loads(text)


def test_a_long_history_has_a_record_a_line() -> None:
    lines = encode_json({"step": 5, "log_history": HISTORY}, "state.json").decode().splitlines()
    assert lines[1] == ' "step": 5,' and lines[2] == ' "log_history": ['
    assert json.loads(lines[3].rstrip(",")) == HISTORY[0] and len(lines) == len(HISTORY) + 5


def test_a_number_that_json_has_not_is_refused_in_a_long_list_too() -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode_json({"log_history": [float("nan")] * 200}, "state.json")
