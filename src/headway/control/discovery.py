"""Where running jobs are found: a private folder for each, with its address and its tokens.

Owns: the folders, their files and permissions, which of them are stale. Does not own: the server
that an address leads to, nor talking to it (client.py).

A job that was killed leaves its files: they are told from those of a running one by the process
id together with the time at which that process began, and the nonce that only the job's own server
can repeat.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from headway.control.schema import JOB_ID
from headway.errors import ConfigError, nearest

ENDPOINT_NAME = "endpoint.json"
TOKEN_NAMES = {"control": "token", "read": "read_token"}
_FOLDER_VARIABLE = "HEADWAY_JOBS_DIR"
_MOST_FILE_BYTES = 64 * 1024


@dataclass(frozen=True)
class Endpoint:
    """Where a job listens, and what tells it from any other."""

    job_id: str
    nonce: str
    pid: int
    process_started_at: float | None
    """Since the machine's start, where the system says; tells a process from a later one."""
    host: str
    port: int | None
    unix_socket: str | None
    started_at: float
    output_dir: str
    logging_dir: str | None
    run_name: str | None
    version: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Job:
    """A job that left its files: where, and whether its process is there."""

    endpoint: Endpoint
    folder: Path
    alive: bool

    def token(self, role: str = "control") -> str | None:
        """The token of a role; None where there is none, or it is not ours to read."""
        try:
            return _read_private(self.folder / TOKEN_NAMES[role]).decode("ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None


def jobs_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder of all jobs of this user on this machine."""
    if given := environment.get(_FOLDER_VARIABLE):
        return Path(given)
    if runtime := environment.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "headway" / "jobs"
    state = environment.get("XDG_STATE_HOME")
    base = Path(state) if state else Path.home() / ".local" / "state"
    return base / "headway" / "jobs"


def check_job_id(job_id: object) -> str:
    """A job id is a folder's name and a part of addresses: a plain word, nothing else."""
    if not isinstance(job_id, str) or not JOB_ID.fullmatch(job_id):
        raise ConfigError(
            f"job_id must be 1 to 64 letters, digits, dots, underscores or hyphens and begin with "
            f"a letter or digit, not {job_id!r}"
        )
    return job_id


def new_job_id(run_name: str | None = None) -> str:
    """A short id: what the run is called, if that is a plain word, and something random."""
    stem = run_name if run_name and JOB_ID.fullmatch(run_name[:40]) else "job"
    return f"{stem[:40]}-{secrets.token_hex(4)}"


class Registration:
    """A running job's files; made by the process that runs it."""

    def __init__(self, job_id: str, folder: Path | None = None) -> None:
        self.job_id = check_job_id(job_id)
        self.nonce = secrets.token_hex(16)
        self._root = jobs_folder() if folder is None else folder
        self.folder = self._root / job_id

    def write_tokens(self, tokens: Mapping[str, str]) -> None:
        """Before the server listens: nobody finds it without."""
        self._take_folder()
        for role, token in tokens.items():
            _write_private(self.folder / TOKEN_NAMES[role], token.encode())

    def write_endpoint(
        self,
        host: str,
        port: int | None,
        unix_socket: str | None,
        *,
        output_dir: str,
        logging_dir: str | None,
        run_name: str | None,
        version: str,
    ) -> Endpoint:
        """Once the server listens."""
        self._take_folder()
        endpoint = Endpoint(
            job_id=self.job_id,
            nonce=self.nonce,
            pid=os.getpid(),
            process_started_at=process_start(os.getpid()),
            host=host,
            port=port,
            unix_socket=unix_socket,
            started_at=time.time(),
            output_dir=os.path.abspath(output_dir),
            logging_dir=None if logging_dir is None else os.path.abspath(logging_dir),
            run_name=run_name,
            version=version,
        )
        text = json.dumps(endpoint.to_dict(), indent=2).encode()
        _write_private(self.folder / ENDPOINT_NAME, text)
        return endpoint

    def _take_folder(self) -> None:
        if self.folder.is_dir():
            held = _read_job(self.folder)
            mine = held is not None and held.endpoint.nonce == self.nonce
            if held is not None and held.alive and not mine:
                raise ConfigError(
                    f"job_id={self.job_id!r} is taken by the running process "
                    f"{held.endpoint.pid} (output_dir {held.endpoint.output_dir})"
                )
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        _require_private(self.folder)

    def remove(self) -> None:
        """The job is over; nothing of it is left."""
        held = _read_job(self.folder)
        if held is None or held.endpoint.nonce == self.nonce:
            _remove_folder(self.folder)


def list_jobs(folder: Path | None = None) -> list[Job]:
    """All jobs of this user that left a readable endpoint, the newest first."""
    root = jobs_folder() if folder is None else folder
    try:
        inside = sorted(root.iterdir())
    except OSError:
        return []
    found = (_read_job(path) for path in inside if JOB_ID.fullmatch(path.name))
    return sorted((job for job in found if job), key=lambda job: -job.endpoint.started_at)


def find_job(prefix: str, folder: Path | None = None) -> Job:
    """The one job whose id is, or begins with, `prefix`; a running one before others."""
    jobs = list_jobs(folder)
    for job in jobs:
        if job.endpoint.job_id == prefix:
            return job
    matching = [job for job in jobs if job.endpoint.job_id.startswith(prefix)]
    matching = [job for job in matching if job.alive] or matching
    if len(matching) == 1:
        return matching[0]
    if matching:
        names = ", ".join(job.endpoint.job_id for job in matching)
        raise ConfigError(f"the job {prefix!r} is not one: {names} begin with it")
    ids = [job.endpoint.job_id for job in jobs]
    hint = nearest(prefix, ids)
    more = f"; did you mean {hint!r}?" if hint else "."
    known = (
        f" Known: {', '.join(ids[:12])}" if ids else " No job of this user has left a trace here"
    )
    raise ConfigError(f"there is no job {prefix!r}{more}{known}")


def clean_stale(folder: Path | None = None) -> list[str]:
    """Remove what jobs left that are gone; returns their ids."""
    gone = [job for job in list_jobs(folder) if not job.alive]
    for job in gone:
        _remove_folder(job.folder)
    return [job.endpoint.job_id for job in gone]


def process_start(pid: int) -> float | None:
    """Clock ticks from the machine's start to that of a process; None where nobody can say."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return float(text.rpartition(")")[2].split()[19])


def _is_alive(endpoint: Endpoint) -> bool:
    try:
        os.kill(endpoint.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return endpoint.pid > 0  # it is there, and another user's
    except OverflowError:
        return False
    started = process_start(endpoint.pid)
    return started is None or started == endpoint.process_started_at


def _read_job(folder: Path) -> Job | None:
    try:
        said = json.loads(_read_private(folder / ENDPOINT_NAME))
        endpoint = Endpoint(**{f.name: said[f.name] for f in fields(Endpoint)})
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    well_formed = (
        endpoint.job_id == folder.name
        and isinstance(endpoint.pid, int)
        and endpoint.pid > 0
        and isinstance(endpoint.nonce, str)
        and isinstance(endpoint.started_at, int | float)
    )
    return Job(endpoint, folder, _is_alive(endpoint)) if well_formed else None


def _read_private(path: Path) -> bytes:
    """A file of this user's own; no link is followed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.getuid():
            raise PermissionError(f"{path} is not a file of this user")
        return os.read(descriptor, _MOST_FILE_BYTES)
    finally:
        os.close(descriptor)


def _write_private(path: Path, content: bytes) -> None:
    """Replace a file at once; at no time can another user read it."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _require_private(folder: Path) -> None:
    facts = os.lstat(folder)
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise ConfigError(f"{folder} is not a folder of this user; remove it or set another job_id")
    if stat.S_IMODE(facts.st_mode) & 0o077:
        os.chmod(folder, 0o700)


def _remove_folder(folder: Path) -> None:
    """Files that a job writes, and the folder if nothing else is in it."""
    for name in (ENDPOINT_NAME, *TOKEN_NAMES.values()):
        (folder / name).unlink(missing_ok=True)
    for leftover in folder.glob(".*"):
        if leftover.is_file() and not leftover.is_symlink():
            leftover.unlink(missing_ok=True)
    try:
        folder.rmdir()
    except OSError:
        pass  # something else lies in it, which is not ours to remove
