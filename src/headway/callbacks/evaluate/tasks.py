"""Tasks: questions with answers, as lines of JSON in a file.

Owns: the format, its reader, the tasks that come with Headway. Does not own: how a model is asked
(requests.py).

A line of a multiple-choice task has `prompt`, `choices` and `answer`, the number of the right
choice from 0; a line of a completion task has `prompt` and `completion`. The model is given the
prompt and asked how likely each choice, or the completion, is as what follows: texts are put
together as they are, so a choice begins with its space. Other fields are not looked at.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.errors import ConfigError, unknown

SUITE = Path(__file__).parent / "suite"
_FIELDS = {
    "multiple_choice": ("prompt", "choices", "answer"),
    "completion": ("prompt", "completion"),
}
_OPTIONS = {"choices", "answer", "completion"}


@dataclass(frozen=True)
class Item:
    """One question: what may follow the prompt, and which of it is right."""

    prompt: str
    choices: tuple[str, ...]
    answer: int
    place: str
    """File and line, for messages."""


@dataclass(frozen=True)
class Task:
    """A named list of questions of one kind: `multiple_choice` or `completion`."""

    name: str
    kind: str
    items: tuple[Item, ...]


def suite_tasks() -> dict[str, Path]:
    """The tasks that come with Headway, by name."""
    return {path.stem: path for path in sorted(SUITE.glob("*.jsonl"))}


def find_tasks(
    option: str, given: Sequence[str | os.PathLike[str]] | Mapping[str, str | os.PathLike[str]]
) -> dict[str, Path]:
    """Files of tasks by name, sorted: names of the suite, paths of files, or names with paths."""
    if isinstance(given, str) or not isinstance(given, Sequence | Mapping) or not given:
        raise ConfigError(
            f"{option}: {given!r} given; allowed: a list of names of tasks and of .jsonl files, "
            "or names with their files"
        )
    listed: Any = given.values() if isinstance(given, Mapping) else given
    for entry in listed:
        if not isinstance(entry, str | os.PathLike):
            raise ConfigError(
                f"{option}: {entry!r} given; allowed: the name of a task, or the path of its file"
            )
    own, found = suite_tasks(), {}
    entries: list[tuple[str, Any]]
    if isinstance(given, Mapping):
        entries = list(given.items())
    else:
        entries = [(Path(entry).stem, entry) for entry in given]
    for name, entry in entries:
        if name in found:
            raise ConfigError(f"{option}: two tasks have the name {name!r}; give each its own")
        path = own.get(os.fspath(entry), Path(entry))
        if path.suffix != ".jsonl" and not path.is_file():
            raise ConfigError(
                f"{option}: {unknown('task', str(entry), list(own))}, or a path to a .jsonl file"
            )
        if not path.is_file():
            raise ConfigError(f"{option}: the task file {path} does not exist")
        found[str(name)] = path
    return dict(sorted(found.items()))


def read_task(name: str, path: str | os.PathLike[str]) -> Task:
    """A task from its file; a mistake names the file and its line."""
    kind, items = None, []
    try:
        # Texts may have separators of Unicode in them, which splitlines() would take for ends.
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"task file {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"task file {path}, line {number}"
        content = _parse(line, place)
        own = _kind_of(content, place)
        if kind is not None and own != kind:
            raise ConfigError(f"{place}: it is {own}, the lines before are {kind}")
        kind = own
        items.append(_make_item(content, kind, place))
    if kind is None:
        raise ConfigError(f"task file {path} holds no item")
    return Task(name, kind, tuple(items))


def _parse(line: str, place: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{place}: must be an object, got {type(content).__name__}")
    return content


def _kind_of(content: dict[str, Any], place: str) -> str:
    has = _OPTIONS & content.keys()
    if has == {"completion"}:
        return "completion"
    if "completion" not in has and has:
        return "multiple_choice"
    raise ConfigError(
        f"{place}: needs 'choices' and 'answer', or 'completion'; it has "
        f"{', '.join(sorted(content)) or 'nothing'}"
    )


def _make_item(content: dict[str, Any], kind: str, place: str) -> Item:
    missing = [name for name in _FIELDS[kind] if name not in content]
    if missing:
        raise ConfigError(f"{place}: lacks {', '.join(map(repr, missing))}")
    prompt = content["prompt"]
    if not isinstance(prompt, str):
        raise ConfigError(f"{place}: 'prompt' must be text, got {prompt!r}")
    if kind == "completion":
        return Item(prompt, (_text(content["completion"], "completion", place),), 0, place)
    choices, answer = content["choices"], content["answer"]
    if not isinstance(choices, list) or len(choices) < 2:
        raise ConfigError(f"{place}: 'choices' must be a list of two or more texts")
    texts = tuple(_text(choice, "choices", place) for choice in choices)
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(texts):
        raise ConfigError(
            f"{place}: 'answer' must be the number of a choice, 0 to {len(texts) - 1}, got "
            f"{answer!r}"
        )
    return Item(prompt, texts, answer, place)


def _text(value: Any, field: str, place: str) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{place}: {field!r} must be text that is not empty, got {value!r}")
    return value
