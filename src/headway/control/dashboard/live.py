"""What only a running job knows or can do: its status, and taking commands.

Owns: the two ways to a job, from inside it and from a dashboard of its own process. Does not own:
what commands mean (control/schema.py), what files tell (answers.py).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from headway.control.client import ENDS_RUN, Client, ControlError, Stream
from headway.control.dashboard.shelf import Place, run_id_of
from headway.control.dashboard.source import Threads
from headway.control.discovery import Job, list_jobs
from headway.control.inbox import Inbox
from headway.control.schema import COMMAND_ID, BadRequest, parse_command
from headway.control.server import take_command
from headway.control.status import StatusBoard
from headway.errors import ConfigError

Status = Mapping[str, Any]

_TIMEOUT_S = 3.0
_FRESH_S = 1.0
_SILENT_S = 10.0
"""How long one that did not answer is not asked again: those who look wait for each try."""
_MOST_AT_ONCE = 16
_MOST_SENT, _MOST_STREAMS = 256, 8
_NOT_SETTLED_S, _LOOK_S = 5.0, 0.1
"""How long an answer waits for a command to be settled; and how often it looks."""
_ENDS_WITHOUT_A_SAVE = ("graceful_stop", "abort")
"""Of these the end of the run is all that was asked for."""


class Live(Protocol):
    """The jobs behind some runs, by the ids of these."""

    async def statuses(self) -> dict[str, Status | None]:
        """Every run that has a job, and what that says of itself; None if it does not answer."""

    async def has(self, run_id: str) -> bool:
        """Whether the run has a job."""

    async def status(self, run_id: str) -> Status | None: ...

    async def command(self, run_id: str, said: Any) -> dict[str, Any]: ...

    async def receipt(self, run_id: str, command_id: str) -> dict[str, Any]: ...


class OwnJob:
    """The job that this process runs."""

    def __init__(self, run_id: str, board: StatusBoard, inbox: Inbox) -> None:
        self._run_id, self._board, self._inbox = run_id, board, inbox

    async def statuses(self) -> dict[str, Status | None]:
        return {self._run_id: self._board.status}

    async def has(self, run_id: str) -> bool:
        return run_id == self._run_id

    async def status(self, run_id: str) -> Status | None:
        return self._board.status if run_id == self._run_id else None

    async def command(self, run_id: str, said: Any) -> dict[str, Any]:
        return take_command(self._inbox, said)

    async def receipt(self, run_id: str, command_id: str) -> dict[str, Any]:
        # This server ends with the run: what became of its last command, who asks already hears.
        deadline = time.monotonic() + _NOT_SETTLED_S
        while True:
            receipt = self._inbox.receipt(command_id)
            if receipt is None:
                raise BadRequest(404, "no command with that id is known")
            if receipt.settled_at is not None or time.monotonic() > deadline:
                return receipt.to_dict()
            await asyncio.sleep(_LOOK_S)


class FoundJobs:
    """The jobs of this user on this machine, as discovery finds them."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._threads = Threads(num_threads=4)
        self._askers = ThreadPoolExecutor(_MOST_AT_ONCE, thread_name_prefix="headway-jobs")
        self._clients: dict[str, Client] = {}
        self._statuses: dict[str, tuple[Job, float, Status | None]] = {}
        self._sent: OrderedDict[tuple[str, str], dict[str, Any]] = OrderedDict()
        self._streams: OrderedDict[tuple[str, str], Stream] = OrderedDict()
        """Of jobs that were told to end: what they said to the last."""

    def places(self) -> list[Place]:
        """Where the runs of live jobs are."""
        return [
            Place(Path(job.endpoint.output_dir), _path(job.endpoint.logging_dir), _name(job))
            for job in self._jobs().values()
        ]

    async def statuses(self) -> dict[str, Status | None]:
        return await self._threads.run(self._all_statuses)

    async def has(self, run_id: str) -> bool:
        return run_id in await self._threads.run(self._jobs)

    async def status(self, run_id: str) -> Status | None:
        job = (await self._threads.run(self._jobs)).get(run_id)
        return None if job is None else await self._threads.run(self._status, job)

    async def command(self, run_id: str, said: Any) -> dict[str, Any]:
        command = parse_command(said)
        client, key = await self._threads.run(self._client_of, run_id), (run_id, command.id)

        def send() -> dict[str, Any]:
            # A run that ends may be gone before it is asked again; its stream says all to the last.
            if command.name in ENDS_RUN and key not in self._streams:
                self._keep_stream(key, client.try_stream())
            return client.send(command.name, dict(command.data), wait=False, command_id=command.id)

        receipt = await self._threads.run(_translate, send)
        self._sent[key] = receipt
        while len(self._sent) > _MOST_SENT:
            self._sent.popitem(last=False)
        return receipt

    def _keep_stream(self, key: tuple[str, str], stream: Stream | None) -> None:
        if stream is not None:
            self._streams[key] = stream
        while len(self._streams) > _MOST_STREAMS:
            self._streams.popitem(last=False)[1].close()

    async def receipt(self, run_id: str, command_id: str) -> dict[str, Any]:
        if not COMMAND_ID.fullmatch(command_id):
            raise BadRequest(404, "no command with that id is known")
        known = self._sent.get((run_id, command_id))
        try:
            client = await self._threads.run(self._client_of, run_id)
            receipt = await self._threads.run(_translate, lambda: client.receipt(command_id))
        except BadRequest:
            gone = run_id not in await self._threads.run(self._jobs)
            if known is None or not gone:
                raise
            receipt = await self._threads.run(self._last_word, (run_id, command_id), known)
        if known is not None:
            self._sent[run_id, command_id] = receipt
        if receipt.get("settled_at") is not None:
            self._drop_stream((run_id, command_id))
        return receipt

    def _last_word(self, key: tuple[str, str], known: dict[str, Any]) -> dict[str, Any]:
        """What became of a command whose job has ended."""
        if known.get("settled_at") is not None:
            return known
        stream, command = self._streams.get(key), known.get("command")
        said = None if stream is None else stream.find_command(key[1])
        if said is None and command in _ENDS_WITHOUT_A_SAVE:
            said = {"state": "applied", "message": "the run has ended"}
        if said is None:
            self._drop_stream(key)
            raise BadRequest(410, f"the run has ended; what became of {command} is not known")
        return {**known, **said, "settled_at": time.time()}

    def _drop_stream(self, key: tuple[str, str]) -> None:
        if (stream := self._streams.pop(key, None)) is not None:
            stream.close()

    async def close(self) -> None:
        for key in list(self._streams):
            self._drop_stream(key)
        self._askers.shutdown(wait=False, cancel_futures=True)
        await self._threads.close()

    def _jobs(self) -> dict[str, Job]:
        """The newest live job of each run."""
        found: dict[str, Job] = {}
        for job in list_jobs(self._folder):
            if job.alive:
                found.setdefault(run_id_of(Path(job.endpoint.output_dir)), job)
        return found

    def _client_of(self, run_id: str) -> Client:
        job = self._jobs().get(run_id)
        if job is None:
            raise BadRequest(
                410, "the run has no live job on this machine: it has ended, or takes no commands"
            )
        known = self._clients.get(run_id)
        if known is None or known.job.endpoint != job.endpoint:
            known = self._clients[run_id] = Client(job, timeout_s=_TIMEOUT_S)
        return known

    def _all_statuses(self) -> dict[str, Status | None]:
        jobs = self._jobs()
        for table in (self._clients, self._statuses):
            for run_id in [key for key in table if key not in jobs]:
                table.pop(run_id, None)  # type: ignore[attr-defined]
        # Together: one that does not answer must not keep the others waiting.
        return dict(zip(jobs, self._askers.map(self._status, jobs.values())))

    def _status(self, job: Job) -> Status | None:
        run_id = run_id_of(Path(job.endpoint.output_dir))
        before = self._statuses.get(run_id)
        if before is not None and before[0].endpoint == job.endpoint:
            _, asked_at, known = before
            if time.monotonic() - asked_at < (_SILENT_S if known is None else _FRESH_S):
                return known
        try:
            known = self._client_of(run_id).status()
        except (ControlError, BadRequest):
            known = None
        self._statuses[run_id] = job, time.monotonic(), known
        return known


def _translate(ask: Any) -> dict[str, Any]:
    """A job's answer, or its refusal as one of this server."""
    try:
        answer: dict[str, Any] = ask()
    except ConfigError as error:
        raise BadRequest(400, str(error)) from None
    except ControlError as error:
        said = error.answer if isinstance(error.answer, dict) else {}
        if "state" in said:  # a receipt that says no is an answer
            return said
        # What the job thinks of this server's token is no word about the user's.
        status = error.status if error.status not in (None, 401, 403) else 502
        more = {key: value for key, value in said.items() if key != "error"}
        raise BadRequest(status, str(error), **more) from None
    return answer


def _path(given: str | None) -> Path | None:
    return None if given is None else Path(given)


def _name(job: Job) -> str:
    endpoint = job.endpoint
    return endpoint.run_name or os.path.basename(endpoint.output_dir.rstrip("/")) or endpoint.job_id
