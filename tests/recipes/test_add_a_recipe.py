"""docs/how-to/add-a-recipe.md as a reader follows it: its files in an empty folder, its commands in
their order."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qinglan.evaluation.models import Report

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "add-a-recipe.md").read_text(encoding="utf-8")
FILES = ("make_questions.py", "topic.py", "check_topic.py", "topic.yaml")
pytestmark = [pytest.mark.slow, pytest.mark.extended]


def run(command: str, folder: Path) -> str:
    program, *words = command.split()
    argv = [sys.executable, *(["-m", "qinglan.cli"] if program == "qinglan" else []), *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        argv, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=1800
    )
    assert done.returncode == 0, f"{command}: {(done.stdout + done.stderr)[-4000:]}"
    return done.stdout


def test_the_page_leads_from_questions_to_a_report_without_a_model_being_paid(tmp_path: Path):
    blocks = {
        language: re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
        for language in ("python", "yaml", "console", "json")
    }
    for name, text in zip(FILES, (*blocks["python"], *blocks["yaml"]), strict=True):
        (tmp_path / name).write_text(text, encoding="utf-8")
    commands = [
        line.removeprefix("$ ") for block in blocks["console"] for line in block.splitlines()
    ]
    printed = {command: run(command, tmp_path) for command in commands}

    ran, shown = (
        printed[f"qinglan {words} --profile topic.yaml"]
        for words in ("run pipeline", "show latest")
    )
    assert "topic accuracy" in " ".join(ran.split()) and "Gate: " in ran
    assert shown.strip() and shown.strip().splitlines()[0] in ran
    latest = tmp_path / "runs" / "latest"
    report = Report.read(latest / "report.json")
    assert [metric.name for metric in report.metrics] == ["right", "format"]
    right = {name: arm.mean("right") for name, arm in report.arms.items()}
    assert right.keys() == {"base", "sft", "rl"} and right["sft"] > right["base"], (
        "SFT learns the five words"
    )
    assert report.decision and (latest / "report.html").is_file()
    assert all(part.calls == 0 for part in (report.api.teacher, report.api.judge))
    wanted: dict[str, Any] = json.loads(blocks["json"][0])
    rows = map(
        json.loads, (latest / "distill" / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    )
    (row,) = [row for row in rows if row["query"] == wanted["query"]]
    assert {name: row[name] for name in wanted} == wanted
