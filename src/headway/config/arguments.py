"""What every argument class does: conform and fill in its fields, check its rules, become a dict.

Owns: `Arguments`, the base of the classes in `headway.args`. Does not own: the fields (args), nor
the rules themselves (rules).
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import time
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from headway.config import rules
from headway.config.hf_options import HF_OPTIONS, HF_SHARES
from headway.config.keywords import parameters_of
from headway.config.secrets import names_secret
from headway.config.typecheck import Problem, conform_fields, field_types, unknown_keys
from headway.errors import ConfigError

_LOWER_IS_BETTER = ("loss", "perplexity", "bits_per_byte", "error")
_LOWER_IS_BETTER_WORDS = {"ppl", "bpb", "wer", "cer"}


class Arguments:
    """Base of the argument dataclasses: strict types, filled-in values, collected problems."""

    strategy_name: ClassVar[str] = "single"

    def __new__(cls, *positional: Any, **given: Any) -> Self:
        parameters = parameters_of(cls)
        if positional and all(p.kind is p.KEYWORD_ONLY for p in parameters.values()):
            raise TypeError(f"{cls.__name__} takes its options by name, such as output_dir=...")
        problems = unknown_keys(given, list(parameters), theirs=HF_OPTIONS)
        if problems:
            raise ConfigError([problem.message for problem in problems])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        conform_fields(self)
        fill_in(self)
        self.validate()

    def validate(self) -> None:
        """Check every rule; raise one ConfigError that lists all that are broken."""
        problems = find_problems(self)
        if problems:
            raise ConfigError([problem.message for problem in problems])
        self._warn()

    def _warn(self) -> None:
        for message in rules.find_warnings(self):
            warnings.warn(message, UserWarning, stacklevel=3)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """Build from a dict; an unknown key, a wrong type or a broken rule is a ConfigError."""
        instance, problems = collect(cls, given)
        if not isinstance(instance, cls):
            raise ConfigError([problem.message for problem in problems])
        instance._warn()
        return instance

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values, nested classes as dicts."""
        plain: dict[str, Any] = {}
        for name in field_types(type(self)):
            value = getattr(self, name)
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                value = dataclasses.asdict(value)
            elif not isinstance(value, bool | int | float | str | list | dict | None):
                value = str(value)
            hidden = isinstance(value, str) and value and names_secret(name)
            plain[name] = f"<{name.upper()}>" if hidden else value
        return plain

    def to_json_string(self) -> str:
        """`to_dict` as indented JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """`to_dict` with every value a number, a bool or text, as experiment trackers want it."""
        plain = self.to_dict()
        for name in ("train_batch_size", "eval_batch_size"):
            plain[name] = getattr(self, name, None)
        return {
            name: value if type(value) in (bool, int, float, str) else str(value)
            for name, value in plain.items()
        }


def find_problems(args: Arguments) -> list[Problem]:
    """Wrong types and broken rules, in that order."""
    problems = _conform(args)
    mistyped = {option for problem in problems for option in problem.options}
    return problems + rules.find_broken(args, skip=mistyped)


def _conform(args: Any) -> list[Problem]:
    """Values of a wrong type, with what to use for those that Hugging Face's options take."""
    return [
        Problem(found.options, f"{found.message}; {HF_SHARES[found.options[0]]}")
        if found.options[0] in HF_SHARES and _is_share(getattr(args, found.options[0]))
        else found
        for found in conform_fields(args)
    ]


def _is_share(value: Any) -> bool:
    return isinstance(value, float) and 0 < value < 1


def collect(cls: type[Any], given: Mapping[str, Any]) -> tuple[Any, list[Problem]]:
    """An instance from a mapping with every problem found; None where there are problems."""
    if not isinstance(given, Mapping):
        return None, [Problem((), f"arguments must be a mapping, got {type(given).__name__}")]
    names = field_types(cls)
    problems = unknown_keys(given, list(names), theirs=HF_OPTIONS)
    instance = object.__new__(cls)
    for field in dataclasses.fields(cls):
        if field.name in given:
            value = given[field.name]
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        else:
            value = field.default
        setattr(instance, field.name, value)
    problems += _conform(instance)
    fill_in(instance)
    seen = {problem.options for problem in problems}
    problems += [problem for problem in find_problems(instance) if problem.options not in seen]
    return (None if problems else instance), problems


def fill_in(args: Any) -> None:
    """Replace the None of a field that has a documented automatic value, and other derived ones."""
    if args.torch_compile_backend is None:
        args.torch_compile_backend = "inductor"
    if args.torch_compile_mode is None:
        args.torch_compile_mode = "default"
    workers = args.dataloader_num_workers
    if args.dataloader_prefetch_factor is None and isinstance(workers, int) and workers > 0:
        args.dataloader_prefetch_factor = 2
    for what in ("save", "eval", "logging"):
        every = "log_every" if what == "logging" else f"{what}_every"
        strategy = f"{what}_strategy"
        untouched = getattr(args, strategy) == rules.default_of(args, strategy)
        if getattr(args, every) is not None and untouched:
            setattr(args, strategy, "steps")
    if args.logging_dir is None:
        args.logging_dir = _logging_dir(str(args.output_dir))
    if args.greater_is_better is None:
        args.greater_is_better = greater_is_better(str(args.metric_for_best_model))
    metric = getattr(args, "best_model_metric", None)
    if metric is not None and args.best_model_greater_is_better is None:
        args.best_model_greater_is_better = greater_is_better(str(metric))


def greater_is_better(metric: str) -> bool:
    """Direction of a metric by its name: losses, perplexities and error rates go down."""
    name = metric.lower()
    words = set(re.split(r"[^a-z0-9]+", name))
    return not (any(part in name for part in _LOWER_IS_BETTER) or words & _LOWER_IS_BETTER_WORDS)


def _logging_dir(output_dir: str) -> str:
    named = os.environ.get("TENSORBOARD_LOGGING_DIR")
    return named or os.path.join(output_dir, "runs", f"{time.time_ns()}_{socket.gethostname()}")
