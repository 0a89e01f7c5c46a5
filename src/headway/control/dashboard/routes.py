"""The routes of the dashboard, the same inside a run's server and in a process of their own.

Owns: paths, roles, and joining what files tell with what a live job says. Does not own: the server
(control/guarded.py), either of the two sources (source.py, live.py), static files (assets.py).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from headway.control.dashboard.live import Live, Status
from headway.control.dashboard.source import Source
from headway.control.guarded import GuardedServer, answer_json, read_json
from headway.control.lost_run import FROM_FILES
from headway.control.schema import COMMANDS, BadRequest

if TYPE_CHECKING:
    from aiohttp import web

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

Verify = Callable[[str, str], Awaitable[dict[str, Any]]]

_FROM_FILES = ("keys", "series", "config", "checkpoints", "samples")
_STATES = {"paused": "paused", "failed": "failed"}
_MOST_INCIDENTS = 1000


class Routes:
    """Handlers over a source of files and the live jobs; `verify` only where it hurts no run."""

    def __init__(
        self,
        server: GuardedServer,
        source: Source,
        live: Live,
        *,
        version: str,
        verify: Verify | None = None,
    ) -> None:
        self._server, self._source, self._live = server, source, live
        self._version, self._verify = version, verify

    def add(self) -> None:
        add, run = self._server.add_route, "/api/runs/{run_id}"
        add("GET", "/api/session", self._session, "read")
        add("GET", "/api/commands", self._commands, "read")
        add("GET", "/api/runs", self._runs, "read")
        add("GET", "/api/diff", self._diff, "read")
        for what in _FROM_FILES:
            add("GET", f"{run}/{what}", self._make_reader(what), "read")
        add("GET", f"{run}/incidents", self._incidents, "read")
        add("GET", f"{run}/post_mortem", self._post_mortem, "read")
        add("GET", f"{run}/status", self._status, "read")
        add("GET", run + "/commands/{command_id}", self._receipt, "read")
        add("POST", f"{run}/control", self._control, "control")
        add("POST", run + "/checkpoints/{name}/verify", self._check, "control")

    async def _session(self, request: web.Request) -> web.StreamResponse:
        role = self._server.role_of(request)
        standalone = self._verify is not None
        return answer_json({"role": role, "standalone": standalone, "version": self._version})

    async def _commands(self, request: web.Request) -> web.StreamResponse:
        return answer_json({name: asdict(kind) for name, kind in COMMANDS.items()})

    async def _runs(self, request: web.Request) -> web.StreamResponse:
        said = json.loads(await self._source.ask("runs", None, list(request.query.items())))
        statuses = await self._live.statuses()
        runs = [
            join_status(run, statuses[run["id"]]) if run["id"] in statuses else run
            for run in said["runs"]
        ]
        return answer_json({**said, "runs": runs})

    async def _diff(self, request: web.Request) -> web.StreamResponse:
        return _send(await self._source.ask("diff", None, list(request.query.items())))

    def _make_reader(self, what: str) -> Handler:
        async def read(request: web.Request) -> web.StreamResponse:
            run_id, query = request.match_info["run_id"], list(request.query.items())
            return _send(await self._source.ask(what, run_id, query))

        return read

    async def _incidents(self, request: web.Request) -> web.StreamResponse:
        """Those of the files and those that the job tells of, the newest first."""
        run_id, query = request.match_info["run_id"], list(request.query.items())
        said = json.loads(await self._source.ask("incidents", run_id, query))
        status = await self._live.status(run_id)
        told = (status or {}).get("incidents")
        found = {
            (one.get("step"), one.get("message")): one
            for one in [*said["incidents"], *(told if isinstance(told, list) else [])]
        }
        ordered = sorted(found.values(), key=_when, reverse=True)
        return answer_json({**said, "incidents": ordered[:_MOST_INCIDENTS]})

    async def _post_mortem(self, request: web.Request) -> web.StreamResponse:
        run_id, query = request.match_info["run_id"], list(request.query.items())
        said = await self._source.ask("post_mortem", run_id, query)
        if json.loads(said).get("reported_by") == FROM_FILES and await self._live.has(run_id):
            raise BadRequest(404, "the run has left no post-mortem: it lives")
        return _send(said)

    async def _status(self, request: web.Request) -> web.StreamResponse:
        run_id = await self._known(request)
        status = await self._live.status(run_id)
        return answer_json(None if status is None else dict(status))

    async def _control(self, request: web.Request) -> web.StreamResponse:
        run_id, said = await self._known(request), await read_json(request)
        return answer_json(await self._live.command(run_id, said))

    async def _receipt(self, request: web.Request) -> web.StreamResponse:
        run_id = await self._known(request)
        return answer_json(await self._live.receipt(run_id, request.match_info["command_id"]))

    async def _check(self, request: web.Request) -> web.StreamResponse:
        await read_json(request)
        run_id = await self._known(request)
        if self._verify is None:
            raise BadRequest(
                403, "reading a whole checkpoint would slow the run down; use: headway dashboard"
            )
        return answer_json(await self._verify(run_id, request.match_info["name"]))

    async def _known(self, request: web.Request) -> str:
        run_id = request.match_info["run_id"]
        # A command to a live job must not have to wait for those who look at curves.
        if not await self._live.has(run_id):
            await self._source.ask("known", run_id)
        return run_id


def join_status(run: dict[str, Any], status: Status | None) -> dict[str, Any]:
    """A run of the list, with what its live job says of itself."""
    if status is None:  # it lives, and does not answer just now
        lost = run["state"] == "lost"
        return {**run, "state": "running", "post_mortem": run["post_mortem"] and not lost}
    phase, outcome = status.get("status"), status.get("outcome")
    state = _STATES.get(str(phase), "running")
    if phase == "finished":
        state = "finished" if outcome in (None, "completed") else "stopped"
    newer: dict[str, Any] = {
        "step": status.get("global_step"),
        "max_steps": _positive(status.get("max_steps")),
        "epoch": status.get("epoch"),
        "updated_at": status.get("timestamp"),
        "started_at": run["started_at"] or status.get("started_at"),
    }
    told = status.get("incidents")
    return {
        **run,
        **{key: value for key, value in newer.items() if value is not None},
        "state": state,
        "job_id": status.get("job_id"),
        "controllable": phase not in ("finished", "failed"),
        "post_mortem": run["post_mortem"] and run["state"] != "lost",
        "incidents": run["incidents"] + (len(told) if isinstance(told, list) else 0),
    }


def _positive(value: Any) -> Any:
    return value if isinstance(value, int | float) and value > 0 else None


def _when(incident: Mapping[str, Any]) -> tuple[float, float]:
    when, step = incident.get("timestamp"), incident.get("step")
    return tuple(float(n) if isinstance(n, int | float) else 0.0 for n in (when, step))  # type: ignore[return-value]


def _send(body: bytes) -> web.Response:
    from aiohttp import web

    return web.Response(body=body, headers={"Content-Type": "application/json; charset=utf-8"})
