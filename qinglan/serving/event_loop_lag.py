"""How far the event loop is behind: for so long may a request have waited before this process saw it.

Without that, a process that gets too little of the CPU would give every request its whole deadline anew, and fall
further behind; with it, requests that have waited long get the question itself, which costs half as much.
"""

import asyncio
import time
from collections.abc import Callable

BEAT_S = 0.02


class EventLoopLag:
    """Beats in the event loop; what is overdue is the lag."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._due = clock, float("inf")

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            self.beat()
            await asyncio.sleep(BEAT_S)

    def beat(self) -> None:
        """The loop came round."""
        self._due = self._clock() + BEAT_S

    def lag_s(self) -> float:
        """What a request that is seen now may have waited, at most."""
        return max(0.0, self._clock() - self._due)
