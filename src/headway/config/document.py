"""YAML with places: a file becomes a tree in which every value knows where it was written.

Owns: the safe reading of one file, the merge of two trees, dotted access.
Does not own: what the keys mean (load).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from headway.errors import ConfigError

MOST_NODES = 100_000
_SHOWN_CHARACTERS = 60
_TAG = "tag:yaml.org,2002:"


@dataclass
class Node:
    """A value and where it stands. `value` is a scalar, a list of nodes or a dict of nodes."""

    value: Any
    where: str

    def plain(self) -> Any:
        """The value without places."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value

    def child(self, key: str) -> Node | None:
        """The item under a key of a mapping or an index of a list."""
        if isinstance(self.value, dict):
            found = self.value.get(key)
            return found if isinstance(found, Node) else None
        if isinstance(self.value, list) and key.isdigit() and int(key) < len(self.value):
            item = self.value[int(key)]
            return item if isinstance(item, Node) else None
        return None

    def find(self, dotted: str) -> Node | None:
        """The node under a dotted path; None where it was not written."""
        node: Node | None = self
        for key in dotted.split("."):
            node = node.child(key) if node else None
        return node

    def locate(self, dotted: str) -> str | None:
        """Where the value under a dotted path, or its nearest written ancestor, stands."""
        node = self
        for key in dotted.split("."):
            found = node.child(key)
            if found is None:
                break
            node = found
        return None if node is self else node.where


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars: `no` is text, 5e-5 is a number, a date is text."""

    yaml_implicit_resolvers: dict[str, Any] = {}


_SCALARS = [
    ("merge", r"<<", "<"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*\.[0-9]*|[0-9][0-9_]*(?=[eE]))([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
]
for _name, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(
        _TAG + _name, re.compile(rf"^(?:{_pattern})$"), ["" if c == "\0" else c for c in _first]
    )


def read_file(path: Path, shown: str | None = None) -> Node:
    """One YAML file as a tree; the root is a mapping."""
    name = shown or str(path)
    if path.suffix == ".py" and path.is_file():
        raise ConfigError(
            f"{name}: is a Python program, and a run file is a YAML file; start it with python, or "
            "on several ranks with torchrun"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{name}: no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{name}: is a folder; a run file is a YAML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not UTF-8 text ({error.reason})") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read ({error.strerror})") from None
    root = read_text(text, name)
    if root.value is None:
        raise ConfigError(f"{name}: the file is empty; it needs at least the key 'model'")
    if not isinstance(root.value, dict):
        shown = repr(root.value)
        shown = shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[:_SHOWN_CHARACTERS]}..."
        kind = "a list" if isinstance(root.value, list) else shown
        raise ConfigError(f"{root.where}: the file must hold a mapping of keys, found {kind}")
    return root


def read_text(text: str, source: str, *, where: str | None = None) -> Node:
    """YAML text as a tree; `where` names one place for all of it (a command line)."""
    try:
        tree = yaml.compose(text, Loader=_Loader)
        builder = _Builder(source, where)
        root = builder.build(tree) if tree is not None else Node(None, where or f"{source}:1")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"{source}:{mark.line + 1}" if mark and where is None else where or source
        raise ConfigError(f"{line}: not valid YAML: {error.problem or error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where or source}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where or source}: nested too deeply") from None
    if builder.problems:
        raise ConfigError(builder.problems)
    return root


class _Builder:
    def __init__(self, source: str, where: str | None) -> None:
        self.source = source
        self.fixed = where
        self.problems: list[str] = []
        self.num_nodes = 0
        self.open: set[int] = set()

    def build(self, node: yaml.Node, where: str | None = None) -> Node:
        where = where or self.place(node)
        self.num_nodes += 1
        if self.num_nodes > MOST_NODES:
            raise ConfigError(f"{where}: more than {MOST_NODES} values (aliases repeated?)")
        if id(node) in self.open:
            raise ConfigError(f"{where}: an alias contains itself")
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
                return Node(self.build_mapping(node), where)
            if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
                return Node([self.build(item) for item in node.value], where)
            if isinstance(node, yaml.ScalarNode):
                return Node(self.build_scalar(node, where), where)
            self.refuse_tag(node, where)
            return Node(None, where)
        finally:
            self.open.discard(id(node))

    def place(self, node: yaml.Node) -> str:
        return self.fixed or f"{self.source}:{node.start_mark.line + 1}"

    def build_mapping(self, node: yaml.MappingNode) -> dict[str, Node]:
        own: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key_node, value_node in node.value:
            where = self.place(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(f"{where}: a key must be plain text")
                continue
            if key_node.tag == _TAG + "merge":
                for source in self.merge_sources(value_node):
                    merged = {**self.build_mapping(source), **merged}
                continue
            key = str(key_node.value)
            if key in own:
                first = own[key].where.removeprefix(f"{self.source}:")
                self.problems.append(
                    f"{where}: the key {key!r} is given twice (first on line {first})"
                )
            own[key] = self.build(value_node, where)
        return {**merged, **own}

    def merge_sources(self, node: yaml.Node) -> list[yaml.MappingNode]:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        good = [source for source in sources if isinstance(source, yaml.MappingNode)]
        if len(good) != len(sources):
            self.problems.append(f"{self.place(node)}: '<<' needs a mapping or a list of them")
        return good

    def build_scalar(self, node: yaml.ScalarNode, where: str) -> Any:
        text = str(node.value)
        kind = node.tag.removeprefix(_TAG)
        try:
            if kind == "null":
                return None
            if kind == "bool":
                return {"true": True, "false": False}[text.lower()]
            if kind == "int":
                based = text[:2].lower() in ("0x", "0o")
                return int(text, 0) if based else int(text.replace("_", ""))
            if kind == "float":
                plain = text.lower().replace("_", "")
                return float(plain.replace(".inf", "inf").replace(".nan", "nan"))
        except (ValueError, KeyError):
            self.problems.append(f"{where}: {text!r} is no {kind}")
            return None
        if kind not in ("str", "merge"):
            self.refuse_tag(node, where)
        return text

    def refuse_tag(self, node: yaml.Node, where: str) -> None:
        tag = str(node.tag).replace(_TAG, "!!")
        self.problems.append(f"{where}: the tag {tag!r} is not allowed; only plain YAML is")


def merge(base: Node, over: Node, path: Sequence[str] = ()) -> Node:
    """`over` laid on `base`: mappings merge, all else replaces, null removes an inherited key.

    An entry of `optimizer_groups` replaces the inherited one whole, and a different `class_path`
    drops the inherited `init_args`, which belonged to another class.
    """
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    if len(path) == 2 and path[0] == "optimizer_groups":
        return over
    merged = dict(base.value)
    old, new = base.child("class_path"), over.child("class_path")
    if old and new and old.value != new.value:
        merged.pop("init_args", None)
    for key, node in over.value.items():
        if key in merged and node.value is None:
            del merged[key]
        elif key in merged:
            merged[key] = merge(merged[key], node, [*path, key])
        else:
            merged[key] = node
    return Node(merged, over.where)
