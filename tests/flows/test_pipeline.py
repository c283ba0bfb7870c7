"""The whole DAG with real engines, small, as a user runs it: interrupted three times by SIGKILL, then finished."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as parquet
import pytest
from mlflow import MlflowClient
from waiting import wait_until

from qinglan.evaluation.models import Report
from qinglan.recipes.query_rewrite import user_text
from qinglan.rows import Row, normalise
from qinglan.runs.artifacts import read_jsonl
from qinglan.simulators.domains.query_rewrite import corpus

pytestmark = pytest.mark.slow

SMALL = {
    "embedded.sample_train_rows": 240,
    "embedded.sample_dev_rows": 40,
    "embedded.sample_test_rows": 60,
    "embedded.pretrain_steps": 40,
    "embedded.teacher_latency_ms": 40,
    "teacher.concurrency": 4,
    "distill.batch_rows": 40,
    "sft.num_train_epochs": 2,
    "sft.save_steps": 8,
    "sft.eval_steps": 8,
    "rl.total_steps": 3,
    "rl.train_batch_size": 16,
    "rl.ppo_mini_batch_size": 16,
    "rl.ppo_micro_batch_size_per_gpu": 16,
    "rl.save_freq": 1,
    "rl.test_freq": 1,
    "evaluate.latency_queries": 5,
}
ROWS = 340


class Site:
    """A user's working directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        settings = SMALL | {"paths.runs": root / "runs", "paths.state": root / "state"}
        overrides = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        self.command = [sys.executable, "-m", "qinglan.cli", "run", "pipeline", *overrides]
        self.log = root / "terminal.log"

    def start(self) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as log:
            return subprocess.Popen(self.command, stdout=log, stderr=log, cwd=self.root)

    def run(self) -> None:
        """Run to the end."""
        assert self.start().wait(timeout=1800) == 0, self.log.read_text()[-4000:]

    def kill_when(self, ready: Callable[[], bool]) -> None:
        """Kill -9 the flow's process, and only that, as soon as `ready`."""
        process = self.start()
        wait_until(
            "the moment to kill",
            lambda: ready() or process.poll() is not None,
            1200,
            explain=self.log.read_text,
            look_every_s=0.05,
        )
        assert process.poll() is None, self.log.read_text()[-4000:]
        children = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        _, alive = psutil.wait_procs(children, timeout=300)
        assert not alive, f"left behind: {[p.cmdline() for p in alive]}"

    def found(self, pattern: str) -> bool:
        return any(self.root.glob(pattern))

    def paid(self, role: str) -> int:
        path = self.root / "state" / "ledger.db"
        if not path.exists():
            return 0
        with closing(sqlite3.connect(path)) as connection:
            try:
                (count,) = connection.execute("SELECT count(*) FROM calls WHERE role = ?", (role,)).fetchone()
            except sqlite3.OperationalError:  # not created yet
                return 0
        return int(count)

    @property
    def run_directory(self) -> Path:
        return (self.root / "runs" / "latest").resolve()

    def report(self) -> dict[str, Any]:
        return json.loads((self.run_directory / "report.json").read_text())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A finished run that was killed in distillation, in SFT and in PPO."""
    site = Site(tmp_path_factory.mktemp("site"))
    site.kill_when(lambda: site.paid("teacher") >= 50)
    site.kill_when(lambda: site.found("runs/*/sft/checkpoints/checkpoint-*/trainer_state.json"))
    site.kill_when(lambda: site.found("runs/*/rl/checkpoints/latest_checkpointed_iteration.txt"))
    site.run()
    return site


def test_interrupted_run_is_one_run(site: Site) -> None:
    assert len([d for d in (site.root / "runs").iterdir() if d.is_dir() and not d.is_symlink()]) == 1


def test_prefect_knows_which_attempts_were_killed(site: Site) -> None:
    with closing(sqlite3.connect(site.root / "state" / "prefect" / "prefect.db")) as connection:
        states = connection.execute("SELECT state_type FROM flow_run ORDER BY created").fetchall()
    assert [state for (state,) in states] == ["CRASHED", "CRASHED", "CRASHED", "COMPLETED"]


def test_no_paid_call_is_repeated(site: Site) -> None:
    assert site.paid("teacher") == ROWS
    usage = site.report()["api"]["teacher"]
    assert usage["calls"] == ROWS and usage["failed"] == 0


def test_training_continued_from_its_checkpoints(site: Site) -> None:
    assert "sft: continuing from checkpoint-" in site.log.read_text()
    lines = (site.run_directory / "rl" / "metrics.2.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps[0] > 0


def test_report_has_every_arm_stage_and_comparison(site: Site) -> None:
    report = site.report()
    Report.read(site.run_directory / "report.json")
    assert list(report["arms"]) == ["original", "teacher", "base", "sft", "rl"]
    stages = ["ingest", "distill", "validate", "select", "dataset", "publish", "base_model", "sft", "rl", "evaluate"]
    assert [stage["name"] for stage in report["stages"]] == [*stages, "gate", "register"]
    assert {(c["a"], c["b"]) for c in report["comparisons"]} >= {("rl", "teacher"), ("sft", "teacher"), ("rl", "sft")}
    assert all(arm["n"] == 60 for arm in report["arms"].values())
    assert report["training"]["rl"]["steps"] == 3


def test_report_has_the_gates_decision_and_the_registered_version(site: Site) -> None:
    report = site.report()
    assert report["decision"]["verdict"] in ("promote", "refuse", "undecided")
    assert {rule["name"] for rule in report["decision"]["rules"]} >= {"gain_vs_teacher", "red_team", "cost"}
    assert report["released"]["version"] == "1"


def test_artifacts_are_what_the_report_says(site: Site) -> None:
    from qinglan.runs.artifacts import sha256_of

    for stage in site.report()["stages"]:
        for artifact in stage["artifacts"]:
            assert sha256_of(Path(artifact["path"])) == artifact["sha256"]


def trigrams(text: str) -> set[str]:
    plain = normalise(text)
    return {plain[i : i + 3] for i in range(max(1, len(plain) - 2))}


@pytest.mark.parametrize("file", ["sft_train.jsonl", "sft_dev.jsonl", "rl_train.parquet", "rl_dev.parquet"])
def test_nothing_of_the_test_split_is_in_what_the_engines_read(site: Site, file: str) -> None:
    dataset = site.run_directory / "dataset"
    test = list(read_jsonl(dataset / "test.jsonl", Row))
    if file.endswith(".jsonl"):
        rows = [json.loads(line) for line in (dataset / file).read_text(encoding="utf-8").splitlines()]
        read = {row["metadata"]["row_id"]: row["messages"][1]["content"] for row in rows}
    else:
        rows = parquet.read_table(dataset / file).to_pylist()
        read = {row["extra_info"]["row_id"]: row["prompt"][1]["content"] for row in rows}
    asked = [user_text(row.query, row.profile, row.history) for row in test]
    assert read and not read.keys() & {row.id for row in test}
    assert not {normalise(text) for text in read.values()} & {normalise(text) for text in asked}
    nearest = max(len(a & b) / len(a | b) for a in map(trigrams, read.values()) for b in map(trigrams, asked))
    assert nearest < 0.85


def test_pretraining_saw_nothing_of_the_test_split(site: Site) -> None:
    # A follow-up such as "那哪些人不能吃这个" names no product; which one is meant stands in its history alone.
    rows = [row for row in read_jsonl(site.run_directory / "dataset" / "test.jsonl", Row) if not row.history]
    test = {normalise(row.query) for row in rows}
    seen = "\n".join(normalise(text) for text in corpus.documents(0, 3000))
    assert not [text for text in test if len(text) > 6 and text in seen]


def test_mlflow_has_the_parent_and_a_child_per_stage(site: Site) -> None:
    client = MlflowClient(f"sqlite:///{site.root / 'state' / 'mlflow.db'}")
    (experiment,) = [e for e in client.search_experiments() if e.name == "qinglan"]
    runs = client.search_runs([experiment.experiment_id], max_results=100)
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    finished = [run for run in runs if run.info.status == "FINISHED" and run is not parent]
    assert {run.data.tags["stage"] for run in finished} >= {"distill", "sft", "rl", "evaluate"}
    assert all(run.data.tags["prefect.flow_run_id"] for run in runs)
    assert {a.path for a in client.list_artifacts(parent.info.run_id)} == {"report.json", "report.html"}
    (rl,) = [run for run in finished if run.data.tags["stage"] == "rl"]
    assert client.get_metric_history(rl.info.run_id, "critic/score/mean")


def test_second_run_pays_nothing_and_repeats_nothing(site: Site) -> None:
    site.run()
    report = site.report()
    assert report["api"]["teacher"]["calls"] == 0 and report["api"]["judge"]["calls"] == 0
    assert [stage["name"] for stage in report["stages"] if not stage["reused_from"]] == ["register"]
    assert report["released"]["version"] == "1", "the same model is not registered twice"
