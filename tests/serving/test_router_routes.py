"""Routes in force: read when the file changes, kept when it is broken; the circuit breaker."""

from pathlib import Path

import pytest

from qinglan.serving.request_handler import CIRCUIT_FAILURES, CIRCUIT_OPEN_FOR_S, CircuitBreaker
from qinglan.serving.routes import CHECK_EVERY_S, Backend, Routes, RouteTable, in_canary


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


def test_no_file_means_no_model(path):
    assert RouteTable(path).pick("0" * 16) is None


def test_a_new_file_counts_once_it_is_looked_for(path, clock):
    Routes(champion=ONE).write(path)
    table = RouteTable(path, clock)
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
    Routes(champion=ONE, challenger=THREE, share=1.0).write(path)
    clock.now += CHECK_EVERY_S
    assert (table.pick("a"), table.dropped_reason) == (("challenger", THREE), None)


def test_a_dropped_challenger_comes_back_only_when_its_canary_is_over(path, clock):
    table = RouteTable(path, clock)
    both = Routes(champion=ONE, challenger=TWO, share=1.0)
    both.write(path)
    table.drop_challenger("a try")
    for routes in (Routes(), both.model_copy(update={"challenger": TWO.model_copy(update={"url": "http://other/v1"})})):
        routes.write(path)
        clock.now += CHECK_EVERY_S
        assert table.routes.challenger is None
    table.allow_challenger()
    assert table.pick("a")[0] == "challenger"


def test_the_split_is_sticky_and_as_large_as_asked():
    ids = [f"{number:016x}" for number in range(4000)]
    chosen = {row_id for row_id in ids if in_canary(row_id, "8", 0.1)}
    assert 330 < len(chosen) < 470
    assert chosen < {row_id for row_id in ids if in_canary(row_id, "8", 0.2)}
    assert chosen != {row_id for row_id in ids if in_canary(row_id, "9", 0.1)}
    assert [sum(in_canary(row_id, "8", share) for row_id in ids) for share in (0.0, 1.0)] == [0, len(ids)]


def fail(circuit: CircuitBreaker, times: int) -> None:
    for _ in range(times):
        assert circuit.admits()
        circuit.failed()
        circuit.ended()


def test_a_circuit_opens_after_failures_in_a_row(clock):
    circuit = CircuitBreaker(clock)
    fail(circuit, CIRCUIT_FAILURES - 1)
    assert circuit.admits()
    circuit.succeeded()
    circuit.ended()
    fail(circuit, CIRCUIT_FAILURES)
    assert circuit.is_open
    assert not circuit.admits()


def test_an_open_circuit_lets_one_request_through_after_a_pause(clock):
    circuit = CircuitBreaker(clock)
    fail(circuit, CIRCUIT_FAILURES)
    clock.now += CIRCUIT_OPEN_FOR_S
    assert [circuit.admits(), circuit.admits()] == [True, False]
    circuit.failed()
    circuit.ended()
    assert not circuit.admits()
    clock.now += CIRCUIT_OPEN_FOR_S
    assert circuit.admits()
    circuit.ended()  # it was cancelled
    assert circuit.admits()
    circuit.succeeded()
    assert not circuit.is_open
