"""What a rank knows of the failure that ends its run, at the moment it fails.

Owns: gathering it, and which ranks write it down. Does not own: the files (post_mortem).

The rank that failed first writes. So does one other, which stands in for it: a process that was
killed writes nothing. No rank asks another for anything here, nor its device.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from headway import __version__
from headway.args import TrainingArguments
from headway.config.schema import RunConfig
from headway.config.secrets import find_secrets, hide_secrets
from headway.config.snapshot import redact, redact_command, resolved_config, versions
from headway.dist.command import continue_command, find_command
from headway.dist.exits import is_launched
from headway.dist.failure import PeerFailure, current_watch
from headway.dist.forced_end import at_forced_end
from headway.dist.watch import Failure
from headway.engine.post_mortem import (
    TEXT_NAME,
    Report,
    find_checkpoint,
    make_report,
    path_to_resume,
    read_report,
    remove_report,
    write_report,
)
from headway.engine.process_note import (
    look_at_process,
    put_back_note,
    read_note,
    remove_note,
    write_note,
)
from headway.engine.state import TrainerState, outcome_of

logger = logging.getLogger(__name__)

Recent = Mapping[int, Mapping[str, Any]]


class Examination:
    """Around a run: a failure inside it is written down, the end of a complete one forgets it."""

    def __init__(
        self, args: TrainingArguments, state: TrainerState, run_config: RunConfig | None
    ) -> None:
        self._args, self._state, self._run_config = args, state, run_config
        self._folder = Path(args.output_dir)
        self._since = time.time()
        self._recent: Recent | None = None
        self._note_before: Mapping[str, Any] | None = None
        self._forced = ExitStack()

    def begin(self, recent: Recent) -> None:
        """A step has worked, and the folder is this run's: from now on there is a run to examine.

        `recent`: the newest steps and their metrics, to be read when it fails.
        """
        self._recent = recent
        if self._args.process_index == 0:
            self._note_process()

    def __enter__(self) -> Examination:
        self._forced.enter_context(at_forced_end(self._on_forced_end))
        before = read_note(self._folder) if self._args.process_index == 0 else None
        if before is not None and look_at_process(before) == "gone":
            if self._died_silently(before):
                logger.warning(
                    "the run that was here before died without a word, as process %s on %s: "
                    "somebody killed it, or the kernel did for want of memory",
                    before.get("pid"),
                    before.get("host"),
                )
            # At once: until a step has worked the run would pass for lost, which may be minutes.
            self._note_before = before
            self._note_process()
        return self

    def _died_silently(self, note: Mapping[str, Any]) -> bool:
        began = note.get("time")
        if not isinstance(began, int | float):
            return False
        return read_report(self._folder, since=began) is None  # another rank may have told of it

    def _note_process(self) -> None:
        """For those who find the run's folder after its process was killed."""
        command, hidden = find_command(), self._secrets()
        if command is not None:
            command = [hide_secrets(word, hidden) for word in redact_command(command)]
        try:
            write_note(
                self._folder,
                command=command,
                resumes=self._args.resume_from_checkpoint is True,
                world_size=self._args.world_size,
                directory=os.getcwd(),
                run_id=self._state.run_id,
            )
        except OSError as problem:
            logger.warning("the run's process cannot be noted in %s: %s", self._folder, problem)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._forced.close()
        if error is None:
            if self._state.outcome in ("completed", "stopped") and not self._args.process_index:
                remove_report(self._folder)
        elif self._recent is not None and outcome_of(error) == "failed":
            self._examine(error)
        # Last: whoever is killed here leaves a report or a note.
        if self._recent is not None and self._args.process_index == 0:
            remove_note(self._folder)
        elif self._note_before is not None:  # a run that cannot start changes nothing on disk
            put_back_note(self._folder, self._note_before)

    def _on_forced_end(self, reason: str) -> None:
        """In a thread of the watch: the main thread will not come out any more."""
        if self._recent is not None:
            self._examine(None)

    def _examine(self, error: BaseException | None) -> None:
        try:
            report = self._gather(error)
            if report is None or not write_report(self._folder, report, since=self._since):
                return
        except Exception:
            # The error that ended the run is the one to report.
            logger.warning("the post-mortem of the run could not be made", exc_info=True)
            return
        if not is_launched():  # else the launcher says so, once for all ranks
            logger.warning("what is known of the failure is in %s", self._folder / TEXT_NAME)

    def _gather(self, error: BaseException | None) -> Report | None:
        rank, world_size = self._args.process_index, self._args.world_size
        failure = _find_failure(error)
        culprit = rank if failure is None else failure.rank
        if culprit == rank:
            cause: dict[str, Any] = _describe_own(error, failure)
        elif failure is not None and rank == int(culprit == 0):
            cause = _describe_other(failure)
        else:
            return None
        checkpoint = find_checkpoint(self._args.checkpoint_place)
        hidden = self._secrets()
        for key in ("error", "traceback"):
            if cause.get(key):
                cause[key] = hide_secrets(redact(cause[key]), hidden)
        return make_report(
            culprit_rank=culprit,
            world_size=world_size,
            **cause,
            step=self._state.global_step,
            last_steps=self._last_steps(),
            memory=_measure_memory(),
            checkpoint=checkpoint,
            resume_command=self._spell_command(checkpoint, hidden),
            directory=os.getcwd(),
            output_dir=os.path.abspath(self._folder),
            run_id=self._state.run_id,
            reported_by=f"rank {rank}",
            host=socket.gethostname(),
            pid=os.getpid(),
            version=__version__,
            versions=versions(),
        )

    def _secrets(self) -> set[str]:
        config = None if self._run_config is None else resolved_config(self._run_config)
        return {
            secret
            for source in (dict(os.environ), self._args.to_dict(), config or {})
            for secret in find_secrets(source)
        }

    def _spell_command(self, checkpoint: Mapping[str, Any] | None, hidden: set[str]) -> str | None:
        command = find_command()
        if command is None:
            return None
        by_itself = self._args.resume_from_checkpoint is True
        words = continue_command(command, path_to_resume(checkpoint), by_itself=by_itself)
        return hide_secrets(shlex.join(redact_command(words)), hidden)

    def _last_steps(self) -> list[dict[str, Any]]:
        """Those that were handed out, and those that this rank noted down as it failed."""
        # A copy: a forced end is written down by a thread, while the run may go on.
        recent = dict(self._recent or {})
        steps = {step: dict(metrics) for step, metrics in recent.items()}
        noted = self._folder / f"last_metrics-rank{self._args.process_index}.json"
        try:
            said = json.loads(noted.read_text())
            if said["timestamp"] >= self._since:
                for step, metrics in said["metrics"].items():
                    steps.setdefault(int(step), {}).update(metrics)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # nothing was left to note down
        return [{"step": step, **steps[step]} for step in sorted(steps)]


def _find_failure(error: BaseException | None) -> Failure | None:
    """What ended the run, as all ranks agree; None where this process is alone with it."""
    watch = current_watch()
    if watch is not None and watch.failure is not None:
        return watch.failure
    if isinstance(error, PeerFailure):
        return Failure(error.rank, error.reason, error.kind)
    return None


def _describe_own(error: BaseException | None, failure: Failure | None) -> dict[str, Any]:
    if error is None or isinstance(error, PeerFailure):
        return _describe_other(failure) if failure is not None else {}
    return {
        "error_type": type(error).__name__,
        "error": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }


def _describe_other(failure: Failure) -> dict[str, Any]:
    """What is known of the failure of a rank that speaks no more."""
    kind, colon, said = failure.reason.partition(": ")
    if failure.kind == "error" and colon and kind.isidentifier():
        return {"error_type": kind, "error": said}
    kinds = {"lost": "lost", "mistake": "ConfigError", "error": None}
    return {"error_type": kinds[failure.kind], "error": failure.reason}


def _measure_memory() -> dict[str, Any]:
    """Of this process, from tables that need no answer of a device."""
    measured: dict[str, Any] = {"host": _measure_host()}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        try:
            stats = torch.cuda.memory_stats()
            measured["device"] = {
                "allocated_bytes": stats.get("allocated_bytes.all.current"),
                "peak_allocated_bytes": stats.get("allocated_bytes.all.peak"),
                "reserved_bytes": stats.get("reserved_bytes.all.current"),
                "total_bytes": torch.cuda.get_device_properties().total_memory,
                "num_ooms": stats.get("num_ooms"),
            }
        except RuntimeError:  # a device that failed says nothing any more
            measured["device"] = None
    return measured


def _measure_host() -> dict[str, int]:
    places = {
        "rss_bytes": ("/proc/self/status", "VmRSS:"),
        "peak_rss_bytes": ("/proc/self/status", "VmHWM:"),
        "available_bytes": ("/proc/meminfo", "MemAvailable:"),
        "total_bytes": ("/proc/meminfo", "MemTotal:"),
    }
    found = {}
    for name, (path, key) in places.items():
        try:
            lines = Path(path).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith(key):
                found[name] = int(line.split()[1]) * 1024
    return found
