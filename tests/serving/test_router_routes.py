"""Routes in force: read when the file changes, kept when it is broken; the circuit breaker."""

from pathlib import Path

import pytest

from qinglan.serving.request_handler import CIRCUIT_FAILURES, CIRCUIT_OPEN_FOR_S, CircuitBreaker
from qinglan.serving.routes import CHECK_EVERY_S, Backend, Routes, RouteTable


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def backend(version: str) -> Backend:
    return Backend(url=f"http://127.0.0.1:{version}/v1", model="m", version=version)


ONE, TWO, THREE = (backend(version) for version in "123")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "routes.json"


def test_a_new_file_counts_once_it_is_looked_for(path, clock):
    table = RouteTable(path, clock)
    assert table.pick("a") is None
    Routes(champion=ONE).write(path)
    clock.now += CHECK_EVERY_S
    assert table.pick("a") == ("champion", ONE)
    Routes(champion=TWO).write(path)
    assert table.pick("a") == ("champion", ONE)
    clock.now += CHECK_EVERY_S
    assert table.pick("a") == ("champion", TWO)
    path.unlink()
    clock.now += CHECK_EVERY_S
    assert table.pick("a") is None


def test_a_broken_file_changes_nothing(path, clock, caplog):
    Routes(champion=ONE).write(path)
    table = RouteTable(path, clock)
    assert table.pick("a") == ("champion", ONE)
    path.write_text('{"champion": 1}')
    for _ in range(2):
        clock.now += CHECK_EVERY_S
        assert table.pick("a") == ("champion", ONE)
    assert "the routes before it stay" in table.problem
    assert len(caplog.records) == 1
    Routes(champion=TWO).write(path)
    clock.now += CHECK_EVERY_S
    assert (table.pick("a"), table.problem) == (("champion", TWO), None)


def test_a_dropped_challenger_stays_out_until_the_file_says_otherwise(path, clock):
    Routes(champion=ONE, challenger=TWO, share=1.0).write(path)
    table = RouteTable(path, clock)
    assert table.pick("a") == ("challenger", TWO)
    table.drop_challenger("it failed")
    assert (table.pick("a"), table.routes.share, table.dropped_reason) == (("champion", ONE), 0.0, "it failed")
    Routes(champion=ONE, challenger=TWO, share=0.5).write(path)
    clock.now += CHECK_EVERY_S
    assert table.pick("a") == ("champion", ONE)
    table.allow_challenger()  # its canary is over
    assert table.routes.challenger == TWO
    table.drop_challenger("it failed again")
    Routes(champion=ONE, challenger=THREE, share=1.0).write(path)
    clock.now += CHECK_EVERY_S
    assert (table.pick("a"), table.dropped_reason) == (("challenger", THREE), None)


def test_the_split_is_sticky_and_as_large_as_asked(path):
    ids = [f"{number:016x}" for number in range(4000)]

    def chosen(challenger: Backend, share: float) -> set[str]:
        Routes(champion=ONE, challenger=challenger, share=share).write(path)
        table = RouteTable(path)
        return {row_id for row_id in ids if table.pick(row_id) == ("challenger", challenger)}

    tenth = chosen(TWO, 0.1)
    assert 330 < len(tenth) < 470
    assert tenth < chosen(TWO, 0.2) and tenth != chosen(THREE, 0.1)
    assert (chosen(TWO, 0.0), chosen(TWO, 1.0)) == (set(), set(ids))


def test_a_circuit_opens_after_failures_in_a_row_and_lets_one_request_through_after_a_pause(clock):
    circuit = CircuitBreaker(clock)

    def admits(has_failed: bool | None) -> bool:
        admitted = circuit.admits()
        if admitted:
            circuit.ended(has_failed)
        return admitted

    assert all(admits(number != 0) for number in range(CIRCUIT_FAILURES)) and not circuit.is_open
    assert admits(True) and not admits(True)
    clock.now += CIRCUIT_OPEN_FOR_S
    assert [circuit.admits(), circuit.admits()] == [True, False]
    circuit.ended(True)
    assert not circuit.admits()
    clock.now += CIRCUIT_OPEN_FOR_S
    assert admits(None), "cancelled, so the next one may try"
    assert admits(False) and not circuit.is_open
