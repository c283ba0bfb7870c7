"""The judge's profile with real engines, small: what it leaves in the report."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qinglan.recipes.answer_judge import RECIPE, verdict_in
from qinglan.rows import Row
from qinglan.runs.artifacts import read_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.ray]

SMALL = {
    "embedded.sample_train_rows": 80,
    "embedded.sample_dev_rows": 24,
    "embedded.sample_test_rows": 48,
    "embedded.pretrain_steps": 20,
    "rl.total_steps": 2,
    "rl.rollouts_per_prompt": 4,
    "rl.ppo_micro_batch_size_per_gpu": 32,
    "rl.save_freq": 2,
    "rl.test_freq": 2,
    "evaluate.latency_queries": 3,
}


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("judge")
    settings = SMALL | {"paths.runs": root / "runs", "paths.state": root / "state"}
    overrides = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "qinglan.cli", "run", "pipeline", "--profile", "answer_judge", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return (root / "runs" / "latest").resolve()


@pytest.fixture(scope="module")
def report(run_directory: Path) -> dict[str, Any]:
    return json.loads((run_directory / "report.json").read_text(encoding="utf-8"))


def test_every_arm_has_the_recipes_metrics(report: dict[str, Any]):
    assert set(report["arms"]) == {"teacher", "base", "sft", "rl"}
    for arm in report["arms"].values():
        assert {metric.name for metric in RECIPE.METRICS} <= set(arm["scores"])
    assert 0.6 < report["arms"]["teacher"]["scores"]["main"]["mean"] < 0.95, "it overlooks what was made up"


def test_weak_and_strong_model_were_both_asked_and_paid(run_directory: Path, report: dict[str, Any]):
    rows = [row for row in read_jsonl(run_directory / "ingest" / "rows.jsonl", Row) if row.status == "ok"]
    assert 0 < report["api"]["answerer"]["calls"] == sum("candidate" not in row.inputs for row in rows) < len(rows)
    assert report["api"]["teacher"]["calls"] == len(rows)
    assert report["api"]["judge"]["calls"] == 0


def test_rows_carry_the_answer_that_was_judged_and_the_verdict_on_it(run_directory: Path):
    rows = list(read_jsonl(run_directory / "distill" / "rows.jsonl", Row))
    assert all(row.inputs["candidate"] and verdict_in(row.answer or "") for row in rows if row.status == "ok")


def test_agreement_robustness_and_certainty_are_reported(report: dict[str, Any]):
    titles = [one["title"][0].split()[0] for one in report["findings"]]
    assert titles == ["Agreement", "Robustness:", "Certainty:"]
    page = report["findings"][1]
    assert all(len(row["values"]) == len(page["columns"]) for row in page["rows"])
    assert {row["label"][0].split(":")[0] for row in page["rows"]} == {"base model", "SFT student", "RL student"}


def test_each_part_of_the_reward_is_logged_by_step(run_directory: Path):
    lines = (run_directory / "rl" / "metrics.1.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line)["data"] for line in lines]
    for part in RECIPE.WEIGHTS:
        assert any(f"reward_extra/{part}/mean" in step for step in steps)
