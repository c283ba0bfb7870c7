"""From a run's stages to a candidate, what a registered version is, and its files among those of
its MLflow run.

A version's tags hold all of `Released`, so that listing and polling need no download, and MLflow's
page shows them.
"""

import shutil
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal, get_args

from pydantic import BaseModel

from qinglan.config import Profile
from qinglan.data.versions import version_of
from qinglan.errors import ArtifactError, ConfigError
from qinglan.evaluation.models import APPROVAL, Decision, Evaluation, Verdict
from qinglan.evaluation.summary import installed_versions
from qinglan.recipes import get_recipe, placeholders, recipe_key
from qinglan.rows import Row, row_id
from qinglan.runs.artifacts import Artifact, StageResult, hash_of, sha256_of
from qinglan.runs.run import Run
from qinglan.runs.schema_version import KEY, SCHEMA_VERSION, check_version, dump_record
from qinglan.text import number

if TYPE_CHECKING:
    from mlflow import MlflowClient

Alias = Literal["champion", "challenger", "previous"]
ALIASES: tuple[Alias, ...] = get_args(Alias)
Weights = Literal["mlflow", "path"]
Models = Mapping[str, StageResult]
"""By arm, the stage that made the model."""
FILES = "release"
"""Where a version's files lie among its run's."""
ADVICE = "or serve another: `qinglan release list`, `qinglan release promote VERSION`"
_NOT_RULES = {"approval", "approval_timeout_s"}
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


class ModelOrigin(BaseModel, frozen=True, extra="forbid"):
    """Which run made a model, and of what."""

    arm: str
    base_model: str = ""
    recipe: str
    recipe_version: str
    prompt_sha256: str
    dataset_version: str
    run_id: str
    """The run that decided."""
    mlflow_run_id: str
    """MLflow's run that holds the version's files."""


class Candidate(ModelOrigin):
    """A model that a run evaluated and the gate decided on: `release.json` of its version."""

    model: Artifact
    """The merged weights, as they are served."""
    adapters: dict[str, Path] = {}
    """LoRA adapters on the way to it, by the stage that trained them."""
    profile: str
    tenant: str
    stages: dict[str, str] = {}
    """By stage, the run that did its work."""
    evaluation: Artifact
    gate: dict[str, object] = {}
    decision: Decision
    metrics: dict[str, float] = {}
    engines: dict[str, str] = {}

    @property
    def identity(self) -> str:
        """The same for the same model, evaluation and rules: it is registered once."""
        return hash_of(self.model.sha256, self.evaluation.sha256, self.gate)

    @property
    def description(self) -> str:
        figures = ", ".join(
            f"{name} {number(value)}" for name, value in sorted(self.metrics.items())
        )
        made = f"recipe {self.recipe} {self.recipe_version}, dataset version {self.dataset_version or 'unknown'}"
        parts = [
            self.decision.sentence,
            f"The {self.arm} model of run {self.run_id}, {made}, from {self.base_model}.",
        ]
        return "\n\n".join([*parts, *([f"On the test split: {figures}."] if figures else [])])


class Released(ModelOrigin):
    name: str
    version: str
    aliases: tuple[Alias, ...] = ()
    folder: Path
    """Where the merged weights were when it was registered; `Registry.folder` gives one that is
    checked."""
    sha256: str
    """Of that folder, as `qinglan.runs.artifacts.sha256_of` counts it."""
    weights: Weights
    """`mlflow`: the folder can be restored from there."""
    verdict: Verdict
    sentence: str = ""
    created: datetime
    replaced: str = ""
    """The champion before it, from when its promotion began."""
    promoted_at: str = ""
    """Once it is the champion, and ever after."""
    rolled_back_to: str = ""
    """The version that serves in its place, where it was rolled back."""
    rolled_back_at: str = ""
    withdrawn: str = ""
    settled: str = ""
    """What the run that registered it made of it: `champion`, `challenger` or `none`; done once,
    then people decide."""
    identity: str = ""
    history: tuple[str, ...] = ()
    """What happened to it since, a line each, the oldest first."""

    @property
    def alias_is_decided(self) -> bool:
        """Once it had an alias or got none, also where that run was killed before it could say so
        in `settled`."""
        return any((self.settled, self.promoted_at, self.rolled_back_to, self.withdrawn))

    @classmethod
    def of_tags(
        cls, name: str, version: str, created: datetime, tags: Mapping[str, str]
    ) -> "Released":
        number = tags.get(KEY, "1")
        versioned = {**tags, KEY: int(number) if number.isdigit() else number}
        tags = check_version(versioned, f"release {version} of {name}")
        known = {key: tags[key] for key in cls.model_fields if key in tags and key != "history"}
        history = tuple(line for line in tags.get("history", "").split("\n") if line)
        return cls.model_validate(
            known | {"name": name, "version": version, "created": created, "history": history}
        )


def candidate_of(
    run: Run,
    decision: Decision,
    evaluated: StageResult,
    dataset: StageResult,
    models: Models,
    mlflow_run_id: str,
) -> Candidate:
    profile, arm = run.profile, decision.challenger
    recipe, evaluation = recipe_key(profile.recipe), evaluated.load("evaluation", Evaluation)
    through = {
        "sft": ["sft"],
        "rl": ["sft", "rl"] if profile.rl.start_from == "sft" else ["rl"],
    }.get(arm, [])
    adapted = [
        stage for stage in through if stage in models and "adapter" in models[stage].artifacts
    ]
    return Candidate(
        arm=arm,
        model=challenger_of(models, arm).artifacts["model"],
        adapters={stage: models[stage].path("adapter") for stage in adapted},
        base_model=str(models["base"].details["model"])
        if "base" in models
        else profile.student.base_model,
        profile=profile.name,
        tenant=profile.tenant.id,
        recipe=recipe["recipe"],
        recipe_version=recipe["version"],
        prompt_sha256=prompt_digest(profile),
        dataset_version=version_of(profile, dataset.artifacts),
        run_id=run.id,
        mlflow_run_id=mlflow_run_id,
        stages={result.stage: result.run_id for result in (dataset, *models.values(), evaluated)},
        evaluation=evaluated.artifacts["evaluation"],
        gate=profile.gate.model_dump(mode="json", exclude=_NOT_RULES),
        decision=decision,
        metrics=evaluation.arms[arm].figures if arm in evaluation.arms else {},
        engines=installed_versions(),
    )


def challenger_of(models: Models, arm: str) -> StageResult:
    """The stage that made the model which is to be released; raises `ConfigError` where none left a
    folder."""
    result = models.get(arm)
    if result is None or "model" not in result.artifacts:
        trained = (
            ", ".join(name for name, each in models.items() if "model" in each.artifacts) or "none"
        )
        problem = "this run has no such model that could be released"
        raise ConfigError(f"gate.challenger or gate.fallback = {arm}: {problem}; it has {trained}")
    return result


def tags_of(candidate: Candidate, weights: Weights) -> dict[str, str]:
    origin: dict[str, str] = candidate.model_dump(
        include={*ModelOrigin.model_fields, "profile", "tenant"}
    )
    return origin | {
        "folder": str(candidate.model.path),
        "sha256": candidate.model.sha256,
        "weights": weights,
        "identity": candidate.identity,
        KEY: str(SCHEMA_VERSION),
        **decision_tags(candidate.decision),
    }


def decision_tags(decision: Decision) -> dict[str, str]:
    blocking = [rule for rule in decision.rules if rule.outcome != "pass"]
    reasons = "; ".join(f"{rule.name}: {(rule.reason or rule.found).render()}" for rule in blocking)
    approval = {rule.name: rule.found.render() for rule in decision.rules if rule.name == APPROVAL}
    return {
        "verdict": decision.verdict,
        "sentence": decision.sentence,
        "reasons": reasons,
    } | approval


def prompt_digest(profile: Profile) -> str:
    """Of a fixed question as the student is asked it: equal where training and serving render
    alike."""
    query, about, history = "这个怎么吃", "女，56岁", "用户问过鱼油"
    tenant, recipe = profile.tenant, get_recipe(profile.recipe)
    key, inputs = row_id(tenant.id, query, about, history), placeholders(recipe.INPUTS, query)
    row = Row(
        id=key,
        tenant=tenant.id,
        query=query,
        profile=about,
        history=history,
        inputs=inputs,
        source="prompt",
    )
    return hash_of(recipe.student_messages(row, tenant))


def log_files(client: "MlflowClient", candidate: Candidate, max_bytes: float) -> Weights:
    """Hand MLflow the model and its adapters; of a model larger than `max_bytes` all but the
    weights."""
    folder, run_id = candidate.model.verify(), candidate.mlflow_run_id
    files = [path for path in folder.rglob("*") if path.is_file()]
    whole = sum(path.stat().st_size for path in files) <= max_bytes
    for path in files:
        if whole or path.suffix not in _WEIGHTS:
            place = PurePosixPath(FILES, "model", path.parent.relative_to(folder))
            client.log_artifact(run_id, str(path), str(place))
    for stage, adapter in candidate.adapters.items():
        for path in adapter.iterdir():
            # Not the state of the optimizer, which lies beside the adapter in a checkpoint.
            belongs = path.name.startswith("adapter_") or path.suffix in (".json", ".jinja", ".txt")
            if path.is_file() and belongs:
                client.log_artifact(run_id, str(path), f"{FILES}/adapters/{stage}")
    client.log_dict(run_id, dump_record(candidate), f"{FILES}/release.json")
    return "mlflow" if whole else "path"


def restore(client: "MlflowClient", released: Released, target: Path) -> None:
    """Fetch the merged weights into `target`, whole or not at all."""
    partial = target.with_name(f".partial-{released.version}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    # Where below `partial` depends on the kind of MLflow's artifact store.
    got = Path(client.download_artifacts(released.mlflow_run_id, f"{FILES}/model", str(partial)))
    if sha256_of(got) != released.sha256:
        problem = f"what MLflow has of run {released.mlflow_run_id} is not what was registered"
        where = f"release {released.version} of {released.name}"
        raise ArtifactError(f"{where}: {problem}; put {released.folder} back, {ADVICE}")
    shutil.rmtree(target, ignore_errors=True)
    got.rename(target)
    shutil.rmtree(partial, ignore_errors=True)
