"""How much text may go to a file in a minute.

Owns: the decision whether a line may be written now. Does not own: the lines.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 60.0
MOST_BYTES = 1024


class TextPace:
    """Lets through at most `most_bytes` in any minute: half at once if need be, then spread."""

    def __init__(
        self, most_bytes: int = MOST_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most_bytes = most_bytes
        self._clock = clock
        self._written: deque[tuple[float, int]] = deque()
        self._sum_bytes = 0

    def allows(self, num_bytes: int) -> bool:
        """Whether that many bytes may be written now; if so they count as written."""
        now_s = self._clock()
        while self._written and now_s - self._written[0][0] >= WINDOW_S:
            self._sum_bytes -= self._written.popleft()[1]
        if self._sum_bytes + num_bytes > self._most_bytes:
            return False
        # Beyond half of it, lines keep a distance at which the other half lasts the minute.
        half = self._most_bytes / 2
        since_s = now_s - self._written[-1][0] if self._written else WINDOW_S
        if self._sum_bytes + num_bytes > half and since_s < WINDOW_S * num_bytes / half:
            return False
        self._written.append((now_s, num_bytes))
        self._sum_bytes += num_bytes
        return True
