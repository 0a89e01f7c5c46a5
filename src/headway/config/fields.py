"""What is known about each option: its type, default, meaning, classes, rules, availability.

Owns: the facts behind `headway explain`, the JSON schema and the option reference.
Does not own: how they are printed.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
from typing import Any

from headway import args as argument_module
from headway.config import schema
from headway.config.components import load_target
from headway.config.registry import BUILT_FROM, DEFAULT_MODEL, resolve_name
from headway.config.rules import Rule, defaults, rules_of
from headway.config.typecheck import describe, field_types
from headway.errors import ConfigError, nearest

ARGUMENT_CLASSES: tuple[type, ...] = (
    argument_module.MinimalTrainingArguments,
    argument_module.BaseTrainingArguments,
    argument_module.TrainingArguments,
    argument_module.AccelTrainingArguments,
    argument_module.DDPTrainingArguments,
    argument_module.FSDP2TrainingArguments,
    argument_module.PipelineTrainingArguments,
)
NESTED_CLASSES: dict[str, type] = {
    "ddp": argument_module.DDPArguments,
    "post_local_sgd": argument_module.PostLocalSGDArguments,
    "fsdp2": argument_module.FSDP2Arguments,
}


@dataclasses.dataclass(frozen=True)
class OptionFacts:
    """Everything to say about one option; `classes` are those that declare it."""

    name: str
    type: str
    default: Any
    meaning: str
    classes: tuple[str, ...]
    rules: tuple[Rule, ...]

    def as_dict(self) -> dict[str, Any]:
        """The facts as plain values."""
        return {
            "name": self.name,
            "type": self.type,
            "default": self.default,
            "meaning": self.meaning,
            "classes": list(self.classes),
            "rules": [
                {
                    "number": rule.number,
                    "stage": rule.stage,
                    "outcome": rule.outcome,
                    "options": list(rule.options),
                    "description": rule.description,
                }
                for rule in self.rules
            ],
        }


def field_docs(cls: type) -> dict[str, str]:
    """Field -> the docstring under it, for the fields a dataclass itself declares."""
    return dict(_module_docs(inspect.getmodule(cls)).get(cls.__name__, {}))


@functools.cache
def _module_docs(module: Any) -> dict[str, dict[str, str]]:
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError):
        return {}
    docs: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        found = docs.setdefault(node.name, {})
        for statement, following in zip(node.body, node.body[1:]):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(following, ast.Expr):
                continue
            text = following.value
            if isinstance(statement.target, ast.Name) and isinstance(text, ast.Constant):
                found[statement.target.id] = " ".join(str(text.value).split())
    return docs


def doc_of(cls: type, name: str) -> str:
    """The docstring of a field, declared by the class or one it extends."""
    for owner in cls.__mro__:
        if dataclasses.is_dataclass(owner) and name in field_docs(owner):
            return field_docs(owner)[name]
    return ""


def own_fields(cls: type) -> list[str]:
    """The fields a class declares itself, in order."""
    declared = inspect.get_annotations(cls)
    return [name for name in field_types(cls) if name in declared]


@functools.cache
def all_options() -> dict[str, OptionFacts]:
    """Every argument option, dotted where nested, with its facts."""
    table: dict[str, OptionFacts] = {}
    for cls in ARGUMENT_CLASSES:
        for name in own_fields(cls):
            owners = table[name].classes if name in table else ()
            table[name] = _facts(cls, name, name, (*owners, cls.__name__))
    for prefix, cls in NESTED_CLASSES.items():
        for name in own_fields(cls):
            table[f"{prefix}.{name}"] = _facts(cls, name, f"{prefix}.{name}", (cls.__name__,))
    return table


@functools.cache
def run_keys() -> dict[str, OptionFacts]:
    """Every key of a run file outside `args`."""
    table = {}
    for cls, prefix in ((schema.RunConfig, ""), (schema.DataConfig, "data.")):
        for name in own_fields(cls):
            table[prefix + name] = _facts(cls, name, prefix + name, (cls.__name__,))
    return table


@functools.cache
def model_keys() -> dict[str, OptionFacts]:
    """Every key under `model` when no class is named: the sizes of the reference decoder."""
    # By its dotted path, as a run file's class is: this package comes before the models.
    cls: Any = load_target(BUILT_FROM[resolve_name(DEFAULT_MODEL, "model")], "model")
    return {
        f"model.{name}": _facts(cls, name, f"model.{name}", (cls.__name__,))
        for name in own_fields(cls)
    }


def find_option(name: str) -> OptionFacts:
    """The facts on an option or run-file key, with or without `args.` before it."""
    known = {**all_options(), **run_keys(), **model_keys()}
    wanted = name.removeprefix("--").removeprefix("args.").replace("model.init_args.", "model.")
    if wanted == "":
        wanted = "args"
    if wanted in known:
        return known[wanted]
    hint = nearest(wanted, known) or nearest(wanted.rsplit(".", 1)[-1], known)
    more = f"; did you mean {hint!r}?" if hint else "; 'headway schema' lists all of them"
    raise ConfigError(f"unknown option {name!r}{more}")


def _facts(cls: type, field: str, name: str, classes: tuple[str, ...]) -> OptionFacts:
    default = defaults(cls)[field]
    if default is dataclasses.MISSING:
        shown: Any = "(required)"
    elif isinstance(default, argument_module.MinimalTrainingArguments):
        shown = "defaults"
    elif dataclasses.is_dataclass(default) and not isinstance(default, type):
        shown = dataclasses.asdict(default)
    else:
        shown = default
    return OptionFacts(
        name=name,
        type=describe(field_types(cls)[field]),
        default=shown,
        meaning=doc_of(cls, field),
        classes=classes,
        rules=tuple(rules_of(name)),
    )
