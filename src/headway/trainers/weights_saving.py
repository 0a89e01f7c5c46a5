"""Weights that are not the run's own, such as an average, as a checkpoint beside its others.

Owns: what such a checkpoint holds and its name. Does not own: the weights (a callback puts them
into the model before, and takes them out after), the bytes (checkpoint).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from headway.checkpoint import CheckpointManager

if TYPE_CHECKING:
    from headway.trainers.checkpointing import Checkpointing
    from headway.trainers.saving import Saver

KIND = "merged"


def begin_to_save(trainer: Checkpointing, saver: Saver, suffix: str, *, wait: bool) -> str:
    """Begin to write the weights as they are now, for good, as `checkpoint-<step>-<suffix>`.

    It is a model folder with the run's configuration and counters, of a kind that no run resumes
    from. The weights may change as soon as this returns. Every rank calls it.
    """
    saver.write_held()
    saver.deliver()
    step = trainer.state.global_step
    tokenizer_saver = getattr(trainer.processing_class, "save_pretrained", None)
    contents = dataclasses.replace(
        saver._contents_to_save(),
        optimizer=None,
        components=[],
        save_tokenizer=tokenizer_saver if callable(tokenizer_saver) else None,
        stores_model=True,
    )
    # Copied to host memory of its own: that of the run's saves is of another size, and stays.
    manager = CheckpointManager(saver.manager.output_dir, ranks=trainer._ranks())
    name = f"checkpoint-{step}-{suffix}"
    pending = manager.stage(contents, step, kind=KIND, permanent=True, name=name)
    saver.background.start(pending)
    if wait:
        saver.deliver()
    return saver.manager.storage.locate(saver.manager.output_dir / name)
