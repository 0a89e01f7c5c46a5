"""The error for a checkpoint that cannot be written or used.

Owns: `CheckpointError`, `DamagedError` and the kinds of `MisfitError`. Does not own: a user's
mistake in an option (`headway.errors.ConfigError`).
"""

from __future__ import annotations

from collections.abc import Sequence


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, incomplete or does not fit; the message names the file or key."""

    failed_rank: int | None = None
    """The rank that failed, where it is not the one that raises this."""


class DamagedError(CheckpointError):
    """Files of a checkpoint are not as they were written; raised on every rank alike."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)
        """One line for every damaged file."""


class MisfitError(CheckpointError):
    """A whole checkpoint does not fit the model it is loaded into: names or shapes differ."""

    part = "model"


class OptimizerMisfitError(MisfitError):
    """A whole checkpoint has the state of another optimizer than the run's."""

    part = "optimizer"
