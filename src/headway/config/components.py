"""From a class path and its arguments to an object, with the check that needs no building.

Owns: import by name, the comparison of `init_args` with a signature, nested components.
Does not own: short names (registry), files and lines (load).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from headway.config.registry import BUILT_FROM, GIVEN, NEEDS_TORCH, resolve_name, short_names
from headway.config.rules_values import DTYPES
from headway.config.schema import Component
from headway.config.typecheck import Problem, conform, describe, field_types, fit, members
from headway.errors import ConfigError, nearest, unknown

_CALLBACKS = "headway.callbacks."


class BuildError(ConfigError):
    """A class or function that a run file names could not be called with what it gives."""


def check_component(component: Component, slot: str, where: str) -> None:
    """Raise a ConfigError with every mistake in a component; `where` opens each message."""
    problems = find_problems(component, slot, "")
    if problems:
        raise ConfigError([f"{where}: {problem.message}" for problem in problems])


def find_problems(component: Component, slot: str, path: str) -> list[Problem]:
    """Every mistake in a component; `path` is its dotted place in the run file."""
    prefix = f"{path}." if path else ""
    dotted = resolve_name(component.class_path, slot)
    problems: list[Problem] = []
    for name, value in component.init_args.items():
        for inner_path, inner in _nested(value, f"{prefix}init_args.{name}"):
            problems += find_problems(inner, slot, inner_path)
    if dotted in NEEDS_TORCH:
        for name, message in _check_names(component.init_args, NEEDS_TORCH[dotted]):
            problems.append(Problem((f"{prefix}init_args.{name}" if name else path,), message))
        return problems
    try:
        target = load_target(BUILT_FROM.get(dotted, dotted), slot)
    except ConfigError as error:
        return [*problems, Problem((f"{prefix}class_path",), str(error))]
    signature = _Signature(target, GIVEN.get(slot, ()))
    for name, message in signature.check(component.init_args):
        problems.append(Problem((f"{prefix}init_args.{name}" if name else path,), message))
    if dotted in BUILT_FROM and not problems:
        problems += _try_values(target, component.init_args, f"{prefix}init_args")
    if dotted.startswith(_CALLBACKS) and not problems and not _has_nested(component.init_args):
        values = {n: signature.convert(n, value) for n, value in component.init_args.items()}
        problems += _try_callback(target, values, f"{prefix}init_args")
    return problems


def names_taken(component: Component, slot: str) -> list[str]:
    """The arguments that a component takes by name; none where its class cannot be found."""
    dotted = resolve_name(component.class_path, slot)
    if dotted in NEEDS_TORCH:
        return list(NEEDS_TORCH[dotted])
    try:
        target = load_target(BUILT_FROM.get(dotted, dotted), slot)
    except ConfigError:
        return []
    return list(_Signature(target, ()).names)


def instantiate(component: Component, slot: str, **given: Any) -> Any:
    """Build what a component names. `given` is passed on where the target takes it."""
    dotted = resolve_name(component.class_path, slot)
    target = load_target(dotted, slot)
    built_from = BUILT_FROM.get(dotted)
    signature = _Signature(load_target(built_from, slot) if built_from else target, tuple(given))
    broken = signature.check(component.init_args)
    if broken:
        raise ConfigError([f"{component.class_path}: {message}" for _, message in broken])
    values = {
        name: _build_nested(value, slot, given)
        if _has_nested(value)
        else signature.convert(name, value)
        for name, value in component.init_args.items()
    }
    for name, value in given.items():
        if name not in values and signature.takes(name):
            values[name] = value
    if built_from:
        return target(signature.target(**values))
    try:
        return target(**values)
    except (ConfigError, OSError, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which need not be imported
            raise
        raise BuildError(f"{component.class_path}: {_explain(error)}") from error


def _explain(error: Exception) -> str:
    """A constructor's own words, and where they come from unless they speak of its arguments."""
    message = " ".join(str(error).split()) or type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)[1:]
    if isinstance(error, TypeError | ValueError) or not frames:
        return message
    own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    return f"{type(error).__name__} at {own[-1].filename}:{own[-1].lineno}: {message}"


def load_target(dotted: str, slot: str) -> Callable[..., Any]:
    """Import a class or function by its dotted path."""
    if "." not in dotted:
        raise ConfigError(unknown(f"{slot} class", dotted, short_names(slot)))
    module, attributes = _import_longest(dotted)
    found: Any = module
    for attribute in attributes:
        if not hasattr(found, attribute):
            names = [name for name in dir(found) if not name.startswith("_")]
            hint = nearest(attribute, names)
            more = f"; did you mean {hint!r}?" if hint else ""
            raise ConfigError(f"{getattr(found, '__name__', found)!r} has no {attribute!r}{more}")
        found = getattr(found, attribute)
    if not callable(found):
        raise ConfigError(f"{dotted!r} is no class or function")
    return found  # type: ignore[no-any-return]


def _import_longest(dotted: str) -> tuple[Any, list[str]]:
    parts = dotted.split(".")
    if not all(part.isidentifier() for part in parts):
        raise ConfigError(f"{dotted!r} is no dotted path such as 'package.module.Class'")
    for cut in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:cut])
        try:
            return importlib.import_module(name), parts[cut:]
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
                raise ConfigError(f"importing {name!r} failed: {error}") from error
        except Exception as error:
            raise ConfigError(f"importing {name!r} failed: {error}") from error
    raise ConfigError(f"no module named {parts[0]!r} for {dotted!r}")


def is_component(value: Any) -> bool:
    """Whether a value inside `init_args` is itself a component."""
    if isinstance(value, Component):
        return True
    return isinstance(value, Mapping) and "class_path" in value and {*value} <= _COMPONENT_KEYS


_COMPONENT_KEYS = {"class_path", "init_args"}
_PLAIN_TYPES = (bool, int, float, str, type(None))


def _as_component(value: Any) -> Component:
    if isinstance(value, Component):
        return value
    return Component(str(value["class_path"]), dict(value.get("init_args") or {}))


def _nested(value: Any, path: str) -> list[tuple[str, Component]]:
    if is_component(value):
        return [(path, _as_component(value))]
    items: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    return [found for key, item in items for found in _nested(item, f"{path}.{key}")]


def _has_nested(value: Any) -> bool:
    return bool(_nested(value, ""))


def _build_nested(value: Any, slot: str, given: Mapping[str, Any]) -> Any:
    if is_component(value):
        return instantiate(_as_component(value), slot, **given)
    if isinstance(value, Mapping):
        return {key: _build_nested(item, slot, given) for key, item in value.items()}
    if isinstance(value, list):
        return [_build_nested(item, slot, given) for item in value]
    return value


def _try_values(target: Callable[..., Any], values: Mapping[str, Any], path: str) -> list[Problem]:
    try:
        target(**values)
    except ConfigError as error:
        return [Problem((_place(message, values, path),), message) for message in error.problems]
    return []


def _try_callback(
    target: Callable[..., Any], values: Mapping[str, Any], path: str
) -> list[Problem]:
    """What a callback of ours says of its values: making one checks them and does nothing else.

    It says one thing at a time, so it is asked again without what it refused. What is not about a
    value, such as a package that is not installed here, is told when the callback is built.
    """
    left, found = dict(values), list[Problem]()
    refused: set[str] = set()
    while True:
        try:
            target(**left)
        except ConfigError as error:
            message = error.problems[0]
            name = _blame(message, left)
            # What follows from a value that was left out is no mistake.
            if name is None or refused & {*re.findall(r"\w+", message)}:
                return found
            found.append(Problem((f"{path}.{name}",), message))
            refused.add(name)
            del left[name]
        except Exception:
            return found
        else:
            return found


def _blame(message: str, values: Mapping[str, Any]) -> str | None:
    """The argument whose value a message refuses: it opens with it, or shows the value."""
    words = re.sub(r"^\w+: ", "", message).removeprefix("unknown ")
    first = re.match(r"\w+", words)
    if first is not None and first[0] in values:
        return first[0]
    named = [word for word in re.findall(r"\w+", message) if word in values]
    return next((name for name in named if repr(values[name]) in message), None)


def _place(message: str, values: Mapping[str, Any], path: str) -> str:
    """The argument a message speaks of first, to point at its line."""
    words = re.findall(r"\w+", message)
    named = [word for word in words if word in values]
    return f"{path}.{named[0]}" if named else path


def _check_names(values: Mapping[str, Any], allowed: Mapping[str, bool]) -> list[tuple[str, str]]:
    """(argument, message) for unknown names; missing ones (those marked True) come under ''."""
    found = [(name, unknown("argument", name, allowed)) for name in values if name not in allowed]
    missing = [name for name, needed in allowed.items() if needed and name not in values]
    if missing:
        shown = ", ".join(missing)
        found.append(("", f"missing argument{'s' if len(missing) > 1 else ''}: {shown}"))
    return found


class _Parser:
    """jsonargparse on one target: names behind **kwargs, and conversions beyond plain types."""

    def __init__(self, target: Callable[..., Any], given: tuple[str, ...]) -> None:
        # Imported here: most run files hold plain values only, which need none of it.
        from jsonargparse import ArgumentParser

        parser = ArgumentParser(exit_on_error=False)
        skip: set[str | int] = {*given}
        try:
            if inspect.isclass(target):
                self.names = parser.add_class_arguments(
                    target, fail_untyped=False, skip=skip, instantiate=False
                )
            else:
                self.names = parser.add_function_arguments(target, fail_untyped=False, skip=skip)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{target!r} cannot be configured: {error}") from error
        # Arguments are converted one by one, so that every mistake is told: a parser that insists
        # on the others at each of them would hide it.
        actions = [action for action in parser._actions if action.required]
        self.required_names = [action.dest for action in actions]
        for action in actions:
            action.required = False
        self._parser = parser

    def convert(self, name: str, value: Any) -> Any:
        """The value as the parameter's annotation wants it."""
        parsed = self._parser.parse_object({name: value}, defaults=False)
        return self._parser.instantiate_classes(parsed)[name]


class _Signature:
    """The parameters of a target, checked by our own types or by jsonargparse."""

    def __init__(self, target: Callable[..., Any], given: tuple[str, ...]) -> None:
        self.target = target
        self.given = given
        self._lazy_parser: Callable[[], _Parser] | None = None
        if dataclasses.is_dataclass(target) and isinstance(target, type):
            fields = [field for field in dataclasses.fields(target) if field.init]
            self.types = field_types(target)
            self.names = [field.name for field in fields]
            missing = dataclasses.MISSING
            self.required = [
                field.name
                for field in fields
                if field.default is missing and field.default_factory is missing
            ]
            self.open = False
        else:
            self._read_callable(target)

    def _read_callable(self, target: Callable[..., Any]) -> None:
        try:
            parameters = inspect.signature(target).parameters
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{target!r} cannot be configured: {error}") from error
        self.types = _hints(target)
        kinds = {parameter.kind for parameter in parameters.values()}
        self.open = inspect.Parameter.VAR_KEYWORD in kinds
        self._lazy_parser = functools.cache(lambda: _Parser(target, self.given))
        if kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}:
            # Where a signature passes on what it does not name, the parser follows it.
            parser = self._lazy_parser()
            self.required, names = parser.required_names, parser.names
            self.names = [*names, *(name for name in parameters if name in self.given)]
            return
        self.names = list(parameters)
        self.required = [
            name for name, p in parameters.items() if p.default is inspect.Parameter.empty
        ]

    def takes(self, name: str) -> bool:
        """Whether the target has a parameter of this name."""
        return name in self.names or self.open

    def check(self, values: Mapping[str, Any]) -> list[tuple[str, str]]:
        """(argument, message) for each mistake in `values`."""
        needed = [name for name in self.required if name not in self.given]
        allowed = {name: name in needed for name in [*self.names, *(values if self.open else ())]}
        found = _check_names(values, allowed)
        for name, value in values.items():
            if name in self.names and not _has_nested(value):
                try:
                    self.convert(name, value)
                except ConfigError as error:
                    found.append((name, str(error)))
        return found

    def convert(self, name: str, value: Any) -> Any:
        """`value` as the parameter's type wants it; a ConfigError says why it cannot be."""
        if self._lazy_parser is None:
            converted, problems = conform(value, self.types[name], name)
            if problems:
                raise ConfigError(problems[0].message)
            return converted
        if name in self.given or name not in self.names:
            return value
        if isinstance(value, str) and _wants_dtype(self.types.get(name)):
            return _torch_dtype(name, value)
        annotation = self.types.get(name)
        for member in members(annotation):
            if member in _PLAIN_TYPES:
                fits, converted = fit(value, member)
                if fits:
                    return converted
        try:
            return self._lazy_parser().convert(name, value)
        except Exception as error:
            wanted = describe(annotation) if annotation is not None else _first_line(error)
            raise ConfigError(f"{name} must be {wanted}, got {value!r}") from error


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    import typing

    try:
        return typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except Exception:
        return {}


def _wants_dtype(annotation: Any) -> bool:
    kinds = [
        (getattr(m, "__module__", ""), getattr(m, "__name__", "")) for m in members(annotation)
    ]
    return ("torch", "dtype") in kinds


def _torch_dtype(name: str, value: str) -> Any:
    import torch

    found = getattr(torch, value, None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"{name}: {unknown('dtype', value, DTYPES)}")
    return found


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if lines else type(error).__name__
    return re.sub(r"<class '([^']*)'>", r"\1", text)
