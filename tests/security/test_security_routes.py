"""Every route with every method and every kind of token, as the server itself lists its routes."""

from __future__ import annotations

import json

import pytest

from headway.control.schema import COMMANDS

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "CONNECT", "BREW")


@pytest.fixture(scope="module")
def old_token(make_target, tmp_path_factory):
    """The token of an earlier run of the same job, by the same user."""
    first = make_target(root=str(tmp_path_factory.mktemp("earlier")))
    token = first.tokens["control"]
    first.end()
    return token


def wrong_tokens(right, old):
    control = right["control"]
    return {
        "none": None,
        "empty": "",
        "wrong": "0" * 64,
        "expired": old,
        "cut": control[:-1],
        "longer": control + "0",
        "in capitals": control.upper() if control.upper() != control else control + "A",
        "both": f"{control},{right['read']}",
        "not ASCII": "é" * 64,
        "very long": "a" * 7000,
    }


def test_all_routes_are_known_with_a_role_that_is_one(target):
    assert len(target.routes) >= 8
    assert {role for _, _, role in target.routes} <= {"public", "read", "control"}
    # A new public route, or one that acts, has to be thought about here.
    public = {path for _, path, role in target.routes if role == "public"}
    assert public == {"/healthz", "/", "/assets/{name}"}
    acting = {(m, p) for m, p, r in target.routes if r == "control"}
    assert acting == {
        ("POST", target.control_path),
        ("POST", "/api/runs/{run_id}/control"),
        ("POST", "/api/runs/{run_id}/checkpoints/{name}/verify"),
    }
    assert {m for m, _, r in target.routes} <= {"GET", "POST"}
    assert all(r == "control" for m, _, r in target.routes if m == "POST")


def test_no_route_answers_without_its_token(target, old_token):
    body = target.command()
    paths = {target.filled(path): role for _, path, role in target.routes} | {"/nothing": "read"}
    for path, role in paths.items():
        for method in METHODS:
            for kind, token in wrong_tokens(target.tokens, old_token).items():
                answer = target.ask(method, path, token, body if method == "POST" else None)
                expected = {401} if method in ("GET", "POST") else {405}
                if role == "public" and method in ("GET", "POST"):
                    expected = {200, 401, 404, 405} if method == "GET" else {401, 405}
                assert answer.status in expected, (method, path, kind, answer.raw[:200])
                assert target.tokens["control"].encode() not in answer.raw
    assert target.take() == []


def test_the_token_that_only_reads_cannot_act(target):
    for method, path, role in target.routes:
        sent = target.command() if method == "POST" else None
        answer = target.ask(method, target.filled(path), target.tokens["read"], sent)
        if role == "control":
            assert answer.status == 403, path
            assert answer.json == {"error": "this token may only read"}
        else:
            assert answer.status in (200, 304, 400, 404), (path, answer.raw[:200])
    for name in COMMANDS:
        answer = target.ask(
            "POST", target.control_path, target.tokens["read"], target.command(name)
        )
        assert answer.status == 403
    assert target.take() == []


def test_the_right_token_acts_by_post_alone(target):
    token = target.tokens["control"]
    for method in METHODS:
        if method != "POST":
            assert target.ask(method, target.control_path, token, target.command()).status == 405
    override = [("X-HTTP-Method-Override", "POST"), ("X-Method-Override", "POST")]
    url = f"{target.control_path}?_method=POST&command=abort&token={token}"
    assert target.ask("GET", url, token, target.command(), override).status == 405
    assert target.take() == []
    for number, path in enumerate((target.control_path, f"/api/runs/{target.run_id}/control")):
        body = target.command("pause", id=f"once-{number}")
        answer = target.ask("POST", path, token, body)
        assert answer.status == 200 and answer.json["state"] == "accepted"
        assert [command["name"] for command in target.take()] == ["pause"]


@pytest.mark.parametrize(
    "how",
    [
        "Authorization: Basic {token}",
        "Authorization: {token}",
        "Authorization: Bearer{token}",
        "Authorization: Bearer  Bearer {token}",
        "Cookie: token={token}; Authorization=Bearer {token}",
        "X-Api-Key: {token}",
        "X-Authorization: Bearer {token}",
        "Proxy-Authorization: Bearer {token}",
    ],
)
def test_a_token_is_taken_from_its_header_alone(target, how):
    name, _, value = how.format(token=target.tokens["control"]).partition(": ")
    body = target.command()
    answer = target.ask("POST", target.control_path, None, body, [(name, value)])
    assert answer.status == 401
    query = f"{target.control_path}?token={target.tokens['control']}&access_token=x"
    assert target.ask("POST", query, None, body).status == 401
    inside = json.dumps({"command": "abort", "token": target.tokens["control"]}).encode()
    assert target.ask("POST", target.control_path, None, inside).status == 401


def test_header_names_and_the_scheme_have_no_case(target):
    header = [("aUTHORIZATION", f"bEARER {target.tokens['read']}")]
    assert target.ask("GET", "/metrics", None, None, header).status == 200


def test_a_job_has_no_other_names(target):
    token = target.tokens["control"]
    for path in (
        "/jobs/other/control",
        f"/jobs/{target.job_id}/control/",
        f"/jobs/{target.job_id}//control",
        f"//jobs/{target.job_id}/control",
        f"/jobs/{target.job_id}/Control",
        f"/JOBS/{target.job_id}/control",
        f"/jobs/{target.job_id}/./control",
        f"/jobs/x/../{target.job_id}/control",
        f"/jobs/{target.job_id}/control;x=1",
        f"/jobs/{target.job_id}/control%00",
        f"/jobs/{target.job_id}%2fcontrol",
    ):
        assert target.ask("POST", path, token, target.command()).status == 404, path


def test_every_answer_is_private_to_this_origin(target):
    for method, path, _ in target.routes:
        for sent in (None, target.tokens["read"]):
            headers = target.ask(method, target.filled(path), sent).headers
            assert headers["x-content-type-options"] == "nosniff", path
            assert headers["x-frame-options"] == "DENY"
            assert headers["referrer-policy"] == "no-referrer"
            assert headers["cross-origin-resource-policy"] == "same-origin"
            policy = headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'")
            assert "unsafe" not in policy.partition("script-src")[2].partition(";")[0]
            assert not [name for name in headers if name.startswith("access-control")]
            assert "set-cookie" not in headers and headers["server"] == "headway"
