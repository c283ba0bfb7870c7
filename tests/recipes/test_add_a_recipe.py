"""docs/how-to/add-a-recipe.md by the letter: its files in an empty folder, its commands in turn."""

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
    argv = [sys.executable, "-m", "qinglan.cli"] if program == "qinglan" else [sys.executable]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [*argv, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert process.returncode == 0, f"{command}: {(process.stdout + process.stderr)[-4000:]}"
    return process.stdout


def test_the_page_leads_from_questions_to_a_report_without_a_model_being_paid(tmp_path: Path):
    blocks = {
        language: re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
        for language in ("python", "yaml", "console", "json")
    }
    for name, text in zip(FILES, (*blocks["python"], *blocks["yaml"]), strict=True):
        (tmp_path / name).write_text(text, encoding="utf-8")
    printed: dict[str, str] = {}
    for block in blocks["console"]:
        for line in block.splitlines():
            command = line.removeprefix("$ ")
            printed[command] = run(command, tmp_path)

    pipeline = printed["qinglan run pipeline --profile topic.yaml"]
    show = printed["qinglan show latest --profile topic.yaml"]
    assert "topic accuracy" in " ".join(pipeline.split())
    assert "Gate: " in pipeline
    assert show.strip().splitlines()[0] in pipeline
    latest = tmp_path / "runs" / "latest"
    report = Report.read(latest / "report.json")
    assert [metric.name for metric in report.metrics] == ["right", "format"]
    right = {name: arm.mean("right") for name, arm in report.arms.items()}
    assert right.keys() == {"base", "sft", "rl"}
    assert right["sft"] > right["base"], "SFT learns the five words"
    assert report.decision
    assert (latest / "report.html").is_file()
    assert [report.api.teacher.calls, report.api.judge.calls] == [0, 0]
    expected: dict[str, Any] = json.loads(blocks["json"][0])
    lines = (latest / "distill" / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    (row,) = [row for row in rows if row["query"] == expected["query"]]
    assert {name: row[name] for name in expected} == expected
