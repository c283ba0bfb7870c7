"""The tasks of canary-check and clean-up: the tables that they show, and their failures."""

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qinglan.errors import StageError
from qinglan.ops.cleanup.records import CleanUp, RetentionDecision
from qinglan.tasks import upkeep
from qinglan.tasks.upkeep import check_canary, remove_unneeded

SHOWN = dict[str, dict[str, str]]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> SHOWN:
    """Artifacts by key."""
    artifacts: SHOWN = {}

    def show(text: str, key: str, description: str) -> None:
        artifacts[key] = {description: text}

    monkeypatch.setattr(upkeep, "create_markdown_artifact", show)
    monkeypatch.setattr(upkeep, "get_run_logger", lambda: logging.getLogger("flow"))
    return artifacts


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    return [f"paths.runs={tmp_path / 'runs'}", f"paths.state={tmp_path / 'state'}", "serve.port=9"]


def test_a_dead_site_is_shown_and_fails(
    shown: SHOWN, overrides: list[str], monkeypatch: pytest.MonkeyPatch
):
    aliases: dict[str, str] = {}
    registry = SimpleNamespace(aliases=lambda: aliases)
    monkeypatch.setattr(upkeep, "registry_of", lambda _: registry)
    check_canary.fn("embedded", overrides, "")
    table = shown["serving-embedded"]["What is served, and the canary"]
    assert "| Router | `http://127.0.0.1:9` |" in table
    aliases["champion"] = "4"
    with pytest.raises(
        StageError,
        match=r"^version 4 is the champion, but no router answers at http://127.0.0.1:9;",
    ):
        check_canary.fn("embedded", overrides, "http://127.0.0.1:9/")
    table = shown["serving-embedded"]["What is served, and the canary"]
    assert "**version 4 is the champion" in table


@pytest.fixture
def cleaner(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def clean_up(profile: Any, *, dry_run: bool, say: Callable[[str], object]) -> CleanUp:
        calls.append(
            {"profile": profile.name, "days": profile.retention.run_days, "dry_run": dry_run}
        )
        removed = [RetentionDecision("run", "r1", "old", 2_000_000)]
        notes = [] if dry_run else ["MLflow is away"]
        return CleanUp(profile, dry_run, say, datetime.now(UTC), removed=removed, notes=notes)

    monkeypatch.setattr(upkeep, "clean_up", clean_up)
    return calls


def test_a_dry_run_shows_what_would_go_problems_fail(
    shown: SHOWN, overrides: list[str], cleaner: list[dict[str, Any]]
):
    remove_unneeded.fn("embedded", [*overrides, "retention.run_days=3"], dry_run=True)
    assert cleaner == [{"profile": "embedded", "days": 3, "dry_run": True}]
    ((sentence, text),) = shown["clean-up-embedded"].items()
    assert sentence.startswith("embedded: would remove 1 run; ")
    assert "| r1 |" in text
    with pytest.raises(StageError, match="not all could be cleaned up: MLflow is away"):
        remove_unneeded.fn("embedded", overrides, dry_run=False)
