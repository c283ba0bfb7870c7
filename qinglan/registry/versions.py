"""A registered version: how a run's stages become one, its tags, and its files in MLflow.

A version's tags hold all of `Released`, so that listing and polling need no download, and MLflow's
page shows them.
"""

import shutil
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal, get_args

from pydantic import BaseModel

from qinglan.config import Profile
from qinglan.data.versions import version_of
from qinglan.errors import ArtifactError, ConfigError
from qinglan.evaluation.models import APPROVAL, Decision, Evaluation, Verdict
from qinglan.evaluation.report.summary import installed_versions
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
"""The stage that made each model, by arm."""
FILES = "release"
"""Folder of a version's files among the artifacts of its MLflow run."""
ADVICE = "or serve another: `qinglan release list`, `qinglan release promote VERSION`"
# Settings of the gate that say who decides, not what a model must fulfil.
_NOT_RULES = {"approval", "approval_timeout_s"}
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_ADAPTER_FILES = (".json", ".jinja", ".txt")


class ModelOrigin(BaseModel, frozen=True, extra="forbid"):
    """The run that made a model, and what it made it of."""

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
    """A model that a run evaluated and the gate decided on, as `release.json` keeps it."""

    model: Artifact
    """The merged weights, as they are served."""
    adapters: dict[str, Path] = {}
    """LoRA adapters on the way to it, by the stage that trained them."""
    profile: str
    tenant: str
    stages: dict[str, str] = {}
    """The run that did each stage's work, by stage."""
    evaluation: Artifact
    gate: dict[str, object] = {}
    decision: Decision
    metrics: dict[str, float] = {}
    engines: dict[str, str] = {}

    @property
    def identity(self) -> str:
        """A digest of model, evaluation and rules; a candidate is registered once for each."""
        return hash_of(self.model.sha256, self.evaluation.sha256, self.gate)

    @property
    def description(self) -> str:
        """The version's text on MLflow's page, in paragraphs."""
        dataset = self.dataset_version or "unknown"
        origin = f"recipe {self.recipe} {self.recipe_version}, dataset version {dataset}"
        paragraphs = [
            self.decision.sentence,
            f"The {self.arm} model of run {self.run_id}, {origin}, from {self.base_model}.",
        ]
        figures = [f"{name} {number(value)}" for name, value in sorted(self.metrics.items())]
        if figures:
            paragraphs.append(f"On the test split: {', '.join(figures)}.")
        return "\n\n".join(paragraphs)


class Released(ModelOrigin):
    """A version of a registered model, and what became of it since."""

    name: str
    version: str
    aliases: tuple[Alias, ...] = ()
    folder: Path
    """The merged weights as they were registered; `Registry.folder` gives a checked folder."""
    sha256: str
    """Digest of that folder, as `qinglan.runs.artifacts.sha256_of` counts it."""
    weights: Weights
    """`mlflow` where the folder can be restored from MLflow."""
    verdict: Verdict
    sentence: str = ""
    created: datetime
    replaced: str = ""
    """The champion before it, set when its promotion begins."""
    promoted_at: str = ""
    """Time of its promotion, set once it is the champion and kept ever after."""
    rolled_back_to: str = ""
    """The version that serves in its place; empty unless it was rolled back."""
    rolled_back_at: str = ""
    withdrawn: str = ""
    settled: str = ""
    """The alias that the run gave which registered it: `champion`, `challenger` or `none`.

    A run decides that once; afterwards people do.
    """
    identity: str = ""
    history: tuple[str, ...] = ()
    """One line for each thing that happened to it since, the oldest first."""

    @property
    def alias_is_decided(self) -> bool:
        """True once it had an alias or was refused one.

        The other tags tell it where the run was killed before it could write `settled`.
        """
        return any((self.settled, self.promoted_at, self.rolled_back_to, self.withdrawn))

    def with_aliases(self, aliases: tuple[Alias, ...]) -> "Released":
        return self.model_copy(update={"aliases": aliases})

    def with_folder(self, folder: Path) -> "Released":
        return self.model_copy(update={"folder": folder})

    @classmethod
    def of_tags(
        cls, name: str, version: str, created: datetime, tags: Mapping[str, str]
    ) -> "Released":
        """Read a version from its tags; tags that others have set are left out."""
        schema_version = tags.get(KEY, "1")
        # MLflow keeps tags as text; `check_version` expects the number that files have.
        number = int(schema_version) if schema_version.isdigit() else schema_version
        checked = check_version({**tags, KEY: number}, f"release {version} of {name}")
        fields = {key: checked[key] for key in cls.model_fields if key in checked}
        lines = checked.get("history", "").split("\n")
        fields["history"] = tuple(line for line in lines if line)
        return cls.model_validate(fields | {"name": name, "version": version, "created": created})


def candidate_of(
    run: Run,
    decision: Decision,
    evaluated: StageResult,
    dataset: StageResult,
    models: Models,
    mlflow_run_id: str,
) -> Candidate:
    """The model that the gate decided on, with all that it was made of."""
    profile = run.profile
    arm = decision.challenger
    recipe = recipe_key(profile.recipe)
    evaluation = evaluated.load("evaluation", Evaluation)
    base_model = profile.student.base_model
    if "base" in models:
        base_model = str(models["base"].details["model"])
    metrics = evaluation.arms[arm].figures if arm in evaluation.arms else {}
    return Candidate(
        arm=arm,
        model=challenger_of(models, arm).artifacts["model"],
        adapters=_adapters(profile, models, arm),
        base_model=base_model,
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
        metrics=metrics,
        engines=installed_versions(),
    )


def _adapters(profile: Profile, models: Models, arm: str) -> dict[str, Path]:
    """The adapters that were trained on the way to an arm's model, by stage."""
    stages: list[str] = []
    if arm == "sft":
        stages = ["sft"]
    elif arm == "rl":
        stages = ["sft", "rl"] if profile.rl.start_from == "sft" else ["rl"]
    adapters: dict[str, Path] = {}
    for stage in stages:
        if stage in models and "adapter" in models[stage].artifacts:
            adapters[stage] = models[stage].path("adapter")
    return adapters


def challenger_of(models: Models, arm: str) -> StageResult:
    """The stage that made the model which is to be released.

    Raises:
        ConfigError: no stage left a folder of this arm.
    """
    result = models.get(arm)
    if result is None or "model" not in result.artifacts:
        arms = [name for name, stage in models.items() if "model" in stage.artifacts]
        trained = ", ".join(arms) or "none"
        problem = "this run has no such model that could be released"
        raise ConfigError(f"gate.challenger or gate.fallback = {arm}: {problem}; it has {trained}")
    return result


def tags_of(candidate: Candidate, weights: Weights) -> dict[str, str]:
    tags: dict[str, str] = candidate.model_dump(
        include={*ModelOrigin.model_fields, "profile", "tenant"}
    )
    tags["folder"] = str(candidate.model.path)
    tags["sha256"] = candidate.model.sha256
    tags["weights"] = weights
    tags["identity"] = candidate.identity
    tags[KEY] = str(SCHEMA_VERSION)
    tags.update(decision_tags(candidate.decision))
    return tags


def decision_tags(decision: Decision) -> dict[str, str]:
    reasons: list[str] = []
    for rule in decision.rules:
        if rule.outcome != "pass":
            reason = rule.reason or rule.found
            reasons.append(f"{rule.name}: {reason.render()}")
    tags: dict[str, str] = {
        "verdict": decision.verdict,
        "sentence": decision.sentence,
        "reasons": "; ".join(reasons),
    }
    for rule in decision.rules:
        if rule.name == APPROVAL:
            tags[APPROVAL] = rule.found.render()
    return tags


def prompt_digest(profile: Profile) -> str:
    """Digest of a fixed question as the student is asked it.

    It is equal where training and serving render prompts alike.
    """
    query = "这个怎么吃"
    about_user = "女，56岁"
    history = "用户问过鱼油"
    tenant = profile.tenant
    recipe = get_recipe(profile.recipe)
    row = Row(
        id=row_id(tenant.id, query, about_user, history),
        tenant=tenant.id,
        query=query,
        profile=about_user,
        history=history,
        inputs=placeholders(recipe.INPUTS, query),
        source="prompt",
    )
    return hash_of(recipe.student_messages(row, tenant))


def log_files(client: "MlflowClient", candidate: Candidate, max_bytes: float) -> Weights:
    """Hand MLflow the model and its adapters; a model larger than `max_bytes` without weights."""
    folder = candidate.model.verify()
    run_id = candidate.mlflow_run_id
    files = [path for path in folder.rglob("*") if path.is_file()]
    is_small = sum(path.stat().st_size for path in files) <= max_bytes
    for path in files:
        if is_small or path.suffix not in _WEIGHTS:
            place = PurePosixPath(FILES, "model", path.parent.relative_to(folder))
            client.log_artifact(run_id, str(path), str(place))
    for stage, adapter in candidate.adapters.items():
        for path in _adapter_files(adapter):
            client.log_artifact(run_id, str(path), f"{FILES}/adapters/{stage}")
    client.log_dict(run_id, dump_record(candidate), f"{FILES}/release.json")
    return "mlflow" if is_small else "path"


def _adapter_files(checkpoint: Path) -> Iterator[Path]:
    # The optimizer's state lies beside the adapter in a checkpoint, and is not needed any more.
    for path in checkpoint.iterdir():
        is_adapter = path.name.startswith("adapter_") or path.suffix in _ADAPTER_FILES
        if path.is_file() and is_adapter:
            yield path


def restore(client: "MlflowClient", released: Released, target: Path) -> None:
    """Fetch the merged weights into `target`, whole or not at all."""
    partial = target.with_name(f".partial-{released.version}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    # The folder below `partial` depends on the kind of MLflow's artifact store.
    download = client.download_artifacts(released.mlflow_run_id, f"{FILES}/model", str(partial))
    weights = Path(download)
    if sha256_of(weights) != released.sha256:
        problem = f"what MLflow has of run {released.mlflow_run_id} is not what was registered"
        where = f"release {released.version} of {released.name}"
        raise ArtifactError(f"{where}: {problem}; put {released.folder} back, {ADVICE}")
    shutil.rmtree(target, ignore_errors=True)
    weights.rename(target)
    shutil.rmtree(partial, ignore_errors=True)
