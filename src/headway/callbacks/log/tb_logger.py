"""The run's figures as TensorBoard curves.

Owns: which figure goes under which tag, and each at most once for a step. Does not own: the
folder and what a resume does to it (summary_writer.py).
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headway.callbacks.log.summary_writer import ResumableSummaryWriter
from headway.callbacks.watch.ranges import require_flag
from headway.config.snapshot import redact
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError, unknown

logger = logging.getLogger(__name__)

Transform = Callable[[Any, Mapping[str, Any]], Any]
_SPEC_KEYS = ("source", "transform")
_COUNTERS = ("epoch", "step", "global_step")


@dataclass(frozen=True)
class TBScalarSpec:
    """One curve: its tag, the key of the record it shows, and what is done to the value."""

    tag: str
    source: str
    transform: Transform | None = None

    @classmethod
    def of(cls, tag: str, given: Any) -> TBScalarSpec:
        """A spec of what the user wrote; the source is the tag with `-` as `_` unless given."""
        if isinstance(given, TBScalarSpec):
            return given
        if not isinstance(given, Mapping):
            raise TypeError(
                f"scalars[{tag!r}] must be a dict with {' and '.join(_SPEC_KEYS)}, or None to "
                f"leave the curve out; got {type(given).__name__} {given!r}"
            )
        for key in given:
            if key not in _SPEC_KEYS:
                raise ConfigError(f"scalars[{tag!r}]: " + unknown("key", key, _SPEC_KEYS))
        source, transform = given.get("source"), given.get("transform")
        if source is not None and not isinstance(source, str):
            raise ConfigError(f"scalars[{tag!r}]: source must be the name of a figure: {source!r}")
        if transform is not None and not callable(transform):
            raise ConfigError(f"scalars[{tag!r}]: transform must be callable: {transform!r}")
        return cls(tag, source or tag.replace("-", "_"), transform)


def _perplexity(value: Any, metrics: Mapping[str, Any]) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def default_tb_scalars() -> dict[str, dict[str, Any]]:
    """The curves that have a tag of their own; every other figure goes under its name."""
    return {
        "train-loss": {"source": "loss"},
        "learning-rate": {},
        "grad-norm": {},
        "max-grad-norm": {},
        "weight-norm": {},
        "tok-per-sec": {},
        "mfu": {},
        "peak-mem": {},
        "eval-loss": {},
        "eval-perplexity": {"source": "eval_loss", "transform": _perplexity},
    }


class TBLogger(TrainerCallback):
    """Writes records, evaluations and, with `step_metrics`, the metrics of every step.

    `summary_writer` is a `ResumableSummaryWriter`, another writer of that kind, or a folder. None
    takes the run's `ResumableSummaryWriter` callback, or makes one for the run's `logging_dir`.
    `scalars` (tag to `source` and `transform`) is laid over `default_tb_scalars()`; None for a tag
    leaves that curve out. `experiment_info` is shown as text.
    """

    failure_policy = "disable"

    def __init__(
        self,
        summary_writer: Any = None,
        scalars: Mapping[str, Any] | None = None,
        experiment_info: Mapping[str, Any] | None = None,
        step_metrics: bool = True,
    ) -> None:
        if isinstance(summary_writer, str | os.PathLike):
            summary_writer = ResumableSummaryWriter(summary_writer)
        if summary_writer is not None and not callable(getattr(summary_writer, "add_scalar", None)):
            raise ConfigError(
                "TBLogger: summary_writer must be a folder or have add_scalar like a "
                f"SummaryWriter; got {summary_writer!r}"
            )
        for option, mapping in (("scalars", scalars), ("experiment_info", experiment_info)):
            if mapping is not None and not isinstance(mapping, Mapping):
                raise ConfigError(
                    f"TBLogger: {option}: {mapping!r} given; allowed: a mapping, or none"
                )
        require_flag("TBLogger: step_metrics", step_metrics)
        self.summary_writer: Any = summary_writer
        self._is_shared = False
        if summary_writer is None:
            self.summary_writer = ResumableSummaryWriter()
        merged = {**default_tb_scalars(), **(scalars or {})}
        self.specs = [
            TBScalarSpec.of(tag, given) for tag, given in merged.items() if given is not None
        ]
        removed = {tag for tag, given in merged.items() if given is None}
        defaults = default_tb_scalars()
        self._named = {spec.source for spec in self.specs}
        self._named |= {TBScalarSpec.of(tag, defaults.get(tag, {})).source for tag in removed}
        # A figure that a curve computes may be in the record as well: it has that curve's tag.
        derived = (spec.tag for spec in self.specs if spec.transform is not None)
        self._named |= {tag.replace("-", "_") for tag in (*derived, *removed)}
        self.experiment_info = experiment_info
        self.step_metrics = step_metrics
        self._finds = summary_writer is None
        self._written: dict[str, int] = {}
        self._told = False
        self._failed: set[str] = set()

    # The run

    def on_load(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        step = state.global_step
        self._written = {tag: at for tag, at in self._written.items() if at <= step}
        if isinstance(self.summary_writer, ResumableSummaryWriter) and not self._is_shared:
            self.summary_writer.rewind(step)

    def on_init_end(
        self, args: Any, state: TrainerState, control: TrainerControl, trainer: Any
    ) -> None:
        self._settle_writer(args, state, trainer)
        if state.global_step == 0:
            self._written, self._told = {}, False

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any
    ) -> None:
        if not state.is_world_process_zero or self._told:
            return
        self._told = True
        step, writer = state.global_step, self.summary_writer
        if self.experiment_info is not None:
            info = redact(dict(self.experiment_info))
            writer.add_text("experiment", self.mapping_as_markdown(info), step)
        facts = _describe_run(args, state, model)
        writer.add_text("training_info", self.mapping_as_markdown(facts), step)

    def on_metrics(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        step: int,
        metrics: dict[str, float],
    ) -> None:
        if self.step_metrics and state.is_world_process_zero:
            self._add(metrics.items(), step)

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any]
    ) -> None:
        if state.is_world_process_zero:
            self._add_record(logs, state.global_step)

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: dict[str, Any]
    ) -> None:
        if state.is_world_process_zero:
            self._add_record(metrics, state.global_step)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        if not state.is_world_process_zero or not state.log_history:
            return
        text = self.mapping_as_markdown({**state.log_history[-1], "outcome": state.outcome})
        self.summary_writer.add_text("train_results", text, state.global_step)
        self.summary_writer.flush()

    def on_close(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        if state.is_world_process_zero and not self._is_shared:
            self.summary_writer.close()

    def state_dict(self) -> dict[str, Any]:
        saved: dict[str, Any] = {"version": 1, "told": self._told, "writer": None}
        if isinstance(self.summary_writer, ResumableSummaryWriter):
            saved["writer"] = self.summary_writer.state_dict()
        elif callable(getattr(self.summary_writer, "flush", None)):
            self.summary_writer.flush()
        return saved

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._told = bool(state.get("told", False))
        writer = state.get("writer")
        if isinstance(self.summary_writer, ResumableSummaryWriter) and isinstance(writer, dict):
            self.summary_writer.load_state_dict(writer)

    def _settle_writer(self, args: Any, state: TrainerState, trainer: Any) -> None:
        """Take the run's writer if there is one, and tell a writer of our own of the run."""
        registered = [
            callback
            for callback in getattr(trainer, "callbacks", {}).values()
            if isinstance(callback, ResumableSummaryWriter)
        ]
        if self._finds and registered:
            self.summary_writer = registered[0]
        self._is_shared = any(callback is self.summary_writer for callback in registered)
        if isinstance(self.summary_writer, ResumableSummaryWriter) and not self._is_shared:
            self.summary_writer.begin(args, state)

    # Scalars

    def _add_record(self, record: Mapping[str, Any], step: int) -> None:
        self._add(self._tagged(record), step)

    def _tagged(self, record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for spec in self.specs:
            value = record.get(spec.source)
            if value is not None:
                yield spec.tag, self._transformed(spec, value, record)
        for name, value in record.items():
            if name not in self._named and name not in _COUNTERS:
                yield name, value

    def _transformed(self, spec: TBScalarSpec, value: Any, record: Mapping[str, Any]) -> Any:
        if spec.transform is None:
            return value
        try:
            return spec.transform(value, record)
        except Exception as error:
            if spec.tag not in self._failed:
                self._failed.add(spec.tag)
                logger.warning("TBLogger: the transform of %r failed: %r", spec.tag, error)
            return None

    def _add(self, tagged: Iterable[tuple[str, Any]], step: int) -> None:
        """Hand all figures of a step over at once: each call costs as much as all of them."""
        figures: dict[str, float] = {}
        for tag, value in tagged:
            for name, number in _numbers(tag, value):
                if self._written.get(name) != step:
                    self._written[name] = step
                    figures[name] = number
        if not figures:
            return
        if isinstance(self.summary_writer, ResumableSummaryWriter):
            self.summary_writer.add_step(step, figures)
        else:
            for name, number in figures.items():
                self.summary_writer.add_scalar(name, number, step)

    @staticmethod
    def mapping_as_markdown(mapping: Mapping[str, Any]) -> str:
        """A mapping as a block that TensorBoard shows as it is."""
        width = max((len(str(key)) for key in mapping), default=0)
        lines = [f"{key!s:<{width}}  {value}" for key, value in mapping.items()]
        return "\n".join(["```", *lines, "```"])


def _numbers(tag: str, value: Any) -> Iterator[tuple[str, float]]:
    """The numbers in a value: itself, or those of a list under numbered tags."""
    if isinstance(value, float):
        yield tag, value
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _numbers(f"{tag}/{index}", item)
    elif value is not None and not isinstance(value, str | Mapping):
        try:
            yield tag, float(value)
        except (TypeError, ValueError):
            return


def _describe_run(args: Any, state: TrainerState, model: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "run_name": getattr(args, "run_name", None),
        "run_id": state.run_id,
        "output_dir": args.output_dir,
        "max_steps": state.max_steps,
        "seed": state.seed,
        "world_size": args.world_size,
    }
    if model is not None:
        facts["model"] = type(model).__name__
        facts["num_parameters"] = sum(p.numel() for p in model.parameters())
    return {**facts, **redact(args.to_dict())}
