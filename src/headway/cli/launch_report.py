"""The launcher's part of a post-mortem: how the process of a rank ended that could say nothing.

Owns: completing the report of another rank, or making one where no rank could. Does not own: the
files (engine/post_mortem), nor what ranks know themselves (engine/examination).
"""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.dist.exits import Death, read_deaths, read_ends

if TYPE_CHECKING:
    from headway.config.schema import RunConfig


@dataclass(frozen=True)
class Launched:
    """A run as its launcher knows it."""

    config: RunConfig
    command: Sequence[str]
    world_size: int
    since: float
    """When it was launched, as `time.time()` has it."""

    @property
    def output_dir(self) -> Path:
        return Path(self.config.args.output_dir)

    def report_failure(self, folder: Path, killed: Collection[int]) -> Path | None:
        """Complete the post-mortem, or make it; returns where it is, if there is one.

        `folder`: the launcher's, with the ranks' own words. `killed`: processes that the launcher
        itself ended, which is not how the run failed.
        """
        from headway.engine.post_mortem import TEXT_NAME, read_report, write_report

        deaths = [death for death in read_deaths(folder) if death.pid not in killed]
        found = read_report(self.output_dir, since=self.since)
        if found is not None:
            death = _death_of(found, deaths)
            if death is not None:
                told = f"{found['reported_by']} and the launcher"
                report = {**found, **_spell_death(death), "reported_by": told}
                write_report(self.output_dir, report, since=self.since)
        elif self._had_begun():
            spoken = {end.rank for end in read_ends(folder)}
            silent = [death for death in deaths if death.rank not in spoken]
            if silent:
                write_report(self.output_dir, self._make_report(silent[0]), since=self.since)
        path = self.output_dir / TEXT_NAME
        return path if read_report(self.output_dir, since=self.since) is not None else None

    def _had_begun(self) -> bool:
        """Whether a step had worked: until then a run changes nothing on disk."""
        try:
            written_s = Path(self.output_dir, "run", "environment.json").stat().st_mtime
        except OSError:
            return False
        return written_s >= self.since

    def _make_report(self, death: Death) -> dict[str, Any]:
        from headway import __version__
        from headway.config.snapshot import redact_command, versions
        from headway.dist.command import continue_command
        from headway.engine.post_mortem import find_checkpoint, make_report, path_to_resume

        checkpoint = find_checkpoint(self.config.args.checkpoint_place)
        by_itself = self.config.args.resume_from_checkpoint is True
        path = path_to_resume(checkpoint)
        command = continue_command(self.command, path, by_itself=by_itself)
        steps = self._read_steps()
        return make_report(
            culprit_rank=death.rank,
            world_size=self.world_size,
            error_type="lost",
            **_spell_death(death),
            step=steps[-1]["step"] if steps else None,
            last_steps=steps,
            checkpoint=checkpoint,
            resume_command=shlex.join(redact_command(command)),
            directory=os.getcwd(),
            output_dir=os.path.abspath(self.output_dir),
            reported_by="the launcher",
            host=socket.gethostname(),
            pid=death.pid,
            version=__version__,
            versions=versions(),
        )

    def _read_steps(self) -> list[dict[str, Any]]:
        """The last records of the log: all that is left of a run whose every rank is gone."""
        from headway.cli.run_folder import open_run
        from headway.errors import ConfigError

        try:
            records = open_run(str(self.output_dir)).records
        except ConfigError:
            return []
        hidden = ("type", "timestamp", "global_step", "max_steps", "step")
        return [
            {"step": record["global_step"], **{k: v for k, v in record.items() if k not in hidden}}
            for record in records
            if record.get("type") in (None, "train")
        ]


def _death_of(report: dict[str, Any], deaths: Sequence[Death]) -> Death | None:
    """How the process ended that a report says is lost."""
    if report.get("error_type") != "lost":
        return None
    return next((death for death in deaths if death.rank == report.get("culprit_rank")), None)


def _spell_death(death: Death) -> dict[str, Any]:
    by = death.signal_name
    if by is None:
        error = f"its process ended with exit code {death.code} (process {death.pid})"
        return {"error": error, "exit_code": death.code}
    return {"error": f"its process was ended by {by} (process {death.pid})", "signal": by}
