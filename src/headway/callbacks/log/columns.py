"""What the console shows of a record: which figures, under which labels, how written.

Owns: the specifications of columns and final rows, their defaults, overrides and checks, and the
text of headers, rows and summaries. Does not own: where and when they are printed (progress.py).
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from headway.callbacks.log.figures import (
    Format,
    Reduce,
    check_format,
    check_reduce,
    format_value,
    reduce_value,
)
from headway.errors import ConfigError, nearest, unknown

_LABEL_WIDTH = 28
# Names this close are taken for a slip; `loss_a` and `loss` are further apart.
_SLIP = 0.85
# Further keys that records of the loop may have, so that asking for them is no slip.
_RECORD_KEYS = (
    "max_grad_norm",
    "peak_mem_allocated",
    "skipped_steps",
    "total_flos",
    "weight_norm",
)


class SpecKindError(ConfigError, TypeError):
    """A specification that is neither a mapping nor a spec object."""


@dataclass(frozen=True)
class ColumnSpec:
    """One column of the table of steps."""

    key: str
    """The figure's name in the log record."""
    label: str = ""
    """Heading; empty: the key."""
    width: int = 10
    fmt: Format = field(default="")
    """`si`, `gib`, a Python format specification, a function, or empty for one that fits."""
    reduce: Reduce = None
    """What becomes of a list: `max` (also None), `min`, `mean`, `sum`, `all` or a function."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label or self.key)
        where = f"step_columns: {self.key}"
        if isinstance(self.width, bool) or not isinstance(self.width, int) or self.width < 1:
            raise ConfigError(f"{where}: width must be an integer of at least 1: {self.width!r}")
        check_format(where, self.fmt)
        check_reduce(where, self.reduce)

    def show(self, value: Any) -> str:
        """The cell for a value of a record."""
        return format_value(reduce_value(value, self.reduce, self.fmt), self.fmt)


@dataclass(frozen=True)
class FinalMetricSpec:
    """One row of the summary."""

    key: str
    label: str = ""
    fmt: Format = field(default="")
    suffix: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label or self.key)
        check_format(f"final_metrics: {self.key}", self.fmt)


STEP_COLUMN = ColumnSpec("step", "step", 10, ",d")
ETA_COLUMN = ColumnSpec("eta", "ETA", 9)


def default_step_columns() -> dict[str, dict[str, Any]]:
    """The columns that are shown unless overridden, in order."""
    return {
        "epoch": {"label": "epoch", "width": 10, "fmt": ".4g"},
        "loss": {"label": "loss", "width": 8, "fmt": ".5f"},
        "grad_norm": {"label": "grad", "width": 8, "fmt": ".4f"},
        "learning_rate": {"label": "lr", "width": 10, "fmt": ".2e"},
        "tokens": {"label": "tokens", "width": 10, "fmt": ",d"},
        "total_tokens": {"label": "total_tok", "width": 10, "fmt": "si"},
        "tok_per_sec": {"label": "tok/s", "width": 10, "fmt": ",d"},
        "mfu": {"label": "mfu", "width": 6, "fmt": ".1%"},
        "peak_mem": {"label": "peak_mem", "width": 11, "fmt": "gib", "reduce": "max"},
    }


def default_final_metrics() -> dict[str, dict[str, Any]]:
    """The rows of the summary unless overridden, in order."""
    return {
        "train_runtime": {"label": "Runtime", "fmt": ".2f", "suffix": " s"},
        "step": {"label": "Total steps", "fmt": ",d"},
        "train_samples": {"label": "Samples", "fmt": ",d"},
        "effective_batch_size": {"label": "Effective batch size", "fmt": ",d"},
        "train_samples_per_second": {"label": "Samples/sec", "fmt": ".3f"},
        "train_steps_per_second": {"label": "Steps/sec", "fmt": ".3f"},
        "epoch": {"label": "Epoch", "fmt": ".6g"},
        "total_tokens": {"label": "Total tokens", "fmt": ",d"},
        "tokens_per_second": {"label": "Tokens/sec", "fmt": ",.0f"},
        "total_flops": {"label": "Total FLOPs", "fmt": ".3e"},
        "flops_per_second": {"label": "FLOPs/sec", "fmt": ".3e"},
        "train_loss": {"label": "Mean loss"},
    }


# Merging


Spec = TypeVar("Spec", ColumnSpec, FinalMetricSpec)


def merge_columns(overrides: Mapping[str, Any] | None) -> dict[str, ColumnSpec]:
    """The default columns with overrides: None removes, a mapping changes fields or appends."""
    return _merge("step_columns", ColumnSpec, default_step_columns(), overrides)


def merge_final_metrics(overrides: Mapping[str, Any] | None) -> dict[str, FinalMetricSpec]:
    """The default rows of the summary with overrides, by the same rule."""
    return _merge("final_metrics", FinalMetricSpec, default_final_metrics(), overrides)


def _merge(
    option: str, kind: type[Spec], defaults: dict[str, Any], overrides: Mapping[str, Any] | None
) -> dict[str, Spec]:
    if overrides is not None and not isinstance(overrides, Mapping):
        raise SpecKindError(f"{option} must be a mapping, got {type(overrides).__name__}")
    merged: dict[str, Any] = dict(defaults)
    for name, given in (overrides or {}).items():
        if name not in defaults:
            _refuse_slip(option, name, given, defaults)
        if given is None:
            merged.pop(name, None)
        elif isinstance(given, Mapping):
            _check_fields(option, name, kind, given)
            before = merged.get(name)
            merged[name] = {**before, **given} if isinstance(before, Mapping) else dict(given)
        elif isinstance(given, kind):
            merged[name] = given
        else:
            raise SpecKindError(
                f"{option}: {name} must be a mapping, a {kind.__name__} or None, "
                f"got {type(given).__name__}"
            )
    return {
        name: spec if isinstance(spec, kind) else kind(**{"key": name, **spec})
        for name, spec in merged.items()
    }


def _refuse_slip(option: str, name: str, given: Any, defaults: Mapping[str, Any]) -> None:
    """A name that is none of the defaults: fine for a new figure, not for a misspelt one."""
    if given is None:
        raise ConfigError(f"{option}: nothing to remove; " + unknown("name", name, defaults))
    if name in _RECORD_KEYS or not isinstance(given, Mapping) or "key" in given:
        return
    close = nearest(str(name), defaults)
    if close and difflib.SequenceMatcher(None, str(name).lower(), close).ratio() >= _SLIP:
        raise ConfigError(
            f"{option}: unknown name {name!r}; did you mean {close!r}? A figure that really has "
            f"this name is asked for with 'key: {name}' among its fields"
        )


def _check_fields(option: str, name: str, kind: type[Any], given: Mapping[str, Any]) -> None:
    allowed = [entry.name for entry in dataclasses.fields(kind)]
    for given_name in given:
        if given_name not in allowed:
            raise ConfigError(f"{option}: {name}: " + unknown("field", given_name, allowed))


# Lines


def header_line(columns: Sequence[ColumnSpec]) -> str:
    """The headings, each above its column."""
    return " ".join(_fit(column.label, column.width, cut=True) for column in columns)


def row_line(columns: Sequence[ColumnSpec], record: Mapping[str, Any]) -> str:
    """The cells of a record, under their headings."""
    cells = []
    for column in columns:
        value = record.get(column.key)
        cells.append(_fit(column.show(value), column.width, cut=isinstance(value, str)))
    return " ".join(cells)


def _fit(text: str, width: int, *, cut: bool) -> str:
    """Text may be cut to the width; a number that is wider moves the rest of its row instead."""
    text = " ".join(text.split())
    if cut and len(text) > width:
        text = text[: width - 1] + "…"
    return text.rjust(width)


def summary_lines(rows: Mapping[str, FinalMetricSpec], record: Mapping[str, Any]) -> list[str]:
    """The figures of the end, those without a row of their own last."""
    known = {*default_final_metrics(), *(spec.key for spec in rows.values())}
    shown = [spec for spec in rows.values() if spec.key in record]
    shown += [FinalMetricSpec(key) for key in record if key not in known]
    return [
        f"{spec.label:<{_LABEL_WIDTH}}{format_value(record[spec.key], spec.fmt)}{spec.suffix}"
        for spec in shown
    ]
