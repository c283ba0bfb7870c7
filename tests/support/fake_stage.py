"""A stage that trains, without Prefect and MLflow."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from qinglan.config import Profile


class FakeStage:
    """A stage and its tracker: what users, Prefect and MLflow get of a training run."""

    def __init__(self, profile: Profile, folder: Path) -> None:
        self.name = "rl"
        self.key = "abcdefghijk"
        self.directory = folder
        self.run = SimpleNamespace(id="run-1", profile=profile)
        self.mlflow_run_id = "child"
        self.tracker = self
        self.sent: list[tuple[int, Mapping[str, float]]] = []
        self.said: list[str] = []
        self.events: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.markdown: dict[str, str] = {}
        self.metrics: list[tuple[str, dict[str, float], int]] = []
        self.tags: dict[str, str] = {}

    def log_steps(self, _: str, steps: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        self.sent += steps

    def progress(self, *_: Any) -> None:
        """Nobody looks."""

    def say(self, text: str, **_: Any) -> None:
        self.said.append(text)

    def emit_event(self, event: str, resource: dict[str, str], payload: dict[str, Any]) -> None:
        self.events.append((event, resource, payload))

    def create_markdown_artifact(self, markdown: str, key: str, description: str) -> None:
        self.markdown[key] = markdown

    def log_metrics(self, run_id: str, metrics: dict[str, float], step: int) -> None:
        self.metrics.append((run_id, metrics, step))

    def set_tags(self, run_id: str, tags: dict[str, str]) -> None:
        self.tags |= tags
