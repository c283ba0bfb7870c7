"""A teacher that counts its answers, which are what has to be paid."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from fake_service import completion


class CountingTeacher:
    """Answers after a moment, unless it fails, as one in so many calls does.

    `then` is called within each answer, with how many there are by now.
    """

    def __init__(
        self, then: Callable[[int], object] = lambda _: None, failing_share: float = 0.0
    ) -> None:
        self.answered: Counter[str] = Counter()
        self.then = then
        self._failing_share = failing_share
        self._lock = threading.Lock()
        self._random = random.Random(5)

    def __call__(self, body: dict[str, Any]) -> Any:
        if "messages" not in body:
            return 404, {}
        with self._lock:
            wait_s = self._random.uniform(0.01, 0.05)
            fails = self._random.random() < self._failing_share
        time.sleep(wait_s)
        if fails:
            return 500, {}
        with self._lock:
            self.answered[body["messages"][-1]["content"]] += 1
            self.then(self.answered.total())
        return 200, completion(f"护眼叶黄素 用法 {len(self.answered)}")
