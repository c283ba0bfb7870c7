"""Samples drawn by a hash: the same items give the same sample, in any order."""

import heapq
from itertools import count
from typing import Generic, TypeVar

from qinglan.rows import hash_fraction

Item = TypeVar("Item")


class BottomK(Generic[Item]):
    """Keeps the `size` items whose keys have the lowest hashes: a uniform sample of a stream."""

    def __init__(self, size: int, seed: str = "") -> None:
        self._size, self._seed = size, seed
        self._heap: list[tuple[float, int, Item]] = []
        self._number = count()  # keeps items from being compared

    def wants(self, key: str) -> bool:
        """Would an item of this key be kept? Saves making those that would not."""
        return self._size > 0 and (len(self._heap) < self._size or self._priority(key) > self._heap[0][0])

    def add(self, key: str, item: Item) -> None:
        if not self.wants(key):
            return
        heapq.heappush(self._heap, (self._priority(key), next(self._number), item))
        if len(self._heap) > self._size:
            heapq.heappop(self._heap)

    def items(self) -> list[Item]:
        """Those kept, the lowest hash first."""
        return [item for _, _, item in sorted(self._heap, key=lambda entry: -entry[0])]

    def _priority(self, key: str) -> float:
        return -hash_fraction(f"{self._seed}:{key}")
