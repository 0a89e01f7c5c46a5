"""`headway dashboard [RUN_DIR...]`: runs and running jobs in a browser."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from headway.errors import ConfigError, nearest

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.usage = "headway dashboard [RUN_DIR ...] [--host ADDRESS] [--port PORT] [--read-only]"
    parser.add_argument(
        "folders",
        metavar="RUN_DIR",
        nargs="*",
        help="folders of runs, or folders that hold some (the current folder); running jobs of "
        "this user are shown too",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen (127.0.0.1)"
    )
    parser.add_argument(
        "--port", type=int, default=0, metavar="PORT", help="0 (default) is one that is free"
    )
    parser.add_argument(
        "--read-only", action="store_true", help="show only: no command can be sent to a run"
    )


def run(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from headway.control.dashboard.assets import find_charts_script
    from headway.control.dashboard.standalone import DashboardServer
    from headway.control.security import is_loopback

    _check(options)
    server = DashboardServer(
        options.folders or ["."],
        host=options.host,
        port=options.port,
        read_only=options.read_only,
    )
    with _until_told() as (over, code):
        server.start()
        try:
            print(f"dashboard: {server.address}", flush=True)
            if not is_loopback(options.host):
                logger.warning(
                    "--host %s: other machines can reach this, and the token travels unencrypted; "
                    "'ssh -L' to 127.0.0.1 is safer",
                    options.host,
                )
            if find_charts_script() is None:
                logger.warning(
                    "plotly is not installed: there are no charts; pip install 'headway[dashboard]'"
                )
            logger.info("Ctrl-C ends it; runs are not touched by that")
            over.wait()
        finally:
            server.stop()
    return code[0]


def _check(options: argparse.Namespace) -> None:
    problems = []
    if not 0 <= options.port <= 65535:
        problems.append(f"--port: must be 0 to 65535, got {options.port}")
    for folder in map(Path, options.folders):
        if folder.exists() and not folder.is_dir():
            problems.append(
                f"RUN_DIR: {folder} is a file; allowed: a run's folder (its output_dir), or one "
                "that holds some"
            )
        elif not folder.exists():
            beside = folder.parent.iterdir() if folder.parent.is_dir() else ()
            hint = nearest(folder.name, [path.name for path in beside if path.is_dir()])
            did_you_mean = f"; did you mean {folder.parent / hint}?" if hint else ""
            problems.append(f"RUN_DIR: {folder} does not exist{did_you_mean}")
    if problems:
        raise ConfigError(problems)


@contextlib.contextmanager
def _until_told() -> Iterator[tuple[threading.Event, list[int]]]:
    """An event that Ctrl-C and SIGTERM set, and the exit code that goes with them."""
    over, code = threading.Event(), [0]

    def end(number: int, frame: FrameType | None) -> None:
        code[0] = 128 + number
        over.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield over, code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
