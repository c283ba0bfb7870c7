"""A run that ended early, as a user sees it in the terminal: what stopped it, and the same by `show` later on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
PROBLEM = "a split is empty (train 1, dev 0, test 0; "


def qinglan(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return subprocess.run(
        [sys.executable, "-m", "qinglan.cli", *words],
        cwd=folder,
        env=env | {"PREFECT_HOME": str(folder / "prefect"), "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def test_what_stopped_a_run_can_be_asked_for_later(tmp_path: Path):
    (tmp_path / "q.csv").write_text("问题\n虾青素咋吃\n", encoding="utf-8")
    stopped = qinglan(tmp_path, "run", "refresh", "--set", "data.workbook=q.csv")
    assert stopped.returncode == 2, stopped.stdout + stopped.stderr
    assert stopped.stderr.strip().splitlines()[-1].startswith(f"error: {PROBLEM}")

    shown = qinglan(tmp_path, "show", "latest")
    assert shown.returncode == 2
    assert f"(refresh of embedded): ended early: {PROBLEM}" in shown.stderr
    assert "Begun, but not done: dataset\n" in shown.stdout
