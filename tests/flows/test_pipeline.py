"""The whole DAG with real engines, small: run by a user, again with nothing changed, and killed."""

import itertools
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from mlflow import MlflowClient
from pipeline_site import ROWS, SMALL, Site

import qinglan
from qinglan.config import Tenant
from qinglan.errors import ArtifactError
from qinglan.evaluation.models import Report
from qinglan.recipes.query_rewrite import TEACHER_SYSTEM, user_text
from qinglan.rows import Row, normalise
from qinglan.runs.artifacts import read_jsonl, sha256_of

pytestmark = pytest.mark.slow

CASES = 26
"""Cases of the red team that the teacher is asked."""
BLANK = 4
"""Cases of these without a question: the teacher answers nothing, is asked once more, and that is
no answer."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    site = Site(tmp_path_factory.mktemp("site"))
    site.run()
    return site


def test_report_has_every_arm_stage_and_comparison_the_gates_decision_and_what_was_paid_once(
    site: Site,
) -> None:
    report = site.report()
    Report.read(site.run_directory / "report.json")
    assert list(report["arms"]) == ["original", "teacher", "base", "sft", "rl"]
    stages = [
        "ingest",
        "distill",
        "validate",
        "select",
        "dataset",
        "publish",
        "base_model",
        "sft",
        "rl",
        "evaluate",
    ]
    assert [stage["name"] for stage in report["stages"]] == [*stages, "gate", "register"]
    pairs = {(pair["a"], pair["b"]) for pair in report["comparisons"]}
    assert pairs >= {("rl", "teacher"), ("sft", "teacher"), ("rl", "sft")}
    questions = {name: arm["n"] for name, arm in report["arms"].items()}
    assert questions == dict.fromkeys(report["arms"], 60)
    assert report["training"]["rl"]["steps"] == 3
    assert report["curves"].keys() >= {
        "sft_loss",
        "rl_reward",
        "rl_gold_top1",
        "rl_judge",
        "rl_policy_loss",
        "rl_value_loss",
        "rl_kl",
        "rl_entropy",
        "rl_clip_fraction",
    }
    usage = report["api"]["teacher"]
    assert (site.paid("teacher"), usage["failed"]) == (ROWS + CASES - BLANK, 2 * BLANK)
    assert usage["calls"] == ROWS + CASES + BLANK
    assert report["decision"]["verdict"] in ("promote", "refuse", "undecided")
    rules = {rule["name"] for rule in report["decision"]["rules"]}
    assert rules >= {"gain_vs_teacher", "red_team", "robustness_vs_teacher", "cost"}
    assert report["released"]["version"] == "1"
    assert list(report["weights"]["found"]) == ["base_model", "sft", "rl"]


def trigrams(text: str) -> set[str]:
    plain = normalise(text)
    return {plain[start : start + 3] for start in range(max(1, len(plain) - 2))}


def similarity(text: str, other_text: str) -> float:
    """Share of the trigrams that both texts have."""
    parts = trigrams(text)
    other_parts = trigrams(other_text)
    return len(parts & other_parts) / len(parts | other_parts)


@pytest.mark.parametrize(
    "file", ["sft_train.jsonl", "sft_dev.jsonl", "rl_train.parquet", "rl_dev.parquet"]
)
def test_nothing_of_the_test_split_is_in_what_the_engines_read(site: Site, file: str) -> None:
    dataset = site.run_directory / "dataset"
    test = list(read_jsonl(dataset / "test.jsonl", Row))
    if file.endswith(".jsonl"):
        lines = (dataset / file).read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        prompts = [(row["metadata"]["row_id"], row["messages"][1]["content"]) for row in rows]
    else:
        rows = parquet.read_table(dataset / file).to_pylist()
        prompts = [(row["extra_info"]["row_id"], row["prompt"][1]["content"]) for row in rows]
    ids, texts = zip(*prompts, strict=True)
    test_texts = [user_text(row.query, row.profile, row.history) for row in test]
    assert ids
    assert {*ids} & {row.id for row in test} == set()
    assert {*map(normalise, texts)} & {*map(normalise, test_texts)} == set()
    assert max(itertools.starmap(similarity, itertools.product(texts, test_texts))) < 0.85


def test_mlflow_has_the_parent_and_a_child_per_stage(site: Site) -> None:
    client = MlflowClient(f"sqlite:///{site.root / 'state' / 'mlflow.db'}")
    experiments = client.search_experiments()
    (experiment,) = [experiment for experiment in experiments if experiment.name == "qinglan"]
    runs = client.search_runs([experiment.experiment_id], max_results=100)
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    finished = [run for run in runs if run.info.status == "FINISHED" and run is not parent]
    assert {run.data.tags["stage"] for run in finished} >= {"distill", "sft", "rl", "evaluate"}
    assert [run for run in runs if not run.data.tags["prefect.flow_run_id"]] == []
    artifacts = client.list_artifacts(parent.info.run_id)
    assert {artifact.path for artifact in artifacts} == {"report.json", "report.html"}
    (rl,) = [run for run in finished if run.data.tags["stage"] == "rl"]
    assert client.get_metric_history(rl.info.run_id, "critic/score/mean")
    prompts = {
        role: client.load_prompt(f"qinglan.sample.query_rewrite.{role}")
        for role in ("student", "teacher", "judge")
    }
    assert prompts["teacher"].template == TEACHER_SYSTEM.format(domain=Tenant().domain)


def test_a_program_reads_the_run_as_dataframes(site: Site) -> None:
    frames = qinglan.run(runs=site.run_directory.parent)
    report = site.report()
    arms = frames.arms()
    assert list(arms.index) == list(report["arms"])
    top1 = report["arms"]["rl"]["scores"]["top1"]
    columns = ["scores.top1.mean", "scores.top1.low", "scores.top1.high"]
    assert arms.loc["rl", columns].tolist() == [top1["mean"], *top1["ci95"]]
    key = ("rl", "sft", "top1")
    comparison = frames.comparisons().set_index(["a", "b", "metric"]).loc[key]
    (expected,) = [
        pair for pair in report["comparisons"] if (pair["a"], pair["b"], pair["metric"]) == key
    ]
    assert [comparison["diff"], comparison["low"]] == [expected["diff"], expected["ci95"][0]]
    answers = frames.rows("evaluate")
    assert answers.groupby("arm").size().to_dict() == dict.fromkeys(report["arms"], 60)
    assert len(frames.rows("ingest")) == ROWS
    assert set(frames.samples()["row_id"]) <= set(frames.rows("validate")["id"])
    calls = frames.ledger()
    assert calls[calls.role == "teacher"].shape[0] == report["api"]["teacher"]["calls"]
    with pytest.raises(ArtifactError, match="sft left no rows; ingest, distill and validate do"):
        frames.rows("sft")


def test_second_run_pays_nothing_and_repeats_nothing(site: Site) -> None:
    site.run()
    report = site.report()
    assert report["api"]["teacher"]["calls"] == 0
    assert report["api"]["judge"]["calls"] == 0
    assert [stage["name"] for stage in report["stages"] if not stage["reused_from"]] == ["register"]
    assert report["released"]["version"] == "1", "the same model is not registered twice"


@pytest.mark.extended
def test_what_was_killed_twice_is_one_run_and_nothing_is_paid_or_trained_twice(
    tmp_path: Path, site: Site
) -> None:
    """It is killed by SIGKILL, in SFT and in PPO.

    Slow services that fail at times change no weight.
    """
    undisturbed = weights(site)
    faults = {"embedded.rag_latency_ms": 30, "embedded.fault_rate": 0.05}
    site = Site(tmp_path, settings=SMALL | faults)
    site.kill_when(lambda: site.found("runs/*/sft/checkpoints/checkpoint-*/trainer_state.json"))
    site.kill_when(lambda: site.found("runs/*/rl/checkpoints/latest_checkpointed_iteration.txt"))
    site.run()
    folders = [path for path in (site.root / "runs").iterdir() if path.is_dir()]
    assert len([folder for folder in folders if not folder.is_symlink()]) == 1
    with closing(sqlite3.connect(site.root / "state" / "prefect" / "prefect.db")) as connection:
        states = connection.execute("SELECT state_type FROM flow_run ORDER BY created").fetchall()
    assert [state for (state,) in states] == ["CRASHED", "CRASHED", "COMPLETED"]
    assert "sft: continuing from checkpoint-" in site.log.read_text()
    lines = (site.run_directory / "rl" / "metrics.2.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["step"] > 0
    usage = site.report()["api"]["teacher"]
    assert site.paid("teacher") == ROWS + CASES - BLANK
    assert usage["calls"] - usage["failed"] == ROWS + CASES - BLANK
    assert weights(site) == undisturbed


def weights(site: Site) -> dict[str, str]:
    """Digests, of RL's after its last step: a run this small may choose the SFT model."""
    folders = {"sft": "sft/merged", "rl": "rl/checkpoints/global_step_3/actor/huggingface"}
    digests = {}
    for stage, folder in folders.items():
        (path,) = site.root.glob(f"runs/2*/{folder}/model.safetensors")
        digests[stage] = sha256_of(path)
    return digests
