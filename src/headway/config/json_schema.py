"""The JSON Schema (2020-12) of a run file, made from the dataclasses.

Owns: `run_schema`. An editor that knows it completes and checks run files while they are written.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from headway.args import DDPArguments, FSDP2Arguments, PostLocalSGDArguments
from headway.config import rules_values
from headway.config.fields import doc_of
from headway.config.registry import DEFAULT_MODEL
from headway.config.rules import defaults
from headway.config.schema import ARGUMENT_CLASSES, Component, DataConfig, RunConfig
from headway.config.typecheck import field_types, members

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_ARGUMENTS = (
    *ARGUMENT_CLASSES.values(),
    DDPArguments,
    PostLocalSGDArguments,
    FSDP2Arguments,
)
_SCALARS = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
_NAMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("eval_strategy", "logging_strategy", "save_strategy"), rules_values.STRATEGIES
    ),
    "nonfinite_action": rules_values.NONFINITE_ACTIONS,
    "default_dtype": rules_values.DTYPES,
    "mixed_precision": rules_values.MIXED_PRECISIONS,
    "fp8_recipe": rules_values.FP8_RECIPES,
    "qat_recipe": rules_values.QAT_RECIPES,
    "construct_model_on": rules_values.CONSTRUCT_ON,
    "torch_compile_mode": rules_values.COMPILE_MODES,
    "float32_matmul_precision": rules_values.MATMUL_PRECISIONS,
    "lr_scheduler_type": rules_values.LR_SCHEDULES,
    "lr_scheduler_unit": rules_values.SCHEDULE_UNITS,
}


def run_schema() -> dict[str, Any]:
    """The schema of a run file as plain values."""
    run = _object_schema(RunConfig)
    properties = run["properties"]
    component = {"$ref": "#/$defs/Component"}
    properties["model"] = {
        "description": properties["model"]["description"],
        "anyOf": [
            component,
            {"type": "string"},
            {
                "type": "object",
                "not": {"anyOf": [{"required": ["class_path"]}, {"required": ["init_args"]}]},
                "description": f"Arguments of {DEFAULT_MODEL}.",
            },
        ],
    }
    properties["trainer"]["enum"] = list(ARGUMENT_CLASSES)
    # What `args` may hold depends on the trainer.
    properties["args"] = {"description": properties["args"]["description"], "type": "object"}
    by_trainer = [
        {
            "if": {
                "properties": {"trainer": {"const": name}},
                **({} if name == "single" else {"required": ["trainer"]}),
            },
            "then": {"properties": {"args": {"$ref": f"#/$defs/{cls.__name__}"}}},
        }
        for name, cls in ARGUMENT_CLASSES.items()
    ]
    properties["extends"] = {
        "description": "A run file, or several, that this one builds on; relative to this file.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    return {
        "$schema": DIALECT,
        "title": "Headway run file",
        **run,
        "allOf": by_trainer,
        "$defs": {
            cls.__name__: _object_schema(cls) for cls in (Component, DataConfig, *_ARGUMENTS)
        },
    }


def _object_schema(cls: type) -> dict[str, Any]:
    properties = {}
    for name, annotation in field_types(cls).items():
        entry = {"description": doc_of(cls, name), **_type_schema(annotation)}
        if name in _NAMES:
            entry = {"description": entry["description"], "enum": _allowed(name, annotation)}
        default = defaults(cls)[name]
        if isinstance(default, bool | int | float | str | list | dict | None):
            entry["default"] = default
        properties[name] = entry
    required = [name for name, default in defaults(cls).items() if default is dataclasses.MISSING]
    schema: dict[str, Any] = {
        "type": "object",
        "description": (cls.__doc__ or "").strip(),
        "properties": properties,
        "additionalProperties": False,
    }
    return {**schema, "required": required} if required else schema


def _allowed(name: str, annotation: Any) -> list[str | None]:
    names: list[str | None] = list(_NAMES[name])
    return [*names, None] if type(None) in members(annotation) else names


def _type_schema(annotation: Any) -> dict[str, Any]:
    alternatives = [_member_schema(member) for member in members(annotation)]
    if len(alternatives) == 1:
        return alternatives[0]
    if all(set(item) == {"type"} for item in alternatives):
        return {"type": [item["type"] for item in alternatives]}
    return {"anyOf": alternatives}


def _member_schema(member: Any) -> dict[str, Any]:
    origin, inner = typing.get_origin(member), typing.get_args(member)
    if member in _SCALARS:
        return {"type": _SCALARS[member]}
    if member is Any:
        return {}
    if origin is list:
        return {"type": "array", "items": _type_schema(inner[0])}
    if origin is dict:
        values = _type_schema(inner[1]) if len(inner) == 2 else {}
        return {"type": "object", **({"additionalProperties": values} if values else {})}
    if member is Component:
        return {"anyOf": [{"$ref": "#/$defs/Component"}, {"type": "string"}]}
    return {"$ref": f"#/$defs/{member.__name__}"}
