"""JSON files of a checkpoint, written and read within the same limits.

Owns: that a JSON file which is too large, nested too deeply or not JSON at all ends in an error
that names it, before it takes much memory, and that nothing is written that would not be read
again. Does not own: what the files mean.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway.checkpoint.errors import CheckpointError

# The largest honest files: the index of a million tensors, a history of a million log records, an
# optimizer's settings for half a million parameters. All of them stay below 256 MiB.
MAX_JSON_BYTES = 1 << 28
# What a text takes in memory is decided by its lists and objects (up to 200 bytes for 2 bytes of
# text), so their number is limited before anything is parsed. An optimizer has 5 per parameter.
MAX_CONTAINERS = 4_000_000
_LONG_LIST = 100
_COMPACT = json.JSONEncoder(allow_nan=False)
# Readers below recurse, several frames to a level; an honest state has a dozen levels.
MAX_DEPTH = 150


class EncodedList:
    """A list of which each item is the text that `encode_item` made of it."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts


def encode_item(value: Any, name: str | Path) -> str:
    """The text of one item of an `EncodedList`, within the limits of a file."""
    with _naming(name):
        text = _COMPACT.encode(value)
        _check_depth(value)
    return text


def encode_json(value: Any, name: str | Path, *, indent: int = 1) -> bytes:
    """The text of a JSON file; `CheckpointError` naming it for what would not be read again."""
    with _naming(name):
        text = _encode(value, indent).encode() + b"\n"
        _check_text(text, MAX_JSON_BYTES, MAX_CONTAINERS)
        _check_depth(value)
    return text


@contextmanager
def _naming(name: str | Path) -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise CheckpointError(f"{name} would be nested too deeply to be read again") from None
    except _TooMuchError as error:
        raise CheckpointError(f"{name} would not be read again: it {error}") from None


def _encode(value: Any, indent: int) -> str:
    """Indented, but for long lists in an object, such as a run's history: an item a line.

    Python indents in Python, which takes three times as long and stops training meanwhile.
    """
    if not isinstance(value, dict) or not any(map(is_long, value.values())):
        return json.dumps(value, indent=indent, allow_nan=False)
    start = "\n" + " " * indent
    members = []
    for key, item in value.items():
        if is_long(item):
            texts = item.texts if isinstance(item, EncodedList) else map(_COMPACT.encode, item)
            text = f"[{start} " + f",{start} ".join(texts) + f"{start}]"
        else:
            text = json.dumps(item, indent=indent, allow_nan=False).replace("\n", start)
        members.append(f"{json.dumps(key)}: {text}")
    return f"{{{start}" + f",{start}".join(members) + "\n}"


def is_long(item: Any) -> bool:
    """Whether it is a list that gets a line for each item."""
    return isinstance(item, EncodedList) or (isinstance(item, list) and len(item) > _LONG_LIST)


def read_json(
    path: Path, *, max_bytes: int = MAX_JSON_BYTES, max_containers: int = MAX_CONTAINERS
) -> Any:
    """The value in a JSON file; anything that stands in the way is a `CheckpointError`."""
    try:
        with open(path, "rb") as file:
            text = file.read(max_bytes + 1)
        _check_text(text, max_bytes, max_containers)
        value = json.loads(text)
        _check_depth(value)
        return value
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    except RecursionError:
        raise CheckpointError(f"{path} is nested too deeply to be read") from None
    except _TooMuchError as error:
        raise CheckpointError(f"{path} {error}; it is not read") from None


def read_json_object(
    path: Path, *, max_bytes: int = MAX_JSON_BYTES, max_containers: int = MAX_CONTAINERS
) -> dict[str, Any]:
    """The same for a file that must hold an object."""
    value = read_json(path, max_bytes=max_bytes, max_containers=max_containers)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value


class _TooMuchError(Exception):
    pass


def _check_text(text: bytes, max_bytes: int, max_containers: int) -> None:
    if len(text) > max_bytes:
        raise _TooMuchError(f"is larger than {max_bytes} bytes")
    # Brackets inside texts count as well: that errs on the safe side, and they are rare.
    if text.count(b"[") + text.count(b"{") > max_containers:
        raise _TooMuchError(f"holds more than {max_containers} lists and objects")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            item
            for one in level
            if isinstance(one, dict | list | tuple)
            for item in (one.values() if isinstance(one, dict) else one)
            if isinstance(item, dict | list | tuple)
        ]
        if not level:
            return
    raise _TooMuchError(f"is nested too deeply, more than {MAX_DEPTH} levels")
