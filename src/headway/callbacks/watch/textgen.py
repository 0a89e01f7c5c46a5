"""Samples of what a model writes in the course of a run.

Owns: when samples are drawn, that training is the same without them, and where they are written.
Does not own: prompts and tokens (prompts.py), the options (text_options.py), drawing tokens (the
strategies and models/generation.py).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from headway.callbacks.log.chosen_writer import ChosenWriter
from headway.callbacks.log.json_lines import JsonLogWriter, log_folder
from headway.callbacks.watch.prompts import Batch, Coder, load_prompts, make_batches, new_tokens
from headway.callbacks.watch.ranges import require_count, require_flag
from headway.callbacks.watch.sharing import num_ranks, on_all_ranks
from headway.callbacks.watch.text_options import (
    DEFAULT_CONFIG,
    TextOptions,
    lent_config,
    position_limit,
    takes_mask,
)
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

TAG = "eval-text"
FILE_NAME = "eval_text.jsonl"
START = " [START] "


class TextgenCallback(TrainerCallback):
    """Continues prompts at evaluations, at least `generation_steps` steps apart.

    `prompts` is a list of texts, the path of a YAML file that holds one, or one text. Samples go
    to TensorBoard (tag `eval-text`), to `file_name` and, with `console`, to the terminal.
    `summary_writer` is a writer, a folder, or None for the writer that the run has, if any.
    `generation_config` takes the place of the defaults (do_sample, top_k=20, temperature=0.7,
    repetition_penalty=1.15); its ids and its max_new_tokens come before the tokenizer's and
    `max_new_tokens`. `generation_steps=None` is `eval_steps`, or every evaluation if those are not
    counted in steps. In a run without evaluations samples come every `generation_steps` steps.

    The same weights give the same samples: they are drawn from `seed`, `batch_size` prompts at a
    time. Training draws as if there were none.
    """

    failure_policy = "disable"

    def __init__(
        self,
        summary_writer: Any = None,
        prompts: list[str] | str | os.PathLike[str] | None = None,
        generation_config: Mapping[str, Any] | None = None,
        generation_steps: int | None = None,
        max_new_tokens: int = 200,
        *,
        seed: int = 42,
        batch_size: int = 8,
        file_name: str | None = FILE_NAME,
        console: bool = True,
    ) -> None:
        if prompts is None:
            raise ConfigError("prompts: a list of texts or the path of a YAML file is needed")
        self.prompts = load_prompts(prompts)
        if generation_config is not None and not isinstance(generation_config, Mapping):
            raise ConfigError(
                f"generation_config: {generation_config!r} given; allowed: a mapping of option to "
                "value, or none"
            )
        self.generation_config = dict(
            DEFAULT_CONFIG if generation_config is None else generation_config
        )
        require_count("generation_steps", generation_steps, least=1, optional=True)
        require_count("max_new_tokens", max_new_tokens, least=1)
        given = self.generation_config.get("max_new_tokens")
        require_count("generation_config.max_new_tokens", given, least=1, optional=True)
        require_count("seed", seed)
        require_count("batch_size", batch_size, least=1)
        require_flag("console", console)
        self._tensorboard = ChosenWriter(summary_writer, "add_text", finds=True)
        self.summary_writer = self._tensorboard.given
        self.generation_steps, self.max_new_tokens = generation_steps, max_new_tokens
        self.seed, self.batch_size, self.console = seed, batch_size, console
        self.writer = None if file_name is None else JsonLogWriter(file_name)
        self._last_step: int | None = None
        self._start_step = 0
        self._event: str | None = None
        self._interval_steps = 1
        self._coder: Coder | None = None
        self._options: TextOptions | None = None
        self._batches: list[Batch] = []

    # The run

    def on_train_begin(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        processing_class: Any,
        trainer: Any,
    ) -> None:
        if state.global_step == 0:
            self._last_step = None
        self._start_step = state.global_step
        self._plan(args, state)
        if processing_class is None:
            raise ConfigError(
                "TextgenCallback needs a tokenizer; give the trainer processing_class, or a run "
                "file its tokenizer"
            )
        self._tensorboard.begin(args, state, trainer)
        self._prepare(trainer.strategy, processing_class)

    def _prepare(self, strategy: Any, processing_class: Any) -> None:
        model, whole = strategy.unwrap(), not hasattr(strategy, "pipeline_generate")

        def prepare() -> None:
            self._coder = Coder(processing_class)
            self._options = TextOptions.of(
                self.generation_config, self.max_new_tokens, self._coder, model, whole
            )
            self._batches = self._make_batches(strategy, model, position_limit(model))

        on_all_ranks(prepare)

    def sample_now(
        self, trainer: Any, prompts: list[str] | None = None, max_new_tokens: int | None = None
    ) -> list[dict[str, str]]:
        """In a run, whatever the interval: continue other prompts, or these, and write that.

        Every rank must call it, and gets the samples.
        """
        once = TextgenCallback(
            prompts=prompts or self.prompts,
            generation_config=self.generation_config,
            max_new_tokens=max_new_tokens or self.max_new_tokens,
            seed=self.seed,
            batch_size=self.batch_size,
        )
        if max_new_tokens is not None:
            once.generation_config.pop("max_new_tokens", None)
        once._prepare(trainer.strategy, trainer.processing_class)
        texts = once._draw(trainer.strategy)
        samples = _pair(once.prompts, texts)

        def emit() -> None:
            if trainer.state.is_world_process_zero:
                self._emit(trainer.args, trainer.state, samples)

        on_all_ranks(emit)
        return samples

    def on_load(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._start_step = state.global_step
        if self.writer is not None:
            self.writer.rewind(state.global_step)
        self._tensorboard.rewind(state.global_step)

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, trainer: Any
    ) -> None:
        if self._event == "on_evaluate":
            self._sample_if_due(args, state, trainer)

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, trainer: Any
    ) -> None:
        if self._event == "on_step_end":
            self._sample_if_due(args, state, trainer)

    def on_close(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._event = None
        if self.writer is not None:
            self.writer.close()
        self._tensorboard.close()

    def state_dict(self) -> dict[str, Any]:
        saved: dict[str, Any] = {"version": 1, "last_step": self._last_step}
        if self.writer is not None:
            saved["file"] = self.writer.state_dict()
        tensorboard = self._tensorboard.state_dict()
        if tensorboard is not None:
            saved["tensorboard"] = tensorboard
        return saved

    def load_state_dict(self, state: dict[str, Any]) -> None:
        last_step = state.get("last_step")
        self._last_step = last_step if isinstance(last_step, int) else None
        file = state.get("file")
        if self.writer is not None and isinstance(file, Mapping):
            self.writer.load_state_dict(file)
        self._tensorboard.load_state_dict(state.get("tensorboard"))

    # When

    def _plan(self, args: Any, state: TrainerState) -> None:
        self._interval_steps = self.generation_steps or (
            args.eval_steps if args.eval_strategy == "steps" else 1
        )
        self._event = "on_evaluate"
        if not args.do_eval:
            self._event = "on_step_end" if self.generation_steps else None
            if self._event is None and state.is_world_process_zero:
                logger.warning(
                    "TextgenCallback draws nothing: this run has no evaluations; set "
                    "generation_steps, or eval_strategy"
                )

    def _sample_if_due(self, args: Any, state: TrainerState, trainer: Any) -> None:
        # In a run without evaluations the interval counts from its start.
        last = 0 if self._event == "on_step_end" else None
        last = last if self._last_step is None else self._last_step
        if last is not None and state.global_step < last + self._interval_steps:
            return
        self._last_step = state.global_step
        samples = _pair(self.prompts, self._draw(trainer.strategy))

        def emit() -> None:
            if state.is_world_process_zero:
                self._emit(args, state, samples)

        on_all_ranks(emit)

    # Drawing

    def _draw(self, strategy: Any) -> list[str]:
        """What the model makes of each prompt; all ranks must call it."""
        model = strategy.unwrap()
        assert self._options is not None
        limit, batches = position_limit(model), self._batches
        with _undisturbed(), lent_config(model, self._options):
            if _is_spread(strategy, model):
                # One by one: a rank that failed at the first must not miss the second, in which
                # the others would wait for it.
                parts = [
                    on_all_ranks(partial(self._continue, strategy, batch, limit))[0]
                    for batch in batches
                ]
                return [text for part in parts for text in part]

            # Of a model that every rank has, each rank draws for other prompts.
            def draw_own() -> list[tuple[int, list[str]]]:
                own = batches[_own_rank() :: num_ranks()]
                return [(batch.first, self._continue(strategy, batch, limit)) for batch in own]

            ordered = sorted(part for drawn in on_all_ranks(draw_own) for part in drawn)
        return [text for _, part in ordered for text in part]

    def _make_batches(self, strategy: Any, model: nn.Module, limit: int | None) -> list[Batch]:
        assert self._coder is not None and self._options is not None
        rows = self._coder.encode(self.prompts)
        if limit is not None:
            # Where both are too long for the model, they share the room.
            room = max(limit - self._options.max_new_tokens, limit // 2)
            rows = [row[-room:] for row in rows]
        pads = hasattr(strategy, "pipeline_generate") or takes_mask(model)
        return make_batches(rows, self.batch_size if pads else 1, self._options.pad)

    def _continue(self, strategy: Any, batch: Batch, limit: int | None) -> list[str]:
        import torch

        assert self._coder is not None and self._options is not None
        options, width = self._options, batch.ids.shape[1]
        num_new = options.max_new_tokens if limit is None else limit - width
        generator = torch.Generator(strategy.device).manual_seed(self.seed + batch.first)
        out = strategy.generate(
            batch.ids.to(strategy.device),
            attention_mask=None if batch.mask is None else batch.mask.to(strategy.device),
            max_new_tokens=min(options.max_new_tokens, num_new),
            eos_token_id=options.ends or None,
            pad_token_id=options.pad,
            generator=generator,
            **options.sampling,
        )
        found: list[list[int]] = out[:, width:].tolist()
        return [
            self._coder.decode(row, new_tokens(new, options.ends))
            for row, new in zip(batch.rows, found, strict=True)
        ]

    # Writing

    def _emit(self, args: Any, state: TrainerState, samples: list[dict[str, str]]) -> None:
        if self.writer is not None:
            if not self.writer.is_open:
                self.writer.open(log_folder(args), self._start_step)
            data = {"samples": samples}
            self.writer.write_record(state.global_step, state.epoch, data, type="text")
        lines = [f"{sample['prompt']}{START}{sample['text']}" for sample in samples]
        tensorboard = self._tensorboard.writer
        if tensorboard is not None:
            tensorboard.add_text(TAG, "\n\n---\n\n".join(lines), state.global_step)
            tensorboard.flush()
        if self.console:
            from tqdm import tqdm

            # Through the bar's own door: a bar that is there stays whole.
            for number, line in enumerate(lines, 1):
                head = f"[step {state.global_step:,}, sample {number} of {len(lines)}]"
                tqdm.write(f"{head} {_printable(line)}", file=sys.stderr)
            sys.stderr.flush()


def _pair(prompts: list[str], texts: list[str]) -> list[dict[str, str]]:
    return [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]


def _printable(text: str) -> str:
    """Without what a terminal would obey: a young model writes any byte."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Random numbers of training as before, and nothing compiled for calls of another shape."""
    import torch

    from headway.checkpoint.rng import RNGState

    generators = RNGState()
    before = generators.state_dict()
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        generators.load_state_dict(before)


def _is_spread(strategy: Any, model: nn.Module) -> bool:
    """Whether ranks hold parts of the model, so that all of them have to run it together."""
    from torch.distributed.tensor import DTensor

    if hasattr(strategy, "pipeline_generate"):
        return True
    return any(
        isinstance(parameter, DTensor)
        or hasattr(parameter, "ds_id")  # DeepSpeed's
        or type(parameter).__name__ == "FlatParameter"
        for parameter in model.parameters()
    )


def _own_rank() -> int:
    import torch

    return torch.distributed.get_rank() if num_ranks() > 1 else 0
