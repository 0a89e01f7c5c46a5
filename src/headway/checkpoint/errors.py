"""The error for a checkpoint that cannot be written or used.

Owns: `CheckpointError` and `MisfitError`. Does not own: a user's mistake in an option
(`headway.errors.ConfigError`).
"""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, incomplete or does not fit; the message names the file or key."""

    failed_rank: int | None = None
    """The rank that failed, where it is not the one that raises this."""


class MisfitError(CheckpointError):
    """A whole checkpoint does not fit the model it is loaded into: names or shapes differ."""
