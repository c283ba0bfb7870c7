"""A ledger whose disk is full: what was asked is still written down, and nothing more is bought."""

import asyncio
from pathlib import Path

import pytest
import sqlalchemy as sa

from qinglan.config import Budget, LedgerStore
from qinglan.errors import LedgerError
from qinglan.ledger import Call, Delivery, Ledger, Order, ledger_url
from qinglan.ledger import queue as ledger_queue
from qinglan.ledger.queue import LedgerQueue
from qinglan.ledger.reserve import RESERVED_BYTES, keep_reserve, release_reserve

FULL = LedgerError("ledger sqlite:///l.db: database or disk is full")


class FullDisk(Ledger):
    """Full once `filled`, for as long as the reserve is there, or for ever."""

    def __init__(self, folder: Path, *, for_ever: bool = False) -> None:
        super().__init__(ledger_url(LedgerStore(), folder))
        self.reserve, self.filled, self._for_ever = folder / "ledger.db.reserve", False, for_ever

    def exchange(self, order: Order) -> Delivery:
        if self.filled and (self._for_ever or self.reserve.exists()):
            raise FULL
        return super().exchange(order)


def call(key: str) -> Call:
    names = {"run_id": "r", "tenant": "t", "role": "teacher", "model": "m", "text": "x", "finish_reason": "stop"}
    return Call(request_hash=key, prompt_tokens=1, completion_tokens=1, cost_usd=1, latency_ms=1, **names)


async def test_answers_under_way_are_kept_and_nothing_more_is_asked(tmp_path: Path):
    ledger = FullDisk(tmp_path)
    queue = LedgerQueue(ledger, "r", Budget())
    assert [await queue.acquire(key) for key in "ab"] == [None, None]
    ledger.filled = True
    await asyncio.gather(*(queue.record(call(key)) for key in "ab"))
    assert not ledger.reserve.exists()
    with pytest.raises(LedgerError, match="disk is full"):
        await queue.acquire("c")
    assert await queue.acquire("a") == call("a")  # what is known costs nothing
    await queue.close()
    again = LedgerQueue(ledger, "r", Budget())  # a later run, with room
    assert ledger.reserve.stat().st_size == RESERVED_BYTES
    ledger.filled = False
    assert await again.acquire("c") is None
    await again.close()
    ledger.close()


async def test_a_disk_without_any_room_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ledger_queue, "_RETRY_FOR_S", 0.1)
    ledger = FullDisk(tmp_path, for_ever=True)
    queue = LedgerQueue(ledger, "r", Budget())
    ledger.filled = True
    with pytest.raises(LedgerError, match="disk is full"):
        await queue.record(call("a"))
    ledger.filled = False
    await queue.close()  # what was paid for is tried once more
    assert ledger.get("a") == call("a")
    ledger.close()


def test_the_reserve_is_made_once_and_only_beside_a_file(tmp_path: Path):
    url = sa.make_url(f"sqlite:///{tmp_path / 'l.db'}")
    keep_reserve(url)
    keep_reserve(url)
    assert (tmp_path / "l.db.reserve").stat().st_size == RESERVED_BYTES
    release_reserve(url)
    release_reserve(url)
    keep_reserve(sa.make_url(f"sqlite:///{tmp_path / 'missing' / 'l.db'}"))
    for elsewhere in ("sqlite://", "postgresql://u@h/d"):
        keep_reserve(sa.make_url(elsewhere))
        release_reserve(sa.make_url(elsewhere))
    assert not list(tmp_path.iterdir())
