"""The publish stage: keeps a dataset as an immutable version."""

from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger

from qinglan.data import versions
from qinglan.data.versions.card import Card
from qinglan.data.versions.card_markdown import card_markdown
from qinglan.runs.artifacts import Artifact, StageResult
from qinglan.runs.run import Run
from qinglan.tasks.stage import Outcome, Stage, perform, stage_task, tracker_of


@stage_task("publish")
def publish_dataset(run: Run, dataset: StageResult) -> StageResult:
    """Keep the dataset as an immutable version with its data card; the same content again is the
    same version."""
    profile = run.profile

    def work(stage: Stage) -> Outcome:
        known = {name: dataset.details[name] for name in ("inputs", "pins", "augmented")}
        version = versions.publish(profile, dataset.run_id, dataset.artifacts, **known)
        _log_dataset(stage.run, stage.mlflow_run_id, version, "published")
        stage.say(f"version {version.id} in {version.directory}")
        if version.drift:
            log = get_run_logger()
            (log.warning if version.drift.warnings else log.info)(
                "publish: %s", version.drift.sentence
            )
        sides = {"new": version.drift.arrivals, "all": version.drift.whole} if version.drift else {}
        metrics = {
            f"drift_{side}/{name}": d.excess
            for side, s in sides.items()
            for name, d in s.distances.items()
        }
        files = {
            "version": versions.VERSION_FILE,
            "card": versions.CARD,
            "card_data": versions.CARD_DATA,
        }
        artifacts = {name: Artifact.of(version.directory / file) for name, file in files.items()}
        details = {"version": version.id, "parent": version.parent}
        return Outcome(dataset.rows_out, dataset.rows_out, {}, artifacts, metrics, details)

    depends_on = {
        "files": {name: artifact.sha256 for name, artifact in dataset.artifacts.items()},
        "folder": str(versions.tenant_folder(profile)),
    }
    published = perform(run, "publish", depends_on, work)
    version = versions.Version.read(published.path("version").parent)
    _log_dataset(run, run.mlflow_run_id, version, "published")
    card = published.load("card_data", Card).model_copy(
        update={"examples": []}
    )  # they quote people
    create_markdown_artifact(
        card_markdown(card), key="data-card", description=f"Dataset version {version.id}"
    )
    return published


@stage_task("note-training")
def note_training(run: Run, dataset: StageResult) -> None:
    """Remember which dataset version this run trained on: from now on, new rows count from
    there."""
    version_id = versions.version_of(run.profile, dataset.artifacts)
    versions.note_training(run.profile, version_id, run.id)
    directory = versions.tenant_folder(run.profile) / version_id
    if (directory / versions.VERSION_FILE).exists():
        _log_dataset(run, run.mlflow_run_id, versions.Version.read(directory), "training")


def _log_dataset(run: Run, mlflow_run_id: str, version: versions.Version, context: str) -> None:
    tracker_of(run.profile).log_dataset(
        mlflow_run_id, version.tenant, version.id, version.directory, context, version.counts
    )
