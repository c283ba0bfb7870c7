"""docs/add-a-recipe.md as a reader follows it: its files in an empty folder, its commands one after the other."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from qinglan.evaluation.models import Report

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "add-a-recipe.md").read_text(encoding="utf-8")
FILES = ("make_questions.py", "topic.py", "check_topic.py", "topic.yaml")
pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.ray]


class Done(NamedTuple):
    """The folder after all commands, and what each printed."""

    folder: Path
    printed: dict[str, str]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    return [line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines()]


def run(command: str, folder: Path) -> str:
    program, *words = command.split()
    argv = [sys.executable, *(["-m", "qinglan.cli"] if program == "qinglan" else []), *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, f"{command}: {(done.stdout + done.stderr)[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("topic")
    for name, text in zip(FILES, (*blocks("python"), *blocks("yaml")), strict=True):
        assert f"`{name}`" in PAGE
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def done(folder: Path) -> Done:
    return Done(folder, {command: run(command, folder) for command in commands()})


def test_the_recipe_is_short_and_passes_the_linter(folder: Path):
    recipe = folder / "topic.py"
    assert len(recipe.read_text(encoding="utf-8").splitlines()) < 60
    config = f"--config={ROOT / 'pyproject.toml'}"
    for words in (["check", config], ["format", "--check", config]):
        checked = subprocess.run(
            [sys.executable, "-m", "ruff", *words, str(recipe)], capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stdout


def test_the_report_is_about_the_recipes_metrics(done: Done):
    report = Report.read(done.folder / "runs" / "latest" / "report.json")
    assert [metric.name for metric in report.metrics] == ["right", "format"]
    assert set(report.arms) == {"base", "sft", "rl"}
    right = {name: arm.mean("right") for name, arm in report.arms.items()}
    assert right["sft"] > right["base"], "SFT learns the five words"
    assert report.decision and {rule.name for rule in report.decision.rules} >= {"gain_vs_sft", "red_team"}
    assert (done.folder / "runs" / "latest" / "report.html").is_file()


def test_the_terminal_shows_them_and_show_repeats_it(done: Done):
    ran, shown = (done.printed[f"qinglan {words} --profile topic.yaml"] for words in ("run pipeline", "show latest"))
    assert "topic accuracy" in " ".join(ran.split()) and "Gate: " in ran
    assert shown.strip() and shown.strip().splitlines()[0] in ran


def test_rows_look_as_the_page_says(done: Done):
    lines = (done.folder / "runs" / "latest" / "distill" / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    (block,) = blocks("json")
    wanted: dict[str, Any] = json.loads(block)
    (row,) = [found for line in lines if (found := json.loads(line))["query"] == wanted["query"]]
    assert {name: row[name] for name in wanted} == wanted
    assert len(lines) == 300


def test_nobody_was_asked_or_paid(done: Done):
    report = Report.read(done.folder / "runs" / "latest" / "report.json")
    assert all(part.calls == 0 for part in (report.api.teacher, report.api.judge))
