"""A TensorBoard writer that goes on in the same folder after a resume.

Owns: which folder is written, that only rank 0 writes, and that TensorBoard shows each step once.
Does not own: what is written (the callbacks that are given it), the event file (event_file.py).
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError, missing_extra

logger = logging.getLogger(__name__)


def _forward(name: str) -> Callable[..., Any]:
    """A method that hands its arguments to the writer's method of this name, on rank 0."""

    def call(self: ResumableSummaryWriter, *args: Any, **kwargs: Any) -> Any:
        writer = self._writer_here()
        return None if writer is None else getattr(writer, name)(*args, **kwargs)

    call.__name__ = name
    call.__doc__ = f"`SummaryWriter.{name}`, on rank 0; makes folder and file when first used."
    return call


class ResumableSummaryWriter(TrainerCallback):
    """Everything a `torch.utils.tensorboard.SummaryWriter` does, in one folder over all resumes.

    It is a callback, so that checkpoints remember the folder, and the writer that other callbacks
    write to. `log_dir=None` is the run's `logging_dir`. Nothing is made on disk before the first
    write. After a resume or a rollback, what was written for later steps is no longer shown.
    """

    failure_policy = "disable"
    priority = 100  # others may write as soon as they hear of an event

    def __init__(self, log_dir: str | os.PathLike[str] | None = None) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise missing_extra("tensorboard", "tensorboard", "ResumableSummaryWriter")
        if log_dir is not None and not isinstance(log_dir, str | os.PathLike):
            raise ConfigError(f"log_dir must be the path of a folder, not {log_dir!r}")
        if log_dir is not None and not str(log_dir):
            raise ConfigError("log_dir must be the path of a folder, not an empty text")
        self._given = None if log_dir is None else str(log_dir)
        self._active = self._given
        self._output_dir: str | None = None
        self._saved: dict[str, Any] = {}
        self._writes: bool | None = None
        self._start_step: int | None = None
        self._marked: set[str] = set()
        self._writer: Any = None

    @property
    def log_dir(self) -> str | None:
        """The folder that is written; None while it is not known."""
        return self._active

    def get_logdir(self) -> str | None:
        return self._active

    @property
    def file_writer(self) -> Any:
        """The open event file, if there is one."""
        return None if self._writer is None else self._writer.file_writer

    # The run

    def begin(self, args: Any, state: TrainerState) -> None:
        """A run starts or goes on at `state.global_step`; repeating it changes nothing."""
        self._output_dir = str(args.output_dir)
        self._writes = state.is_world_process_zero
        if self._writer is not None:
            return
        self._active = self._find_saved() or self._given or str(args.logging_dir)
        self._start_step = state.global_step + 1 if state.global_step else 0
        self._marked.clear()

    def rewind(self, global_step: int) -> None:
        """What was written for steps after `global_step` did not happen."""
        if self._writer is None:
            return
        self._start_step = global_step + 1
        self._marked.clear()
        for folder, files in (self._writer.all_writers or {}).items():
            self._mark(folder, files.event_writer)

    def on_load(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self.rewind(state.global_step)
        self.begin(args, state)

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self.begin(args, state)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self.flush()

    def on_close(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        # A checkpoint stands for everything up to its step: a kill after it must lose none of it.
        self.flush()
        folder, inside = self._active, False
        if self._output_dir is None and self._saved:  # no run has taken it up yet
            folder, inside = self._saved.get("log_dir"), bool(self._saved.get("in_output_dir"))
        elif folder is not None and self._output_dir is not None:
            relative = os.path.relpath(folder, self._output_dir)
            if relative.split(os.sep)[0] != os.pardir:
                folder, inside = Path(relative).as_posix(), True
        return {"version": 1, "log_dir": folder, "in_output_dir": inside}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved = dict(state)

    def _find_saved(self) -> str | None:
        """The folder that the checkpoint names, if it is still there."""
        folder = self._saved.get("log_dir")
        if not isinstance(folder, str):
            return None
        if self._saved.get("in_output_dir") and self._output_dir is not None:
            folder = os.path.join(self._output_dir, folder)
        if os.path.isdir(folder):
            if self._writes:
                logger.info("TensorBoard goes on in %s", folder)
            return folder
        if self._writes:
            logger.warning(
                "the folder of TensorBoard that the checkpoint names is gone (%s); a new one is "
                "begun",
                folder,
            )
        self._saved = {}
        return None

    # The writer

    def add_step(self, step: int, figures: Mapping[str, float]) -> None:
        """Figures of a step by tag, on rank 0: as `add_scalar` for each, at the cost of one call.

        The mapping is read later and must not change.
        """
        writer = self._writer_here()
        if writer is not None:
            writer.add_step(step, figures)

    def _writer_here(self) -> Any:
        if self._writes is None:
            self._writes = _is_first_rank()
        if not self._writes:
            return None
        if self._writer is None:
            if self._active is None:
                raise ConfigError("ResumableSummaryWriter: log_dir is not given and no run is on")
            from headway.callbacks.log.event_file import open_writer

            self._writer = open_writer(self._active, self._mark)
        return self._writer

    def _mark(self, folder: str, file: Any) -> None:
        # Once in a run: a writer that is closed and used again must not hide what it wrote.
        if self._start_step is not None and folder not in self._marked:
            self._marked.add(folder)
            file.mark_start(self._start_step)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Finish the file; the next write begins another one in the same folder."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def __enter__(self) -> ResumableSummaryWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    add_audio = _forward("add_audio")
    add_custom_scalars = _forward("add_custom_scalars")
    add_custom_scalars_marginchart = _forward("add_custom_scalars_marginchart")
    add_custom_scalars_multilinechart = _forward("add_custom_scalars_multilinechart")
    add_embedding = _forward("add_embedding")
    add_figure = _forward("add_figure")
    add_graph = _forward("add_graph")
    add_histogram = _forward("add_histogram")
    add_histogram_raw = _forward("add_histogram_raw")
    add_hparams = _forward("add_hparams")
    add_image = _forward("add_image")
    add_image_with_boxes = _forward("add_image_with_boxes")
    add_images = _forward("add_images")
    add_mesh = _forward("add_mesh")
    add_onnx_graph = _forward("add_onnx_graph")
    add_pr_curve = _forward("add_pr_curve")
    add_pr_curve_raw = _forward("add_pr_curve_raw")
    add_scalar = _forward("add_scalar")
    add_scalars = _forward("add_scalars")
    add_tensor = _forward("add_tensor")
    add_text = _forward("add_text")
    add_video = _forward("add_video")


def _is_first_rank() -> bool:
    import torch.distributed as dist

    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
