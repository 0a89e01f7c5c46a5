"""Setting options in a run file as a person would: one line changes, all others stay.

Owns: finding the place of a key, writing a value there, and making sure that nothing else has
changed. Does not own: what the options mean (config/).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from headway.config.document import read_text
from headway.errors import ConfigError


class _NotClean(Exception):
    """More than a line would have to change."""


def set_options(path: str | Path, values: Mapping[str, Any]) -> None:
    """Write values under dotted keys into a YAML file; comments and layout are kept.

    What cannot be done by changing single lines is refused, and the file stays as it is.
    """
    path = Path(path)
    with path.open(encoding="utf-8", newline="") as file:
        before = file.read()
    text, wanted = before, read_text(before, str(path)).plain()
    try:
        for key, value in values.items():
            text = _set(text, key.split("."), _spell(value))
            _set_plain(wanted, key.split("."), value)
        is_clean = read_text(text, str(path)).plain() == wanted
    except (_NotClean, ConfigError):
        is_clean = False
    if not is_clean:
        lines = ", ".join(f"{key}: {_spell(value)}" for key, value in values.items())
        raise ConfigError(
            f"--apply: {path} cannot be changed without touching other lines; set by hand: {lines}"
        )
    _replace(path, text)


def _spell(value: Any) -> str:
    """A number as YAML 1.2 reads it back."""
    return "null" if value is None else repr(value)


def _set(text: str, keys: list[str], value: str) -> str:
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    for depth, key in enumerate(keys):
        if not isinstance(node, yaml.MappingNode) or (node.flow_style and not node.value):
            raise _NotClean
        below = next((v for k, v in node.value if k.value == key), None)
        if below is None or (below.tag.endswith(":null") and depth < len(keys) - 1):
            if node.flow_style or below is not None:
                raise _NotClean
            return _insert(text, node, keys[depth:], value)
        node = below
    if not isinstance(node, yaml.ScalarNode) or node.start_mark.line != node.end_mark.line:
        raise _NotClean
    if node.start_mark.index == node.end_mark.index:  # `key:` with nothing behind it
        value = f" {value}"
    return text[: node.start_mark.index] + value + text[node.end_mark.index :]


def _insert(text: str, mapping: yaml.MappingNode, keys: list[str], value: str) -> str:
    """A new key below the last line of a block mapping."""
    indent = mapping.value[0][0].start_mark.column
    last = _last_line(mapping)
    lines = text.splitlines(keepends=True)
    ending = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
    if lines and not lines[last].endswith(("\n", "\r")):
        lines[last] += ending
    added = [f"{' ' * (indent + 2 * n)}{key}:" for n, key in enumerate(keys)]
    added[-1] += f" {value}"
    lines[last + 1 : last + 1] = [line + ending for line in added]
    return "".join(lines)


def _last_line(node: yaml.Node) -> int:
    """The last line on which something of a node stands."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style and node.value:
        return max(_last_line(part) for pair in node.value for part in pair)
    if isinstance(node, yaml.SequenceNode) and not node.flow_style and node.value:
        return max(_last_line(item) for item in node.value)
    end: int = node.end_mark.line
    # A block of text ends where the next thing begins.
    return end - 1 if node.end_mark.column == 0 and end > node.start_mark.line else end


def _set_plain(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        if tree.get(key) is None:
            tree[key] = {}
        tree = tree[key]
    tree[keys[-1]] = value


def _replace(path: Path, text: str) -> None:
    """The whole new file or the whole old one, whatever happens; its mode stays."""
    target = path.resolve()
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        os.chmod(name, target.stat().st_mode)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise
