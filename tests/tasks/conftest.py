"""The frame around a stage with neither Prefect nor MLflow."""

import logging
from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock

import pytest

from qinglan.tasks import stage as stage_module


class FakeTracker:
    """Remembers what MLflow would."""

    def __init__(self) -> None:
        self.ended: list[bool] = []
        """One entry for each run that ended: had it failed?"""
        self.metrics: dict[str, float] = {}
        self.running: set[str] = set()
        self.tags: dict[str, str] = {}
        self.started = 0
        self.datasets: list[tuple[str, str, str, str]] = []

    def start_run(self, _name: str, tags: dict[str, str], parent: str | None = None) -> str:
        self.started += 1
        self.tags |= tags
        child = f"child-{self.started}"
        self.running.add(child)
        return child

    def resume_run(self, run_id: str) -> bool:
        self.running.add(run_id)
        return True

    def set_tags(self, _: str, tags: dict[str, str]) -> None:
        self.tags |= tags

    def log_metrics(self, _: str, metrics: dict[str, float]) -> None:
        self.metrics = metrics

    def log_dataset(
        self, run_id: str, name: str, digest: str, source: Any, context: str, _profile: Any
    ) -> None:
        assert source.name == digest
        self.datasets.append((run_id, name, digest, context))

    def end_run(self, run_id: str, *, failed: bool = False) -> None:
        self.ended.append(failed)
        self.running.discard(run_id)

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_, **__: None


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> FakeTracker:
    fake = FakeTracker()
    monkeypatch.setattr(stage_module, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(stage_module, "tracker_of", lambda _: fake)
    monkeypatch.setattr(stage_module, "create_markdown_artifact", lambda *_, **__: "id")
    for function in ("acreate_progress_artifact", "aupdate_progress_artifact"):
        monkeypatch.setattr(stage_module, function, AsyncMock(return_value="id"))
    return fake
