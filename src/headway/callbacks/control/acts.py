"""What each command does to a run, on every rank alike.

Owns: from a command to flags, rates, lengths, samples and traces; when a run cannot do it. Does not
own: how commands come here (engine/commands.py), what they are called (control/schema.py), nor the
receipts (receipts.py).

First every rank says whether it can, then all do it or none does: a command that only some ranks
followed would tear them apart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.control.schema import Command
from headway.engine.events import COMMANDED
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.callbacks.profile.profiler import ProfilerCallback

logger = logging.getLogger(__name__)

PROFILES_FOLDER = "profiles"
_NEED_ANOTHER_STEP = ("pause", "resume", "extend_max_steps", "profile_next_steps")
_LEVELS = {name.lower(): getattr(logging, name) for name in logging._nameToLevel}


class Acts:
    """The commands of one run on one rank."""

    def __init__(self, trainer: Any, name: str) -> None:
        self._trainer, self._name = trainer, name
        self.profiler: ProfilerCallback | None = None
        """What traces steps by command, while it does."""
        self.samples: list[dict[str, str]] = []
        """What was written by command last."""
        self._level_before: int | None = None

    def find_obstacle(self, command: Command) -> str | None:
        """Why this run cannot do it now; None if it can."""
        if command.name in _NEED_ANOTHER_STEP and self._trainer.bus.control.should_training_stop:
            return "the run ends after this step"
        find: Callable[..., str | None] | None = getattr(self, f"_cannot_{command.name}", None)
        return None if find is None else find(**command.data)

    def act(self, command: Command) -> str:
        """Do it, or have the loop do it at the end of this step; returns words for a person."""
        do: Callable[..., str] = getattr(self, f"_do_{command.name}")
        return do(**command.data)

    def end(self) -> None:
        """The run is over."""
        self._end_profile()
        if self._level_before is not None:
            logging.getLogger("headway").setLevel(self._level_before)
            self._level_before = None

    # Ends

    def _stop(self, kind: str = "stop") -> None:
        bus = self._trainer.bus
        bus.control.should_training_stop = True
        bus.control.should_abort_without_save |= kind == "abort"
        # Also where a handler asked in the same step, whose stop a rollback would take back.
        bus.stopped_by = (self._name, COMMANDED, kind)

    def _do_graceful_stop(self) -> str:
        self._bring_back()
        self._stop()
        return "the run ends after this step"

    def _do_abort(self) -> str:
        self._stop("abort")
        return "the run ends after this step, without a save"

    def _do_save_checkpoint(self) -> str:
        self._bring_back()
        args, control = self._trainer.args, self._trainer.bus.control
        control.should_save = True
        strategy = getattr(args.eval_strategy, "value", args.eval_strategy)
        if args.load_best_model_at_end and strategy != "no":
            control.should_evaluate = True
        return ""

    def _do_save_and_stop(self) -> str:
        self._do_save_checkpoint()
        self._stop()
        return ""

    # A pause

    def _cannot_pause(self, offload: bool) -> str | None:
        if self._trainer.commands.paused:
            return "the run is paused already"
        if offload and (obstacle := self._trainer.find_offload_obstacle()):
            return f"its state cannot be moved to the host: {obstacle}; pause it without offload"
        return None

    def _do_pause(self, offload: bool) -> str:
        words: str = self._trainer.pause(offload=offload)
        return words

    def _cannot_resume(self) -> str | None:
        return None if self._trainer.commands.paused else "the run is not paused"

    def _do_resume(self) -> str:
        self._trainer.commands.resume()
        return "the run goes on"

    def _bring_back(self) -> None:
        """Where the state was moved to the host, what follows needs it on the device."""
        self._trainer.commands.bring_back(or_end=False)

    # Looking at the model

    def _cannot_evaluate_now(self) -> str | None:
        return None if self._trainer.can_evaluate else "the run has no eval_dataset"

    def _do_evaluate_now(self) -> str:
        self._bring_back()
        self._trainer.bus.control.should_evaluate = True
        return ""

    def _cannot_generate_now(
        self, prompt: str | None = None, max_new_tokens: int | None = None
    ) -> str | None:
        if self._trainer.processing_class is None:
            return "the run has no tokenizer (processing_class)"
        if prompt is None and self._writer_of_texts() is None:
            return "the run has no prompts of its own (TextgenCallback); give a prompt"
        return None

    def _do_generate_now(self, prompt: str | None = None, max_new_tokens: int | None = None) -> str:
        self._bring_back()
        trainer = self._trainer
        draw = trainer.timing.tell("generate", self._draw)
        with trainer.timing.aside():
            self.samples = draw(None if prompt is None else [prompt], max_new_tokens)
        told = "1 sample is" if len(self.samples) == 1 else f"{len(self.samples)} samples are"
        return f"{told} written{self._place_of_texts()}"

    def _place_of_texts(self) -> str:
        from headway.callbacks.log.json_lines import log_folder
        from headway.callbacks.watch.textgen import FILE_NAME

        own, name = self._writer_of_texts(), FILE_NAME
        if own is not None:
            if own.writer is None:
                return ""
            name = own.writer.filename
        return f" to {(log_folder(self._trainer.args) / name).absolute()}"

    def _draw(self, prompts: list[str] | None, max_new_tokens: int | None) -> list[dict[str, str]]:
        from headway.callbacks.watch.textgen import TextgenCallback

        trainer, writer = self._trainer, self._writer_of_texts()
        if writer is not None:
            drawn: list[dict[str, str]] = writer.sample_now(trainer, prompts, max_new_tokens)
            return drawn
        writer = TextgenCallback(prompts=prompts, console=False)
        writer._start_step = trainer.state.global_step
        try:
            return writer.sample_now(trainer, prompts, max_new_tokens)
        finally:
            writer.on_close(trainer.args, trainer.state, trainer.bus.control)

    def _writer_of_texts(self) -> Any:
        """The run's own callback for samples, if it has one that works."""
        from headway.callbacks.watch.textgen import TextgenCallback

        bus = self._trainer.bus
        for name, callback in bus.callbacks.items():
            if isinstance(callback, TextgenCallback) and name not in bus.disabled:
                return callback
        return None

    # Changes

    def _cannot_set_learning_rate(
        self, scale: float | None = None, value: float | None = None, **_: Any
    ) -> str | None:
        obstacle: str | None = self._trainer.find_rate_obstacle(scale=scale, value=value)
        return obstacle

    def _do_set_learning_rate(self, **data: Any) -> str:
        words: str = self._trainer.change_learning_rate(**data)
        return words

    def _new_length(self, max_steps: int | None, by: int | None) -> int:
        """`by` counts from the end as it is now."""
        return max_steps if max_steps is not None else self._trainer.state.max_steps + (by or 0)

    def _cannot_extend_max_steps(
        self, max_steps: int | None = None, by: int | None = None
    ) -> str | None:
        obstacle: str | None = self._trainer.find_length_obstacle(self._new_length(max_steps, by))
        return obstacle

    def _do_extend_max_steps(self, max_steps: int | None = None, by: int | None = None) -> str:
        words: str = self._trainer.change_max_steps(self._new_length(max_steps, by))
        return words

    def _do_set_log_level(self, level: str) -> str:
        chosen = logging.getLogger("headway")
        if self._level_before is None:
            self._level_before = chosen.level
        chosen.setLevel(_LEVELS[level])
        return f"the run tells records of level {level} and above, to the end of the run"

    def _do_status(self) -> str:
        return "the status is that of this step"

    # Traces

    def _cannot_profile_next_steps(self, num_steps: int) -> str | None:
        from headway.callbacks.profile.profiler import ProfilerCallback

        others = [c for c in self._trainer.bus.callbacks.values() if type(c) is ProfilerCallback]
        if self.profiler is not None or any(other.is_tracing for other in others):
            return "steps are being traced already"
        return None

    def _do_profile_next_steps(self, num_steps: int) -> str:
        from headway.callbacks.profile.profiler import ProfilerCallback

        trainer, state = self._trainer, self._trainer.state
        profiler = ProfilerCallback(
            start_step=state.global_step, num_steps=num_steps, output_dir=PROFILES_FOLDER
        )
        given = trainer.args, state, trainer.bus.control
        profiler.on_train_begin(*given, trainer)
        self.profiler = profiler
        # Now, and not when the next step begins: a run that is not traced need not look then.
        profiler.on_step_begin(*given)
        first, place = state.global_step + 1, Path(trainer.args.output_dir, PROFILES_FOLDER)
        return (
            f"profiling from step {first}; the trace of steps {first} to {first + num_steps - 1} "
            f"will be in {place.absolute()}"
        )

    def end_step(self) -> None:
        """Only while `profiler` is there."""
        trainer, profiler = self._trainer, self.profiler
        assert profiler is not None
        try:
            profiler.on_step_end(trainer.args, trainer.state, trainer.bus.control)
        except Exception as error:
            # A trace is of this rank alone, and not worth the run.
            logger.warning("profile_next_steps failed: %s: %s", type(error).__name__, error)
            self._end_profile()
        if profiler.is_through:
            self._end_profile()

    def _end_profile(self) -> None:
        profiler, self.profiler = self.profiler, None
        if profiler is not None:
            try:
                profiler.on_close()
            except Exception as error:
                logger.warning("profile_next_steps failed: %s: %s", type(error).__name__, error)


def describe_failure(error: BaseException) -> str:
    """For a receipt: a person's mistake in its own words, all else with its kind."""
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
