"""Traces of some steps by torch's profiler.

Owns: which steps are traced, and that the profiler is ended whatever happens. Does not own: the
files (trace_files.py), the choice of ranks (rank_choice.py).
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.callbacks.profile.rank_choice import Ranks, is_chosen, require_ranks
from headway.callbacks.profile.trace_files import make_tables, write_trace
from headway.callbacks.watch.ranges import require_count, require_flag, require_path
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.engine.timing import LoopTiming
from headway.errors import ConfigError

logger = logging.getLogger(__name__)

_START_STEP, _NUM_STEPS = 3, 5
_SCHEDULE = {"skip_first": 0, "wait": 1, "warmup": 5, "active": 3, "repeat": 1}
_LEAST = {"active": 1}

_owner: weakref.ref[ProfilerCallback] | None = None  # whose profiler was the last of this process


class ProfilerCallback(TrainerCallback):
    """Traces steps, on rank 0 or the chosen `ranks`, as Chrome traces with tables beside them.

    Either one window: `num_steps` steps from when `start_step` steps are done. Or a schedule, if
    any part of one is given: after `skip_first` steps, `repeat` times (0: for ever) `wait` steps
    without, `warmup` steps whose record is thrown away, `active` steps traced.

    A relative `output_dir` lies in the run's folder. A run that is resumed beyond `start_step`
    traces its first steps, unless a checkpoint says that all is traced already.
    """

    priority = -10  # what other callbacks do in a step belongs into its trace
    failure_policy = "disable"

    def __init__(
        self,
        start_step: int = _START_STEP,
        num_steps: int = _NUM_STEPS,
        output_dir: str = "benchmarks/profiles",
        with_stack: bool = True,
        with_flops: bool = True,
        record_shapes: bool = True,
        skip_first: int | None = None,
        wait: int | None = None,
        warmup: int | None = None,
        active: int | None = None,
        repeat: int | None = None,
        profile_memory: bool = False,
        enable_cuda_sync_events: bool = False,
        enabled: bool = True,
        ranks: Ranks = None,
        compress: bool = True,
        table_rows: int = 30,
    ) -> None:
        schedule = {
            "skip_first": skip_first,
            "wait": wait,
            "warmup": warmup,
            "active": active,
            "repeat": repeat,
        }
        require_count("start_step", start_step)
        require_count("num_steps", num_steps, least=1)
        require_count("table_rows", table_rows, least=1)
        require_path("output_dir", output_dir)
        for option, count in schedule.items():
            require_count(option, count, least=_LEAST.get(option, 0), optional=True)
        for option, flag in (
            ("with_stack", with_stack),
            ("with_flops", with_flops),
            ("record_shapes", record_shapes),
            ("profile_memory", profile_memory),
            ("enable_cuda_sync_events", enable_cuda_sync_events),
            ("enabled", enabled),
            ("compress", compress),
        ):
            require_flag(option, flag)
        require_ranks(ranks)
        given = [option for option, count in schedule.items() if count is not None]
        if given and (start_step, num_steps) != (_START_STEP, _NUM_STEPS):
            raise ConfigError(
                f"ProfilerCallback: {', '.join(given)} make a schedule and start_step={start_step},"
                f" num_steps={num_steps} one window; give one of both"
            )
        self.start_step, self.num_steps = start_step, num_steps
        self.schedule: dict[str, int] | None = None
        """The parts of the schedule; None for one window."""
        if given:
            self.schedule = {
                option: default if schedule[option] is None else int(schedule[option] or 0)
                for option, default in _SCHEDULE.items()
            }
        self.output_dir, self.ranks, self.enabled = output_dir, ranks, enabled
        self.compress, self.table_rows = compress, table_rows
        self.enable_cuda_sync_events = enable_cuda_sync_events
        self._options: dict[str, Any] = {
            "with_stack": with_stack,
            "with_flops": with_flops,
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
        }
        self._parts = self._make_parts(0)
        self._cycles_done = 0
        self._profiler: Any = None
        self._timing = LoopTiming()
        self._opens_at: int | None = None
        """Steps done when the profiler is to be made; None: not, or not any more."""
        self._folder = Path()
        self._rank = self._step = self._first_traced = 0
        self._has_cuda = self._speaks = False
        self._writes_empty = True
        """Whether a trace without a whole step is kept: that of a step that failed is."""

    # State: what is traced is not traced again

    def _forget_run(self) -> None:
        self._cycles_done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"version": 1, "cycles_done": self._cycles_done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._cycles_done = int(state.get("cycles_done") or 0)

    # Events

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, trainer: Any
    ) -> None:
        self._opens_at, self._writes_empty = None, True
        self._timing = trainer.timing
        if not self.enabled:
            return
        chosen = is_chosen(self.ranks, args, trainer.strategy)
        self._rank, self._speaks = args.process_index, state.is_world_process_zero
        self._has_cuda = trainer.strategy.device.type == "cuda"
        self._folder = Path(args.output_dir) / self.output_dir
        self._parts = self._make_parts(state.global_step)
        cycles = self._parts["repeat"]
        if cycles and self._cycles_done >= cycles:
            self._tell(
                "not profiling again: the run has %d of %d traces", self._cycles_done, cycles
            )
            return
        opens_at = self._plan(state)
        if chosen:
            self._opens_at = opens_at

    def _make_parts(self, now: int) -> dict[str, int]:
        """The schedule; one window as a schedule, from when `now` steps are done."""
        if self.schedule is not None:
            return self.schedule
        skip = max(0, self.start_step - now)
        warmup = min(1, skip)
        return {
            "skip_first": skip - warmup,
            "wait": 0,
            "warmup": warmup,
            "active": self.num_steps,
            "repeat": 1,
        }

    def _plan(self, state: TrainerState) -> int | None:
        """How many steps are done when the profiler is made; tells what does not fit."""
        now, parts = state.global_step, self._parts
        if self.schedule is None and now > self.start_step:
            self._tell(
                "start_step=%d is behind step %d, where this run goes on: its first steps are "
                "profiled",
                self.start_step,
                now,
            )
        opens_at = now + parts["skip_first"]
        begins = opens_at + parts["wait"] + parts["warmup"]
        ends = begins + parts["active"]
        if state.max_steps > 0 and begins >= state.max_steps:
            self._warn(
                "nothing will be profiled: steps %d to %d lie past the end of training "
                "(max_steps=%d)",
                begins + 1,
                ends,
                state.max_steps,
            )
            return None
        if state.max_steps > 0 and ends > state.max_steps:
            self._warn(
                "the profile of steps %d to %d will be cut short: training ends at step %d",
                begins + 1,
                ends,
                state.max_steps,
            )
        self._tell("profiling steps %d to %d into %s", begins + 1, ends, self._folder)
        return opens_at

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        if self._opens_at is not None and state.global_step >= self._opens_at:
            self._opens_at = None
            if self._is_taken():
                self._warn(
                    "nothing is profiled from step %d on: another profiler is at work there, and a "
                    "process can have one at a time; give them steps that lie apart (a step of "
                    "warm-up comes before the first)",
                    state.global_step + 1,
                )
                return
            with self._timing.aside():  # the first time, torch looks for the device's tracer
                self._open(state.global_step)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        if self._profiler is None:
            return
        self._step = state.global_step
        with self._timing.aside():  # writing a trace may take longer than many steps
            self._profiler.step()
            cycles = self._parts["repeat"]
            if cycles and self._cycles_done >= cycles:
                self._close()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        waits = self._opens_at is not None or self._profiler is not None
        before, self._writes_empty = self._cycles_done, False
        self._close()
        if waits and before == self._cycles_done == 0:
            logger.warning(
                "nothing was profiled: the run ended at step %d, before the steps to be traced",
                state.global_step,
            )

    def on_close(self) -> None:
        self._close()

    # The profiler

    @property
    def is_tracing(self) -> bool:
        """Whether torch's profiler, of which a process can have one, is on."""
        return self._profiler is not None

    @property
    def is_through(self) -> bool:
        """Whether all that was asked for is traced, or this rank traces nothing."""
        return self._profiler is None and self._opens_at is None

    def _is_taken(self) -> bool:
        """Whether a profiler of somebody else is on: torch crashes where there are two."""
        import torch

        owner = None if _owner is None else _owner()
        return (owner is not None and owner.is_tracing) or torch._C._autograd._profiler_enabled()

    def _open(self, steps_done: int) -> None:
        global _owner
        from torch import profiler

        parts = dict(self._parts)
        parts["skip_first"] = 0  # those steps are over
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a window has no warm-up of its own, as meant
            plan = profiler.schedule(**parts)
        first = steps_done + 1

        def plan_by_step(number: int) -> Any:
            return plan(number - first if number >= first else number)

        activities = [profiler.ProfilerActivity.CPU]
        if self._has_cuda:
            activities.append(profiler.ProfilerActivity.CUDA)
        made = profiler.profile(
            activities=activities,
            schedule=plan_by_step,
            on_trace_ready=self._write,
            experimental_config=self._experimental(),
            **self._options,
        )
        # So that the steps in a trace have the numbers they have in training.
        made.step_num = first
        self._step, self._first_traced = steps_done, first + parts["wait"] + parts["warmup"]
        self._profiler, _owner = made, weakref.ref(self)
        made.start()

    def _experimental(self) -> Any:
        if not self.enable_cuda_sync_events:
            return None
        from torch._C._profiler import _ExperimentalConfig

        return _ExperimentalConfig(enable_cuda_sync_events=True)

    def _write(self, profiler: Any) -> None:
        """A traced stretch is complete, or cut off by the end of the run."""
        first, parts = self._first_traced, self._parts
        if first > self._step and not self._writes_empty:
            return
        self._cycles_done += 1
        self._first_traced = self._step + 1 + parts["wait"] + parts["warmup"]
        path = write_trace(profiler, self._folder, self._rank, self._step, compress=self.compress)
        tables = make_tables(profiler, has_cuda=self._has_cuda, num_rows=self.table_rows)
        name = path.name.partition(".chrome_trace")[0]
        path.with_name(f"{name}.tables.txt").write_text(tables, encoding="utf-8")
        self._tell("profile of steps %d to %d: %s\n%s", first, self._step, path, tables)

    def _close(self) -> None:
        self._opens_at = None
        if self._profiler is None:
            return
        closing, self._profiler = self._profiler, None
        closing.stop()

    # Words, from one rank

    def _tell(self, message: str, *values: Any) -> None:
        if self._speaks:
            logger.info(message, *values)

    def _warn(self, message: str, *values: Any) -> None:
        if self._speaks:
            logger.warning(message, *values)
