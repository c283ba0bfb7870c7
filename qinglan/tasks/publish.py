"""The publish stage: keeps a dataset as an immutable version."""

from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger

from qinglan.data import versions
from qinglan.data.versions.card import Card
from qinglan.data.versions.card_markdown import card_markdown
from qinglan.data.versions.drift import Drift
from qinglan.runs.artifacts import Artifact, StageResult
from qinglan.runs.run import Run
from qinglan.tasks.stage import Outcome, Stage, perform, stage_task, tracker_of


@stage_task("publish")
def publish_dataset(run: Run, dataset: StageResult) -> StageResult:
    """Keep the dataset as an immutable version with its data card.

    The same content again is the same version.
    """
    profile = run.profile

    def work(stage: Stage) -> Outcome:
        version = versions.publish(
            profile,
            dataset.run_id,
            dataset.artifacts,
            inputs=dataset.details["inputs"],
            pins=dataset.details["pins"],
            augmented=dataset.details["augmented"],
        )
        _log_dataset(stage.run, stage.mlflow_run_id, version, "published")
        stage.say(f"version {version.id} in {version.directory}")
        metrics: dict[str, float] = {}
        if version.drift:
            _log_drift(version.drift)
            metrics = _drift_metrics(version.drift)
        directory = version.directory
        return Outcome(
            rows_in=dataset.rows_out,
            rows_out=dataset.rows_out,
            artifacts={
                "version": Artifact.of(directory / versions.VERSION_FILE),
                "card": Artifact.of(directory / versions.CARD),
                "card_data": Artifact.of(directory / versions.CARD_DATA),
            },
            metrics=metrics,
            details={"version": version.id, "parent": version.parent},
        )

    depends_on = {
        "files": {name: artifact.sha256 for name, artifact in dataset.artifacts.items()},
        "folder": str(versions.tenant_folder(profile)),
    }
    published = perform(run, "publish", depends_on, work)
    # Also where the stage was reused: each run shows the version of its rows.
    version = versions.Version.read(published.path("version").parent)
    _log_dataset(run, run.mlflow_run_id, version, "published")
    # The examples quote people.
    card = published.load("card_data", Card).model_copy(update={"examples": []})
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


def _log_drift(drift: Drift) -> None:
    log = get_run_logger()
    write = log.warning if drift.warnings else log.info
    write("publish: %s", drift.sentence)


def _drift_metrics(drift: Drift) -> dict[str, float]:
    """Each distance beyond chance, of the new rows and of all rows."""
    metrics: dict[str, float] = {}
    for side, shift in (("new", drift.arrivals), ("all", drift.whole)):
        for name, distance in shift.distances.items():
            metrics[f"drift_{side}/{name}"] = distance.excess
    return metrics


def _log_dataset(run: Run, mlflow_run_id: str, version: versions.Version, context: str) -> None:
    tracker_of(run.profile).log_dataset(
        mlflow_run_id, version.tenant, version.id, version.directory, context, version.counts
    )
