"""What a failed run leaves for people: `post_mortem.json` and `post_mortem.txt` in its folder.

Owns: the fields, their limits, the text, and which report stays where several are made of one
failure. Does not own: what a rank knows when it fails (examination), nor what the launcher knows
(cli/launch). Needs no torch.

Of one failure the report stays that knows most: the traceback of the rank that failed, then how its
process ended, then what another rank was told of it. Of two that know as much, the first one does.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

JSON_NAME, TEXT_NAME = "post_mortem.json", "post_mortem.txt"
FORMAT = 1
FIELDS = (
    "format",
    "culprit_rank",
    "world_size",
    "error_type",
    "error",
    "traceback",
    "signal",
    "exit_code",
    "step",
    "last_steps",
    "memory",
    "checkpoint",
    "resume_command",
    "directory",
    "output_dir",
    "run_id",
    "reported_by",
    "host",
    "pid",
    "time",
    "version",
    "versions",
)
_MOST_STEPS, _MOST_METRICS = 20, 60
_MOST_NAME, _MOST_ERROR, _MOST_TRACEBACK = 200, 8_000, 64_000
_MOST_FILE_BYTES = 1 << 20
_LOCK_S = 1.0
_SHOWN_METRICS = 6
_HINTS = {
    "SIGKILL": "somebody killed it, or the kernel did for want of memory (see: dmesg)",
    "SIGSEGV": "a native library failed",
    "SIGBUS": "a native library failed, or /dev/shm is full",
    "SIGABRT": "a native library gave up; its message is in the output of the run",
    "SIGTERM": "something outside ended it, a scheduler perhaps",
}

Report = dict[str, Any]


def make_report(**known: Any) -> Report:
    """A report with every field there is, None where nothing is known, and within its limits."""
    assert set(known) <= set(FIELDS), set(known) - set(FIELDS)
    report: Report = {**dict.fromkeys(FIELDS), "time": time.time(), **known, "format": FORMAT}
    report["error"] = _cut(report["error"], _MOST_ERROR)
    report["traceback"] = _cut(report["traceback"], _MOST_TRACEBACK)
    report["last_steps"] = [_trim(step) for step in (report["last_steps"] or [])[-_MOST_STEPS:]]
    return report


def write_report(folder: str | Path, report: Report, *, since: float) -> bool:
    """Write both files, unless a report of the same failure is there that knows as much.

    `since`: when the run began, as `time.time()` has it; an older report is of another failure.
    """
    folder = Path(folder)
    try:
        with _alone_in(folder):
            before = read_report(folder, since=since)
            if before is not None and _knowledge(before) >= _knowledge(report):
                return False
            _replace(folder / JSON_NAME, json.dumps(report, indent=2, allow_nan=False) + "\n")
            _replace(folder / TEXT_NAME, render_text(report))
    except OSError as problem:
        logger.warning("the post-mortem of the run cannot be written to %s: %s", folder, problem)
        return False
    return True


def read_report(folder: str | Path, *, since: float = 0.0) -> Report | None:
    """The report in a run's folder, if there is one that is not older than `since`."""
    try:
        with Path(folder, JSON_NAME).open("rb") as file:
            report = json.loads(file.read(_MOST_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(report, dict) or not isinstance(report.get("time"), int | float):
        return None
    return report if report["time"] >= since else None


def remove_report(folder: str | Path) -> None:
    """For a run that is complete: its earlier failure is no longer of interest."""
    for name in (JSON_NAME, TEXT_NAME):
        with contextlib.suppress(OSError):
            Path(folder, name).unlink()


def find_checkpoint(place: str | Path) -> dict[str, Any] | None:
    """The newest checkpoint that a run can go on from, in a folder or at an address.

    The `step` is None, and the `path` where its checkpoints are, if nobody could look there.
    """
    from headway.checkpoint.manifest import committed
    from headway.checkpoint.storage import is_url, open_storage

    try:
        storage = open_storage(place)
        storage.refresh()
        usable = [found for found in committed(storage.root) if found.kind == "training"]
    except Exception as error:  # whatever a network or its library raises: a run has failed already
        logger.warning("could not look for checkpoints in %s: %s", place, error)
        return {"path": str(place), "step": None} if is_url(place) else None
    if not usable:
        return None
    return {"path": storage.locate(usable[-1].path), "step": usable[-1].step}


def path_to_resume(checkpoint: Mapping[str, Any] | None) -> str | None:
    """What `--resume` would name."""
    return None if checkpoint is None or checkpoint["step"] is None else str(checkpoint["path"])


def describe(report: Mapping[str, Any]) -> str:
    """Who failed, and how, in one line."""
    rank, world_size = report.get("culprit_rank"), report.get("world_size")
    who = "the run" if rank is None or world_size in (None, 1) else f"rank {rank} of {world_size}"
    if report.get("signal"):
        hint = _HINTS.get(str(report["signal"]))
        return f"{who} was ended by {report['signal']}{f': {hint}' if hint else ''}"
    error = str(report.get("error") or "for a reason nobody could tell").partition("\n")[0]
    if report.get("error_type") == "lost":
        return f"{who} was lost: {error}"
    kind = report.get("error_type")
    return f"{who} failed: {f'{kind}: ' if kind else ''}{error}"


def render_text(report: Mapping[str, Any]) -> str:
    """The report for people."""
    told = datetime.datetime.fromtimestamp(report["time"], datetime.UTC)
    lines = [
        describe(report),
        "",
        *_rows(
            ("when", told.isoformat(" ", "seconds")),
            ("after step", report.get("step")),
            ("exit code", report.get("exit_code")),
            ("told by", report.get("reported_by")),
            ("process", _spell_process(report)),
            ("run", report.get("run_id")),
            ("folder", report.get("output_dir")),
            ("checkpoint", _spell_checkpoint(report.get("checkpoint"))),
            ("headway", report.get("version")),
        ),
        "",
        f"Go on with, in {report.get('directory') or 'the folder it was started in'}:",
        "",
        f"    {report.get('resume_command') or 'the command that started it'}",
        "",
    ]
    if report.get("traceback"):
        lines += ["Traceback", "", str(report["traceback"]).rstrip(), ""]
    if report.get("last_steps"):
        lines += ["The last steps", "", *map(_spell_step, report["last_steps"]), ""]
    if report.get("memory"):
        lines += ["Memory", "", *_spell_memory(report["memory"]), ""]
    return "\n".join(lines)


def _spell_checkpoint(found: Mapping[str, Any] | None) -> str:
    if not found:
        return "none: it begins anew"
    if found["step"] is None:
        return f"what is in {found['path']} was not looked at"
    return f"{found['path']} (step {found['step']})"


def _rows(*rows: tuple[str, Any]) -> list[str]:
    return [f"{label:<12}{value}" for label, value in rows if value not in (None, "")]


def _spell_process(report: Mapping[str, Any]) -> str:
    if report.get("pid") is None:
        return ""
    return f"{report['pid']} on {report.get('host') or '?'}"


def _spell_step(metrics: Mapping[str, Any]) -> str:
    shown = [(name, value) for name, value in metrics.items() if name != "step"]
    told = "  ".join(
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in shown[:_SHOWN_METRICS]
    )
    return f"  {metrics.get('step')}: {told}"


def _spell_memory(memory: Mapping[str, Any]) -> list[str]:
    return [
        f"  {place}: "
        + ", ".join(
            f"{name.removesuffix('_bytes').replace('_', ' ')} {value / 2**30:.2f} GiB"
            if name.endswith("_bytes")
            else f"{name.replace('_', ' ')} {value}"
            for name, value in facts.items()
            if value is not None
        )
        for place, facts in memory.items()
        if isinstance(facts, Mapping)
    ]


def _knowledge(report: Mapping[str, Any]) -> int:
    if report.get("traceback"):
        return 3
    return 2 if report.get("signal") or report.get("exit_code") is not None else 1


def _cut(given: Any, most: int) -> str | None:
    """The beginning and, of what is too long, mostly the end: that is where it happened."""
    if given is None:
        return None
    text = str(given)
    if len(text) <= most:
        return text
    head = most // 4
    return f"{text[:head]}\n... {len(text) - most} characters left out ...\n{text[head - most :]}"


def _trim(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics of one step, as JSON can say them."""
    kept: dict[str, Any] = {}
    for name, value in list(metrics.items())[:_MOST_METRICS]:
        if isinstance(value, float) and not math.isfinite(value):
            value = str(value)
        if value is None or isinstance(value, int | float):
            kept[str(name)[:_MOST_NAME]] = value
        else:
            kept[str(name)[:_MOST_NAME]] = str(value)[:_MOST_NAME]
    return kept


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Other ranks that write wait meanwhile; but nobody waits long for anybody in a failure."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system: ranks write one after the other, as it comes
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + _LOCK_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, text: str) -> None:
    """So that a reader sees the old file or the whole new one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
