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


class TextPace:
    """Lets through at most `most_bytes` in any minute.

    The first lines may come at once; later ones keep a distance, so that they are spread over the
    minute.
    """

    def __init__(
        self, most_bytes: int = MOST_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most_bytes = most_bytes
        self._clock = clock
        self._written: deque[tuple[float, int]] = deque()
        self._sum_bytes = 0
        self._total_bytes = 0

    def allows(self, num_bytes: int, *, rare: bool = False) -> bool:
        """Whether that many bytes may be written now; if so they count as written."""
        now_s = self._clock()
        since_s = now_s - self._written[-1][0] if self._written else WINDOW_S
        while self._written and now_s - self._written[0][0] >= WINDOW_S:
            self._sum_bytes -= self._written.popleft()[1]
        most = self._most_bytes - (0 if rare else _RESERVED_BYTES)
        if self._sum_bytes + num_bytes > most:
            return False
        at_first = self._total_bytes + num_bytes <= most
        if not rare and not at_first and since_s < WINDOW_S * num_bytes / most:
            return False
        self._written.append((now_s, num_bytes))
        self._sum_bytes += num_bytes
        self._total_bytes += num_bytes
        return True
