"""A registered model for tests: MLflow on SQLite, and candidates made up for it."""

from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from qinglan.config import Tracking
from qinglan.evaluation.models import Decision, Rule, Verdict
from qinglan.evaluation.reasons import reason
from qinglan.registry import Candidate, Registry
from qinglan.runs.artifacts import Artifact, write_json
from qinglan.runs.tracking import Tracker

BLOCKED = Rule(
    name="cost",
    outcome="fail",
    found=reason("cost_beside_teacher", cost=0.9, ratio=0.9, teacher=1.0),
    required=reason("cost_at_most", ratio=0.5),
    reason=reason("cost_too_high", ratio=0.9),
)


class Models:
    """One registered model in a database."""

    def __init__(self, uri: str, name: str, folder: Path) -> None:
        self.uri = uri
        self.name = name
        self.folder = folder
        self.client = MlflowClient(uri)
        self.tracker = Tracker(uri, Tracking(uri=uri, experiment=name), folder)
        self.registry = self.open()

    def open(self, **how: Any) -> Registry:
        return Registry(self.uri, self.name, self.folder / "state", **how)

    def candidate(
        self,
        weights: str = "one",
        verdict: Verdict = "promote",
        seed: int | None = None,
        **fields: Any,
    ) -> Candidate:
        """A made-up candidate; another `seed` stands for another evaluation of the same weights."""
        model = self.folder / f"model-{weights}"
        model.mkdir(exist_ok=True)
        (model / "model.safetensors").write_text(weights)
        (model / "tokenizer.json").write_text("{}")
        evaluation = self.folder / "evaluation.json"
        seeds = {} if seed is None else {"p": seed}
        write_json(evaluation, {"arms": weights, **seeds})
        rules = [] if verdict == "promote" else [BLOCKED]
        defaults: dict[str, Any] = {
            "arm": "rl",
            "model": Artifact.of(model),
            "base_model": "qwen",
            "profile": "p",
            "tenant": "t",
            "recipe": "query_rewrite",
            "recipe_version": "2",
            "prompt_sha256": "abc",
            "dataset_version": "d1",
            "run_id": "run-1",
            "mlflow_run_id": self.tracker.start_run("register", {}),
            "evaluation": Artifact.of(evaluation),
            "decision": Decision(verdict=verdict, challenger="rl", rules=rules),
            "metrics": {"top1": 0.9},
        }
        return Candidate(**defaults | fields)

    def register(self, *weights: str) -> list[str]:
        return [self.registry.register(self.candidate(model)).version for model in weights]

    def promote(self, *weights: str) -> None:
        """Register each and make it the champion, one after the other."""
        for version in self.register(*weights):
            self.registry.promote(version)
