"""DiLoCoCallback: its options, what misconfiguration leads to, and whole runs against a server."""

from __future__ import annotations

import logging
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from headway.callbacks import DiLoCoCallback
from headway.errors import ConfigError
from headway.testing import assert_no_import
from headway.testing.trainer import tiny_trainer

VARIABLES = {
    "DILOCO_SERVER": "kite:7650",
    "DILOCO_SYNC_EVERY": "20",
    "DILOCO_WORKER_ID": "left",
    "DILOCO_BF16_COMM": "no",
    "DILOCO_DYLU": "Yes",
    "DILOCO_HEARTBEAT_INTERVAL": "1.5",
    "DILOCO_NUM_FRAGMENTS": "2",
}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*VARIABLES, "DILOCO_COMM", "DILOCO_TOKEN", "DILOCO_TOKEN_FILE", "DILOCO_TLS_CA"]:
        monkeypatch.delenv(name, raising=False)


def shown(callback: DiLoCoCallback) -> dict[str, Any]:
    o = callback.options
    return {
        "DILOCO_SERVER": callback.server_addr,
        "DILOCO_SYNC_EVERY": o.sync_every,
        "DILOCO_WORKER_ID": callback.worker_id,
        "DILOCO_BF16_COMM": o.comm,
        "DILOCO_DYLU": o.dylu,
        "DILOCO_HEARTBEAT_INTERVAL": o.heartbeat_interval,
        "DILOCO_NUM_FRAGMENTS": o.num_fragments,
    }


# Options


def test_defaults() -> None:
    callback = DiLoCoCallback()
    assert list(shown(callback).values()) == ["", 500, "", "bf16", False, 30.0, 1]
    assert callback.options.timeout == 600 and callback.options.max_sync_retries == 3
    assert not callback.active


def test_the_environment_comes_before_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    assert list(shown(DiLoCoCallback()).values()) == [
        "kite:7650", 20, "left", "float32", True, 1.5, 2,
    ]  # fmt: skip


def test_arguments_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    callback = DiLoCoCallback(
        server_addr="gull:1",
        sync_every=3,
        worker_id="right",
        bf16_comm=True,
        dylu=False,
        heartbeat_interval=9.0,
        num_fragments=1,
    )
    assert list(shown(callback).values()) == ["gull:1", 3, "right", "bf16", False, 9.0, 1]


def test_empty_variables_are_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, " ")
    assert shown(DiLoCoCallback()) == shown(DiLoCoCallback())
    assert DiLoCoCallback().options.sync_every == 500 and not DiLoCoCallback().active


def test_an_empty_address_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_SERVER", "kite:7650")
    assert DiLoCoCallback().active and not DiLoCoCallback(server_addr="").active


@pytest.mark.parametrize(
    ("word", "meant"), [("1", 1), ("TRUE", 1), ("yes", 1), ("on", 0), ("0", 0)]
)
def test_flags_of_the_environment(monkeypatch: pytest.MonkeyPatch, word: str, meant: int) -> None:
    monkeypatch.setenv("DILOCO_DYLU", word)
    assert DiLoCoCallback().options.dylu is bool(meant)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"sync_every": 0}, ("sync_every: 0", "from 1 up")),
        ({"sync_every": -3}, ("sync_every: -3",)),
        ({"sync_every": 1.5}, ("sync_every: 1.5",)),
        ({"num_fragments": 0}, ("num_fragments: 0",)),
        ({"num_fragments": 9, "sync_every": 4}, ("num_fragments: 9", "sync_every (4)")),
        ({"heartbeat_interval": 0}, ("heartbeat_interval: 0", "above 0")),
        ({"timeout": float("nan")}, ("timeout: nan",)),
        ({"max_sync_retries": -1}, ("max_sync_retries: -1",)),
        ({"comm": "bfloat16"}, ("comm", "bf16")),
        ({"bf16_comm": "yes"}, ("bf16_comm: 'yes'",)),
        ({"dylu": 1}, ("dylu: 1",)),
        ({"overlap_steps": 6, "sync_every": 5}, ("overlap_steps: 6", "at most 5")),
        ({"merge_alpha": 2}, ("merge_alpha: 2", "0 to 1")),
        ({"worker_id": "a b"}, ("worker_id: 'a b'",)),
        ({"server_addr": "kite"}, ("server_addr: 'kite'", "HOST:PORT")),
        ({"server_addr": 7650}, ("server_addr: 7650",)),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_a_wrong_value_is_refused_with_its_name(given: dict[str, Any], told: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        DiLoCoCallback(**given)
    assert str(caught.value).startswith("DiLoCoCallback: ")
    for text in told:
        assert text in str(caught.value)


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        DiLoCoCallback(sync_every=0, timeout=-1, comm="int4")
    assert len(caught.value.problems) == 3


def test_a_bad_number_in_the_environment_names_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DILOCO_SYNC_EVERY", "often")
    with pytest.raises(ValueError, match="DILOCO_SYNC_EVERY: 'often'"):
        DiLoCoCallback()


def test_making_one_imports_no_torch() -> None:
    assert_no_import(
        "from headway.callbacks import DiLoCoCallback; DiLoCoCallback('kite:7650', sync_every=5)"
    )


# Runs without a server


def test_without_an_address_a_run_trains_alone_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "headway"):
        output = tiny_trainer(tmp_path, [DiLoCoCallback()], max_steps=2).train()
    assert output.global_step == 2
    assert len(re.findall("DiLoCoCallback: not active", caplog.text)) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "kite.invalid"])
def test_a_server_that_is_not_there_ends_the_run_before_it_trains(
    tmp_path: Path, host: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    callback = DiLoCoCallback(f"{host}:{port}", max_sync_retries=1, first_retry_s=0.01)
    trainer = tiny_trainer(tmp_path, [callback], max_steps=2)
    with pytest.raises(ConfigError, match=f"DiLoCo: {host}:{port}"):
        trainer.train()
    assert trainer.state.global_step == 0 and callback.worker is None
