"""Progress on the console: a bar in a terminal, a line per log record elsewhere."""

from __future__ import annotations

import math
import sys
import time
from typing import Any, TextIO

from tqdm.auto import tqdm

from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState


class ProgressCallback(TrainerCallback):
    """Shows step, loss, learning rate, tokens per second and the time left, on stderr.

    `use_tqdm=None` draws a bar when stderr is a terminal and `disable_tqdm` does not forbid it;
    otherwise each log record is one plain line.
    """

    def __init__(self, use_tqdm: bool | None = None, output_stream: TextIO | None = None) -> None:
        self.use_tqdm = use_tqdm
        self._stream = output_stream
        self._bar: Any = None
        self._eval_bar: Any = None
        self._started: tuple[float, int] = (0.0, 0)

    @property
    def stream(self) -> TextIO:
        return self._stream if self._stream is not None else sys.stderr

    def _draws(self, args: Any) -> bool:
        if self.use_tqdm is not None:
            return self.use_tqdm
        if args.disable_tqdm is not None:
            return not args.disable_tqdm
        return bool(getattr(self.stream, "isatty", lambda: False)())

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._started = (time.monotonic(), state.global_step)
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
        if "train_runtime" in logs:
            self._say(
                f"done: {state.global_step:,} steps, {logs['total_tokens']:,} tokens in "
                f"{_clock(logs['train_runtime'])}, {logs['tokens_per_second']:,.0f} tokens/s"
            )
        elif "loss" in logs:
            if self._bar is not None:
                self._bar.set_postfix_str(_figures(logs))
            else:
                of = f"/{state.max_steps:,}" if state.max_steps else ""
                eta = self._time_left(state)
                left = f"  ETA {_clock(eta)}" if eta is not None else ""
                step = f"step {state.global_step:,}{of}  epoch {state.epoch:.2f}"
                self._say(f"{step}  {_figures(logs)}{left}")

    def on_prediction_step(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: Any,
    ) -> None:
        if self._bar is None:
            return
        if self._eval_bar is None:
            try:
                total = len(eval_dataloader)
            except TypeError:
                total = None
            if args.max_eval_steps > 0:
                total = min(total or args.max_eval_steps, args.max_eval_steps)
            self._eval_bar = tqdm(
                total=total, file=self.stream, dynamic_ncols=True, leave=False, desc="evaluate"
            )
        self._eval_bar.update(1)

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: dict[str, float]
    ) -> None:
        self._close_eval_bar()
        if state.is_world_process_zero:
            shown = {k: v for k, v in metrics.items() if not k.endswith(("_second", "_runtime"))}
            figures = "  ".join(f"{key} {value:.4f}" for key, value in shown.items())
            self._say(f"step {state.global_step:,}  {figures}")

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._close()

    def on_close(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._close()

    def _close_eval_bar(self) -> None:
        if self._eval_bar is not None:
            self._eval_bar.close()
            self._eval_bar = None

    def _close(self) -> None:
        self._close_eval_bar()
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _time_left(self, state: TrainerState) -> float | None:
        started_s, started_step = self._started
        done = state.global_step - started_step
        if not state.max_steps or done <= 0:
            return None
        return (state.max_steps - state.global_step) * (time.monotonic() - started_s) / done

    def _say(self, line: str) -> None:
        if self._bar is not None:
            tqdm.write(line, file=self.stream)
        else:
            print(line, file=self.stream, flush=True)


def _figures(logs: dict[str, Any]) -> str:
    parts = [f"loss {_number(logs['loss'])}"]
    if "grad_norm" in logs:
        parts.append(f"grad {_number(logs['grad_norm'])}")
    if "learning_rate" in logs:
        parts.append(f"lr {logs['learning_rate']:.2e}")
    if "tok_per_sec" in logs:
        parts.append(f"{logs['tok_per_sec']:,} tok/s")
    if "mfu" in logs:
        parts.append(f"mfu {logs['mfu']:.1%}")
    return "  ".join(parts)


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) and math.isfinite(value) else str(value)


def _clock(seconds: float) -> str:
    minutes, secs = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}"
