"""The description of the HTTP interface, made from the table of commands.

Owns: the OpenAPI document. Does not own: the routes themselves (server.py); a test holds the two
against each other.
"""

from __future__ import annotations

from typing import Any

from headway.control.schema import COMMAND_ID, COMMANDS, JOB_ID, CommandKind, Field
from headway.control.status import PHASES

_KINDS = {"integer": "integer", "number": "number", "boolean": "boolean", "string": "string"}


def describe(version: str) -> dict[str, Any]:
    """The whole document, OpenAPI 3.1."""
    errors = {
        str(code): {"description": text, "content": _json({"$ref": "#/components/schemas/Error"})}
        for code, text in (
            (400, "Not understood; what is valid is in the answer."),
            (401, "No token, or not one of this job."),
            (403, "A token that may only read, or a page of another site."),
            (404, "No such job or command."),
            (409, "The id was used for another command."),
            (410, "The run has ended."),
            (429, "Too many requests or commands."),
        )
    }
    job = {"name": "job_id", "in": "path", "required": True, "schema": _text(JOB_ID.pattern)}
    number = {
        "name": "command_id",
        "in": "path",
        "required": True,
        "schema": _text(COMMAND_ID.pattern),
    }

    def read(summary: str, content: dict[str, Any], *parameters: Any) -> dict[str, Any]:
        answer = {"200": {"description": summary, "content": content}, **errors}
        return {"get": {"summary": summary, "parameters": list(parameters), "responses": answer}}

    receipt = _json({"$ref": "#/components/schemas/Receipt"})
    control = {
        "summary": "Ask something of the run.",
        "parameters": [job],
        "requestBody": {
            "required": True,
            "content": _json({"oneOf": [_command(n, k) for n, k in COMMANDS.items()]}),
        },
        "responses": {"200": {"description": "Accepted.", "content": receipt}, **errors},
    }
    text = {"text/plain": {"schema": {"type": "string"}}}
    stream = {"text/event-stream": {"schema": {"type": "string"}}}
    anything = _json({"type": "object"})
    status = _json({"$ref": "#/components/schemas/Status"})
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headway, control of a running job", "version": version},
        "security": [{"token": []}],
        "paths": {
            "/healthz": read("That the server answers.", anything),
            "/metrics": read("The status for Prometheus.", text),
            "/openapi.json": read("This document.", anything),
            "/jobs": read("The jobs of this user on this machine.", anything),
            "/jobs/{job_id}/status": read("What the run does.", status, job),
            "/jobs/{job_id}/events": read("What happens to the run.", stream, job),
            "/jobs/{job_id}/commands/{command_id}": read(
                "What became of a command.", receipt, job, number
            ),
            "/jobs/{job_id}/control": {"post": control},
        },
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {
                "Error": {"type": "object", "properties": {"error": {"type": "string"}}},
                "Receipt": _receipt(),
                "Status": _status(),
            },
        },
    }


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _text(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^{pattern}$"}


def _command(name: str, kind: CommandKind) -> dict[str, Any]:
    data: dict[str, Any] = {
        "type": "object",
        "additionalProperties": False,
        "properties": {key: _field(wanted) for key, wanted in kind.fields.items()},
    }
    if kind.exactly_one_of:
        data["oneOf"] = [{"required": [key]} for key in kind.exactly_one_of]
    return {
        "type": "object",
        "description": kind.help,
        "additionalProperties": False,
        "required": ["command", "data"] if kind.exactly_one_of else ["command"],
        "properties": {"command": {"const": name}, "id": _text(COMMAND_ID.pattern), "data": data},
    }


def _field(wanted: Field) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": _KINDS[wanted.kind], "description": wanted.help}
    limits = {
        "minimum": wanted.least,
        "exclusiveMinimum": wanted.above,
        "maximum": wanted.most,
        "default": wanted.default,
    }
    schema.update({key: value for key, value in limits.items() if value is not None})
    if wanted.choices:
        schema["enum"] = list(wanted.choices)
    elif wanted.kind == "string":
        schema["maxLength"] = wanted.most_characters
    return schema


def _status() -> dict[str, Any]:
    """What is always there; a run shows more as it comes."""
    return {
        "type": "object",
        "properties": {
            "job_id": {"type": "string"},
            "status": {"enum": list(PHASES)},
            "offloaded": {
                "type": "boolean",
                "description": "weights and optimizer state of all ranks are on the host",
            },
            "global_step": {"type": "integer"},
            "max_steps": {"type": "integer"},
            "output_dir": {"type": "string"},
            "incidents": {"type": "array", "items": {"type": "object"}},
            "timestamp": {"type": "number"},
            "started_at": {"type": "number"},
        },
    }


def _receipt() -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "command": {"enum": sorted(COMMANDS)},
            "state": {"enum": ["accepted", "applied", "refused", "failed"]},
            "step": {"type": ["integer", "null"]},
            "message": {"type": "string"},
            "accepted_at": {"type": "number"},
            "settled_at": {"type": ["number", "null"]},
        },
    }
