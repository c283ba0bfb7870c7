"""A circuit breaker: a model that fails several times in a row is left alone, then tried with one request at a time."""

import time
from collections.abc import Callable

FAILURES = 5
OPEN_FOR_S = 1.0


class Circuit:
    """Of one backend. Every request that it admits must report its result, if there is one, and that it `ended`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures, self._open_until = 0, 0.0
        self._in_flight = 0

    @property
    def is_open(self) -> bool:
        """Were there too many failures in a row, with no success since?"""
        return self._failures >= FAILURES

    def admits(self) -> bool:
        """May the backend be asked now?"""
        if self.is_open and (self._in_flight or self._clock() < self._open_until):
            return False
        self._in_flight += 1
        return True

    def succeeded(self) -> None:
        """The backend answered, whatever it said."""
        self._failures = 0

    def failed(self) -> None:
        """It did not answer, or with an error of its own."""
        self._failures += 1
        self._open_until = self._clock() + OPEN_FOR_S

    def ended(self) -> None:
        """The request is over, however it went; it may have been cancelled."""
        self._in_flight -= 1
