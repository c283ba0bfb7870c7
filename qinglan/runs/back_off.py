"""How long to wait before another try: twice as long after each failure, up to a limit."""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class BackOff:
    """The pauses between the tries of one kind of request or process."""

    first_s: float
    longest_s: float
    jitter: bool = False
    """Draw each pause between 0 and its length, so that callers that failed together don't return
    together."""

    def pause_s(self, failures: int) -> float:
        """Before the next try, after so many failures in a row (at least 1)."""
        pause_s = min(self.first_s * 2.0 ** min(failures - 1, 60), self.longest_s)
        return random.uniform(0, pause_s) if self.jitter else pause_s
