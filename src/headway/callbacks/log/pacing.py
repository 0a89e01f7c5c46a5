"""How much text may go to a file in a minute.

Owns: the decision whether a line may be written now. Does not own: the lines.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 60.0
MOST_BYTES = 1024
# Left to what is rare, such as evaluations.
_RESERVED_BYTES = 128
# What may come at once, after a time of silence; the rest of a minute's share is spread over it.
_BURST = 1 / 2


class TextPace:
    """Lets through at most `most_bytes` in any minute, and something in every part of it.

    Half of that may come at once; beyond it lines come as fast as the share grows again.
    """

    def __init__(
        self, most_bytes: int = MOST_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most_bytes = most_bytes
        self._clock = clock
        self._written: deque[tuple[float, int]] = deque()
        self._sum_bytes = 0
        usual_bytes = most_bytes - min(_RESERVED_BYTES, most_bytes // 2)
        self._burst_bytes = self._left_bytes = usual_bytes * _BURST
        self._bytes_per_s = (usual_bytes - self._burst_bytes) / WINDOW_S
        self._counted_s: float | None = None

    def allows(self, num_bytes: int, *, rare: bool = False) -> bool:
        """Whether that many bytes may be written now; if so they count as written."""
        now_s = self._clock()
        while self._written and now_s - self._written[0][0] >= WINDOW_S:
            self._sum_bytes -= self._written.popleft()[1]
        if self._counted_s is not None:
            grown_bytes = (now_s - self._counted_s) * self._bytes_per_s
            self._left_bytes = min(self._burst_bytes, self._left_bytes + grown_bytes)
        self._counted_s = now_s
        if self._sum_bytes + num_bytes > self._most_bytes:
            return False
        if not rare:
            # A line longer than all that may come at once comes when that is whole again.
            if self._left_bytes < min(num_bytes, self._burst_bytes):
                return False
            self._left_bytes -= num_bytes
        self._written.append((now_s, num_bytes))
        self._sum_bytes += num_bytes
        return True
