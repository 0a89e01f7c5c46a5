"""What a trainer offers to those who save and load it.

Owns: the two protocols. Does not own: an implementation (trainers, manager.py).
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from headway.checkpoint.component import StateComponent


@runtime_checkable
class CheckpointInterface(Protocol):
    """Something whose full state can be saved and loaded."""

    def save_checkpoint(
        self, checkpoint_path: str | None = None, checkpoint_id: str | int | None = None
    ) -> str:
        """Save the full state; the id, such as the step, counts only without a path."""
        ...

    def load_checkpoint(self, checkpoint_path: str | None = None) -> None:
        """Load a checkpoint, by default the newest."""
        ...

    def save_model(self, output_dir: str | None = None, overwrite_output_dir: bool = False) -> None:
        """Save the model alone, with its config and tokenizer."""
        ...

    def set_best_checkpoint(self, best_checkpoint: str) -> None:
        """Say which checkpoint is the best; it is kept."""
        ...

    def resolve_checkpoint_path(self, checkpoint_path: str | None) -> str | None:
        """The checkpoint that is meant, the newest without a path; None if there is none."""
        ...


@runtime_checkable
class StatefulProvider(Protocol):
    """Something that lists what a checkpoint must hold."""

    def get_state_components(self) -> list[StateComponent]:
        """Every object with state, and how ranks share it."""
        ...

    def get_process_groups(self) -> dict[str, Any]:
        """The process groups of components that are shared by group, by name."""
        ...
