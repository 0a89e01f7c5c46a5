"""Short sequences first: the length of samples as a function of the step.

Owns: which length each step has. Does not own: how a batch is shortened (cutting.py).
"""

from __future__ import annotations

import logging
from typing import Any

from headway.callbacks.schedule.cutting import cut_batch, cut_window
from headway.callbacks.schedule.points import require_known_end
from headway.callbacks.watch.ranges import require_count, require_flag
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError

logger = logging.getLogger(__name__)

_WHO = "SequenceLengthSchedulerCallback"
_RECOMPILE_LIMIT = 8
"""torch's own; beyond it a compiled block runs uncompiled."""
_OTHER_SHAPES = 2
"""Graphs that are left for other shapes: an evaluation's, the rest of an epoch."""


class SequenceLengthSchedulerCallback(TrainerCallback):
    """Grows the length of training sequences from `min_sequence_length` to the data's own.

    Over the first `warmup_steps` steps a line leads from the least to the full length. Without
    `truncate` each sample is split into shorter ones, of the least length times the power of two
    that is nearest to the line in ratio: no token is lost, and a micro-batch keeps its tokens. With
    `truncate` samples are cut off at the line, rounded down to a multiple of `keep_multiple_of`;
    what is cut off is not counted as seen. `max_sequence_length` is for data that does not say how
    long its samples are. The length follows from the step alone, so nothing has to be stored.
    """

    priority = 50  # whoever looks at a window sees what is trained on

    def __init__(
        self,
        min_sequence_length: int = 128,
        warmup_steps: int = 2000,
        truncate: bool = False,
        keep_multiple_of: int = 128,
        enabled: bool = True,
        max_sequence_length: int | None = None,
    ) -> None:
        require_count(f"{_WHO}: min_sequence_length", min_sequence_length, least=2)
        require_count(f"{_WHO}: warmup_steps", warmup_steps, least=1)
        require_flag(f"{_WHO}: truncate", truncate)
        require_count(f"{_WHO}: keep_multiple_of", keep_multiple_of, least=1)
        require_flag(f"{_WHO}: enabled", enabled)
        require_count(f"{_WHO}: max_sequence_length", max_sequence_length, least=2, optional=True)
        if truncate and min_sequence_length % keep_multiple_of:
            raise ConfigError(
                f"{_WHO}: min_sequence_length: {min_sequence_length} given; allowed with truncate: "
                f"multiples of keep_multiple_of={keep_multiple_of}"
            )
        self.min_sequence_length = min_sequence_length
        self.warmup_steps = warmup_steps
        self.truncate = truncate
        self.keep_multiple_of = keep_multiple_of
        self.enabled = enabled
        self.max_sequence_length = max_sequence_length
        if max_sequence_length is not None:
            self._check_target(max_sequence_length)
        self._target: int | None = max_sequence_length
        self._quantum = keep_multiple_of
        self._last: int | None = None

    def length_at(self, step: int) -> int:
        """The length of samples in a step; the first step is 1."""
        assert self._target is not None, "known when training begins"
        least, full, whole = self.min_sequence_length, self._target, self.warmup_steps
        if step >= whole:
            return full
        line = least * whole + (full - least) * step  # times `whole`: no fractions
        if self.truncate:
            return max(least, line // whole // self._quantum * self._quantum)
        length = least
        while length < full and 2 * line**2 >= (2 * length * whole) ** 2:
            length *= 2
        return length

    # Events

    def on_init_end(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        train_dataloader: Any,
        lr_scheduler: Any,
    ) -> None:
        if not self.enabled:
            return
        self._target = self._find_target(train_dataloader.dataset)
        self._check_target(self._target)
        if self.truncate:
            require_known_end(args, lr_scheduler, f"{_WHO} (truncate)")
            if args.fp8_recipe is not None and self.keep_multiple_of % 16:
                raise ConfigError(
                    f"{_WHO}: keep_multiple_of: {self.keep_multiple_of} given; allowed with "
                    "fp8_recipe: "
                    "multiples of 16"
                )
        self._limit_lengths(args, self._target)
        if train_dataloader.num_samples is not None:  # of a stream the first window tells
            self._try(train_dataloader.read_one())

    def on_window(
        self, args: Any, state: TrainerState, control: TrainerControl, window: Any, trainer: Any
    ) -> None:
        if not self.enabled:
            return
        length = self.length_at(state.global_step + 1)
        if length != self._last and self._last is not None:
            logger.info("sequences of %d tokens from step %d on", length, state.global_step + 1)
            if trainer.strategy.device.type == "cuda":
                import torch

                # Blocks of memory of the old shapes would be of no use to the new ones.
                torch.cuda.empty_cache()
        self._last = length
        self._require_full(window)
        if length != self._target:
            cut_window(window, length, split=not self.truncate)

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, trainer: Any
    ) -> None:
        if self._last is not None:
            trainer.record_metric("train/sequence length", self._last)

    # Checks

    def _check_target(self, target: int) -> None:
        least = self.min_sequence_length
        if least >= target:
            raise ConfigError(
                f"{_WHO}: min_sequence_length: {least} given; allowed: less than the data's "
                f"{target} "
                "tokens per sample"
            )
        if self.truncate:
            return
        ratio, rest = divmod(target, least)
        if rest or ratio & (ratio - 1):
            fits = [target >> n for n in range(1, target.bit_length()) if target % (1 << n) == 0]
            fits = [length for length in fits if length >= 2]
            allowed = ", ".join(map(str, fits)) if fits else "none, so set truncate=True"
            raise ConfigError(
                f"{_WHO}: min_sequence_length: {least} given; the data's {target} tokens per "
                "sample must "
                f"be a power of two times it where samples are split; allowed: {allowed}"
            )

    def _find_target(self, dataset: Any) -> int:
        told = getattr(dataset, "sequence_length", None)
        given = self.max_sequence_length
        if isinstance(told, int) and not isinstance(told, bool):
            if given not in (None, told):
                raise ConfigError(
                    f"{_WHO}: max_sequence_length: {given} given, but samples of the "
                    f"{type(dataset).__name__} have {told} tokens; leave it out"
                )
            return told
        if given is None:
            raise ConfigError(
                f"{_WHO}: max_sequence_length: none given, and a {type(dataset).__name__} does not "
                "say how "
                "long its samples are (sequence_length); give the full length"
            )
        return given

    def _limit_lengths(self, args: Any, target: int) -> None:
        """Where every length has to be compiled, have no more of them than are kept."""
        self._quantum = self.keep_multiple_of
        if not args.torch_compile or args.torch_compile_dynamic:
            return
        limit = args.dynamo_recompile_limit or _RECOMPILE_LIMIT
        most = max(2, limit - _OTHER_SHAPES)
        if self.truncate:
            steps = 1
            while self._num_lengths(steps * self.keep_multiple_of, target) > most:
                steps += 1
            self._quantum = steps * self.keep_multiple_of
            if steps > 1:
                logger.info(
                    "torch_compile without torch_compile_dynamic: lengths in steps of %d tokens, "
                    "so that there are at most %d to compile",
                    self._quantum,
                    most,
                )
        elif (target // self.min_sequence_length).bit_length() > most:
            raise ConfigError(
                f"{_WHO}: min_sequence_length: {self.min_sequence_length} given; doubling it up to "
                f"{target} makes more lengths than torch compiles ({limit}, "
                "dynamo_recompile_limit); set torch_compile_dynamic=True, or raise one of the two"
            )

    def _num_lengths(self, quantum: int, target: int) -> int:
        """The least length, the full one, and the multiples between them."""
        return 2 + (target - 1) // quantum - self.min_sequence_length // quantum

    def _try(self, batch: Any) -> None:
        """Shorten a sample for nothing, so that data that cannot be is refused at once."""
        if batch is not None:
            self._require_width(batch)
            cut_batch(batch, self.min_sequence_length, split=not self.truncate)

    def _require_full(self, window: Any) -> None:
        for batch in window.micro_batches:
            self._require_width(batch)

    def _require_width(self, batch: Any) -> None:
        """No batch may be longer than what the schedule ends at; a shorter one has to fit."""
        ids: Any = batch.get("input_ids") if hasattr(batch, "get") else None
        width = ids.shape[1] if getattr(ids, "ndim", 0) == 2 else None
        if width is None or self._target is None or width == self._target:
            return
        if width > self._target:
            raise ConfigError(
                f"{_WHO}: max_sequence_length: {self._target} tokens expected, but a batch has "
                "sequences "
                f"of {width}"
            )
        if not self.truncate:
            raise ConfigError(
                f"{_WHO}: a batch has sequences of {width} tokens instead of {self._target}; "
                "samples of different lengths cannot be split alike: pack them or pad them to the "
                "full length, or set truncate=True"
            )
