"""The medical and the judge's profile through the whole DAG with real engines, small."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet as parquet
import pytest
from pipeline_site import SMALL, Site

from qinglan.recipes.answer_judge import RECIPE
from qinglan.rows import Row
from qinglan.runs.artifacts import read_jsonl
from qinglan.runs.launcher import JsonlTail
from qinglan.training.engines.progress import DEV_VALUE, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.extended]

CONFIGS = Path(__file__).parents[2] / "qinglan" / "configs"
MEDICAL = SMALL | {
    "embedded.sample_train_rows": 200,
    "embedded.pretrain_steps": 20,
    "sft.num_train_epochs": 1,
    "rl.total_steps": 2,
}
JUDGE = {
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


def finished(root: Path, profile: str, settings: dict[str, int]) -> Site:
    site = Site(root, str(CONFIGS / f"{profile}.yaml"), settings)
    site.run()
    return site


@pytest.fixture(scope="module")
def medical(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return finished(tmp_path_factory.mktemp("medical"), "medical", MEDICAL)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return finished(tmp_path_factory.mktemp("judge"), "answer_judge", JUDGE)


def test_rl_is_asked_by_pools_and_students_are_compared_on_the_recipes_metrics(medical: Site):
    records = parquet.read_table(medical.run_directory / "dataset" / "rl_train.parquet").to_pylist()
    pools = [Row.model_validate_json(record["extra_info"]["row"]).pool for record in records]
    assert pools.count("red_team") / len(pools) == pytest.approx(0.6, abs=0.02)
    assert pools.count("gold") / len(pools) == pytest.approx(0.1, abs=0.02)
    assert list(medical.report()["arms"]) == ["base", "sft", "rl"]
    assert [metric["name"] for metric in medical.report()["metrics"]][:3] == [
        "red_team_pass",
        "quality",
        "keywords",
    ]
    assert medical.report()["arms"]["rl"]["scores"]["keywords"]["n"] == 60


def test_a_steps_figures_are_means_over_the_logged_samples_that_have_the_part(medical: Site):
    dev_rows = parquet.read_table(medical.run_directory / "dataset" / "rl_dev.parquet").to_pylist()
    dev = {row["extra_info"]["row_id"] for row in dev_rows}
    lines = list(JsonlTail(medical.run_directory / "rl" / "samples.jsonl").new())
    validated = [line for line in lines if line["row_id"] in dev][: len(dev)]
    steps = read_metrics(medical.run_directory / "rl")
    trained = [line for line in lines if line["row_id"] not in dev]
    first = trained[: int(steps[1]["reward_extra/samples"])]

    def mean(part: str, samples: list[dict[str, Any]]) -> float:
        return fmean(line[part] for line in samples if part in line)

    assert 0 < sum("red_team_pass" in line for line in first) < len(first)
    for part in ("rule", "judge", "safety", "red_team_pass"):
        assert steps[1][f"reward_extra/{part}/mean"] == pytest.approx(mean(part, first), abs=1e-6)
    assert steps[1]["critic/score/mean"] == pytest.approx(mean("score", first), abs=1e-6)
    assert steps[0][DEV_VALUE] == pytest.approx(mean("red_team_pass", validated))
    assert [name for name in (*first[0], *steps[1]) if "rag" in name] == []


def test_every_arm_has_the_recipes_metrics_and_every_step_the_parts_of_the_reward(judged: Site):
    assert set(judged.report()["arms"]) == {"teacher", "base", "sft", "rl"}
    for arm in judged.report()["arms"].values():
        assert {metric.name for metric in RECIPE.grader.metrics} <= set(arm["scores"])
    assert 0.6 < judged.report()["arms"]["teacher"]["scores"]["main"]["mean"] < 0.95, (
        "it overlooks what was made up"
    )
    metrics = judged.run_directory / "rl" / "metrics.1.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines()
    logged: set[str] = set()
    for line in lines:
        logged.update(json.loads(line)["data"])
    assert {f"reward_extra/{part}/mean" for part in RECIPE.grader.weights} <= logged


def test_weak_and_strong_model_were_both_asked_and_paid(judged: Site):
    ingested = read_jsonl(judged.run_directory / "ingest" / "rows.jsonl", Row)
    rows = [row for row in ingested if row.status == "ok"]
    without_answer = [row for row in rows if "candidate" not in row.inputs]
    api = judged.report()["api"]
    assert api["answerer"]["calls"] == len(without_answer)
    assert 0 < len(without_answer) < len(rows)
    assert (api["teacher"]["calls"], api["judge"]["calls"]) == (len(rows), 0)


def test_agreement_robustness_and_certainty_are_reported(judged: Site):
    findings = judged.report()["findings"]
    titles = [finding["title"][0].split()[0] for finding in findings]
    assert titles == ["Agreement", "Robustness:", "Certainty:", "Targets"]
    robustness = findings[1]
    assert {len(row["values"]) for row in robustness["rows"]} == {len(robustness["columns"])}
    students = {row["label"][0].split(":")[0] for row in robustness["rows"]}
    assert students == {"base model", "SFT student", "RL student"}
