"""What tests share: profiles and services."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_ray import FakeRay
from fake_service import PRICE, FakeService, Script

from qinglan.clients import rag as retrieval
from qinglan.config import Profile
from qinglan.runs.back_off import BackOff

# A shell has SIGINT ignored in background jobs, processes inherit that, and Prefect's make a SIGINT of a SIGTERM: with
# `make test &`, tests would wait for ever for what they have asked to end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first; a file's tests share a process and its fixtures, and so do all that start Ray.

    Two Ray clusters that start on one machine at the same time take each other's ports.
    """
    items.sort(key=lambda item: (item.get_closest_marker("ray") is None, item.get_closest_marker("slow") is None))
    for item in items:
        group = "ray" if item.get_closest_marker("ray") else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture
def serve() -> Iterator[Callable[[Script], FakeService]]:
    """Start services that end with the test."""
    started: list[FakeService] = []

    def start(script: Script) -> FakeService:
        started.append(FakeService(script))
        return started[-1]

    yield start
    for service in started:
        service.close()


@pytest.fixture
def profile_of(tmp_path: Path) -> Callable[..., Profile]:
    """Profiles that keep everything below the test's own folder."""

    def make(**sections: Any) -> Profile:
        values = {
            "name": "test",
            "teacher": {"model": "big"},
            "judge": {"model": "small"},
            "prices": {"big": PRICE, "small": PRICE},
            "paths": {"runs": str(tmp_path / "runs"), "state": str(tmp_path / "state")},
        }
        return Profile.model_validate(values | sections)

    return make


@pytest.fixture(autouse=True)
def no_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries without waiting; what a service asks for is still waited for."""
    monkeypatch.setattr(retrieval, "_BACK_OFF", BackOff(0.0, 0.0))


@pytest.fixture
def ray() -> Iterator[FakeRay]:
    """A cluster's dashboard."""
    fake = FakeRay()
    yield fake
    fake.close()
