"""The register stage: keeps the challenger in the registry."""

from collections.abc import Mapping

from prefect.logging import get_run_logger

from qinglan.evaluation.models import Decision
from qinglan.registry import registry_of
from qinglan.registry.versions import candidate_of, challenger_of
from qinglan.rows import ArmName
from qinglan.runs.artifacts import StageResult, json_artifact
from qinglan.runs.run import Run
from qinglan.tasks.stage import Outcome, Stage, perform, stage_task, tracker_of


@stage_task("register")
def register_model(
    run: Run,
    gated: StageResult,
    evaluated: StageResult,
    dataset: StageResult,
    models: Mapping[ArmName, StageResult],
) -> StageResult:
    """Keep the challenger in the registry, whatever was decided; if it passed, it gets its alias
    there."""
    profile = run.profile
    decision = gated.load("decision", Decision)
    registry = registry_of(profile)

    def work(stage: Stage) -> Outcome:
        candidate = candidate_of(run, decision, evaluated, dataset, models, stage.mlflow_run_id)
        version = registry.register(candidate).version
        released = registry.assign_alias(version, profile.release.promote, decision.champion)
        aliases = ", ".join(released.aliases) or f"no alias, the gate said {decision.verdict}"
        stage.say(f"version {released.version} of {registry.name} ({aliases})")
        if decision.verdict == "promote" and not released.aliases and released.history:
            last_event = released.history[-1]
            get_run_logger().warning("register: version %s: %s", released.version, last_event)
        content = released.model_dump(mode="json")
        artifact = json_artifact(stage.directory / "released.json", content)
        return Outcome(artifacts={"released": artifact}, details={"released": content})

    depends_on = {
        # Never taken over from another run: registering the same again changes nothing, and shows
        # where it stands.
        "run": run.id,
        "decision_sha256": gated.artifacts["decision"].sha256,
        "model_sha256": challenger_of(models, decision.challenger).artifacts["model"].sha256,
        "registry": registry.name,
        "tracking_uri": profile.tracking_uri,
        "release": profile.release.model_dump(mode="json"),
    }
    registered = perform(run, "register", depends_on, work)
    released = registered.details["released"]
    tags = {
        "release": f"{released['name']}/{released['version']}",
        "release.aliases": ", ".join(released["aliases"]),
    }
    tracker_of(run.profile).set_tags(run.mlflow_run_id, tags)
    return registered
