"""What a proof counted and which trials failed."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_MEMORY = Path("/dev/shm")
_MOST_FAILURES = 50


@dataclass
class Outcome:
    """Counts by name, and a line for every failed trial that says how to repeat it."""

    name: str
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def fail(self, line: str) -> None:
        """Note a failed trial."""
        self.counts["failures"] += 1
        if len(self.failures) < _MOST_FAILURES:
            self.failures.append(line)

    def require_success(self) -> None:
        """Raise with the failed trials, if there are any."""
        if self.failures:
            raise AssertionError(f"{self.name}, seed {self.seed}:\n" + "\n".join(self.failures))


@contextlib.contextmanager
def memory_folder() -> Iterator[Path]:
    """A temporary directory in memory, where the system has such a place."""
    place = str(_MEMORY) if _MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="headway-", dir=place) as folder:
        yield Path(folder)
