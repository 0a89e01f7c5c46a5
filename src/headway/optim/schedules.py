"""Learning-rate schedules by name: pure functions from progress to a factor of the base rate.

Owns which pieces a named schedule has, and what it needs to be drawn. Does not own the pieces
(curves.py), the check of single options (schedule_options.py) nor the optimizer (scheduler.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headway.config.rules_values import REFUSED_SCHEDULES
from headway.errors import ConfigError, unknown
from headway.optim.curves import (
    Curve,
    Segment,
    climb,
    cosine_shape,
    decay_shape,
    fall,
    hold,
    power_shape,
)
from headway.optim.schedule_options import FLOORS, WARMUPS, read_options
from headway.optim.sequence import read_pieces

_ALIASES = {"wsd": "warmup_stable_decay"}
_TIMESCALE_STEPS = 10_000
_ANY_RATE = 1e30
"""A base rate above any level that options give."""


@dataclass(frozen=True)
class ScheduleSpec:
    """A schedule as a run asks for it; `draw` makes the curve of it for a base rate.

    `length` and `warmup` count `unit`, which is steps or tokens; `stride` is what one update adds.
    """

    kind: str
    length: int | None
    warmup: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    unit: str = "steps"
    stride: int = 1

    def draw(self, base_lr: float = 1.0) -> Curve:
        """The curve; rates in the options (`min_lr`) are set against `base_lr`."""
        kind = read_kind(self.kind, "lr_scheduler_type")
        options = read_options(kind, self.options, _KINDS[kind].options, self.unit)
        ask = _Ask(
            kind, 0, self.length, self.warmup, 1.0, None, options, base_lr, self.unit, self.stride
        )
        return Curve(_make_segments(ask))

    def describe(self) -> dict[str, Any]:
        """What it is, in plain values; two schedules of one description have one curve."""
        return {
            "type": read_kind(self.kind, "lr_scheduler_type"),
            "length": self.length if self._goes_by_length() else None,
            "warmup": self.warmup,
            "options": dict(self.options),
        }

    def _goes_by_length(self) -> bool:
        """Whether a training of another length has another curve."""
        try:
            replace(self, length=None).draw(_ANY_RATE)
        except ConfigError:
            return True
        return False


def make_schedule(
    kind: str,
    *,
    total_steps: int | None,
    warmup_steps: int = 0,
    base_lr: float = 1.0,
    **options: Any,
) -> Curve:
    """The schedule of a name in steps. `total_steps` may be None where it is not needed."""
    return ScheduleSpec(kind, total_steps, warmup_steps, options).draw(base_lr)


def read_kind(given: Any, option: str) -> str:
    """A schedule's own name; what is unknown, or no function of progress, is told."""
    name = str(getattr(given, "value", given))
    name = _ALIASES.get(name, name)
    if name in REFUSED_SCHEDULES:
        raise ConfigError(f"{option}={name!r} {REFUSED_SCHEDULES[name]}")
    if name not in _KINDS:
        raise ConfigError(f"{option}: " + unknown("schedule", name, SCHEDULES))
    return name


@dataclass(frozen=True)
class _Ask:
    """What a curve, or one piece of a composed one, is drawn from."""

    kind: str
    start: int
    length: int | None
    warmup: int
    high: float
    before: float | None
    """Where the piece before this one ended; None for the first."""
    options: dict[str, Any]
    base_lr: float
    unit: str
    stride: int

    @property
    def begin(self) -> int:
        """Where the warm-up is over."""
        return self.start + self.warmup

    @property
    def room(self) -> int:
        """What is left after the warm-up."""
        if self.length is None:
            ways = "max_steps (or train_for in steps)"
            if self.unit == "tokens":
                ways = "train_for in tokens (or data whose samples have one length)"
            raise ConfigError(
                f"lr_scheduler_type={self.kind!r} needs to know how many {self.unit} the training "
                f"has: give {ways}, or use 'constant_with_warmup'"
            )
        return self.length - self.warmup

    @property
    def rest(self) -> int:
        """The length of a decay that takes all that is left."""
        return max(1, self.room)

    @property
    def low(self) -> float:
        """The floor as a factor of the base rate."""
        low = self.as_ratio("min_ratio", "min_lr", 0.0)
        if low > self.high:
            raise ConfigError(
                f"lr_scheduler_kwargs: the floor, {low:g} of the learning rate, is above the "
                f"{self.high:g} that {self.kind!r} starts from"
            )
        return low

    def as_ratio(self, ratio: str, rate: str, default: float) -> float:
        """A level given as a factor or as a rate."""
        if rate not in self.options:
            return float(self.options.get(ratio, default))
        level = float(self.options[rate])
        if level > self.base_lr > 0:
            raise ConfigError(
                f"lr_scheduler_kwargs.{rate}={level:g} is above the learning rate "
                f"{self.base_lr:g}, so there is nothing to decay"
            )
        return level / self.base_lr if self.base_lr else 0.0

    def shape(self, option: str, default: str) -> Any:
        """The shape that an option names."""
        kind = self.options.get(option, default)
        if kind == "exponential" and self.low <= 0:
            raise ConfigError(
                f"lr_scheduler_kwargs.{option}='exponential' never reaches 0: give min_ratio or "
                f"min_lr above 0, or another {option}"
            )
        return decay_shape(
            kind,
            power=self.options.get("power", 1.0),
            num_cycles=self.options.get("num_cycles", 0.5),
        )


def _make_segments(ask: _Ask) -> list[Segment]:
    kind = _KINDS[ask.kind]
    if ask.warmup < 0:
        raise ConfigError(f"warmup_{ask.unit} must not be negative, got {ask.warmup}")
    if ask.length is not None and ask.warmup > ask.length:
        raise ConfigError(
            f"warmup_{ask.unit}={ask.warmup} is longer than the training of {ask.length} {ask.unit}"
        )
    main = kind.make(ask)
    if not ask.warmup:
        return main
    return [_warm_up(ask), *main]


def _warm_up(ask: _Ask) -> Segment:
    shape = ask.options.get("warmup_type", "linear")
    if "warmup_lr_rate" in ask.options:
        # Hugging Face's: the first update has exactly this rate.
        first, length = ask.options["warmup_lr_rate"], max(ask.stride, ask.warmup - ask.stride)
        segment = climb(ask.start, length, first, ask.high, shape, lead=0)
        return replace(segment, end=ask.begin)
    low = ask.before
    if low is None:
        low = ask.low if ask.kind == "warmup_stable_decay" else 0.0
    low = ask.options.get("warmup_start", low)
    return climb(ask.start, ask.warmup, low, ask.high, shape, lead=ask.stride)


def _constant(ask: _Ask) -> list[Segment]:
    return [hold("constant", ask.begin, math.inf, ask.high)]


def _decay(ask: _Ask) -> list[Segment]:
    shape = cosine_shape(ask.options.get("num_cycles", 0.5))
    if ask.kind == "linear":
        shape = power_shape(1.0)
    elif ask.kind == "polynomial":
        shape = power_shape(ask.options.get("power", 1.0))
    lead = ask.stride if ask.kind == "cosine_warmup_with_min_lr" else 0
    if "_with_min_lr" in ask.kind and not ask.options.keys() & set(FLOORS):
        raise ConfigError(
            f"lr_scheduler_kwargs: the schedule {ask.kind!r} needs its floor: min_lr (a rate) or "
            f"min_ratio (a part of the learning rate)"
        )
    return [fall("decay", ask.begin, ask.rest, ask.high, ask.low, shape, lead=lead)]


def _restarts(ask: _Ask) -> list[Segment]:
    cycles = ask.options.get("num_cycles", 1)
    if int(cycles) != cycles:
        raise ConfigError(
            f"lr_scheduler_kwargs.num_cycles of {ask.kind!r} must be whole, got {cycles!r}"
        )
    rest, low, count = ask.rest, ask.low, int(cycles)
    ends = [ask.begin + number * rest / count for number in range(count + 1)]
    return [
        fall(f"cycle {number + 1}", ends[number], rest / count, ask.high, low, cosine_shape())
        for number in range(count)
    ]


def _inverse_sqrt(ask: _Ask) -> list[Segment]:
    timescale = ask.options.get("timescale", ask.warmup)
    if not timescale:
        if ask.unit != "steps":
            raise ConfigError(
                f"lr_scheduler_kwargs.timescale: 'inverse_sqrt' in {ask.unit} needs it, or a "
                f"warm-up to take it from"
            )
        timescale = _TIMESCALE_STEPS
    low, high = ask.low, ask.high
    return [
        Segment(
            "decay",
            ask.begin,
            math.inf,
            lambda done: max(low, high / math.sqrt(1 + done / timescale)),
        )
    ]


def _stable_decay(ask: _Ask) -> list[Segment]:
    stable, decay = ask.options.get("stable_steps"), ask.options.get("decay_steps")
    if decay is None and (stable is None or "decay_ratio" in ask.options):
        whole = ask.warmup + ask.room
        decay = round(ask.options.get("decay_ratio", 0.1) * whole)
        if "decay_ratio" not in ask.options:
            decay = min(decay, ask.room)
    if decay is None:
        assert stable is not None
        decay = ask.room - stable
    elif stable is None:
        stable = ask.room - decay
    needed = ask.warmup + max(stable, 0) + max(decay, 0)
    if min(stable, decay) < 0 or (ask.length is not None and needed > ask.length):
        raise ConfigError(
            f"lr_scheduler_kwargs: warm-up {ask.warmup}, stable {max(stable, 0)} and decay "
            f"{max(decay, 0)} are longer than the training of {ask.length} {ask.unit}"
        )
    segments = [hold("stable", ask.begin, ask.begin + stable, ask.high)] if stable else []
    if decay:
        shape = ask.shape("decay_type", "cosine")
        segments.append(fall("decay", ask.begin + stable, decay, ask.high, ask.low, shape))
        if segments[-1].value(decay) > ask.low:  # waves that are not over
            segments.append(hold("floor", segments[-1].end, math.inf, ask.low))
    return segments or [hold("stable", ask.begin, math.inf, ask.high)]


def _infinite(ask: _Ask) -> list[Segment]:
    options, unit = ask.options, ask.unit
    level = ask.as_ratio("constant_ratio", "constant_lr", ask.high)
    cooldown = int(options.get("cooldown_steps", 0))
    if (cooldown > 0) != (level < ask.high):
        raise ConfigError(
            f"lr_scheduler_kwargs: 'infinite' cools down over cooldown_{unit} to constant_ratio "
            f"(or constant_lr), a level below its peak and above 0; give both or neither"
        )
    steady = ask.begin + cooldown
    segments = []
    if cooldown:
        shape = ask.shape("cooldown_type", "cosine")
        segments.append(fall("cool-down", ask.begin, cooldown, ask.high, level, shape))
    start, decay = options.get("decay_start"), options.get("decay_steps")
    if start is None and decay is None:
        return [*segments, hold("constant", steady, math.inf, level)]
    if ask.length is None and (start is None or decay is None):
        raise ConfigError(
            f"lr_scheduler_kwargs: 'infinite' needs decay_start and decay_{unit} to decay in "
            f"a training of unknown length, got only one of them"
        )
    length = ask.length or 0
    start = ask.start + (length - (decay or 0) if start is None else start)
    decay = ask.start + length - start if decay is None else decay
    if start < steady or decay <= 0:
        raise ConfigError(
            f"lr_scheduler_kwargs: 'infinite' decays over {decay} {unit} from {start} on, which "
            f"must lie after its warm-up and cool-down, at {steady}, and before the end"
        )
    if start > steady:
        segments.append(hold("constant", steady, start, level))
    below = replace(ask, high=level)
    shape = below.shape("decay_type", "exponential")
    return [*segments, fall("decay", start, decay, level, below.low, shape)]


def _sequential(ask: _Ask) -> list[Segment]:
    pieces = ask.options.get("schedules")
    if pieces is None:
        raise ConfigError(
            "lr_scheduler_kwargs.schedules: 'sequential' needs a list of {type, length, kwargs}"
        )
    if ask.warmup:
        raise ConfigError(
            f"warmup_{ask.unit}: the pieces of 'sequential' have warm-ups of their own: give "
            f"warmup_{ask.unit} in the first of lr_scheduler_kwargs.schedules"
        )
    segments: list[Segment] = []
    before: float | None = None
    for number, piece in enumerate(read_pieces(pieces, ask.length, ask.unit), 1):
        kind = read_kind(piece.kind, f"{piece.where}.type")
        if kind == "sequential":
            raise ConfigError(f"{piece.where}.type: 'sequential' holds no other 'sequential'")
        start = int(segments[-1].end) if segments else ask.start
        high = 1.0 if before is None or piece.warmup else before
        high = high if piece.peak is None else piece.peak
        if high <= 0:
            raise ConfigError(
                f"{piece.where}: the piece before ends at 0 and this one starts there: give it "
                f"warmup_{ask.unit} or a peak, or the one before a floor"
            )
        try:
            options = read_options(kind, piece.options, _KINDS[kind].options, ask.unit)
            part = _Ask(
                kind, start, piece.length, piece.warmup, high, before, options, ask.base_lr,
                ask.unit, ask.stride,
            )  # fmt: skip
            curve = Curve(_make_segments(part))
        except ConfigError as error:
            raise ConfigError([f"{piece.where}: {text}" for text in error.problems]) from error
        if piece.length is not None:
            curve = _stretch(curve, start + piece.length)
        segments += [replace(s, name=f"{number}. {kind}: {s.name}") for s in curve.segments]
        before = curve(curve.end) if math.isfinite(curve.end) else 0.0
    return segments


def _stretch(curve: Curve, end: int) -> Curve:
    """The curve up to exactly `end`: cut there, or standing still until then."""
    curve = curve.cut(end)
    if curve.end == end:
        return curve
    level = curve(curve.end)
    return Curve([*curve.segments, hold("held", curve.end, end, level)])


@dataclass(frozen=True)
class _Kind:
    make: Callable[[_Ask], list[Segment]]
    options: tuple[str, ...]


_WSD = ("decay_type", "decay_steps", "power")
_KINDS: dict[str, _Kind] = {
    "constant": _Kind(_constant, WARMUPS),
    "constant_with_warmup": _Kind(_constant, WARMUPS),
    "linear": _Kind(_decay, (*FLOORS, *WARMUPS)),
    "cosine": _Kind(_decay, (*FLOORS, *WARMUPS, "num_cycles")),
    "cosine_with_restarts": _Kind(_restarts, (*FLOORS, *WARMUPS, "num_cycles")),
    "cosine_with_min_lr": _Kind(_decay, (*FLOORS, *WARMUPS, "num_cycles")),
    "cosine_warmup_with_min_lr": _Kind(
        _decay, (*FLOORS, *WARMUPS, "num_cycles", "warmup_lr_rate")
    ),
    "polynomial": _Kind(_decay, (*FLOORS, *WARMUPS, "power")),
    "inverse_sqrt": _Kind(_inverse_sqrt, (*FLOORS, *WARMUPS, "timescale")),
    "warmup_stable_decay": _Kind(
        _stable_decay, (*FLOORS, *WARMUPS, *_WSD, "num_cycles", "stable_steps", "decay_ratio")
    ),
    "infinite": _Kind(
        _infinite,
        (*FLOORS, *WARMUPS, *_WSD, "decay_start", "cooldown_steps", "cooldown_type",
         "constant_ratio", "constant_lr"),
    ),
    "sequential": _Kind(_sequential, ("schedules",)),
}  # fmt: skip
SCHEDULES = (*_KINDS, *_ALIASES)
