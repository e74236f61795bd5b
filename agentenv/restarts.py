"""How often what died may be started again, and after which wait."""

from __future__ import annotations

import time
from collections import deque

MAX_WAIT_S = 30.0
WINDOW_S = 3600.0


class Restarts:
    """A budget of restarts within a window of time; a training of weeks outlives many, what is broken few.

    Args:
        max_restarts: within the window, of all together.
        wait_s: before the first of each.
        window_s: how long a restart counts.
    """

    def __init__(self, max_restarts: int, *, wait_s: float = 0.0, window_s: float = WINDOW_S) -> None:
        self.num = 0
        """All so far."""
        self._max, self._window_s, self._wait_s = max_restarts, window_s, wait_s
        self._recent: deque[tuple[float, int]] = deque()

    def spend(self, index: int = 0) -> float | None:
        """Seconds to wait before that one starts again, doubled for each such time in the window; None: spent."""
        now = time.monotonic()
        while self._recent and now - self._recent[0][0] > self._window_s:
            self._recent.popleft()
        if len(self._recent) >= self._max:
            return None
        num_own = sum(of == index for _, of in self._recent)
        self._recent.append((now, index))
        self.num += 1
        return min(MAX_WAIT_S, self._wait_s * 2.0**num_own)
