"""Progress on the console: a bar in a terminal or notebook, paced lines elsewhere.

Owns: bars, the table of steps, evaluation lines and the summary at the end. Does not own: which
figures there are and how they are written (columns.py), what is stored (the other logs).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from tqdm.auto import tqdm

from headway.callbacks.log.columns import (
    ETA_COLUMN,
    STEP_COLUMN,
    ColumnSpec,
    header_line,
    merge_columns,
    merge_final_metrics,
    row_line,
    summary_lines,
)
from headway.callbacks.log.figures import format_value
from headway.callbacks.log.json_logger import record_type
from headway.callbacks.log.pacing import TextPace
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError, unknown

STREAMS = ("stderr", "stdout")
_STAMP = "%Y-%m-%d %H:%M:%S"
_STAMP_WIDTH = 22
_SPEEDS = ("_runtime", "_per_second", "_tokens")


class ProgressCallback(TrainerCallback):
    """Shows a table of steps, evaluations and a summary, with bars where they can be drawn.

    `use_tqdm=None` draws bars if the stream is a terminal or a notebook and `disable_tqdm` does not
    forbid it; otherwise there is one line per log record, at most 1 KB a minute. `output_stream` is
    `stderr` (the default), `stdout` or an object with `write`. `step_columns` and `final_metrics`
    are merged over the defaults: None removes one, a mapping changes its fields or adds one. The
    header comes every `header_interval` rows and whenever other columns appear. `show_eta=None`
    adds the time left where no bar shows it.
    """

    failure_policy = "disable"

    def __init__(
        self,
        use_tqdm: bool | None = None,
        output_stream: Any = None,
        step_columns: Mapping[str, Any] | None = None,
        final_metrics: Mapping[str, Any] | None = None,
        header_interval: int = 20,
        show_eta: bool | None = None,
    ) -> None:
        _check("use_tqdm", use_tqdm, "true, false or None", use_tqdm in (None, True, False))
        _check("show_eta", show_eta, "true, false or None", show_eta in (None, True, False))
        if isinstance(output_stream, str) and output_stream not in STREAMS:
            raise ConfigError(
                "ProgressCallback: " + unknown("output_stream", output_stream, STREAMS)
            )
        known = output_stream is None or isinstance(output_stream, str)
        writes = known or callable(getattr(output_stream, "write", None))
        _check("output_stream", output_stream, "stderr, stdout or an object with write()", writes)
        whole = isinstance(header_interval, int) and not isinstance(header_interval, bool)
        allowed = "an integer of at least 1"
        _check("header_interval", header_interval, allowed, whole and header_interval >= 1)
        self.use_tqdm = use_tqdm
        self.header_interval = header_interval
        self.show_eta = show_eta
        self.columns = merge_columns(step_columns)
        self.final_metrics = merge_final_metrics(final_metrics)
        self._stream = output_stream
        self._pace = TextPace()
        self._bar: Any = None
        self._eval_bar: Any = None
        self._eval_counts: dict[int, int] = {}
        self._num_rows = 0
        self._shown: tuple[str, ...] = ()
        self._held: list[str] = []
        self._started: tuple[float, int] = (0.0, 0)

    @property
    def stream(self) -> Any:
        """Where output goes; asked for at each use, since streams get redirected."""
        if self._stream is None or isinstance(self._stream, str):
            return getattr(sys, self._stream or "stderr")
        return self._stream

    def _draws(self, args: Any) -> bool:
        """Whether bars are drawn."""
        if self.use_tqdm is not None:
            return self.use_tqdm
        disabled = getattr(args, "disable_tqdm", None)
        if disabled is not None:
            return not disabled
        own = self._stream is None or isinstance(self._stream, str)
        return (own and _in_notebook()) or bool(getattr(self.stream, "isatty", lambda: False)())

    # Training

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._started = (time.monotonic(), state.global_step)
        self._num_rows, self._shown, self._held = 0, (), []
        if state.is_world_process_zero and self._draws(args):
            self._bar = tqdm(
                initial=state.global_step,
                total=state.max_steps or None,
                file=self.stream,
                dynamic_ncols=True,
                smoothing=0.03,
                unit="step",
            )

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any]
    ) -> None:
        if not state.is_world_process_zero:
            return
        kind = record_type(logs)
        if kind == "summary":
            lines = summary_lines(self.final_metrics, logs)
            self._say(*self._held, "Training summary", *lines)
            self._held = []
        elif kind == "train":
            self._show_row(state, logs)

    def _show_row(self, state: TrainerState, logs: dict[str, Any]) -> None:
        columns = [column for column in self.columns.values() if column.key in logs]
        if not any(column.key != "epoch" for column in columns):
            return
        if self._bar is not None and state.max_steps and self._bar.total != state.max_steps:
            self._bar.total = state.max_steps
            self._bar.refresh()
        columns.insert(0, STEP_COLUMN)
        record: dict[str, Any] = {**logs, "step": state.global_step}
        if self._bar is None:  # which has the total
            total = f"/{state.max_steps:,}" if state.max_steps else ""
            record["step"] = f"step {state.global_step:,}{total}"
            columns[0] = ColumnSpec("step", width=max(STEP_COLUMN.width, 4 + 2 * len(total)))
        if self.show_eta if self.show_eta is not None else self._bar is None:
            left_s = self._time_left(state)
            if left_s is not None:
                columns.append(ETA_COLUMN)
                record["eta"] = _clock(left_s)
        keys = tuple(column.key for column in columns)
        lines = [row_line(columns, record)]
        if self._num_rows % self.header_interval == 0 or keys != self._shown:
            lines.insert(0, header_line(columns))
        self._held = lines  # the last row is shown with the summary, if not before
        if self._say(*lines, paced=True):
            # A header that comes out of turn starts the count anew.
            self._num_rows = 1 if len(lines) > 1 else self._num_rows + 1
            self._shown, self._held = keys, []

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._close()

    def on_close(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._close()

    def _time_left(self, state: TrainerState) -> float | None:
        started_s, started_step = self._started
        done = state.global_step - started_step
        if not state.max_steps or done <= 0:
            return None
        return (state.max_steps - state.global_step) * (time.monotonic() - started_s) / done

    # Evaluation

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, eval_dataloader: Any
    ) -> None:
        if self._eval_bar is not None:
            self._eval_bar.update(1)
        elif state.is_world_process_zero and (self._bar is not None or self._draws(args)):
            self._eval_bar = tqdm(
                initial=1,
                total=self._eval_steps(args, eval_dataloader),
                file=self.stream,
                dynamic_ncols=True,
                leave=self._bar is None,
                desc="evaluate",
            )

    def _eval_steps(self, args: Any, loader: Any) -> int | None:
        try:
            total: int | None = len(loader)
        except TypeError:  # it has no length; it may have been read before
            total = self._eval_counts.get(id(loader))
        most = getattr(args, "max_eval_steps", -1)
        if most > 0:
            total = most if total is None else min(total, most)
        return total

    def on_evaluate(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any],
        eval_dataloader: Any,
    ) -> None:
        if self._eval_bar is not None:
            self._eval_counts[id(eval_dataloader)] = self._eval_bar.n
        self._close_eval_bar()
        if not state.is_world_process_zero:
            return
        figures = {key: value for key, value in metrics.items() if not key.endswith(_SPEEDS)}
        if "eval_loss" in figures:
            figures = {"eval_loss": figures["eval_loss"], **figures}
        shown = "  ".join(
            f"{key}: {format_value(value, '.5f' if key == 'eval_loss' else '.5g')}"
            for key, value in figures.items()
        )
        self._say(
            f"step {state.global_step:,}  epoch {state.epoch:.2f}  {shown or metrics}",
            paced=True,
            rare=True,
        )

    # Output

    def _close_eval_bar(self) -> None:
        if self._eval_bar is not None:
            self._eval_bar.close()
            self._eval_bar = None

    def _close(self) -> None:
        self._close_eval_bar()
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _say(self, *lines: str, paced: bool = False, rare: bool = False) -> bool:
        """Write lines, the time before each; False if it is too soon for them."""
        stamp = time.strftime(_STAMP)
        if self._bar is not None:
            for line in lines:
                tqdm.write(f"{stamp:<{_STAMP_WIDTH}}{line}", file=self.stream)
            return True
        text = "".join(f"{stamp} {line}\n" for line in lines)
        stream = self.stream
        on_screen = bool(getattr(stream, "isatty", lambda: False)())
        if paced and not on_screen and not self._pace.allows(len(text.encode()), rare=rare):
            return False
        stream.write(text)
        flush = getattr(stream, "flush", None)
        if callable(flush):
            flush()
        return True


def _check(option: str, given: Any, allowed: str, holds: bool) -> None:
    if not holds:
        raise ConfigError(f"ProgressCallback: {option} must be {allowed}, got {given!r}")


def _in_notebook() -> bool:
    """Whether this is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in getattr(shell, "config", {})


def _clock(seconds: float) -> str:
    minutes, secs = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}"
