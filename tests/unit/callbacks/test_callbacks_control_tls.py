"""TrainerControlCallback over TLS."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from headway import TrainerCallback
from headway.callbacks import TrainerControlCallback
from headway.control.client import Client, ControlError
from headway.control.discovery import find_job
from headway.testing.trainer import tiny_trainer

_MAKE = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-batch")


def make_certificate(folder: Path, name: str) -> tuple[str, str]:
    certificate, key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    command = [*_MAKE, "-subj", f"/CN={name}", "-out", certificate, "-keyout", key]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


class Conductor(TrainerCallback):
    """Drives the run from another thread, once it has begun."""

    def __init__(self, drive: Any) -> None:
        self.drive, self.error = drive, None
        self.thread: threading.Thread | None = None

    def on_step_begin(self, trainer: Any) -> None:
        if self.thread is None:
            self.thread = threading.Thread(target=self._drive, args=(trainer,))
            self.thread.start()

    def _drive(self, trainer: Any) -> None:
        try:
            self.drive()
        except BaseException as error:
            self.error = error
        finally:
            trainer.cancel_run("the drive is over")


@pytest.mark.timeout(60)
@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_clients_take_the_jobs_own_certificate_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_JOBS_DIR", str(tmp_path / "jobs"))
    certificate, key = make_certificate(tmp_path, "own")
    other, _ = make_certificate(tmp_path, "other")
    control = TrainerControlCallback(job_id="kite", tls_certificate=certificate, tls_key=key)
    found: list[Any] = []

    def drive() -> None:
        job = find_job("kite")
        foreign = dataclasses.replace(job.endpoint, tls_certificate=other)
        with pytest.raises(ControlError, match="certificate verify failed"):
            Client(dataclasses.replace(job, endpoint=foreign)).status()
        found.extend([control.url, Client(job).status()["job_id"]])
        found.append(Client(job).graceful_stop()["state"])

    conductor = Conductor(drive)
    tiny_trainer(tmp_path, [control, conductor], max_steps=100_000).train()
    assert conductor.thread is not None
    conductor.thread.join()
    assert conductor.error is None
    assert found[0].startswith("https://127.0.0.1:") and found[1:] == ["kite", "applied"]
