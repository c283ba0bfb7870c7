"""Pauses between tries: twice as long after each failure, up to a limit."""

import random
from dataclasses import dataclass

_MOST_DOUBLINGS = 60
"""More would overflow a float long after any limit is reached."""


@dataclass(frozen=True)
class BackOff:
    """The pauses between the tries of one kind of request or process."""

    first_s: float
    longest_s: float
    jitter: bool = False
    """Draw each pause between 0 and its length, so that callers that failed together don't return
    together."""

    def pause_s(self, failures: int) -> float:
        """The pause before the next try, after so many failures in a row (at least 1)."""
        doublings = min(failures - 1, _MOST_DOUBLINGS)
        pause_s = min(self.first_s * 2.0**doublings, self.longest_s)
        return random.uniform(0, pause_s) if self.jitter else pause_s
