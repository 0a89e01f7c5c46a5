"""What is known of a run that died without a word, from the files that it left.

Owns: the report of it, in the form of a post-mortem. Does not own: whether it is dead
(dashboard/run.py), nor what a run writes of itself (engine/post_mortem.py, engine/process_note.py).
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from headway.control.dashboard.files import read_end
from headway.control.dashboard.run import Run
from headway.control.dashboard.tail import parse_line
from headway.control.run_log import step_of
from headway.dist.command import continue_command
from headway.engine.post_mortem import Report, find_checkpoint, make_report, path_to_resume
from headway.engine.process_note import look_at_process

FROM_FILES = "the run's files"
_MOST_LOG_BYTES = 64 << 10
_HIDDEN = ("type", "timestamp", "global_step", "max_steps", "step")


def examine(run: Run) -> Report:
    """The run must have caught up with its log."""
    note, environment = run.process_note() or {}, run.environment()
    address = run.args().get("checkpoint_address")
    # An address of any file that somebody is shown is not opened.
    remote = {"path": address, "step": None} if isinstance(address, str) else None
    checkpoint = remote or find_checkpoint(run.folder)
    pid, host = note.get("pid"), note.get("host") or environment.get("host")
    if look_at_process(note) == "gone":
        error = f"process {pid} on {host} is gone, and left no word of why"
    else:
        error = "nothing was heard of it for long, and its log has no end"
    steps = _last_steps(run)
    return make_report(
        culprit_rank=None,
        world_size=note.get("world_size"),
        error_type="lost",
        error=error,
        step=step_of(run.last) if run.last else None,
        last_steps=steps,
        checkpoint=checkpoint,
        resume_command=_spell_command(run, note, checkpoint),
        directory=note.get("directory") or environment.get("directory"),
        output_dir=str(run.folder),
        run_id=note.get("run_id"),
        reported_by=FROM_FILES,
        host=host,
        pid=pid,
        time=run.updated_at() or note.get("time"),
        versions=environment.get("versions"),
    )


def _spell_command(run: Run, note: dict[str, Any], checkpoint: dict[str, Any] | None) -> str | None:
    """What goes on with it; None where nobody noted what started it."""
    words = note.get("command")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return None
    path, by_itself = path_to_resume(checkpoint), note.get("resumes") is True
    return shlex.join(continue_command(words, path, by_itself=by_itself))


def _last_steps(run: Run) -> list[dict[str, Any]]:
    name = run.log_name
    if name is None:
        return []
    lines = read_end(Path(run.log_folder), name, _MOST_LOG_BYTES).split(b"\n")
    records = (record for line in lines for record in parse_line(line))
    return [
        {"step": step_of(record), **{k: v for k, v in record.items() if k not in _HIDDEN}}
        for record in records
        if record.get("type") in (None, "train") and "global_step" in record
    ]
