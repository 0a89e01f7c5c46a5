"""Tokens and nonces are in their files, and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headway.control.discovery import find_job
from headway.control.security import Guard, check_token, new_token


def secrets_of(target, root):
    nonce = find_job(target.job_id, Path(root)).endpoint.nonce
    return [*target.tokens.values(), nonce]


@pytest.fixture(scope="module")
def logged(make_target, tmp_path_factory):
    root, folder = tmp_path_factory.mktemp("jobs"), tmp_path_factory.mktemp("log")
    os.environ["HEADWAY_JOBS_DIR"] = str(root)
    try:
        target = make_target(
            root=str(root), log=str(folder / "log.txt"), limited=False, dashboard=True
        )
    finally:
        del os.environ["HEADWAY_JOBS_DIR"]
    target.root, target.log_file = root, folder / "log.txt"
    return target


def test_no_answer_shows_a_secret(logged):
    secrets = [secret.encode() for secret in secrets_of(logged, logged.root)]
    tokens = (None, "0" * 64, logged.tokens["read"], logged.tokens["control"])
    for method, path, _ in logged.routes:
        for token in tokens:
            for body in (None, b"{", b'{"command": "no"}', logged.command("status")):
                path = logged.filled(path)
                sent = body if method == "POST" else None
                answer = logged.ask(method, path, token, sent)
                assert not any(secret in answer.raw for secret in secrets), path
                if path == "/jobs" and answer.status == 200:
                    (job,) = answer.json["jobs"]
                    assert job["job_id"] == logged.job_id and job["alive"]
    logged.take()


def test_no_error_repeats_a_token_that_was_put_in_the_wrong_place(logged):
    token = logged.tokens["control"]
    for answer in (
        logged.ask("GET", f"/{token}"),
        logged.ask("GET", f"/jobs?token={token}"),
        logged.ask("GET", f"/jobs/{token}/status", token),
        logged.ask("GET", "/jobs", None, None, [(token, "x")]),
        logged.ask("GET", "/jobs", None, None, [(token, "x"), (token, "x")]),
        logged.ask(token.upper(), "/jobs"),
        logged.raw(f"{token} / HTTP/1.1\r\n\r\n".encode()),
        logged.raw(f"GET /jobs HTTP/1.1\r\nAuthorization: Bearer {token}\x00\r\n\r\n".encode()),
        logged.ask("GET", "/jobs", None, None, [("Authorization", f"Basic {token}")]),
        logged.ask("GET", "/jobs", token, None, [("Host", token)]),
    ):
        assert answer.status >= 400
        assert token.encode() not in answer.raw.lower(), answer.raw[:300]


def test_no_log_and_no_list_of_processes_shows_a_secret(logged):
    token = logged.tokens["control"]
    for number in range(20):
        logged.ask("POST", logged.control_path, token, logged.command("status", id=f"s{number}"))
        logged.ask("POST", logged.control_path, token, b"{broken")
        logged.ask("POST", logged.control_path, token, b'{"command": "' + token.encode() + b'"}')
        logged.raw(b"\x00" * 100)
    assert len(logged.take()) == 20
    text = logged.log_file.read_text()
    arguments = Path(f"/proc/{logged.pid}/cmdline").read_bytes().decode()
    environment = Path(f"/proc/{logged.pid}/environ").read_bytes().decode()
    for secret in secrets_of(logged, logged.root):
        assert secret not in text and secret not in arguments and secret not in environment
    assert "Traceback" not in text


def test_secrets_do_not_show_in_what_python_prints(tmp_path):
    token = new_token()
    assert token not in repr(Guard({"control": token}, 80))
    assert len({new_token() for _ in range(1000)}) == 1000
    assert len(token) == 64 and int(token, 16) >= 0  # 256 bits


@pytest.mark.parametrize("token", ["", "short", "a b" * 20, "é" * 32, "x" * 40 + "\n", None, 5])
def test_tokens_that_a_header_cannot_carry_are_no_tokens(token):
    assert check_token(token) is not None
