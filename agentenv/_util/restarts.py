"""How often dead workers may be restarted, and after which wait."""

from __future__ import annotations

import time
from collections import deque

MAX_WAIT_S = 30.0
WINDOW_S = 3600.0


class Restarts:
    """A budget of restarts within a window of time, so that a training of weeks survives many of them.

    Args:
        max_restarts: restarts of all workers within the window.
        wait_s: wait before a worker's first restart.
        window_s: how long a restart counts.
    """

    def __init__(self, max_restarts: int, *, wait_s: float = 0.0, window_s: float = WINDOW_S) -> None:
        self.num = 0
        """Restarts so far."""
        self._max = max_restarts
        self._window_s = window_s
        self._wait_s = wait_s
        self._recent: deque[tuple[float, int]] = deque()

    def spend(self, index: int = 0) -> float | None:
        """Return the wait in seconds before worker `index` restarts, None if the budget is spent.

        The wait doubles with each restart of the same worker within the window.
        """
        now = time.monotonic()
        while self._recent and now - self._recent[0][0] > self._window_s:
            self._recent.popleft()
        if len(self._recent) >= self._max:
            return None
        num_own = sum(worker == index for _, worker in self._recent)
        self._recent.append((now, index))
        self.num += 1
        return min(MAX_WAIT_S, self._wait_s * 2.0**num_own)
