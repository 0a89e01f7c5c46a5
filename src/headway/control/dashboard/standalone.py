"""The dashboard as a process of its own, over the folders of runs and the jobs of this user.

Owns: putting its parts together, its token and its address. Does not own: any part, nor any run: it
reads their files, and sends a command only where somebody pressed a button.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headway import __version__
from headway.control.dashboard.answers import Answers
from headway.control.dashboard.assets import Assets
from headway.control.dashboard.live import FoundJobs
from headway.control.dashboard.routes import Routes
from headway.control.dashboard.shelf import Shelf
from headway.control.dashboard.source import Threads, ThreadSource
from headway.control.guarded import GuardedServer
from headway.control.security import new_token

_VERIFY_S = 15.0


class DashboardServer(GuardedServer):
    """Serves the runs in and below some folders, and those of live jobs.

    With `read_only` there is no token that commands could be sent with.
    """

    thread_name = "headway-dashboard"
    extra, purpose = "dashboard", "The dashboard"

    def __init__(
        self,
        folders: Iterable[str | Path],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        read_only: bool = False,
        jobs_folder: Path | None = None,
    ) -> None:
        self.token = new_token()
        super().__init__(
            tokens={"read" if read_only else "control": self.token}, host=host, port=port
        )
        jobs = FoundJobs(jobs_folder)
        roots = [Path(folder).absolute() for folder in folders]
        answers, threads = Answers(Shelf(roots, jobs.places)), Threads()
        # Reading a whole checkpoint may take minutes; nobody else is to wait for it.
        checks = Threads(num_threads=1, most_waiting=4)

        async def verify(run_id: str, name: str) -> dict[str, Any]:
            try:
                async with asyncio.timeout(_VERIFY_S):
                    return await checks.run(answers.verify, run_id, name)
            except TimeoutError:
                message = "it goes on; the list of checkpoints tells when it is done"
                return {"name": name, "state": "verifying", "problems": [], "message": message}

        Assets().add_routes(self)
        source = ThreadSource(answers, threads)
        Routes(self, source, jobs, version=__version__, verify=verify).add()
        for part in (threads, checks, jobs):
            self.add_ending(part.close)

    @property
    def address(self) -> str:
        """Where a browser finds it, with the token where no server and no log sees it."""
        anywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        host = anywhere.get(self.host, self.host)
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}/#token={self.token}"
