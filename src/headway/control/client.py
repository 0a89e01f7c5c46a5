"""Talking to a running job, from Python or the shell, without any package.

Owns: `Client` and `AsyncClient`, the check that an address still is the job that wrote it, and the
errors a caller sees. Does not own: which jobs there are (discovery.py), what commands mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import http.client
import json
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from headway.control.discovery import Job, find_job, list_jobs
from headway.control.schema import COMMANDS, BadRequest, check_data, new_command_id
from headway.control.security import prove
from headway.errors import ConfigError, unknown

_TIMEOUT_S = 30.0
_LOOK_S = 0.05
_LEAVING_S = 2.0
_MOST_ANSWER_BYTES = 16 << 20
_MOST_LINE_BYTES = 1 << 20
ENDS_RUN = ("graceful_stop", "save_and_stop", "abort")
"""Commands after which a job may be gone before anybody has read their receipt."""


class ControlError(Exception):
    """A job refused a request or cannot be reached; `status` is HTTP's, None without an answer."""

    def __init__(self, message: str, status: int | None = None, answer: Any = None) -> None:
        super().__init__(message)
        self.status, self.answer = status, answer


class Client:
    """A running job, by its id, the beginning of its id, or what discovery found.

    Methods are named as commands are: `client.save_checkpoint()`, `client.pause(offload=True)`.
    They return the receipt, by default once the command took effect on all ranks.
    """

    def __init__(self, job: str | Job, *, timeout_s: float = _TIMEOUT_S) -> None:
        self.job = find_job(job) if isinstance(job, str) else job
        self.job_id = self.job.endpoint.job_id
        self._timeout_s = timeout_s
        self._proven = False
        self._tokens: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        if name not in COMMANDS or name == "status":
            raise AttributeError(name)

        def send(*, wait: bool = True, timeout_s: float | None = None, **data: Any) -> Any:
            return self.send(name, data, wait=wait, timeout_s=timeout_s)

        return send

    def status(self) -> dict[str, Any]:
        """What the run does now."""
        found: dict[str, Any] = self._ask("GET", "status", role="read")
        return found

    def receipt(self, command_id: str) -> dict[str, Any]:
        """What became of a command so far."""
        found: dict[str, Any] = self._ask("GET", f"commands/{command_id}", role="read")
        return found

    def send(
        self,
        command: str,
        data: dict[str, Any] | None = None,
        *,
        wait: bool = True,
        timeout_s: float | None = None,
        command_id: str | None = None,
    ) -> dict[str, Any]:
        """Send a command; returns its receipt.

        With `wait`, that is the settled one, or `ControlError` when the time is over: the command
        may still take effect then, and sending it again with the same id does not repeat it.
        """
        if command not in COMMANDS:
            raise ConfigError(unknown("command", command, COMMANDS))
        try:
            check_data(command, data or {})
        except BadRequest as error:
            raise ConfigError(error.message) from None
        command_id = command_id or new_command_id()
        body = {"command": command, "id": command_id, "data": data or {}}
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        # A run that ends may be gone before it is asked again; its stream says all to the last.
        stream = self.try_stream() if wait else None
        try:
            receipt: dict[str, Any] = self._ask("POST", "control", role="control", body=body)
            if wait:
                receipt = self._wait(receipt, limit_s, stream)
        finally:
            if stream is not None:
                stream.close()
        if receipt["state"] in ("refused", "failed"):
            raise ControlError(
                receipt["message"] or f"{command} {receipt['state']}", answer=receipt
            )
        return receipt

    def _wait(
        self, receipt: dict[str, Any], limit_s: float, stream: Stream | None
    ) -> dict[str, Any]:
        """The receipt once it is settled."""
        command, command_id = receipt["command"], receipt["id"]
        deadline = time.monotonic() + limit_s
        while receipt["settled_at"] is None:
            if time.monotonic() > deadline:
                raise ControlError(
                    f"{command} was accepted, but took no effect within {limit_s:g} s: a step, an "
                    f"evaluation or a save is under way (its id: {command_id})"
                )
            time.sleep(_LOOK_S)
            try:
                receipt = self._ask("GET", f"commands/{command_id}", role="read")
            except ControlError as error:
                if error.status is not None:
                    raise
                last = None if stream is None else stream.find_command(command_id)
                if last is None and command in ENDS_RUN and self._has_left():
                    raise ControlError(
                        f"the run has ended; what became of {command} is not known", answer=receipt
                    ) from None
                if last is None:
                    raise
                return {**receipt, "settled_at": time.time(), **last}
        return receipt

    def try_stream(self) -> Stream | None:
        """The events from now on, which keep until they are read; None if it cannot be had."""
        try:
            return Stream(self, None)
        except ControlError:
            return None  # what is wrong, the command will tell

    def events(self, after: int | None = None) -> Iterator[dict[str, Any]]:
        """What happens to the run, as it happens, until the run ends."""
        stream = Stream(self, after)
        try:
            while (event := stream.read()) is not None:
                yield event
        finally:
            stream.close()

    def _has_left(self) -> bool:
        """Whether the job ended in order: then its files go, soon after it stops to answer."""
        nonce, deadline = self.job.endpoint.nonce, time.monotonic() + _LEAVING_S
        while True:
            here = [j for j in list_jobs(self.job.folder.parent) if j.endpoint.nonce == nonce]
            if not here:
                return True
            if here[0].gone or time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_S)

    def _ask(self, method: str, what: str, *, role: str, body: Any = None) -> Any:
        self._prove()
        return self._request(method, f"/jobs/{self.job_id}/{what}", self._headers(role), body)

    def _headers(self, role: str) -> dict[str, str]:
        token = self._token("control") or (self._token("read") if role == "read" else None)
        return {} if token is None else {"Authorization": f"Bearer {token}"}

    def _token(self, role: str) -> str | None:
        """Read once: a run that ends takes its files away before it stops to answer."""
        if role not in self._tokens and (found := self.job.token(role)) is not None:
            self._tokens[role] = found
        return self._tokens.get(role)

    def _prove(self) -> None:
        """Before a token is sent: that who listens there is the job, not somebody after it."""
        if self._proven:
            return
        if self.job.gone:
            raise ControlError(
                f"the job {self.job_id} is not running any more (process "
                f"{self.job.endpoint.pid} is gone)"
            )
        challenge = secrets.token_hex(16)
        answer = self._request("GET", f"/healthz?challenge={challenge}", {}, None)
        expected = prove(self.job.endpoint.nonce, challenge)
        proof = answer.get("proof") if isinstance(answer, dict) else None
        if not isinstance(proof, str) or not hmac.compare_digest(proof.encode(), expected.encode()):
            raise ControlError(f"what answers at the address of {self.job_id} is not that job")
        self._proven = True

    def _request(self, method: str, path: str, headers: dict[str, str], body: Any) -> Any:
        connection = self._connect()
        content = None
        if body is not None:
            content = json.dumps(body).encode()
            headers = {**headers, "Content-Type": "application/json"}
        try:
            connection.request(method, path, body=content, headers=headers)
            answer = connection.getresponse()
            text = answer.read(_MOST_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise ControlError(f"the job {self.job_id} does not answer: {error}") from None
        finally:
            connection.close()
        if answer.status != 200:
            raise _error_of(answer.status, text)
        return json.loads(text)

    def _connect(self) -> http.client.HTTPConnection:
        endpoint = self.job.endpoint
        if endpoint.unix_socket is not None:
            return _UnixConnection(endpoint.unix_socket, self._timeout_s)
        # What listens on all addresses is reached on this machine's own.
        anywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        host = anywhere.get(endpoint.host, endpoint.host)
        if endpoint.tls_certificate is not None:
            context = _trust_only(endpoint.tls_certificate)
            return http.client.HTTPSConnection(
                host, endpoint.port, timeout=self._timeout_s, context=context
            )
        return http.client.HTTPConnection(host, endpoint.port, timeout=self._timeout_s)


class AsyncClient:
    """`Client` for asyncio: the same methods, to be awaited."""

    def __init__(self, job: str | Job, *, timeout_s: float = _TIMEOUT_S) -> None:
        self._client = Client(job, timeout_s=timeout_s)
        self.job_id = self._client.job_id

    def __getattr__(self, name: str) -> Any:
        if name not in COMMANDS or name == "status":
            raise AttributeError(name)

        async def send(**data: Any) -> Any:
            return await asyncio.to_thread(getattr(self._client, name), **data)

        return send

    async def status(self) -> dict[str, Any]:
        """What the run does now."""
        return await asyncio.to_thread(self._client.status)

    async def send(self, command: str, data: dict[str, Any] | None = None, **how: Any) -> Any:
        """As `Client.send`."""
        return await asyncio.to_thread(self._client.send, command, data, **how)

    async def events(self, after: int | None = None) -> AsyncIterator[dict[str, Any]]:
        """As `Client.events`."""
        stream = await asyncio.to_thread(Stream, self._client, after)
        try:
            while (event := await asyncio.to_thread(stream.read)) is not None:
                yield event
        finally:
            # Also lets go of a thread that reads: nobody will come for what it waits for.
            stream.close()


class Stream:
    """The events of a job over a connection of its own."""

    def __init__(self, client: Client, after: int | None) -> None:
        client._prove()
        self._job_id, self._connection = client.job_id, client._connect()
        self._left = b""
        headers = client._headers("read")
        if after is not None:
            headers["Last-Event-ID"] = str(after)
        try:
            self._connection.request("GET", f"/jobs/{client.job_id}/events", headers=headers)
            # An answer without an end takes the socket over.
            self._socket = self._connection.sock
            self._answer = self._connection.getresponse()
            if self._answer.status != 200:
                raise _error_of(self._answer.status, self._answer.read(_MOST_ANSWER_BYTES))
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise ControlError(f"the job {self._job_id} does not answer: {error}") from None
        except BaseException:
            self._connection.close()
            raise

    def read(self) -> dict[str, Any] | None:
        """The next event; None when the run has ended."""
        try:
            while (line := self._read_line()) is not None:
                if line.startswith(b"data: "):
                    event: dict[str, Any] = json.loads(line[6:])
                    return event
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = "cut off" if isinstance(error, http.client.IncompleteRead) else str(error)
            raise ControlError(f"the job {self._job_id} is gone: {why}") from None
        return None

    def find_command(self, command_id: str) -> dict[str, Any] | None:
        """To the end of the stream: what became of a command, if it is told."""
        with contextlib.suppress(ControlError):
            while (event := self.read()) is not None:
                if event.get("event") == "command" and event.get("id") == command_id:
                    return {key: event.get(key) for key in ("state", "step", "message")}
        return None

    def _read_line(self) -> bytes | None:
        # `readline` of an answer takes a connection that was cut off for the end of the answer.
        while b"\n" not in self._left:
            more = self._answer.read1(_MOST_LINE_BYTES)
            if not more:
                return None
            self._left += more
            if len(self._left) > _MOST_LINE_BYTES:
                raise ValueError("what it sends is no stream of events")
        line, _, self._left = self._left.partition(b"\n")
        return line

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _trust_only(certificate: str) -> ssl.SSLContext:
    """What takes this certificate and no other, whoever signed it and whatever name it has."""
    try:
        context = ssl.create_default_context(cafile=certificate)
    except (OSError, ssl.SSLError) as error:
        raise ControlError(f"the job's certificate {certificate} cannot be read: {error}") from None
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _error_of(status: int, text: bytes) -> ControlError:
    try:
        answer = json.loads(text)
        message = str(answer["error"])
    except (ValueError, KeyError, TypeError):
        answer, message = None, f"the server answered {status}"
    return ControlError(message, status, answer)
