"""A run file becomes a `RunConfig`: the chain of `extends`, the overrides, the types.

Owns: `load_run` and the wording of its errors (file, line, key, found, allowed).
Does not own: YAML (document), rules (rules), the check of a component (components).
"""

from __future__ import annotations

import copy
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.config import arguments, components, rules
from headway.config.document import Node, merge, read_file, read_text
from headway.config.group_settings import check_setting
from headway.config.registry import DEFAULT_MODEL
from headway.config.schema import ARGUMENT_CLASSES, Component, DataConfig, RunConfig
from headway.config.typecheck import Problem, conform, field_types
from headway.errors import ConfigError, UnknownName, nearest, unknown

logger = logging.getLogger(__name__)

_COMPONENT_KEYS = ("class_path", "init_args")
_GROUP_KEYS = ("config", "factory", "regex")
_MOST_FILES = 64
COMMAND_LINE = "command line"


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file with its `extends` chain and dotted overrides; all mistakes at once."""
    files = _Files()
    root = files.read(Path(path), [])
    problems = _apply_overrides(root, overrides)
    reader = _Reader(root)
    run = reader.read_run()
    problems += [_tell(root, problem) for problem in reader.problems]
    if problems or run is None:
        raise ConfigError(problems)
    if os.environ.get("RANK", "0") == "0":  # ranks say it once
        # The precision of a run file is handed to the Accelerator, where there is one.
        for message in rules.find_warnings(run.args, skip=("mixed_precision",)):
            logger.warning("args: %s", message)
    return run


def locate_key(path: str | Path, overrides: Sequence[str], key: str) -> str | None:
    """Where a run has its dotted key, or the nearest one above it: file and line."""
    root = _Files().read(Path(path), [])
    _apply_overrides(root, overrides)
    return root.locate(key)


_PARTS = re.compile(r"(?:callbacks|data|model|tokenizer)(?:\.\w+)*(?=: )")


@contextmanager
def telling_where(path: str | Path, overrides: Sequence[str]) -> Iterator[None]:
    """Put file and line before what a part of the run is found to be wrong with when it is made."""
    try:
        yield
    except ConfigError as error:
        told = []
        for problem in error.problems:
            part = _PARTS.match(problem)
            where = part and locate_key(path, overrides, part.group())
            told.append(f"{where}: {problem}" if where else problem)
        if told == error.problems:
            raise
        raise type(error)(told) from error


def _tell(root: Node, problem: Problem) -> str:
    """The problem with its place: that of an option which was given, best on the command line."""
    given = [
        (node.where, option)
        for option in problem.options
        if (node := root.find(option)) is not None
    ]
    given.sort(key=lambda place: place[0] != COMMAND_LINE)
    where, key = given[0] if given else (None, next(iter(problem.options), ""))
    if where is None:
        where = root.locate(key) or root.where.rsplit(":", 1)[0]
    if not key:
        return f"{where}: {problem.message}"
    # Most messages open with their option, which the place already names.
    message = problem.message.removeprefix(f"{key} ")
    return f"{where}: {key}: {message.removeprefix(key.removeprefix('args.') + ' ')}"


@dataclass
class _Files:
    """Reads files and what they extend."""

    num_read: int = 0

    def read(self, path: Path, chain: list[Path]) -> Node:
        resolved = path.resolve()
        if resolved in chain:
            names = " -> ".join(str(item) for item in [*chain, resolved])
            raise ConfigError(f"{chain[-1]}: extends: the files extend each other: {names}")
        self.num_read += 1
        if self.num_read > _MOST_FILES:
            raise ConfigError(f"{path}: extends: more than {_MOST_FILES} files are read")
        node = read_file(path)
        bases = node.value.pop("extends", None)
        if bases is None or bases.value is None:
            return node
        named = bases.value if isinstance(bases.value, list) else [bases]
        merged: Node | None = None
        for item in named:
            if not isinstance(item.value, str) or not item.value.strip():
                raise ConfigError(
                    f"{item.where}: extends: must name a file or a list of files, "
                    f"got {item.plain()!r}"
                )
            base_path = path.parent / item.value
            if not base_path.exists():
                raise ConfigError(f"{item.where}: extends: no such file: {base_path}")
            base = self.read(base_path, [*chain, resolved])
            merged = base if merged is None else merge(merged, base)
        return node if merged is None else merge(merged, node)


def _apply_overrides(root: Node, overrides: Sequence[str]) -> list[str]:
    problems = []
    for given in overrides:
        text = given.removeprefix("--")
        key, equals, value = text.partition("=")
        where = f"{COMMAND_LINE}: --{key}"
        if not equals or not key:
            problems.append(f"command line: {given}: an override looks like --args.max_steps=100")
            continue
        try:
            node = read_text(value, where, where=COMMAND_LINE)
            _set(root, key.split("."), node)
        except ConfigError as error:
            problems += [f"{where}: {message}" for message in error.problems]
    return problems


def _set(root: Node, keys: list[str], value: Node) -> None:
    node = root
    for number, key in enumerate(keys):
        last = number == len(keys) - 1
        if isinstance(node.value, list):
            if not key.isdigit() or int(key) >= len(node.value):
                raise ConfigError(
                    f"{'.'.join(keys[:number])} is a list of {len(node.value)}; "
                    f"{key!r} is no index of it"
                )
            if last:
                node.value[int(key)] = value
            else:
                # Aliases share nodes: a write through one of them must not reach the others.
                node.value[int(key)] = copy.copy(node.value[int(key)])
                node = node.value[int(key)]
            continue
        if not isinstance(node.value, dict):
            node.value = {}
        if last:
            node.value[key] = value
        else:
            child = node.value.get(key)
            node.value[key] = (
                Node(_copy(child.value), child.where) if child else Node({}, value.where)
            )
            node = node.value[key]


def _copy(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, dict | list) else value


class _Reader:
    """Turns the tree into typed objects and gathers what is wrong."""

    def __init__(self, root: Node) -> None:
        self.root = root
        self.problems: list[Problem] = []

    def add(self, key: str, message: str) -> None:
        self.problems.append(Problem((key,), message))

    def read_run(self) -> RunConfig | None:
        fields = field_types(RunConfig)
        for key in self.root.value:
            if key not in fields:
                self.add(key, _unknown_key(key, list(fields)))
        trainer = self.read_trainer()
        args = self.read_args(trainer)
        model = self.read_model()
        data = self.read_data()
        values = {
            name: self.read_plain(name, fields[name])
            for name in ("tokenizer", "default_callbacks")
            if name in self.root.value
        }
        run_components = {
            name: self.read_component(name, name) for name in ("optimizer", "lr_scheduler")
        }
        groups = self.read_groups()
        callbacks = self.read_callbacks()
        if self.problems or model is None or args is None:
            self.point_elsewhere(trainer)
            return None
        return RunConfig(
            model=model,
            data=data,
            trainer=trainer,
            args=args,
            optimizer=run_components["optimizer"],
            lr_scheduler=run_components["lr_scheduler"],
            optimizer_groups=groups,
            callbacks=callbacks,
            **values,
        )

    def point_elsewhere(self, trainer: str) -> None:
        """Say of an unknown name which other section has it, where none here is near."""
        sections = {"args": list(field_types(ARGUMENT_CLASSES[trainer]))}
        for number, problem in enumerate(self.problems):
            found = problem.message
            if not isinstance(found, UnknownName) or found.nearest is not None:
                continue
            if len(sections) == 1:
                sections |= self.name_arguments()
            place = next((key for key, names in sections.items() if found.name in names), None)
            if place is not None:
                message = (
                    f"unknown {found.kind} {found.name!r}; did you mean '{place}.{found.name}'?"
                )
                self.problems[number] = Problem(problem.options, message)

    def name_arguments(self) -> dict[str, list[str]]:
        """What the classes of model and data take, under the keys where it is given."""
        found = {}
        for key, slot in (("model", "model"), ("data.train", "data"), ("data.eval", "data")):
            node = self.root.find(f"{key}.class_path") or self.root.find(key)
            given = None if node is None else node.plain()
            if key == "model" and isinstance(given, dict):
                found[key] = components.names_taken(Component(DEFAULT_MODEL, {}), slot)
            elif isinstance(given, str):
                found[f"{key}.init_args"] = components.names_taken(Component(given, {}), slot)
        return found

    def read_plain(self, key: str, annotation: Any) -> Any:
        node = self.root.value[key]
        value, problems = conform(node.plain(), annotation, key)
        self.problems += problems
        return value

    def read_trainer(self) -> str:
        node = self.root.child("trainer")
        if node is None:
            return "single"
        name = node.plain()
        if not isinstance(name, str) or name not in ARGUMENT_CLASSES:
            self.add("trainer", unknown("trainer", name, ARGUMENT_CLASSES))
            return "single"
        return name

    def read_args(self, trainer: str) -> Any:
        node = self.root.child("args")
        given = {} if node is None or node.value is None else node.plain()
        if not isinstance(given, dict):
            self.add("args", f"must be a mapping of options, got {given!r}")
            return None
        instance, problems = arguments.collect(ARGUMENT_CLASSES[trainer], given)
        for problem in problems:
            options = tuple(f"args.{option}" for option in problem.options) or ("args",)
            self.problems.append(Problem(options, problem.message))
        return instance

    def read_model(self) -> Component | None:
        node = self.root.child("model")
        if node is None or node.value is None:
            self.add("model", "missing; a run file needs a model")
            return None
        if isinstance(node.value, dict) and not set(_COMPONENT_KEYS) & set(node.value):
            component = Component(DEFAULT_MODEL, node.plain())
            for found in components.find_problems(component, "model", "model"):
                options = tuple(
                    option.replace("model.init_args", "model") for option in found.options
                )
                self.problems.append(Problem(options, found.message))
            return component
        return self.read_component("model", "model")

    def read_data(self) -> DataConfig:
        node = self.root.child("data")
        if node is None or node.value is None:
            return DataConfig()
        if not isinstance(node.value, dict):
            self.add(
                "data", f"must be a mapping with train, eval and collator, got {node.plain()!r}"
            )
            return DataConfig()
        for key in node.value:
            if key not in field_types(DataConfig):
                self.add(f"data.{key}", unknown("key", key, field_types(DataConfig)))
        return DataConfig(
            train=self.read_component("data.train", "data"),
            eval=self.read_component("data.eval", "data"),
            collator=self.read_component("data.collator", "collator"),
        )

    def read_groups(self) -> dict[str, dict[str, Any] | None] | None:
        node = self.root.child("optimizer_groups")
        groups = None if node is None else node.plain()
        if groups is not None and not isinstance(groups, dict):
            self.add("optimizer_groups", f"must be a mapping of groups, got {groups!r}")
            return None
        for name, entry in (groups or {}).items():
            if entry is not None:
                self.check_group(name, entry)
        return groups

    def check_group(self, name: str, entry: Any) -> None:
        key = f"optimizer_groups.{name}"
        if name == "__default__":
            self.add(key, "the name '__default__' is reserved")
        elif not isinstance(entry, dict):
            self.add(key, f"must be a mapping with regex and config, got {entry!r}")
        else:
            for part in entry:
                if part not in _GROUP_KEYS:
                    self.add(f"{key}.{part}", unknown("key", part, _GROUP_KEYS))
            self.read_component(f"{key}.factory", "optimizer")
            if not isinstance(entry.get("regex"), str):
                self.add(key, f"needs a regex (text), got {entry.get('regex')!r}")
            if not isinstance(entry.get("config"), dict | None):
                self.add(f"{key}.config", f"must be a mapping, got {entry['config']!r}")
                return
            for setting, value in (entry.get("config") or {}).items():
                wrong = check_setting(setting, value)
                if wrong is not None:
                    self.add(f"{key}.config.{setting}", wrong)

    def read_callbacks(self) -> list[Component] | dict[str, Component | None]:
        node = self.root.child("callbacks")
        if node is None or node.value is None:
            return []
        if isinstance(node.value, list):
            found = [
                self.read_component(f"callbacks.{number}", "callbacks")
                for number in range(len(node.value))
            ]
            return [component for component in found if component is not None]
        if isinstance(node.value, dict):
            return {
                name: self.read_component(f"callbacks.{name}", "callbacks") for name in node.value
            }
        self.add("callbacks", f"must be a list or a mapping of callbacks, got {node.plain()!r}")
        return []

    def read_component(self, key: str, slot: str) -> Component | None:
        node: Node | None = self.root
        for part in key.split("."):
            node = node.child(part) if node else None
        value = None if node is None else node.plain()
        if value is None:
            return None
        if isinstance(value, str):
            value = {"class_path": value}
        if not isinstance(value, dict):
            self.add(key, f"must be a class_path with init_args, got {value!r}")
            return None
        before = len(self.problems)
        for name in value:
            if name not in _COMPONENT_KEYS:
                self.add(f"{key}.{name}", unknown("key", name, _COMPONENT_KEYS))
        if not isinstance(value.get("class_path"), str):
            self.add(key, f"needs a class_path (text), got {value.get('class_path')!r}")
        init_args = value.get("init_args")
        if not isinstance(init_args, dict | None):
            self.add(f"{key}.init_args", f"must be a mapping of arguments, got {init_args!r}")
        if len(self.problems) > before:
            return None
        component = Component(value["class_path"], init_args or {})
        self.problems += components.find_problems(component, slot, key)
        return component


def _unknown_key(key: str, allowed: list[str]) -> str:
    hint = nearest(key, allowed)
    inner = next((cls for cls in ARGUMENT_CLASSES.values() if key in field_types(cls)), None)
    if inner is not None:
        return f"unknown key {key!r}; did you mean 'args.{key}'?"
    if hint is None:
        close = nearest(key, field_types(ARGUMENT_CLASSES["single"]))
        if close:
            return f"unknown key {key!r}; did you mean 'args.{close}'?"
    return unknown("key", key, [*allowed, "extends"])
