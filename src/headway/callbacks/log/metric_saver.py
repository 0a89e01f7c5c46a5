"""The newest value of each metric, in JSON files."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.callbacks.log.json_lines import JsonLogWriter, log_folder
from headway.callbacks.log.json_values import plain_value
from headway.callbacks.log.name_patterns import NamePatterns
from headway.config.snapshot import write_json
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError

logger = logging.getLogger(__name__)


class MetricSaverCallback(TrainerCallback):
    """Writes the newest value of each metric to files in `output_dir`, each file whole or not.

    `step_metrics_fname` is written every `save_interval` steps and at `fixed_steps`;
    `final_metrics_fname` when the run ends, however it ends. `metrics_to_capture` are patterns of
    names (None: all). Next to the values, `_steps` tells the step of each and `_step` the last.
    `history_fname` is a file with one line for each step, that is cut where a resumed run begins.
    """

    failure_policy = "disable"

    def __init__(
        self,
        step_metrics_fname: str = "metrics_step{step}.json",
        final_metrics_fname: str = "metrics.json",
        metrics_to_capture: Sequence[str] | None = None,
        save_interval: int | None = None,
        fixed_steps: Sequence[int] | None = None,
        enabled: bool = True,
        history_fname: str | None = None,
    ) -> None:
        if not isinstance(enabled, bool):
            raise ConfigError(
                f"MetricSaverCallback: enabled must be true or false, got {enabled!r}"
            )
        _check_name("step_metrics_fname", step_metrics_fname)
        _check_name("final_metrics_fname", final_metrics_fname)
        if save_interval is not None and not _is_step(save_interval):
            raise ConfigError(
                f"MetricSaverCallback: save_interval must be an integer of at least 1 or None, "
                f"got {save_interval!r}"
            )
        if fixed_steps is not None and not (
            isinstance(fixed_steps, list | tuple | set) and all(map(_is_step, fixed_steps))
        ):
            raise ConfigError(
                f"MetricSaverCallback: fixed_steps must be a list of integers of at least 1 or "
                f"None, got {fixed_steps!r}"
            )
        several = save_interval is not None or len(set(fixed_steps or ())) > 1
        if several and "{step}" not in step_metrics_fname:
            raise ConfigError(
                f"MetricSaverCallback: step_metrics_fname must hold {{step}}, or each file takes "
                f"the place of the one before; got {step_metrics_fname!r}"
            )
        patterns = ["*"] if metrics_to_capture is None else metrics_to_capture
        self._patterns = NamePatterns("MetricSaverCallback: metrics_to_capture", patterns)
        self.step_metrics_fname = step_metrics_fname
        self.final_metrics_fname = final_metrics_fname
        self.save_interval = save_interval
        self.fixed_steps = frozenset(fixed_steps or ())
        self.enabled = enabled
        self._history = None
        if history_fname is not None:
            self._history = JsonLogWriter(
                history_fname, option="MetricSaverCallback: history_fname"
            )
        self._metrics: dict[str, Any] = {}
        self._steps: dict[str, int] = {}
        self._metrics_step = 0
        self._epochs: dict[int, float] = {}
        self._start_step = 0
        self._began = False

    @property
    def metrics(self) -> dict[str, Any]:
        """The newest value of each metric."""
        return dict(self._metrics)

    def _forget_run(self) -> None:
        self._metrics, self._steps, self._metrics_step = {}, {}, 0

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._began = self.enabled and state.is_world_process_zero
        self._start_step = state.global_step
        self._epochs.clear()

    def on_load(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        late = [name for name, step in self._steps.items() if step > state.global_step]
        for name in late:  # what came after that step did not happen
            del self._metrics[name], self._steps[name]
        self._metrics_step = min(self._metrics_step, state.global_step)
        if self._history is not None:
            self._history.rewind(state.global_step)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        if self._began:
            self._epochs[state.global_step] = state.epoch

    def on_metrics(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        step: int,
        metrics: Mapping[str, Any],
    ) -> None:
        if not self._began:
            return
        captured = self._capture(step, metrics)
        epoch = self._epochs.pop(step, state.epoch)
        if self._history is not None and captured:
            if not self._history.is_open:
                self._history.open(log_folder(args), self._start_step)
            self._history.write_record(step, epoch, captured, type="metrics")
        periodic = self.save_interval is not None and step % self.save_interval == 0
        if step > 0 and (periodic or step in self.fixed_steps):
            path = Path(args.output_dir) / self.step_metrics_fname.replace("{step}", str(step))
            if step < self._metrics_step:
                _add_late(path, step, captured)
            else:
                self._write(path)

    def on_evaluate(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any],
    ) -> None:
        if self._began:
            self._capture(state.global_step, metrics)

    def on_close(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        if self._began and self._metrics:
            self._write(Path(args.output_dir) / self.final_metrics_fname)
        self._began = False
        if self._history is not None:
            self._history.close()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "version": 1,
            "metrics": plain_value(self._metrics),
            "steps": dict(self._steps),
            "metrics_step": self._metrics_step,
        }
        if self._history is not None:
            state["history"] = self._history.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._metrics = dict(state.get("metrics", {}))
        self._steps = {name: state.get("steps", {}).get(name, 0) for name in self._metrics}
        self._metrics_step = state.get("metrics_step", 0)
        if self._history is not None and "history" in state:
            self._history.load_state_dict(state["history"])

    def _capture(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        captured = {name: metrics[name] for name in metrics if self._patterns.match(name)}
        newest = {n: v for n, v in captured.items() if step >= self._steps.get(n, step)}
        self._metrics.update(newest)
        self._steps.update(dict.fromkeys(newest, step))
        self._metrics_step = max(self._metrics_step, step)
        return captured

    def _write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        figures = {**self._metrics, "_step": self._metrics_step, "_steps": self._steps}
        write_json(path, plain_value(figures))


def _add_late(path: Path, step: int, captured: Mapping[str, Any]) -> None:
    """Add metrics of a step that come when later steps are known, and change nothing else."""
    try:
        figures = json.loads(path.read_text())
    except FileNotFoundError:
        figures = {"_step": step, "_steps": {}}
    figures |= plain_value(captured)
    figures["_steps"] |= dict.fromkeys(captured, step)
    write_json(path, figures)


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_name(option: str, name: Any) -> None:
    if not isinstance(name, str) or not name or Path(name).name != name:
        raise ConfigError(
            f"MetricSaverCallback: {option} must be the name of a file without a folder, "
            f"got {name!r}"
        )
