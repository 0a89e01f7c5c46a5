"""`headway jobs`: the runs of this user on this machine that can be steered.

Exit code: 0, also where there is none.
"""

from __future__ import annotations

import argparse
from typing import Any

_COLUMNS = ("job", "status", "step", "loss", "address", "output")
_HIDDEN = ("nonce", "process_started_at", "place")
_ANSWER_S = 5.0
_MOST_AT_ONCE = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.usage = "headway jobs [--clean] [--json]"
    parser.add_argument(
        "--clean", action="store_true", help="remove what jobs left behind that are gone"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print a line for each job, the newest first."""
    from concurrent.futures import ThreadPoolExecutor

    from headway.cli.job import printable
    from headway.cli.messages import print_json
    from headway.control.discovery import clean_stale, list_jobs

    removed = clean_stale() if options.clean else []
    # Together: one that does not answer must not keep the others waiting.
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        jobs = list(pool.map(_describe, list_jobs()))
    if options.json:
        print_json({"jobs": jobs, "removed": removed})
        return 0
    for job_id in removed:
        print(f"removed what {job_id} left behind")
    if not jobs:
        print("no job is running")
        return 0
    rows = [_COLUMNS, *(_row(job) for job in jobs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip())
    for job in jobs:
        if job.get("problem"):
            print(f"{job['job_id']}: {job['problem']}")
        for line in _spell_post_mortem(job["post_mortem"]) if "post_mortem" in job else ():
            print(f"{job['job_id']}: {printable(line).replace(chr(10), ' ')}")
    if any(job["status"] == "gone" for job in jobs):
        print("headway jobs --clean forgets those that are gone")
    return 0


def _describe(job: Any) -> dict[str, Any]:
    """What is known of a job, from its files and, where it answers, from itself."""
    from headway.control.client import Client, ControlError

    endpoint = job.endpoint
    facts = {key: value for key, value in endpoint.to_dict().items() if key not in _HIDDEN}
    facts |= {"alive": job.alive, "elsewhere": job.elsewhere}
    scheme = "http" if endpoint.tls_certificate is None else "https"
    address = f"{scheme}://{_bracket(endpoint.host)}:{endpoint.port}"
    facts["address"] = endpoint.unix_socket or address
    if job.gone:
        return {**facts, "status": "gone", **_examine(endpoint)}
    try:
        return {**Client(job, timeout_s=_ANSWER_S).status(), **facts}
    except ControlError as error:
        if not job.elsewhere:
            return {**facts, "status": "silent", "problem": str(error)}
        problem = (
            f"of another machine or container, or from before this machine was started anew "
            f"({error}); if it is gone, remove {job.folder}"
        )
        return {**facts, "status": "elsewhere", "problem": problem}


def _examine(endpoint: Any) -> dict[str, Any]:
    """What the files of a run tell whose process is gone, and how to go on with it."""
    import time
    from pathlib import Path

    from headway.control.dashboard.run import Run
    from headway.control.lost_run import examine
    from headway.engine.post_mortem import read_report

    folder = Path(endpoint.output_dir)
    logs = None if endpoint.logging_dir is None else Path(endpoint.logging_dir)
    run = Run(endpoint.job_id, endpoint.job_id, folder, logs)
    note, report = run.process_note(), read_report(folder, since=endpoint.started_at)
    if _is_note_of(note, endpoint):
        run.catch_up(time.monotonic() + _ANSWER_S)
        report = report or examine(run)
    elif report is None or report.get("pid") != endpoint.pid:
        # What lies there is another process's, alive or dead, or from before this one.
        why = "it left no word of why" if note is None else "its folder has been used since"
        error = f"process {endpoint.pid} is gone; {why}"
        return {"post_mortem": {"error_type": "lost", "error": error}}
    kept = ("step", "error_type", "error", "checkpoint", "resume_command", "directory")
    told = {key: report.get(key) for key in kept}
    return {"post_mortem": told, "global_step": told["step"]}


def _is_note_of(note: dict[str, Any] | None, endpoint: Any) -> bool:
    """Whether a run's note is that of the process which wrote the endpoint."""
    if note is None or note.get("pid") != endpoint.pid:
        return False
    if endpoint.place is not None and note.get("place") != endpoint.place:
        return False
    try:
        started: float | None = float(note["started"])
    except (KeyError, TypeError, ValueError):
        started = None  # a system that does not tell
    return bool(started == endpoint.process_started_at)


def _spell_post_mortem(found: dict[str, Any]) -> list[str]:
    if "checkpoint" not in found:
        return [str(found["error"])]
    checkpoint, command = found["checkpoint"], found.get("resume_command")
    at = "" if found.get("step") is None else f" after step {found['step']}"
    saved = "nothing is saved"
    if isinstance(checkpoint, dict):
        seen = checkpoint.get("step") is not None
        what = "the last checkpoint is" if seen else "its checkpoints are in"
        saved = f"{what} {checkpoint.get('path')}"
    lines = [f"gone{at}: {found.get('error')}; {saved}"]
    if command:
        lines.append(f"go on with, in {found.get('directory')}: {command}")
    return lines


def _bracket(host: Any) -> str:
    return f"[{host}]" if ":" in str(host) else str(host)


def _row(job: dict[str, Any]) -> tuple[str, ...]:
    from headway.cli.job import printable

    step, last = job.get("global_step"), job.get("max_steps")
    progress = "" if step is None else f"{step}/{last}" if last else str(step)
    metrics = job.get("metrics")
    loss = metrics.get("loss") if isinstance(metrics, dict) else None
    shown = f"{loss:.4g}" if isinstance(loss, float) else "" if loss is None else str(loss)
    cells = (job["job_id"], job["status"], progress, shown, job["address"], job["output_dir"])
    return tuple(printable(cell).replace("\n", "?") for cell in cells)
