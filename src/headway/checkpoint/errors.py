"""The error for a checkpoint that cannot be written or used.

Owns: `CheckpointError`. Does not own: a user's mistake in an option (`headway.errors.ConfigError`).
"""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, incomplete or does not fit; the message names the file or key."""
