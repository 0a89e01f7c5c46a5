"""Does a value fit an annotation? Strict, and with words a user understands.

Owns: the comparison of Python values with the types of our dataclasses, and the few conversions
that lose nothing (an int where a float is meant, a path object, an enum's value, a dict for a
nested dataclass). Does not own: what a value of the right type may be (rules).
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import math
import numbers
import os
import re
import sys
import types
import typing
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from headway.config.duration import Duration
from headway.errors import nearest, unknown


@dataclasses.dataclass(frozen=True)
class Problem:
    """One mistake: the options it concerns (dotted, the first is the one to point at) and why."""

    options: tuple[str, ...]
    message: str


_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
_FIELD_TYPES: dict[type, dict[str, Any]] = {}


def field_types(cls: type) -> dict[str, Any]:
    """The resolved annotation of every dataclass field of `cls`, in order."""
    if cls not in _FIELD_TYPES:
        names = [field.name for field in dataclasses.fields(cls)]
        try:
            hints = typing.get_type_hints(cls)
        except Exception:
            # Another library's class may name what only its author's type checker imports.
            hints = {name: _single_hint(cls, name) for name in names}
        _FIELD_TYPES[cls] = {name: hints[name] for name in names}
    return _FIELD_TYPES[cls]


def _single_hint(cls: type, name: str) -> Any:
    for owner in cls.__mro__:
        written = inspect.get_annotations(owner)
        if name in written:
            holder = types.SimpleNamespace(__annotations__={name: written[name]})
            try:
                return typing.get_type_hints(holder, vars(sys.modules[owner.__module__]))[name]
            except Exception:
                break
    return Any


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union; a plain annotation is its own only one."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def describe(annotation: Any) -> str:
    """The annotation in words: 'int or None', 'list of str'."""
    words = []
    for member in members(annotation):
        origin, inner = typing.get_origin(member), typing.get_args(member)
        if member is type(None):
            words.append("None")
        elif member is Any:
            words.append("anything")
        elif origin is list:
            words.append(f"list of {describe(inner[0])}")
        elif origin is dict:
            words.append("mapping")
        elif origin is Literal:
            words.append(" or ".join(map(repr, inner)))
        elif dataclasses.is_dataclass(member):
            words.append(f"mapping ({getattr(member, '__name__', member)})")
        else:
            words.append(getattr(member, "__name__", str(member)))
    return " or ".join(words)


def conform(value: Any, annotation: Any, option: str) -> tuple[Any, list[Problem]]:
    """`value` as `annotation` wants it, or the problems that stand in the way."""
    if annotation is Any:
        return value, []
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, Duration):
        value = str(value)
    for member in members(annotation):
        if dataclasses.is_dataclass(member) and isinstance(member, type):
            if isinstance(value, Mapping):
                return build(member, value, option)
            if isinstance(value, member):
                return value, conform_fields(value, option)
        fits, converted = fit(value, member)
        if fits:
            return converted, []
    message = f"{option} must be {describe(annotation)}, got {_show(value)}"
    return value, [Problem((option,), message + _type_hint(value, annotation))]


def conform_fields(instance: Any, prefix: str = "") -> list[Problem]:
    """Conform every field of a dataclass instance in place; the problems that remain."""
    problems: list[Problem] = []
    for name, annotation in field_types(type(instance)).items():
        option = f"{prefix}.{name}" if prefix else name
        value, found = conform(getattr(instance, name), annotation, option)
        if found:
            problems += found
        elif value is not getattr(instance, name):
            setattr(instance, name, value)
    return problems


def build(cls: type, given: Mapping[Any, Any], prefix: str) -> tuple[Any, list[Problem]]:
    """A plain (rule-free) dataclass from a mapping; unknown keys are problems."""
    problems = unknown_keys(given, list(field_types(cls)), prefix)
    instance = cls(**{key: item for key, item in given.items() if key in field_types(cls)})
    return instance, problems + conform_fields(instance, prefix)


def unknown_keys(
    given: Mapping[Any, Any],
    allowed: list[str],
    prefix: str = "",
    *,
    kind: str = "option",
    theirs: Mapping[str, str] = MappingProxyType({}),
) -> list[Problem]:
    """A problem for each key of `given` that is not allowed.

    `theirs` are names that Hugging Face has, with what to use in their place.
    """
    dotted = f"{prefix}." if prefix else ""
    problems = []
    for key in given:
        if key in allowed:
            continue
        option = f"{dotted}{key}"
        hint = nearest(str(key), allowed)
        if key in theirs:
            message = f"unknown {kind} {option!r} (Hugging Face's): {theirs[key]}"
        elif hint:
            message = f"unknown {kind} {option!r}; did you mean {dotted + hint!r}?"
        else:
            message = unknown(kind, option, [dotted + name for name in allowed])
        problems.append(Problem((option,), message))
    return problems


def fit(value: Any, member: Any) -> tuple[bool, Any]:
    """Whether a value fits one member of a union, and the value as that member wants it."""
    origin, inner = typing.get_origin(member), typing.get_args(member)
    if member is type(None):
        return value is None, value
    if member is bool:
        return isinstance(value, bool), value
    if member is int:
        whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        return whole, int(value) if whole and type(value) is not int else value
    if member is float:
        real = isinstance(value, numbers.Real) and not isinstance(value, bool)
        return real, float(value) if real and type(value) is not float else value
    if member is str:
        text = isinstance(value, str | os.PathLike)
        return text, os.fspath(value) if text and type(value) is not str else value
    if origin is list:
        items = list(value) if isinstance(value, list | tuple) else []
        return isinstance(value, list | tuple) and all(fit(i, inner[0])[0] for i in items), items
    if origin is dict:
        return isinstance(value, Mapping), value
    if origin is Literal:
        return value in inner, value
    try:
        return isinstance(value, member), value
    except TypeError:  # another library's annotation; it has checks of its own
        return True, value


def _show(value: Any) -> str:
    kind = "" if value is None else f" ({type(value).__name__})"
    text = repr(value)
    return (text if len(text) <= 80 else text[:77] + "...") + kind


def _type_hint(value: Any, annotation: Any) -> str:
    if bool in members(annotation) and value in ("yes", "no", "on", "off", "true", "false"):
        return "; write true or false"
    if isinstance(value, str) and {int, float} & set(members(annotation)):
        if float in members(annotation) and _DECIMAL_COMMA.fullmatch(value):
            return f"; write it with a point: {value.replace(',', '.')}"
        try:
            number = float(value)
        except ValueError:
            return ""
        if math.isfinite(number):
            return "; write the number without quotes"
    return ""
