"""What a model is to the two ends of the wire: ordered names, shapes and dtypes.

Owns: `Specification`, its fingerprint, its form in JSON, what differs between two of them, and the
cut into fragments. Does not own: values (wire.py), how a strategy lays them out (parameters.py).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import xxhash

from headway.errors import ConfigError

MOST_TENSORS = 100_000
MOST_NAME_CHARACTERS = 512
_MOST_DIMS = 16
_MOST_ELEMENTS = 1 << 48
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_LAYER = re.compile(r"(?:.*?\.)?\d+(?=\.|$)")


@dataclass(frozen=True)
class Entry:
    """One parameter."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    """What the model holds it in; on the wire the communication's choice counts."""
    travels: bool = True
    """Whether it is trained, and so exchanged; a frozen one only has to be the same model's."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class Specification:
    """The parameters of a model in their order."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = dict(entries)
        self.shapes = {name: e.shape for name, e in self.entries.items() if e.travels}
        """The parameters that are exchanged."""
        if not self.shapes:
            raise ConfigError("the model has no parameter that is trained: nothing to exchange")

    @classmethod
    def of(cls, tensors: Mapping[str, Any], *, frozen: Iterable[str] = ()) -> Specification:
        """The specification of named tensors; `ConfigError` if some cannot travel."""
        kept = set(frozen)
        found = cls(
            {
                name: Entry(
                    tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), name not in kept
                )
                for name, tensor in tensors.items()
            }
        )
        for item in found.layout:
            _check_item(item)
        return found

    @property
    def layout(self) -> list[list[Any]]:
        """As JSON: `[name, shape, dtype, travels]` for every parameter, in order."""
        return [[n, list(e.shape), e.dtype, e.travels] for n, e in self.entries.items()]

    @classmethod
    def from_layout(cls, layout: Any) -> Specification:
        """From what somebody sent; `ConfigError` for anything that is no layout."""
        if not isinstance(layout, list) or not 0 < len(layout) <= MOST_TENSORS:
            raise ConfigError(f"a layout lists 1 to {MOST_TENSORS} parameters")
        entries: dict[str, Entry] = {}
        for item in layout:
            name = _check_item(item)
            if name in entries:
                raise ConfigError(f"the layout names {name!r} twice")
            entries[name] = Entry(tuple(item[1]), item[2], item[3])
        return cls(entries)

    @cached_property
    def fingerprint(self) -> str:
        """The same for two models that agree in names, order, shapes, dtypes and what travels."""
        return xxhash.xxh3_128_hexdigest(canonical_json(self.layout))

    @property
    def num_elements(self) -> int:
        """Elements that are exchanged."""
        return sum(e.num_elements for e in self.entries.values() if e.travels)

    def select(self, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """The shapes of some parameters, in the given order."""
        return {name: self.shapes[name] for name in names}

    def differences(self, other: Specification, *, most: int = 5) -> list[str]:
        """What another model has otherwise, the first few in words."""
        found: list[str] = []
        for name, mine in self.entries.items():
            theirs = other.entries.get(name)
            if theirs is None:
                found.append(f"{name} {list(mine.shape)} is missing")
            elif theirs != mine:
                found.append(f"{name} is {_describe(theirs)} instead of {_describe(mine)}")
        found += [f"{name} is not part of it" for name in other.entries if name not in self.entries]
        if not found and list(self.entries) != list(other.entries):
            found = ["the parameters come in another order"]
        more = [f"and {len(found) - most} more"] if len(found) > most else []
        return found[:most] + more

    # -- fragments ------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        """Numbered layers of the model; of one without any, its parameters."""
        layers = {match.group() for n in self.shapes if (match := _LAYER.match(n))}
        return len(layers) or len(self.shapes)

    def cut(self, num_fragments: int) -> list[list[str]]:
        """The exchanged names in contiguous groups of about the same size; layers stay whole."""
        if not 1 <= num_fragments <= self.num_layers:
            raise ConfigError(
                f"num_fragments={num_fragments}: allowed are 1 to {self.num_layers}, the number "
                "of the model's layers"
            )
        groups: list[tuple[str, list[str]]] = []
        for name in self.shapes:
            match = _LAYER.match(name)
            key = match.group() if match else name
            if not groups or groups[-1][0] != key:
                groups.append((key, []))
            groups[-1][1].append(name)
        sizes = [sum(self.entries[n].num_elements for n in names) for _, names in groups]
        total, seen, fragments = sum(sizes), 0, [[]]  # type: int, int, list[list[str]]
        for number, (_, names) in enumerate(groups):
            begun = len(fragments)
            # A group goes where its middle falls, unless fragments would be left without any.
            due = (2 * seen + sizes[number]) * num_fragments > 2 * total * begun
            must = len(groups) - number <= num_fragments - begun
            if fragments[-1] and begun < num_fragments and (due or must):
                fragments.append([])
            fragments[-1] += names
            seen += sizes[number]
        return fragments


def canonical_json(value: Any) -> bytes:
    """The one text that a value has on the wire and under a digest."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _check_item(item: Any) -> str:
    if not isinstance(item, list) or len(item) != 4:
        raise ConfigError("an entry of a layout is [name, shape, dtype, travels]")
    name, shape, dtype, travels = item
    if not isinstance(name, str) or not 0 < len(name) <= MOST_NAME_CHARACTERS:
        raise ConfigError(f"a parameter's name has 1 to {MOST_NAME_CHARACTERS} characters")
    if not name.isprintable():
        raise ConfigError("a parameter's name has printable characters only")
    if not isinstance(shape, list) or len(shape) > _MOST_DIMS:
        raise ConfigError(f"{name}: a shape is a list of at most {_MOST_DIMS} numbers")
    if any(type(size) is not int or not 0 <= size <= _MOST_ELEMENTS for size in shape):
        raise ConfigError(f"{name}: a shape holds whole numbers of 0 or more")
    if math.prod(shape) > _MOST_ELEMENTS:
        raise ConfigError(f"{name}: its shape has too many elements")
    if dtype not in _DTYPES:
        raise ConfigError(f"{name}: dtype {str(dtype)[:32]!r}; allowed: {', '.join(_DTYPES)}")
    if type(travels) is not bool:
        raise ConfigError(f"{name}: whether it travels is true or false")
    return name


def _describe(entry: Entry) -> str:
    return f"{entry.dtype} {list(entry.shape)}{'' if entry.travels else ' (frozen)'}"
