"""A working directory with evaluated runs in it, and the command line in that folder."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from qinglan_process import own_environment
from run_stages import end_stage

from qinglan.config import Profile, load_profile
from qinglan.evaluation.evaluating import evaluate
from qinglan.evaluation.red_team import RedTeamResult
from qinglan.recipes.keys import scoring_digest
from qinglan.recipes.query_rewrite import RECIPE
from qinglan.registry import Registry, registry_of
from qinglan.rows import ArmRow, Retrieved, Row
from qinglan.runs.artifacts import Artifact, sha256_of, write_json, write_jsonl
from qinglan.runs.run import Run, finish_run, open_run
from qinglan.simulators.domains.query_rewrite import write_sample

ROWS = 200
SMALL = {"sample_train_rows": 60, "sample_dev_rows": 20, "sample_test_rows": 20}
DEADLINE_S = 900


class Site:
    """A user's working directory with evaluated runs in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / "profile.yaml"
        embedded = Path(__file__).parents[2] / "qinglan" / "configs" / "embedded.yaml"
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
                Row(
                    id=f"{number:04}",
                    tenant=profile.tenant.id,
                    query=f"问{number}",
                    source=f"q!A{number}",
                    gold_id=f"g{number}",
                )
                for number in range(ROWS)
            ]
            folder = run.stage_directory("dataset")
            files = {name: write_jsonl(folder / f"{name}.jsonl", rows) for name in ("test", "rows")}
            self._save(run, "dataset", files, {"scored_with": scoring_digest(run)})
            for stage in ("base_model", "sft", "rl"):
                model = self._model(run, stage, weights)
                details = {
                    "model": str(model.path),
                    "summary": {"steps": 3, "chosen_step": 3},
                    "alarms": [],
                }
                self._save(run, stage, {"model": model}, details)
            self._evaluate(run, rows)
            finish_run(run)
        return run

    def _model(self, run: Run, stage: str, weights: str) -> Artifact:
        folder = run.stage_directory(stage) / "model"
        folder.mkdir()
        (folder / "model.safetensors").write_text(f"{stage} {weights}")
        return Artifact.of(folder)

    def _evaluate(self, run: Run, rows: list[Row]) -> None:
        arms = {"teacher": _arm(rows, 3), "sft": _arm(rows, 4), "rl": _arm(rows, 20)}
        evaluation = evaluate(arms, rows, run.profile.evaluate, RECIPE)
        passed = RedTeamResult(case_id="c", name="n", kind="long", must_pass=True, passed=True)
        evaluation = evaluation.model_copy(update={"red_team": {"rl": [passed]}})
        folder = run.stage_directory("evaluate")
        write_json(folder / "evaluation.json", evaluation.model_dump(mode="json"))
        files = {
            f"arm_{name}": write_jsonl(folder / f"arm_{name}.jsonl", arm)
            for name, arm in arms.items()
        }
        digests = {name: sha256_of(run.directory / name / "model") for name in ("sft", "rl")}
        files["evaluation"] = Artifact.of(folder / "evaluation.json")
        self._save(run, "evaluate", files, {"models": digests})

    def _save(
        self, run: Run, stage: str, artifacts: dict[str, Artifact], details: dict[str, Any]
    ) -> None:
        end_stage(run, stage, key=f"{run.id} {stage}", artifacts=artifacts, details=details)

    def start(self, *words: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "qinglan.cli", *words, "--profile", str(self.path)]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, cwd=self.root, env=own_environment(), **output)

    def qinglan(self, *words: str) -> str:
        process = self.start(*words)
        text, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, text
        return text


def _arm(rows: list[Row], misses: int) -> list[ArmRow]:
    """The answers of an arm that gets every `misses`-th question wrong; a good one is cheap."""
    arm = []
    for number, row in enumerate(rows):
        first_id = "x" if number % misses == 0 else row.gold_id
        arm.append(
            ArmRow(
                row_id=row.id,
                text=f"词 {row.id}",
                retrieved=Retrieved(ids=(first_id,), scores=(0.9,)),
                judge_score=4.0 + number % 2,
                latency_ms=5.0,
                cost_usd=1e-6 if misses > 5 else 1e-3,
            )
        )
    return arm
