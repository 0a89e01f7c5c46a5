"""How long a run took to its first step, and what took that long.

Owns: these seconds. Does not own: who marks them (cli, trainers), who shows them.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

clock = time.monotonic


class StartTimes:
    """Seconds from a beginning to the end of each phase, in order."""

    def __init__(self, began_s: float | None = None) -> None:
        self._began_s = self._last_s = clock() if began_s is None else began_s
        self._compiled_s = _compile_seconds()
        self.phases: dict[str, float] = {}
        """Seconds of each phase so far."""
        self.is_over = False
        """Whether the first step was reached."""

    @classmethod
    def of_process(cls) -> StartTimes:
        """Counts from the start of this process, where the system tells it."""
        return cls(clock() - (_process_age() or 0.0))

    @property
    def total_s(self) -> float:
        return self._last_s - self._began_s

    def reach(self, phase: str) -> None:
        """A phase ends here: what passed since the last one was it."""
        now_s = clock()
        self.phases[phase] = self.phases.get(phase, 0.0) + now_s - self._last_s
        self._last_s = now_s

    def finish(self, phase: str) -> None:
        """The first step was made in this phase; compilation in it is told apart."""
        self.reach(phase)
        compiling_s = min(_compile_seconds() - self._compiled_s, self.phases[phase])
        if compiling_s > 0:
            whole_s = self.phases.pop(phase)
            self.phases.update({"compilation": compiling_s, phase: whole_s - compiling_s})
        self.is_over = True

    def describe(self) -> str:
        parts = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self.phases.items())
        return f"{self.total_s:.1f} s ({parts})"


def _process_age() -> float | None:
    """Seconds since this process was started; None where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # since the machine was
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def _compile_seconds() -> float:
    """What torch.compile took of this process so far, forward and backward."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # not imported: nothing was compiled
    if dynamo is None:
        return 0.0
    seconds: float = dynamo.calculate_time_spent()["total_wall_time"]
    return seconds
