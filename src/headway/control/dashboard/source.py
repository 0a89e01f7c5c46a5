"""Where a server gets its answers about runs' files: from threads of its own, or from a process.

Owns: that few of them are worked on at once, however many are asked for. Does not own: the answers
(answers.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from headway.control.dashboard.answers import Answers, Query
from headway.control.listener import Bucket
from headway.control.schema import BadRequest

Result = TypeVar("Result")

_NUM_THREADS = 3
_MOST_WAITING = 48
_PATIENCE_S = 30.0
_AGAIN_S = 5.0
_MOST_LINE_BYTES = 4096
_ASKS_PER_S, _ASK_BURST = 20.0, 60
"""Of a run's own server: ten pages that look at it."""


class Source(Protocol):
    """Answers questions about files, as JSON."""

    async def ask(self, what: str, run_id: str | None = None, query: Query = ()) -> bytes: ...


class Threads:
    """Some threads for work that blocks; who finds too many others waiting is sent away."""

    def __init__(self, num_threads: int = _NUM_THREADS, most_waiting: int = _MOST_WAITING) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="headway-dashboard")
        self._most_waiting = most_waiting
        self._num_waiting = 0

    async def run(self, work: Callable[..., Result], *given: Any) -> Result:
        if self._num_waiting >= self._most_waiting:
            raise BadRequest(503, "too many requests wait already; ask again later")
        self._num_waiting += 1
        under_way = asyncio.get_running_loop().run_in_executor(self._pool, work, *given)
        under_way.add_done_callback(self._count_down)
        # Work that has begun goes on when the one who asked is gone; it still counts.
        return await asyncio.shield(under_way)

    def _count_down(self, done: asyncio.Future[Any]) -> None:
        self._num_waiting -= 1
        if not done.cancelled():
            done.exception()  # nobody may be left to take it

    async def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class ThreadSource:
    """Reads in this process."""

    def __init__(self, answers: Answers, threads: Threads) -> None:
        self._answers, self._threads = answers, threads

    async def ask(self, what: str, run_id: str | None = None, query: Query = ()) -> bytes:
        return await self._threads.run(self._answers.ask, what, run_id, query)


class ProcessSource:
    """Has a process read, one question after the other; it is started by the first."""

    def __init__(self, folder: Path, logging_dir: Path | None, name: str) -> None:
        self._about = [folder, logging_dir, name]
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._pace = Bucket(_ASKS_PER_S, _ASK_BURST)
        self._num_waiting = 0
        self._started_at = -_AGAIN_S

    @property
    def pid(self) -> int | None:
        """The process that reads, while there is one."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if self._process is not None and running else None

    async def ask(self, what: str, run_id: str | None = None, query: Query = ()) -> bytes:
        if self._num_waiting >= _MOST_WAITING:
            raise BadRequest(503, "too many requests wait already; ask again later")
        question = json.dumps({"what": what, "run": run_id, "query": list(query)}).encode() + b"\n"
        # To its end, also when the one who asked is gone: the reply after it is somebody else's.
        status, body = await asyncio.shield(asyncio.create_task(self._wait_and_put(question)))
        if status != 200:
            said = json.loads(body)
            raise BadRequest(status, said.pop("error"), **said)
        return body

    async def _wait_and_put(self, question: bytes) -> tuple[int, bytes]:
        self._num_waiting += 1
        try:
            # Also to pass answers on takes time of the process that trains.
            await asyncio.sleep(self._pace.take())
            async with self._turn:
                return await self._put(question)
        except (TimeoutError, OSError) as error:
            message = f"the process that reads the run's files does not answer: {error}"
            return 503, json.dumps({"error": message}).encode()
        finally:
            self._num_waiting -= 1

    async def _put(self, question: bytes) -> tuple[int, bytes]:
        for _ in range(2):
            process = await self._ready()
            assert process.stdin is not None and process.stdout is not None
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    process.stdin.write(question)
                    await process.stdin.drain()
                    head = json.loads(await process.stdout.readuntil(b"\n"))
                    return head["status"], await process.stdout.readexactly(head["bytes"])
            except (asyncio.IncompleteReadError, ConnectionError):
                await self.close()  # it was idle for long, or was killed: once more
            except BaseException:
                # Its next reply would be taken for that to another question.
                self._kill()
                raise
        raise OSError("it ends at once")

    async def _ready(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        now = asyncio.get_running_loop().time()
        if now - self._started_at < _AGAIN_S:
            await asyncio.sleep(_AGAIN_S - (now - self._started_at))
        self._started_at = asyncio.get_running_loop().time()
        package = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        about = [json.dumps(None if word is None else str(word)) for word in self._about]
        module = "headway.control.dashboard.worker"
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", module, *about),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            # A signal to the run's group is the run's to answer.
            start_new_session=True,
            limit=_MOST_LINE_BYTES,
        )
        return self._process

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        self._process = None

    async def close(self) -> None:
        """Let the process end."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await process.wait()
                return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
