"""The medical profile through the whole DAG with real engines, small: nothing in it is another recipe's."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qinglan.rows import Row
from qinglan.runs.artifacts import read_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.ray]

PROFILE = Path(__file__).parents[2] / "configs" / "medical.yaml"
SMALL = {
    "embedded.sample_train_rows": 200,
    "embedded.sample_dev_rows": 40,
    "embedded.sample_test_rows": 60,
    "embedded.pretrain_steps": 30,
    "sft.num_train_epochs": 1,
    "rl.total_steps": 2,
    "rl.train_batch_size": 16,
    "rl.ppo_mini_batch_size": 16,
    "rl.ppo_micro_batch_size_per_gpu": 16,
    "rl.save_freq": 1,
    "rl.test_freq": 1,
    "evaluate.latency_queries": 5,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("site")
    settings = SMALL | {"paths.runs": site / "runs", "paths.state": site / "state"}
    overrides = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "qinglan.cli", "run", "pipeline", "--profile", str(PROFILE), *overrides]
    done = subprocess.run(command, cwd=site, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return (site / "runs" / "latest").resolve()


@pytest.fixture(scope="module")
def report(run: Path) -> Any:
    return json.loads((run / "report.json").read_text(encoding="utf-8"))


def test_only_missing_answers_are_bought(run: Path, report: Any) -> None:
    rows = list(read_jsonl(run / "dataset" / "rows.jsonl", Row))
    assert len(rows) == 300
    assert report["api"]["teacher"]["calls"] == sum("answer" not in row.inputs for row in rows) > 0
    assert all(row.answer_request is None for row in rows if "answer" in row.inputs)


def test_rl_is_asked_by_pools(run: Path) -> None:
    import pyarrow.parquet as parquet

    records = parquet.read_table(run / "dataset" / "rl_train.parquet").to_pylist()
    pools = [Row.model_validate_json(each["extra_info"]["row"]).pool for each in records]
    assert pools.count("red_team") / len(pools) == pytest.approx(0.6, abs=0.02)
    assert pools.count("gold") / len(pools) == pytest.approx(0.1, abs=0.02)


def test_students_are_compared_on_the_recipes_metrics(report: Any) -> None:
    assert list(report["arms"]) == ["base", "sft", "rl"]
    assert [metric["name"] for metric in report["metrics"]][:3] == ["red_team_pass", "quality", "keywords"]
    assert report["arms"]["rl"]["scores"]["keywords"]["n"] == 60


def test_the_gate_wants_a_gain_over_sft(report: Any) -> None:
    names = {rule["name"] for rule in report["decision"]["rules"]}
    assert {"gain_vs_sft", "quality_vs_sft", "red_team"} <= names


def test_training_logs_the_rules_parts_and_the_kl(run: Path) -> None:
    lines = (run / "rl" / "metrics.1.jsonl").read_text(encoding="utf-8").splitlines()
    last = json.loads(lines[-1])["data"]
    wanted = {f"reward_extra/{part}/mean" for part in ("rule", "judge", "safety", "restraint", "red_team_pass")}
    assert wanted <= last.keys()
    assert "actor/reward_kl_penalty" in last


def test_the_report_tells_the_kinds_of_danger(run: Path) -> None:
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "各类高风险问题的红队通过率" in page or "Red-team pass rate by kind of danger" in page
