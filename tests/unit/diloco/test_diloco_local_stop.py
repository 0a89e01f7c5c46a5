"""`headway diloco local` that is stopped while it starts its processes."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.cli.diloco_local import _Local, _Process

IDLE = [sys.executable, "-c", "import time; time.sleep(100)"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("late", [True, False], ids=["before it is known", "between two"])
def test_a_stop_reaches_the_worker_that_is_being_started_and_no_other_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    options = argparse.Namespace(
        workers=3, config="run.yaml", sync_every=4, comm="bf16", num_fragments=1, dylu=False,
        bf16_fetch=False, overrides=[], timeout_s=None, quiet=True, json=False,
    )  # fmt: skip
    local = _Local(options, tmp_path, None, 0)
    children: list[subprocess.Popen[bytes]] = []

    def start(self: _Local, name: str, words: list[str]) -> _Process:
        if not late and children:
            os.kill(os.getpid(), signal.SIGTERM)
        children.append(subprocess.Popen(IDLE, start_new_session=True))
        if late:
            os.kill(os.getpid(), signal.SIGTERM)
        (tmp_path / f"{name}.log").touch()
        return _Process(name, children[-1], tmp_path / f"{name}.log")

    def start_server(self: Any) -> str:
        (tmp_path / "server").mkdir()
        (tmp_path / "server" / "token").write_text("k" * 40)
        return "127.0.0.1:9"

    monkeypatch.setattr(_Local, "_start", start)
    monkeypatch.setattr(_Local, "_start_server", start_server)
    with local.taking_signals():
        assert local.run() == 143
    assert [child.returncode for child in children] == [-15] * (1 if late else 2)
