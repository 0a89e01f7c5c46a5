"""Signed messages to a local server: contents, attempts, limits."""

from __future__ import annotations

import email.utils
import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from local_server import LocalServer, local_server

from headway import TrainerCallback
from headway.callbacks import WebhookCallback
from headway.callbacks.remote import http_post
from headway.callbacks.remote.webhook import sign, verify
from headway.config.load import load_run
from headway.errors import ConfigError
from headway.testing import tiny_trainer
from headway.trainers.from_config import build_callbacks


class Waits(threading.Event):
    """Counts how long attempts wait for each other, and does not."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.append(timeout or 0.0)
        return False


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADWAY_WEBHOOK_URL", "HEADWAY_WEBHOOK_SECRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def bodies(server: LocalServer) -> list[dict[str, Any]]:
    return [json.loads(got.body) for got in server.got]


def test_events_of_a_run_arrive_signed(tmp_path: Path) -> None:
    events = ["start", "log", "evaluate", "save", "epoch", "end", "failure"]
    with local_server() as server:
        mine = WebhookCallback(
            f"{server.url}/in", "s3cret", events, {"X-Team": "night"}, name="mine"
        )
        tiny_trainer(
            tmp_path, [mine], num_samples=4, num_train_epochs=1, save_strategy="epoch",
            eval_strategy="epoch",
        ).train()  # fmt: skip
    told = bodies(server)
    names = [body["event"] for body in told]
    assert names[0] == "start" and names[-1] == "end"
    assert {"log", "evaluate", "save", "epoch"} <= set(names)
    for got, body in zip(server.got, told):
        headers = {name.lower(): value for name, value in got.headers.items()}
        assert verify("s3cret", got.headers, got.body)
        assert not verify("other", got.headers, got.body)
        assert not verify("s3cret", got.headers, got.body + b" ")
        late = {**headers, "x-headway-timestamp": str(int(headers["x-headway-timestamp"]) - 999)}
        assert not verify("s3cret", late, got.body)
        assert headers["x-team"] == "night" and headers["content-type"] == "application/json"
        assert body["run_name"] == "mine" and len(body["run_id"]) == 12
    end = told[-1]
    assert (end["step"], end["max_steps"], end["outcome"]) == (2, 2, "completed")
    assert end["tokens"] == 32 and end["loss"] > 0
    evaluated = next(body for body in told if body["event"] == "evaluate")
    assert evaluated["metrics"]["eval_loss"] > 0
    assert next(b for b in told if b["event"] == "save")["checkpoint"].endswith("checkpoint-2")
    assert len({got.headers["X-Headway-Delivery"] for got in server.got}) == len(told)


def test_a_signature_is_hmac_sha256_over_time_and_body() -> None:
    # What `printf '17.{}' | openssl dgst -sha256 -hmac key` prints.
    digest = "e66392eac42eafc68c35a01c712811e016386c12456975fc3af80c9268568e3a"
    assert sign("key", "17", b"{}") == f"sha256={digest}"


def test_a_failure_carries_error_and_traceback(tmp_path: Path) -> None:
    class Break(TrainerCallback):
        def on_step_end(self) -> None:
            raise ValueError("bad luck")

    with local_server() as server, pytest.raises(ValueError):
        tiny_trainer(tmp_path, [WebhookCallback(server.url), Break()], max_steps=1).train()
    last = bodies(server)[-1]
    assert (last["event"], last["outcome"]) == ("failure", "failed")
    assert last["error"] == "ValueError: callback 'Break', on_step_end: bad luck"
    assert "on_step_end" in last["traceback"]
    assert "X-Headway-Signature" not in server.got[-1].headers


def send(server: LocalServer, **more: Any) -> list[float]:
    """Post once; returns the waits between attempts."""
    waits = Waits()
    options: dict[str, Any] = {"timeout_s": 5.0, "max_retries": 3, **more}
    http_post.post(server.url, lambda: (b"{}", {}), closing=waits, **options)
    return waits.waited


@pytest.mark.parametrize("status", [500, 502, 503, 429, 408])
def test_busy_and_broken_servers_are_tried_again(status: int) -> None:
    with local_server(lambda number: (status if number < 2 else 204, {})) as server:
        before = random.getstate()
        first, second = send(server)
        assert random.getstate() == before  # which is training's
    assert len(server.got) == 3
    assert 0.25 <= first <= 0.5 and 0.5 <= second <= 1.0  # doubles, with jitter


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 301, 307])
def test_refusals_and_redirects_are_final(status: int) -> None:
    with (
        local_server(lambda number: (status, {"Location": "/elsewhere"})) as server,
        pytest.raises(http_post.DeliveryError, match=rf"127.0.0.1 answered {status}"),
    ):
        send(server)
    assert [got.path for got in server.got] == ["/"]


def test_attempts_are_bounded() -> None:
    with (
        local_server(lambda number: (503, {})) as server,
        pytest.raises(http_post.DeliveryError, match="4 attempts"),
    ):
        send(server)
    assert len(server.got) == 4


def test_a_server_may_say_when_to_come_back() -> None:
    date = email.utils.formatdate(time.time() + 20, usegmt=True)
    asked = ["7", date, "9999", "soon", "-3"]
    with local_server(
        lambda number: (429, {"Retry-After": asked[number]}) if number < 5 else (200, {})
    ) as server:
        waits = send(server, max_retries=5)
    assert waits[0] == 7 and 15 < waits[1] <= 20 and waits[2] == 30 and waits[4] == 0
    assert 2 <= waits[3] <= 4  # not understood: as without it


def test_a_connection_that_fails_is_tried_again_and_a_slow_one_given_up() -> None:
    with local_server(lambda number: None if number == 0 else (200, {})) as server:
        assert len(send(server, timeout_s=0.1)) == 1
        assert len(server.got) == 2
    with pytest.raises(http_post.DeliveryError, match="cannot be reached"):
        send(server, max_retries=1)


def test_the_end_of_a_run_does_not_wait_between_attempts() -> None:
    closing = threading.Event()
    closing.set()
    with (
        local_server(lambda number: (503, {"Retry-After": "30"})) as server,
        pytest.raises(http_post.DeliveryError, match="2 attempts"),
    ):
        http_post.post(server.url, lambda: (b"", {}), timeout_s=5, max_retries=9, closing=closing)


def test_how_a_run_ended_is_tried_again_while_there_is_time(tmp_path: Path) -> None:
    # As of a service that takes one message a second: the last ones of a run come all at once.
    with local_server(
        lambda number: (429, {"Retry-After": "0.05"}) if number < 7 else (200, {})
    ) as server:
        mine = WebhookCallback(server.url, events=["epoch", "end"], max_retries=8)
        tiny_trainer(tmp_path, [mine], max_steps=1).train()
    assert [body["event"] for body in bodies(server)][-1] == "end"
    assert len(server.got) == 8


def test_an_attempt_has_its_own_time_and_the_same_delivery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_post, "_wait_s", lambda attempt, asked_s: 0.0)
    with local_server(lambda number: (503 if number == 0 else 200, {})) as server:
        mine = WebhookCallback(server.url, "k", events=["end"])
        tiny_trainer(tmp_path, [mine], max_steps=1).train()
    one, two = server.got
    assert one.body == two.body
    assert one.headers["X-Headway-Delivery"] == two.headers["X-Headway-Delivery"]
    assert verify("k", two.headers, two.body)


def test_a_server_that_hangs_holds_no_step(tmp_path: Path) -> None:
    with local_server(lambda number: None) as server:
        mine = WebhookCallback(
            server.url, events=["start", "log", "end"], timeout_s=30, close_timeout_s=0.2,
            queue_size=2,
        )  # fmt: skip
        started_s = time.monotonic()
        assert tiny_trainer(tmp_path, [mine], max_steps=6).train().global_step == 6
        assert time.monotonic() - started_s < 10


def test_an_unreachable_server_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with local_server() as server:
        pass
    mine = WebhookCallback(f"{server.url}/token-in-path", max_retries=0)
    assert tiny_trainer(tmp_path, [mine], max_steps=1).train().global_step == 1
    assert "cannot be reached" in caplog.text and "token-in-path" not in caplog.text


def test_address_and_secret_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="HEADWAY_WEBHOOK_URL"):
        tiny_trainer(tmp_path, [WebhookCallback()], max_steps=1).train()
    with local_server() as server:
        monkeypatch.setenv("HEADWAY_WEBHOOK_URL", server.url)
        monkeypatch.setenv("HEADWAY_WEBHOOK_SECRET", "from outside")
        tiny_trainer(tmp_path, [WebhookCallback(events=["end"])], max_steps=1).train()
    (got,) = server.got
    assert verify("from outside", got.headers, got.body)


RUN = """
model: {vocab_size: 258, hidden_size: 32, num_layers: 1, num_heads: 4}
data: {train: {class_path: TokenDataset, init_args: {paths: tokens, sequence_length: 8}}}
callbacks:
  - class_path: SlackNotifierCallback
    init_args: {webhook_url: "https://chat.example.org/services/T0/B0/buried", notifications: all}
  - class_path: WebhookCallback
    init_args:
      url: https://example.org/hooks/buried
      secret: buried
      events: [end, failure]
args: {output_dir: out}
"""


def test_a_run_file_builds_them_and_its_copy_holds_no_secret(tmp_path: Path) -> None:
    from headway.config.snapshot import take_snapshot

    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    run = load_run(path)
    slack, hook = build_callbacks(run)
    assert slack.notifications == "all" and hook.events == ("end", "failure")
    assert "buried" not in json.dumps(take_snapshot(run, run.args)["config"])
    assert "buried" not in repr(slack) + repr(hook)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "ftp://example.org"}, "url must be an address"),
        ({"url": "http://"}, "url must be an address"),
        ({"url": "http://a b"}, "url must be an address"),
        ({"url": 3}, "url must be an address"),
        ({"secret": ""}, "secret: must be text"),
        ({"events": "end"}, "events: 'end' given"),
        ({"events": []}, "events: "),
        ({"events": ["ends"]}, "did you mean 'end'"),
        ({"headers": ["a"]}, "headers: must be a mapping"),
        ({"headers": {"A": "x\ny"}}, "headers: 'A'"),
        ({"headers": {"X-Headway-Signature": "x"}}, "set by WebhookCallback"),
        ({"timeout_s": -1}, "timeout_s: -1 given"),
        ({"max_retries": 1.5}, "max_retries: 1.5 given"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WebhookCallback(**{"url": "https://example.org/x", **options})
