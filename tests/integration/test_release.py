"""Releasing for real: the flow under Prefect with a person's approval, the command line, and MLflow's server."""

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from registered import Models
from waiting import wait_until

from qinglan.config import Profile, load_profile
from qinglan.evaluation import ArmRow
from qinglan.evaluation.models import Report
from qinglan.evaluation.red_team_cases import RedTeamResult
from qinglan.evaluation.summary import evaluate
from qinglan.ops import up
from qinglan.ops.prefect_api import PatientClient, call
from qinglan.recipes.query_rewrite import RECIPE
from qinglan.recipes.scoring.identity import scored_with
from qinglan.rows import Retrieved, Row
from qinglan.runs.artifacts import Artifact, StageResult, sha256_of, write_json, write_jsonl
from qinglan.runs.processes import answers, free_port
from qinglan.runs.run import Run, finish_run, open_run, save_stage
from qinglan.serving.registry import Registry, registry_of
from qinglan.serving.registry.approval import Waiting
from qinglan.simulators.domains.query_rewrite.sample import write_sample

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # MLflow's own use of SQLAlchemy
]

ROWS = 200
SMALL = {"sample_train_rows": 60, "sample_dev_rows": 20, "sample_test_rows": 20}
DEADLINE_S = 900


class Site:
    """A user's working directory with evaluated runs in it."""

    def __init__(self, root: Path) -> None:
        self.root, self.path = root, root / "profile.yaml"
        embedded = Path(__file__).parents[2] / "configs" / "embedded.yaml"
        values = yaml.safe_load(embedded.read_text(encoding="utf-8"))
        values["paths"] = {"runs": str(root / "runs"), "state": str(root / "state")}
        values["embedded"] = values.get("embedded", {}) | SMALL
        values["gate"] = values.get("gate", {}) | {"approval": "required"}
        self.path.write_text(yaml.safe_dump(values))

    @property
    def profile(self) -> Profile:
        return load_profile(str(self.path))

    @property
    def registry(self) -> Registry:
        return registry_of(self.profile)

    def evaluated_run(self, weights: str) -> Run:
        """A finished run whose RL model is clearly better than the teacher."""
        profile = self.profile
        sample = write_sample(profile.paths.state / "sample", profile.embedded)
        with open_run(profile, "pipeline", fresh=True) as run:
            run = run.model_copy(update={"knowledge_base_sha256": sha256_of(sample.knowledge_base)})
            rows = [
                Row(id=f"{n:04}", tenant=profile.tenant.id, query=f"问{n}", source=f"q!A{n}", gold_id=f"g{n}")
                for n in range(ROWS)
            ]
            files = {
                name: write_jsonl(run.stage_directory("dataset") / f"{name}.jsonl", rows) for name in ("test", "rows")
            }
            self._save(run, "dataset", files, {"scored_with": scored_with(run)})
            for stage in ("base_model", "sft", "rl"):
                self._save(run, stage, {"model": self._model(run, stage, weights)}, _details(run, stage))
            self._evaluate(run, rows)
            finish_run(run)
        return run

    def _model(self, run: Run, stage: str, weights: str) -> Artifact:
        folder = run.stage_directory(stage) / "model"
        folder.mkdir()
        (folder / "model.safetensors").write_text(f"{stage} {weights}")
        return Artifact.of(folder)

    def _evaluate(self, run: Run, rows: list[Row]) -> None:
        arms = {name: _arm(rows, misses) for name, misses in (("teacher", 3), ("sft", 4), ("rl", 20))}
        found = evaluate(arms, rows, run.profile.evaluate, RECIPE)
        passed = RedTeamResult(case_id="c", name="n", kind="long", must_pass=True, passed=True)
        found = found.model_copy(update={"red_team": {"rl": [passed]}})
        folder = run.stage_directory("evaluate")
        write_json(folder / "evaluation.json", found.model_dump(mode="json"))
        files = {f"arm_{name}": write_jsonl(folder / f"arm_{name}.jsonl", arm) for name, arm in arms.items()}
        digests = {name: sha256_of(run.directory / name / "model") for name in ("sft", "rl")}
        files["evaluation"] = Artifact.of(folder / "evaluation.json")
        self._save(run, "evaluate", files, {"models": digests})

    def _save(self, run: Run, stage: str, artifacts: dict[str, Artifact], details: dict[str, Any]) -> None:
        key = f"{run.id} {stage}"
        save_stage(
            run, StageResult(stage=stage, key=key, run_id=run.id, seconds=1, artifacts=artifacts, details=details)
        )

    def start(self, *words: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "qinglan.cli", *words, "--profile", str(self.path)]
        env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        return subprocess.Popen(
            command, cwd=self.root, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def qinglan(self, *words: str) -> str:
        process = self.start(*words)
        text, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, text
        return text


def _arm(rows: list[Row], misses: int) -> list[ArmRow]:
    """Every `misses`-th question goes wrong."""
    return [
        ArmRow(
            row_id=row.id,
            text=f"词 {row.id}",
            retrieved=Retrieved(ids=("x" if n % misses == 0 else row.gold_id,), scores=(0.9,)),
            judge_score=4.0 + n % 2,
            latency_ms=5.0,
            cost_usd=1e-6 if misses > 5 else 1e-3,
        )
        for n, row in enumerate(rows)
    ]


def _details(run: Run, stage: str) -> dict[str, Any]:
    return {"model": str(run.directory / stage / "model"), "summary": {"steps": 3, "chosen_step": 3}, "alarms": []}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def asked_in(site: Site, flow: "subprocess.Popen[str]") -> Path:
    """The file by which the flow says that it waits for a person."""

    def asks() -> Path | None:
        return next(site.profile.paths.runs.glob("*/gate/waiting.json"), None)

    wait_until("the gate's question", lambda: flow.poll() is not None or asks(), DEADLINE_S)
    waiting = asks()
    assert waiting is not None, flow.communicate()[0]
    return waiting


def believe_crashed(waiting: Waiting | None) -> None:
    """As where no sign of life came through for a while: the process lives, and asks again."""
    assert waiting
    path = f"flow_runs/{waiting.flow_run_id}"
    with PatientClient(base_url=waiting.api_url, timeout=DEADLINE_S) as api:

        def paused_at() -> str | None:
            state = call(api, "GET", path)["state"]
            return str(state["timestamp"]) if state["name"] == "Paused" else None

        for state in ({"type": "CRASHED"}, {"type": "SCHEDULED", "name": "AwaitingRetry"}):
            wait_until("the flow run's pause", paused_at, DEADLINE_S)
            before = paused_at()
            call(api, "POST", f"{path}/set_state", {"state": state, "force": True})
            wait_until("it to ask again", lambda before=before: paused_at() not in (None, before), DEADLINE_S)


def test_a_model_that_a_person_approved_serves_until_it_is_rolled_back(site: Site):
    first = site.evaluated_run("first")
    flow = site.start("run", "release", "--from", first.id)
    waiting = asked_in(site, flow)
    assert (waiting.parent / "review.xlsx").exists()
    believe_crashed(Waiting.read(waiting.parent))
    site.qinglan("release", "approve", waiting.parents[1].name, "--reviewer", "李雷")
    text, _ = flow.communicate(timeout=DEADLINE_S)
    assert flow.returncode == 0, text
    assert "approved by 李雷" in text
    assert "version 1 (champion)" in text
    report = Report.read(waiting.parents[1] / "report.json")
    assert report.decision and report.decision.verdict == "promote"
    assert report.released and (report.released.version, report.released.aliases) == ("1", ["champion"])

    second = site.evaluated_run("second")
    site.qinglan("run", "release", "--from", second.id, "--set", "gate.approval=none")
    assert site.registry.aliases() == {"champion": "1"}  # it was not compared with the champion, which came later
    decision = Report.read(site.profile.paths.runs / "latest" / "report.json").decision
    assert decision and decision.verdict == "undecided"
    unknown = {rule.name: rule.reason for rule in decision.rules if rule.outcome == "unknown"}
    assert "was not evaluated in this run" in unknown["gain_vs_champion"]
    site.qinglan("release", "promote", "2", "--force", "--reason", "tried by hand")
    assert "champion 1, previous 2" in site.qinglan("release", "rollback", "--reason", "it was slow")
    lineage = site.qinglan("lineage", "champion", "--worst", "1")
    assert f"mean over {ROWS} of {ROWS} rows: the same" in lineage

    champion = site.registry.released("champion")
    assert champion is not None
    shutil.rmtree(champion.folder)
    restored = site.registry.folder(champion)
    assert (restored / "model.safetensors").read_text() == "rl first"


def test_a_wait_that_was_cancelled_ends_though_no_worker_is_there(site: Site):
    evaluated = site.evaluated_run("first")
    flow = site.start("run", "release", "--from", evaluated.id)
    waiting = Waiting.read(asked_in(site, flow).parent)
    assert waiting
    with PatientClient(base_url=waiting.api_url, timeout=DEADLINE_S) as api:
        path = f"flow_runs/{waiting.flow_run_id}"
        wait_until("the pause", lambda: call(api, "GET", path)["state"]["name"] == "Paused", DEADLINE_S)
        call(api, "POST", f"{path}/set_state", {"state": {"type": "CANCELLED"}})
    text, _ = flow.communicate(timeout=DEADLINE_S)
    assert flow.returncode == 2, text
    assert "error: gate: the flow run became Cancelled while it waited for a person" in text
    assert site.registry.aliases() == {}


def test_a_model_that_nobody_looked_at_ends_the_flow_well_and_can_be_approved_later(site: Site):
    evaluated = site.evaluated_run("first")
    text = site.qinglan("run", "release", "--from", evaluated.id, "--set", "gate.approval_timeout_s=20")
    assert "Undecided about the RL student" in text
    with closing(sqlite3.connect(next(site.profile.paths.state.rglob("prefect.db")))) as database:
        states = [name for (name,) in database.execute("SELECT name FROM flow_run_state ORDER BY timestamp")]
    assert states[-3:] == ["Paused", "Running", "Completed"]  # never Failed, of which people would be told
    assert site.registry.aliases() == {}
    assert "champion 1" in site.qinglan("release", "approve", "latest", "--reviewer", "李雷")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """MLflow's server, as `qinglan up` starts it."""
    port = free_port()
    command = up.Site(tmp_path, f"sqlite:///{tmp_path / 'mlflow.db'}", mlflow_port=port).mlflow_server()
    assert command
    env = {**os.environ, **command.env}
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen(command.argv, env=env, stdout=log, stderr=log, start_new_session=True)
    url, said = f"http://127.0.0.1:{port}", (tmp_path / "server.log").read_text
    wait_until("MLflow", lambda: process.poll() is not None or answers(f"{url}/health"), DEADLINE_S, explain=said)
    assert process.poll() is None, said()
    yield url
    process.terminate()
    process.wait(300)


def test_the_registry_works_over_mlflows_server(server: str, tmp_path: Path):
    models = Models(server, "m", tmp_path)
    models.register("one", "two")
    refused = models.registry.register(models.candidate("three", "refuse"))
    models.registry.promote("1")
    models.registry.promote("2")
    assert models.registry.roll_back("slow").version == "1"
    assert models.open().aliases() == {"champion": "1", "previous": "2"}
    assert (refused.version, models.registry.version("3").aliases) == ("3", ())
    champion = models.registry.released("champion")
    assert champion is not None
    shutil.rmtree(champion.folder)
    assert (models.registry.folder(champion) / "model.safetensors").read_text() == "one"
    assert httpx.get(f"{server}/health", trust_env=False).status_code == 200
