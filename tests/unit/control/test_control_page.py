"""What docs/control.md says of the commands is what the schema says."""

from __future__ import annotations

import re
from pathlib import Path

from headway.cli.job import COMMANDS as WORDS
from headway.control.openapi import describe
from headway.control.schema import COMMANDS
from headway.control.status import PHASES

PAGE = (Path(__file__).resolve().parents[3] / "docs/control.md").read_text()


def row(name: str) -> str:
    words = {command: word for word, command in WORDS.items()}
    fields = "<br>".join(
        f"`{key}`: {field.describe()}"
        + ("" if field.default is None else f" ({str(field.default).lower()})")
        for key, field in COMMANDS[name].fields.items()
    )
    word = f"`{words[name]}`" if name in words else ""
    return f"| `{name}` | {word} | {fields} | {COMMANDS[name].help} |"


def test_the_table_of_commands_is_that_of_the_schema():
    section = PAGE.partition("## Commands")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert rows == [row(name) for name in COMMANDS]


def test_the_phases_and_the_exit_codes_are_named():
    assert f"({', '.join(PHASES)})" in PAGE.replace("\n", " ")
    status = describe("1")["components"]["schemas"]["Status"]["properties"]["status"]
    assert status["enum"] == list(PHASES)
    codes = re.findall(r"^\| (\d) \|", PAGE, re.MULTILINE)
    assert codes == ["0", "2", "3", "4"]
