"""What the control plane takes for a command, and what it says of anything else."""

from __future__ import annotations

import json

import pytest

from headway.control.openapi import describe
from headway.control.schema import COMMANDS, MOST_BODY_BYTES, BadRequest, parse_command, parse_json


def take(**body):
    return parse_command(parse_json(json.dumps(body).encode()))


def test_a_command_gets_an_id_and_its_defaults():
    command = take(command="pause")
    assert command.name == "pause" and command.data == {"offload": False}
    assert len(command.id) == 32 and command.received_at > 0
    assert take(command="pause", id="mine").id == "mine"
    assert take(command="set_learning_rate", data={"scale": 0.5}).data == {
        "scale": 0.5,
        "keep": True,
    }


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"command": "save_checkpont"}, ["save_checkpont", "did you mean 'save_checkpoint'"]),
        ({"command": ["abort"]}, ["unknown command ['abort']"]),
        ({}, ["unknown command None"]),
        ({"command": "abort", "now": 1}, ["unknown key 'now'"]),
        ({"command": "abort", "data": [1]}, ["abort: data must be an object"]),
        ({"command": "abort", "data": {"x": 1}}, ["abort: unknown field 'x'"]),
        ({"command": "pause", "data": {"ofload": True}}, ["did you mean 'offload'"]),
        ({"command": "pause", "data": {"offload": 1}}, ["offload must be true or false, not 1"]),
        ({"command": "set_learning_rate"}, ["exactly one of scale, value, not 0"]),
        ({"command": "set_learning_rate", "data": {"scale": 1, "value": 1}}, ["not 2"]),
        (
            {"command": "set_learning_rate", "data": {"scale": 0}},
            ["scale must be a number above 0"],
        ),
        ({"command": "set_learning_rate", "data": {"value": True}}, ["value must be a number"]),
        ({"command": "set_learning_rate", "data": {"value": 10**400}}, ["value must be a number"]),
        ({"command": "set_log_level", "data": {"level": "loud"}}, ["one of debug, info"]),
        ({"command": "extend_max_steps", "data": {"by": 1.5}}, ["by must be a whole number"]),
        ({"command": "profile_next_steps", "data": {"num_steps": 101}}, ["at most 100"]),
        ({"command": "generate_now", "data": {"prompt": "x" * 5000}}, ["at most 4096 characters"]),
        ({"command": "abort", "id": "a/b"}, ["id must be 1 to 64 letters"]),
        ({"command": "abort", "id": ""}, ["id must be 1 to 64 letters"]),
    ],
)
def test_a_wrong_request_is_told_what_is_valid(body, words):
    with pytest.raises(BadRequest) as raised:
        take(**body)
    assert raised.value.status == 400
    for word in words:
        assert word in raised.value.message
    said = raised.value.to_dict()
    assert len(said) == 2 and len(json.dumps(said)) < 4000  # the error, and what is valid


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"command": NaN}',
        b"[" * 60000,
        b'{"a":' * 20 + b"1" + b"}" * 20,
        b"1" * 10000,
        b'"command"',
        b"null",
        b"[]",
    ],
)
def test_what_is_no_object_of_json_is_refused(body):
    with pytest.raises(BadRequest) as raised:
        parse_command(parse_json(body))
    assert raised.value.status == 400 and len(raised.value.message) < 400


def test_a_body_beyond_the_limit_is_refused():
    with pytest.raises(BadRequest) as raised:
        parse_json(b'"' + b"x" * MOST_BODY_BYTES + b'"')
    assert raised.value.status == 413


def test_the_description_has_every_command_and_every_field():
    document = describe("1.2")
    body = document["paths"]["/jobs/{job_id}/control"]["post"]["requestBody"]
    kinds = body["content"]["application/json"]["schema"]["oneOf"]
    said = {k["properties"]["command"]["const"]: k["properties"]["data"] for k in kinds}
    assert set(said) == set(COMMANDS)
    for name, kind in COMMANDS.items():
        assert set(said[name]["properties"]) == set(kind.fields)
    json.dumps(document, allow_nan=False)
