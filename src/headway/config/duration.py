"""A length of training in steps, epochs, tokens or wall time, and how it is written.

Owns: `Duration`, its parser, its text and its arithmetic. Does not own: what is done every so often
(engine/triggers).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from functools import total_ordering

from headway.errors import ConfigError, nearest

UNITS = ("steps", "epochs", "tokens", "seconds")

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_COUNT_WORDS = {
    "step": "steps",
    "steps": "steps",
    "epoch": "epochs",
    "epochs": "epochs",
    "token": "tokens",
    "tokens": "tokens",
    "tok": "tokens",
}
_SECONDS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86400),
}
_NUMBER = r"(\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d{1,2})?|\.\d+)"
_COUNT = re.compile(_NUMBER + r"\s*([kmbt]?)\s*(steps?|epochs?|tok(?:ens?)?)", re.IGNORECASE)
_TIME_PART = re.compile(_NUMBER + r"\s*([A-Za-z]+)\s*")
_EXAMPLES = "'500 steps', '1.5 epochs', '2B tokens', '300s', '20min', '1h30m', '2 days'"
TOKENS_PER_PARAMETER = 20


@total_ordering
@dataclass(frozen=True)
class Duration:
    """`value` of `unit` (steps, epochs, tokens or seconds); steps and tokens are whole numbers."""

    value: int | float
    unit: str

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            hint = nearest(str(self.unit), UNITS)
            more = f"; did you mean {hint!r}?" if hint else ""
            raise ConfigError(
                f"unknown unit {self.unit!r} of a duration{more} Allowed: {', '.join(UNITS)}"
            )
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"a duration's value must be a number, got {value!r}")
        if not math.isfinite(value) or value < 0:
            raise ConfigError(f"a duration must be finite and not negative, got {value!r}")
        if float(value).is_integer() or self.unit in ("steps", "tokens"):
            if int(value) != value:
                raise ConfigError(f"a duration in {self.unit} must be whole, got {value!r}")
            object.__setattr__(self, "value", int(value))

    @classmethod
    def steps(cls, value: int) -> Duration:
        """So many optimizer steps."""
        return cls(value, "steps")

    @classmethod
    def epochs(cls, value: int | float) -> Duration:
        """So many passes over the training data."""
        return cls(value, "epochs")

    @classmethod
    def tokens(cls, value: int) -> Duration:
        """So many tokens, counted over all ranks."""
        return cls(value, "tokens")

    @classmethod
    def seconds(cls, value: int | float) -> Duration:
        """So much wall time, by rank 0's clock."""
        return cls(value, "seconds")

    @classmethod
    def chinchilla_tokens(cls, multiple: float, model_params: int) -> Duration:
        """`multiple` times 20 tokens for each non-embedding parameter."""
        for name, value in (("multiple", multiple), ("model_params", model_params)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"chinchilla_tokens: {name} must be above 0, got {value!r}")
        return cls(round(multiple * TOKENS_PER_PARAMETER * model_params), "tokens")

    @classmethod
    def parse(cls, text: str | int | Duration) -> Duration:
        """Read a duration as written in a configuration; a bare whole number counts steps."""
        if isinstance(text, Duration):
            return text
        if isinstance(text, int) and not isinstance(text, bool):
            return cls(text, "steps")
        if not isinstance(text, str):
            raise ConfigError(f"a duration is a whole number or text, got {text!r}")
        stripped = text.strip()
        if re.fullmatch(r"\d[\d_]*", stripped):
            return cls(int(stripped), "steps")
        count = _COUNT.fullmatch(stripped)
        if count:
            scaled = Decimal(count[1].replace("_", "")) * _SUFFIXES[count[2].lower()]
            whole = scaled == scaled.to_integral_value()
            return cls(int(scaled) if whole else float(scaled), _COUNT_WORDS[count[3].lower()])
        return cls(_parse_seconds(text, stripped), "seconds")

    def progress(
        self, *, step: int = 0, tokens: int = 0, epoch: float = 0.0, seconds: float = 0.0
    ) -> float:
        """How far a run is, in this duration's unit; `epoch` counts what is done, from 0."""
        return {"steps": step, "tokens": tokens, "epochs": epoch, "seconds": seconds}[self.unit]

    def due(
        self, *, step: int = 0, tokens: int = 0, epoch: float = 0.0, seconds: float = 0.0
    ) -> bool:
        """Whether a run that is so far has lasted this long."""
        done = self.progress(step=step, tokens=tokens, epoch=epoch, seconds=seconds)
        # The small allowance keeps 0.1 + 0.2 epochs from falling just short of 0.3.
        return done >= self.value - 1e-9

    def _other_value(self, other: Duration, what: str) -> int | float:
        if self.unit != other.unit:
            raise ConfigError(
                f"{self} and {other} cannot be {what}: one is in {self.unit}, one in {other.unit}"
            )
        return other.value

    def __add__(self, other: Duration) -> Duration:
        if not isinstance(other, Duration):
            return NotImplemented
        return Duration(self.value + self._other_value(other, "added"), self.unit)

    def __sub__(self, other: Duration) -> Duration:
        if not isinstance(other, Duration):
            return NotImplemented
        return Duration(self.value - self._other_value(other, "subtracted"), self.unit)

    def __mul__(self, factor: float) -> Duration:
        """Steps and tokens are rounded to whole ones."""
        if isinstance(factor, bool) or not isinstance(factor, int | float):
            return NotImplemented
        value = self.value * factor
        whole = self.unit in ("steps", "tokens") and math.isfinite(value)
        return Duration(round(value) if whole else value, self.unit)

    __rmul__ = __mul__

    def __lt__(self, other: Duration) -> bool:
        if not isinstance(other, Duration):
            return NotImplemented
        return self.value < self._other_value(other, "compared")

    def __str__(self) -> str:
        if self.unit == "seconds":
            return _spell_seconds(self.value)
        if self.unit == "tokens" and isinstance(self.value, int) and self.value:
            for suffix in "TBMK":
                scale = _SUFFIXES[suffix.lower()]
                if self.value % scale == 0:
                    return f"{self.value // scale}{suffix} tokens"
        return f"{self.value} {self.unit}"


def _parse_seconds(text: str, stripped: str) -> int | float:
    total, position = Decimal(0), 0
    while position < len(stripped):
        part = _TIME_PART.match(stripped, position)
        if part is None or part[2].lower() in _COUNT_WORDS:
            raise ConfigError(f"cannot read the duration {text!r}; write for example {_EXAMPLES}")
        word = part[2].lower()
        if word not in _SECONDS or part[2] == "M":
            raise ConfigError(_unit_problem(text, part[2]))
        total += Decimal(part[1].replace("_", "")) * _SECONDS[word]
        position = part.end()
    if position == 0:
        raise ConfigError(f"an empty duration; write for example {_EXAMPLES}")
    return int(total) if total == total.to_integral_value() else float(total)


def _unit_problem(text: str, word: str) -> str:
    if word.lower() in _SUFFIXES:
        return (
            f"the duration {text!r} does not say what it counts; "
            f"write '{text.strip()} tokens' or '{text.strip()} steps'"
        )
    hint = nearest(word, [*_COUNT_WORDS, *(name for name in _SECONDS if len(name) > 2)])
    did_you_mean = f"; did you mean {hint!r}?" if hint else ";"
    return f"unknown unit {word!r} in {text!r}{did_you_mean} write for example {_EXAMPLES}"


def _spell_seconds(value: int | float) -> str:
    if not isinstance(value, int):
        return f"{value!r}s"
    hours, rest = divmod(value, 3600)
    minutes, seconds = divmod(rest, 60)
    parts = ((hours, "h"), (minutes, "min"), (seconds, "s"))
    return "".join(f"{number}{unit}" for number, unit in parts if number) or "0s"
