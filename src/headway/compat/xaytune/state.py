"""`TrainState`: what a handler is given; it lives where checkpoints can return it."""

from __future__ import annotations

from headway.checkpoint.train_state import TrainState, to_number

__all__ = ["TrainState", "to_number"]
