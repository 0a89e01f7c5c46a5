"""Which checkpoints may go when a newer one is complete: the choices a user has."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from headway.errors import ConfigError, unknown


class CheckpointRemovalStrategy(StrEnum):
    """What `CheckpointerCallback` removes; permanent checkpoints stay under each of them."""

    ephemeral_only = "ephemeral_only"
    """Ephemeral ones go as soon as a newer checkpoint is there."""
    all_non_permanent = "all_non_permanent"
    """So do all others that were not made to stay: of requests, interruptions, other runs."""
    never = "never"
    """Nothing is removed, ephemeral ones included."""

    @classmethod
    def parse(cls, given: object, who: str = "CheckpointerCallback") -> CheckpointRemovalStrategy:
        """A member, or its name as a run file has it; `who` was given it."""
        try:
            return cls(given)  # type: ignore[arg-type]
        except ValueError:
            raise ConfigError(
                f"{who}: remove: "
                + unknown("removal strategy", str(given), [str(member) for member in cls])
            ) from None

    def retention(self, max_checkpoints: int | None) -> dict[str, Any]:
        """The settings of the one retention function."""
        return {
            "limit": max_checkpoints,
            "keep_ephemeral": self is CheckpointRemovalStrategy.never,
            "drop_ordinary": self is CheckpointRemovalStrategy.all_non_permanent,
        }
