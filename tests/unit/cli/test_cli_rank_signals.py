"""A signal outside of training ends a rank, whatever it meets there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headway.dist.exits import FOLDER_VARIABLE, read_ends

# As a library does that wants no error of an import of its own to come out.
_DEAF = """
def load():
    print("up", flush=True)
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass
work = None
"""
# As importlib does, which misses a lock of its own then.
_CONFUSED = """
def load():
    return "job", {"use_cpu": True}
def work(job):
    print("up", flush=True)
    try:
        time.sleep(60)
    except BaseException:
        raise KeyError(1)
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("program", "number"),
    [(_DEAF, signal.SIGTERM), (_DEAF, signal.SIGINT), (_CONFUSED, signal.SIGTERM)],
    ids=["while it starts", "while it starts, Ctrl-C", "before it trains"],
)
def test_a_rank_that_is_told_to_end_ends_and_is_not_started_again(
    program: str, number: signal.Signals, tmp_path: Path
) -> None:
    start = f"import time\nfrom headway.cli.rank import run_as_rank{program}run_as_rank(load, work)"
    environ = {**os.environ, FOLDER_VARIABLE: str(tmp_path)}
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        environ.pop(name, None)
    rank = subprocess.Popen(
        [sys.executable, "-c", start],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert rank.stdout is not None and rank.stdout.readline() == "up\n"
        rank.send_signal(number)
        _, said = rank.communicate(timeout=60)
    finally:
        rank.kill()
    # To torchrun a success: it starts again whatever fails.
    assert rank.returncode == 0 and "Traceback" not in said
    (end,) = read_ends(tmp_path)
    assert end.code == 128 + number and not end.victim and not end.is_answer
