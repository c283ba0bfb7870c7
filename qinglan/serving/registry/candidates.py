"""From a run's stages to what the gate weighs and the registry keeps."""

from collections.abc import Mapping
from typing import Any

from qinglan.config import Profile
from qinglan.data.versions import version_of
from qinglan.errors import ConfigError
from qinglan.evaluation.gate import CHAMPION, alarms_about
from qinglan.evaluation.models import Decision, Evaluation
from qinglan.evaluation.summary import installed_versions
from qinglan.recipes import recipe_key
from qinglan.runs.artifacts import StageResult
from qinglan.runs.run import Run
from qinglan.serving.registry.versions import Candidate, Released, prompt_digest
from qinglan.training.alarms import Alarm

Models = Mapping[str, StageResult]
"""By arm, the stage that made the model."""
_NOT_RULES = {"approval", "approval_timeout_s"}


def candidate_of(
    run: Run, decision: Decision, evaluated: StageResult, dataset: StageResult, models: Models, mlflow_run_id: str
) -> Candidate:
    profile, arm = run.profile, decision.challenger
    recipe = recipe_key(profile.recipe)
    evaluation = evaluated.load("evaluation", Evaluation)
    through = {"sft": ["sft"], "rl": ["sft", "rl"] if profile.rl.start_from == "sft" else ["rl"]}.get(arm, [])
    return Candidate(
        arm=arm,
        model=challenger_of(profile, models).artifacts["model"],
        adapters={
            stage: models[stage].path("adapter")
            for stage in through
            if stage in models and "adapter" in models[stage].artifacts
        },
        base_model=str(models["base"].details["model"]) if "base" in models else profile.student.base_model,
        profile=profile.name,
        tenant=profile.tenant.id,
        recipe=recipe["recipe"],
        recipe_version=recipe["version"],
        prompt_sha256=prompt_digest(profile),
        dataset_version=version_of(dataset.artifacts),
        run_id=run.id,
        mlflow_run_id=mlflow_run_id,
        stages={result.stage: result.run_id for result in (dataset, *models.values(), evaluated)},
        evaluation=evaluated.artifacts["evaluation"],
        gate=profile.gate.model_dump(mode="json", exclude=_NOT_RULES),
        decision=decision,
        metrics=evaluation.arms[arm].figures if arm in evaluation.arms else {},
        engines=installed_versions(),
    )


def challenger_of(profile: Profile, models: Models) -> StageResult:
    """The stage that made the model which is to be released; raises `ConfigError` where none left a folder."""
    arm = profile.gate.challenger
    result = models.get(arm)
    if result is None or "model" not in result.artifacts:
        trained = ", ".join(name for name, each in models.items() if "model" in each.artifacts) or "none"
        raise ConfigError(
            f"gate.challenger = {arm}: this run has no such model that could be released; it has {trained}"
        )
    return result


def alarms_of(profile: Profile, models: Models) -> list[Alarm]:
    """Those that speak of the challenger: of RL, up to the step that was chosen."""
    result = models.get(profile.gate.challenger)
    found = [Alarm.model_validate(alarm) for alarm in result.details.get("alarms", [])] if result else []
    chosen: int | None = result.details.get("summary", {}).get("chosen_step") if result else None
    return found if chosen is None else alarms_about(found, chosen, profile.rl.alarms.window_steps)


def beside_champion(
    evaluation: Evaluation, identities: Mapping[str, str], champion: Released | None, challenger: str
) -> tuple[Evaluation, str | None]:
    """The evaluation with the champion under its own name, and its version; None where there is nothing to replace.

    An evaluation leaves the champion out where a model of the run has the same digest; here that one stands for it.
    """
    if champion is None or identities.get(challenger) == champion.sha256:
        return evaluation, None
    mine = next((arm for arm, sha256 in identities.items() if sha256 == champion.sha256), None)
    if mine == CHAMPION:
        return evaluation, champion.version
    # One that was evaluated as the champion is it no longer.
    kept = [each for each in evaluation.comparisons if CHAMPION not in (each.a, each.b)]
    named = [each.model_copy(update={"b": CHAMPION}) for each in kept if mine is not None and each.b == mine]
    return evaluation.model_copy(update={"comparisons": kept + named}), champion.version


def identities_of(evaluated: StageResult) -> dict[str, str]:
    found: dict[str, Any] = evaluated.details.get("models", {})
    return {arm: str(digest) for arm, digest in found.items()}
