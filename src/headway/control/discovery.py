"""Where running jobs are found: a private folder for each, with its address and its tokens.

Owns: the folders, their files and permissions, which of them are stale. Does not own: the server
that an address leads to, nor talking to it (client.py).

A job that was killed leaves its files: they are told from those of a running one by the process
id together with the time at which that process began, and the nonce that only the job's own server
can repeat. Process ids mean something on one machine and in one container only: what came from
elsewhere, into a folder that is shared, is nobody's to judge here. Folders and files count only if
they are this user's and nobody else can write to them, and they are reached without following
links.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from headway.control.schema import JOB_ID
from headway.dist.processes import identify, look_at
from headway.errors import ConfigError, nearest

logger = logging.getLogger(__name__)

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
    tls_certificate: str | None = None
    """The file of the one certificate that the job's server shows; None: it speaks plain HTTP."""
    place: str | None = None
    """Where `pid` is a number of: machine as booted and container; None: it was not told."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Job:
    """A job that left its files: where, and whether its process is there."""

    endpoint: Endpoint
    folder: Path
    alive: bool
    """Whether its process runs here."""
    elsewhere: bool = False
    """Whether its process, dead or alive, is none that can be seen from here."""

    @property
    def gone(self) -> bool:
        """Whether its process was one of this machine and is no more."""
        return not self.alive and not self.elsewhere

    def token(self, role: str = "control") -> str | None:
        """The token of a role; None where there is none, or it is not ours to read."""
        try:
            with _opened(self.folder) as folder:
                return _read_private(folder, TOKEN_NAMES[role]).decode("ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None


def jobs_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder of all jobs of this user on this machine."""
    if given := environment.get(_FOLDER_VARIABLE):
        return Path(given)
    # Batch systems pass the variable on to machines that have no such folder.
    runtime = environment.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "headway" / "jobs"
    state = environment.get("XDG_STATE_HOME")
    base = Path(state) if state else Path.home() / ".local" / "state"
    # A home may be shared by machines, on each of which a process number means another process.
    machine = re.sub(r"[^A-Za-z0-9.-]", "_", os.uname().nodename).lstrip(".") or "localhost"
    return base / "headway" / "jobs" / machine


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


class UnusableFolder(ConfigError):
    """The folder for running jobs cannot be made, or is not this user's alone."""


class Registration:
    """A running job's files; made by the process that runs it."""

    def __init__(self, job_id: str, folder: Path | None = None) -> None:
        self.job_id = check_job_id(job_id)
        self.nonce = secrets.token_hex(16)
        self._root = jobs_folder() if folder is None else folder
        self.folder = self._root / job_id
        self._tokens: Mapping[str, str] = {}

    def write_tokens(self, tokens: Mapping[str, str]) -> None:
        """Before the server listens: nobody finds it without. Those of an earlier run go."""
        self._tokens = tokens
        with self._taken() as folder:
            held = _read_job(self.folder)
            if held is not None and held.elsewhere:
                logger.warning(
                    "job_id=%r: what process %s of another machine or container left in %s is "
                    "replaced; whether it still runs cannot be seen from here",
                    self.job_id,
                    held.endpoint.pid,
                    self.folder,
                )
            self._replace_tokens(folder)

    def _replace_tokens(self, folder: int) -> None:
        for role, name in TOKEN_NAMES.items():
            if role in self._tokens:
                _write_private(folder, name, self._tokens[role].encode())
            else:
                _unlink(folder, name)

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
        tls_certificate: str | None = None,
    ) -> Endpoint:
        """Once the server listens."""
        process = identify()
        endpoint = Endpoint(
            job_id=self.job_id,
            nonce=self.nonce,
            pid=process.pid,
            process_started_at=float(process.started) if process.started else None,
            host=host,
            port=port,
            unix_socket=unix_socket,
            started_at=time.time(),
            output_dir=os.path.abspath(output_dir),
            logging_dir=None if logging_dir is None else os.path.abspath(logging_dir),
            run_name=run_name,
            version=version,
            tls_certificate=None if tls_certificate is None else os.path.abspath(tls_certificate),
            place=process.place or None,
        )
        text = json.dumps(endpoint.to_dict(), indent=2).encode()
        with self._taken() as folder:
            _write_private(folder, ENDPOINT_NAME, text)
            # A job of the same id that began meanwhile, and is refused from now on, wrote its own.
            self._replace_tokens(folder)
        return endpoint

    @contextlib.contextmanager
    def _taken(self) -> Iterator[int]:
        """This job's folder, made if it is not there; no other running job's."""
        held = _read_job(self.folder)
        if held is not None and held.alive and held.endpoint.nonce != self.nonce:
            raise ConfigError(
                f"job_id={self.job_id!r} is taken by the running process "
                f"{held.endpoint.pid} (output_dir {held.endpoint.output_dir})"
            )
        _make_folders(self._root)
        with _opened_or_refused(self._root, f"set {_FOLDER_VARIABLE} to another") as root:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.job_id, 0o700, dir_fd=root)
            with contextlib.suppress(OSError):
                _close_to_others(root, self.job_id)
            with _opened_or_refused(self.folder, "remove it or set another job_id") as folder:
                yield folder

    def remove(self) -> None:
        """The job is over; nothing of it is left."""
        held = _read_job(self.folder)
        if held is None or held.endpoint.nonce == self.nonce:
            _remove_folder(self.folder)


def list_jobs(folder: Path | None = None) -> list[Job]:
    """All jobs of this user that left a readable endpoint, the newest first."""
    root = jobs_folder() if folder is None else folder
    try:
        with _opened(root) as descriptor:
            names = sorted(os.listdir(descriptor))
    except OSError:
        return []
    found = (_read_job(root / name) for name in names if JOB_ID.fullmatch(name))
    return sorted((job for job in found if job), key=lambda job: -job.endpoint.started_at)


def find_job(prefix: str, folder: Path | None = None) -> Job:
    """The one job whose id is, or begins with, `prefix`; a running one before others."""
    jobs = list_jobs(folder)
    for job in jobs:
        if job.endpoint.job_id == prefix:
            return job
    matching = [job for job in jobs if job.endpoint.job_id.startswith(prefix)]
    alive, there = [j for j in matching if j.alive], [j for j in matching if not j.gone]
    matching = alive or there or matching
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
    """Remove what jobs of this machine left that are gone; returns their ids."""
    cleaned = []
    for job in list_jobs(folder):
        # Looked at again: another run of the job may have begun since the list was made.
        now = _read_job(job.folder) if job.gone else None
        if now is not None and now.gone and now.endpoint.nonce == job.endpoint.nonce:
            _remove_folder(job.folder)
            cleaned.append(job.endpoint.job_id)
    return cleaned


def _is_alive(endpoint: Endpoint) -> bool:
    try:
        os.kill(endpoint.pid, 0)
    except (OSError, OverflowError):
        return False  # it is gone, or another user's, who has got its number since
    process = identify(endpoint.pid)
    if not process.started:
        return True  # this system does not tell more
    return float(process.started) == endpoint.process_started_at and look_at(process) != "gone"


def _read_job(folder: Path) -> Job | None:
    try:
        with _opened(folder) as descriptor:
            said = json.loads(_read_private(descriptor, ENDPOINT_NAME))
        said = {"tls_certificate": None, "place": None, **said}
        endpoint = Endpoint(**{f.name: said[f.name] for f in fields(Endpoint)})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    well_formed = (
        endpoint.job_id == folder.name
        and isinstance(endpoint.pid, int)
        and endpoint.pid > 0
        and isinstance(endpoint.nonce, str)
        and isinstance(endpoint.started_at, int | float)
        and isinstance(endpoint.place, str | None)
    )
    if not well_formed:
        return None
    # Older versions do not tell the place.
    elsewhere = bool(endpoint.place) and endpoint.place != identify().place
    return Job(endpoint, folder, not elsewhere and _is_alive(endpoint), elsewhere)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A folder that is this user's, and that nobody else can write to; no link is followed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _require_own(os.fstat(descriptor), path)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _opened_or_refused(path: Path, remedy: str) -> Iterator[int]:
    """As `_opened`, for a user who has to mend it."""
    with contextlib.ExitStack() as stack:
        try:
            descriptor = stack.enter_context(_opened(path))
        except OSError as error:
            raise UnusableFolder(
                f"{path} must be a folder of this user, no link, to which nobody else can write "
                f"({error.strerror or error}); {remedy}"
            ) from None
        yield descriptor


def _require_own(facts: os.stat_result, name: object) -> None:
    if facts.st_uid != os.getuid():
        raise PermissionError(f"{name} is another user's")
    if facts.st_mode & 0o022:
        raise PermissionError(f"others can write to {name}: chmod go-w")


def _make_folders(path: Path) -> None:
    """Those that are missing, each for this user alone; `Path.mkdir` opens its parents to all."""
    for folder in [*reversed(path.parents), path]:
        if not folder.exists():
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
            except OSError as error:
                raise UnusableFolder(
                    f"the folder {folder} for running jobs cannot be made ({error.strerror}); "
                    f"set {_FOLDER_VARIABLE} to another"
                ) from None


def _close_to_others(root: int, name: str) -> None:
    """A job's folder that was made by hand, say, is made private; another user's cannot be."""
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=root)
    try:
        if stat.S_IMODE(os.fstat(folder).st_mode) != 0o700:
            os.fchmod(folder, 0o700)
    finally:
        os.close(folder)


def _read_private(folder: int, name: str) -> bytes:
    """A file of this user's own, to which nobody else can write; no link is followed."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(name, flags, dir_fd=folder)
    try:
        facts = os.fstat(descriptor)
        _require_own(facts, name)
        if not stat.S_ISREG(facts.st_mode):
            raise PermissionError(f"{name} is not a file")
        return os.read(descriptor, _MOST_FILE_BYTES)
    finally:
        os.close(descriptor)


def _write_private(folder: int, name: str, content: bytes) -> None:
    """Replace a file at once; at no time can another user read it."""
    temporary = f".{name}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    descriptor = os.open(temporary, flags, 0o600, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        _unlink(folder, temporary)
        raise
    os.fsync(folder)


def _unlink(folder: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def _remove_folder(path: Path) -> None:
    """Files that a job writes, and the folder if nothing else is in it."""
    with contextlib.suppress(OSError):  # what is not ours, or not empty, stays
        with _opened(path) as folder:
            for name in (ENDPOINT_NAME, *TOKEN_NAMES.values()):
                _unlink(folder, name)
            for name in os.listdir(folder):
                facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if name.startswith(".") and stat.S_ISREG(facts.st_mode):
                    _unlink(folder, name)
        path.rmdir()
