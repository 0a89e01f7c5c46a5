"""TrainerControlCallback: its options, the dashboard it mounts."""

from __future__ import annotations

import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from headway import ConfigError
from headway.callbacks import TrainerControlCallback
from headway.control.discovery import list_jobs
from headway.testing.trainer import tiny_trainer


@pytest.fixture(autouse=True)
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_JOBS_DIR", str(tmp_path / "jobs"))


# The dashboard


def test_the_dashboard_is_mounted_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted: list[Any] = []
    module = types.ModuleType("headway.control.dashboard.mounted")
    module.mount = lambda *given: mounted.append(given)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "headway.control.dashboard.mounted", module)
    for dashboard in (True, False):
        control = TrainerControlCallback(dashboard=dashboard)
        trainer = tiny_trainer(tmp_path, [control], max_steps=1)
        trainer.train()
    ((_, board, inbox, output_dir, logging_dir),) = mounted
    assert board.job_id and inbox is not None and output_dir == trainer.args.output_dir
    assert logging_dir is not None


def test_a_dashboard_without_its_package_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def mount(*given: Any) -> None:
        raise ConfigError("the dashboard needs plotly")

    module = types.ModuleType("headway.control.dashboard.mounted")
    module.mount = mount  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "headway.control.dashboard.mounted", module)
    with caplog.at_level(logging.INFO, "headway.callbacks.control"):
        tiny_trainer(tmp_path, [TrainerControlCallback()], max_steps=1).train()
    assert "no dashboard: the dashboard needs plotly" in caplog.text


# Options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"job_id": "../etc"}, ("job_id", "letters, digits")),
        ({"job_id": 3}, ("job_id",)),
        ({"port": 70000}, ("port: 70000 given", "65535")),
        ({"port": -1}, ("port: -1 given",)),
        ({"port": "8900"}, ("port: '8900' given",)),
        ({"enable_http": "yes"}, ("enable_http: 'yes' given",)),
        ({"host": ""}, ("host: '' given",)),
        ({"host": "0.0.0.0", "disable_auth": True}, ("disable_auth", "0.0.0.0", "127.0.0.1")),
        ({"auth_token": "short"}, ("auth_token", "16 characters")),
        ({"auth_token": "ü" * 20}, ("auth_token", "ASCII")),
        ({"auth_token": "a" * 20, "disable_auth": True}, ("auth_token", "disable_auth")),
        ({"auth_token": "a" * 20, "read_token": "a" * 20}, ("read_token",)),
        ({"unix_socket": "/tmp/s", "port": 1}, ("unix_socket", "one place")),
        ({"extra_hosts": "example.org"}, ("extra_hosts",)),
        ({"tls_certificate": "a.pem"}, ("tls_certificate and tls_key",)),
        ({"tls_certificate": "no.pem", "tls_key": "no.key"}, ("tls_certificate", "no.pem")),
        ({"dashboard": 1}, ("dashboard: 1 given",)),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        TrainerControlCallback(**options)
    assert all(word in str(refused.value) for word in words), refused.value
    assert "ü" not in str(refused.value)


def test_files_that_are_no_certificate_are_refused(tmp_path: Path) -> None:
    files = {"tls_certificate": tmp_path / "a.pem", "tls_key": tmp_path / "a.key"}
    for path in files.values():
        path.write_text("nothing")
    control = TrainerControlCallback(**{option: str(path) for option, path in files.items()})
    with pytest.raises(ConfigError, match="tls_certificate="):
        tiny_trainer(tmp_path, [control], max_steps=1).train()
    assert list_jobs() == []
