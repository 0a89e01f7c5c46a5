"""The dashboard inside the server of a run, for that run alone.

Owns: putting its parts together there. Does not own: any of them. The run's files are read by
another process: whatever is asked of the dashboard, training shares no lock with it.
"""

from __future__ import annotations

import os
from pathlib import Path

from headway import __version__
from headway.control.dashboard.assets import Assets
from headway.control.dashboard.live import OwnJob
from headway.control.dashboard.routes import Routes
from headway.control.dashboard.shelf import run_id_of
from headway.control.dashboard.source import ProcessSource
from headway.control.inbox import Inbox
from headway.control.server import ControlServer
from headway.control.status import StatusBoard


def mount(
    server: ControlServer,
    board: StatusBoard,
    inbox: Inbox,
    output_dir: str | os.PathLike[str],
    logging_dir: str | os.PathLike[str] | None,
) -> None:
    """Add the dashboard's routes to a server that has not started yet."""
    folder = Path(output_dir).absolute()
    logs = None if logging_dir is None else Path(logging_dir).absolute()
    source = ProcessSource(folder, logs, folder.name)
    server.add_ending(source.close)
    Assets().add_routes(server)
    Routes(server, source, OwnJob(run_id_of(folder), board, inbox), version=__version__).add()
