"""Pages of other sites: rebound names, forms, and fetches without consent, by every method."""

from __future__ import annotations

import json

import pytest

METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "BREW")
HOSTS = (
    "evil.example",
    "evil.example:{port}",
    "localhost:{port}0",
    "localhost:+{port}",
    "localhost:0{port}x",
    "localhost:{port}:{port}",
    "127.0.0.1.evil.example:{port}",
    "127.0.0.1:{port}.evil.example",
    "evil.example@127.0.0.1:{port}",
    "127.0.0.1:{port}@evil.example",
    "127.0.0.1:{port}/",
    "127.0.0.1:{port}, evil.example",
    "127.1:{port}",
    "2130706433:{port}",
    "0x7f.0.0.1:{port}",
    "0.0.0.0:{port}",
    "[::]:{port}",
    "[::1",
    "[::ffff:127.0.0.1]:{port}",
    "10.0.0.1:{port}",
    "localhost.:{port}",
    "xn--lcalhost-54a:{port}",
    "loc\xe4lhost:{port}",
    "",
    " ",
    "*",
)
ORIGINS = (
    "http://evil.example",
    "https://evil.example",
    "null",
    "",
    "file://",
    "chrome-extension://abcdef",
    "http://127.0.0.1",
    "http://127.0.0.1:1",
    "http://localhost:{port}",
    "http://127.0.0.1:{port}.evil.example",
    "http://127.0.0.1:{port}@evil.example",
    "http://evil.example/http://127.0.0.1:{port}",
    "http://127.0.0.1:{port}/",
    "HTTP://127.0.0.1:{port}",
    "ws://127.0.0.1:{port}",
    "http://127.0.0.1:{port} http://evil.example",
)
SITES = ("cross-site", "same-site", "", "None", "same-origin, cross-site", "anything")


def refused(target, method, path, headers):
    sent = [(name, value.format(port=target.port)) for name, value in headers]
    body = target.command() if method == "POST" else None
    answer = target.ask(method, path, target.tokens["control"], body, sent)
    assert not [name for name in answer.headers if name.startswith("access-control")]
    expected = {400, 421, 403} if method in ("GET", "POST") else {405}
    assert answer.status in expected, (method, path, headers, answer.raw[:200])


@pytest.mark.parametrize("method", METHODS)
def test_a_name_that_was_rebound_reaches_nothing(target, method):
    for host in HOSTS:
        for path in (target.control_path, "/healthz", "/jobs", "/nothing", "/"):
            refused(target, method, path, [("Host", host)])


@pytest.mark.parametrize("method", METHODS)
def test_a_page_of_another_origin_reaches_nothing(target, method):
    for path in (target.control_path, "/healthz", "/jobs", "/nothing", "/"):
        for origin in ORIGINS:
            refused(target, method, path, [("Origin", origin)])
        for site in SITES:
            refused(target, method, path, [("Sec-Fetch-Site", site)])
            refused(target, method, path, [("sEC-fETCH-sITE", site)])


def test_every_route_refuses_pages_of_other_sites(target):
    for method, path, _ in target.routes:
        path = target.filled(path)
        for header in (("Host", "evil.example:{port}"), ("Origin", "http://evil.example")):
            refused(target, method, path, [header])


def test_a_missing_host_is_none(target):
    token = target.tokens["control"]
    for version in ("1.0", "1.1"):
        head = f"GET /jobs HTTP/{version}\r\nAuthorization: Bearer {token}\r\n\r\n"
        assert target.raw(head.encode()).status == 421


@pytest.mark.parametrize(
    "name", ["Host", "Origin", "Sec-Fetch-Site", "Authorization", "Content-Type", "Content-Length"]
)
@pytest.mark.parametrize("spelling", [str, str.lower, str.upper])
def test_a_header_that_decides_something_cannot_be_sent_twice(target, name, spelling):
    body = target.command()
    right = {
        "Host": target.host,
        "Origin": f"http://{target.host}",
        "Sec-Fetch-Site": "same-origin",
        "Authorization": f"Bearer {target.tokens['control']}",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
    }
    wrong = {"Host": "evil.example", "Origin": "null", "Content-Length": "1"}.get(name, "x")
    for first, second in ((right[name], wrong), (wrong, right[name]), (right[name], right[name])):
        lines = [f"POST {target.control_path} HTTP/1.1"]
        for key, value in right.items():
            lines += [f"{key}: {first}", f"{spelling(key)}: {second}"] if key == name else []
            lines += [f"{key}: {value}"] if key != name else []
        answer = target.raw("\r\n".join([*lines, "", ""]).encode() + body)
        assert answer.status == 400, answer.raw[:200]


KINDS = (
    "text/plain",
    "text/plain; charset=application/json",
    "text/plain, application/json",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=application/json",
    "application/json-seq",
    "application/jsonp",
    "text/json",
    "*/*",
    "",
)


def test_what_a_form_or_a_fetch_without_consent_can_send_is_refused(target):
    body = target.command()
    for kind in KINDS:
        sent = [("Content-Type", kind)]
        answer = target.ask("POST", target.control_path, target.tokens["control"], body, sent)
        assert answer.status == 415, (kind, answer.raw[:200])
    # A form's field that is called {"command":"abort","x":" and has the value "} .
    form = b'{"command":"abort","id":"=x"}'
    sent = [("Content-Type", "text/plain")]
    answer = target.ask("POST", target.control_path, target.tokens["control"], form, sent)
    assert answer.status == 415
    head = f"POST {target.control_path} HTTP/1.1\r\nHost: {target.host}\r\n"
    head += f"Authorization: Bearer {target.tokens['control']}\r\nContent-Length: {len(body)}\r\n"
    assert target.raw(head.encode() + b"\r\n" + body).status == 415


def test_without_a_token_in_use_pages_of_other_sites_still_reach_nothing(make_target):
    """With authentication turned off these checks are all there is."""
    target = make_target(limited=False, server={"tokens": {}})
    body = target.command()
    fetch = [("Content-Type", "text/plain"), ("Sec-Fetch-Mode", "no-cors")]
    assert target.ask("POST", target.control_path, None, body, fetch).status == 415
    for header in (
        ("Host", f"evil.example:{target.port}"),
        ("Origin", "http://evil.example"),
        ("Origin", "null"),
        ("Sec-Fetch-Site", "cross-site"),
        ("Sec-Fetch-Site", "same-site"),
    ):
        assert target.ask("POST", target.control_path, None, body, [header]).status in (403, 421)
        assert target.ask("GET", "/jobs", None, None, [header]).status in (403, 421)
    assert target.take() == []
    assert target.ask("POST", target.control_path, None, body).status == 200
    assert [command["name"] for command in target.take()] == ["abort"]


def test_the_server_s_own_page_and_plain_programs_are_not_refused(target):
    token = target.tokens["control"]
    own = [("Origin", f"http://{target.host}"), ("Sec-Fetch-Site", "same-origin")]
    for headers in (own, [("Sec-Fetch-Site", "none")], [("Host", f"localhost:{target.port}")]):
        answer = target.ask("POST", target.control_path, token, target.command("status"), headers)
        assert answer.status == 200, answer.raw[:200]
        assert json.loads(answer.body)["command"] == "status"
        assert len(target.take()) == 1


def test_a_preflight_is_granted_nothing(target):
    asked = [
        ("Origin", "http://evil.example"),
        ("Access-Control-Request-Method", "POST"),
        ("Access-Control-Request-Headers", "authorization,content-type"),
        ("Access-Control-Request-Private-Network", "true"),
    ]
    answer = target.ask("OPTIONS", target.control_path, None, None, asked)
    assert answer.status == 405
    assert not [name for name in answer.headers if name.startswith("access-control")]
