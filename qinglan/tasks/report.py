"""The report stage: report.json and report.html."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from prefect.artifacts import create_markdown_artifact

from qinglan.data.dataset.thresholds import findings_of
from qinglan.errors import StageError
from qinglan.evaluation.models import Report
from qinglan.evaluation.report.html import render_html
from qinglan.evaluation.report.summary import COMPARING, build_report, result_markdown
from qinglan.evaluation.targets import target_findings
from qinglan.recipes import get_recipe
from qinglan.runs.artifacts import StageResult
from qinglan.runs.run import Run
from qinglan.tasks.stage import stage_task, tracker_of


@contextmanager
def reported_without_dataset(run: Run, stages: Sequence[StageResult]) -> Iterator[None]:
    """Write a report before the run ends because too few rows may teach.

    It shows what was found and paid for until then.
    """
    try:
        yield
    except StageError as error:
        # The command shows it with the error.
        error.report = write_report(run, stages)
        raise


@stage_task("report")
def write_report(run: Run, stages: Sequence[StageResult]) -> Path:
    """report.json and report.html, in the run's directory, MLflow and Prefect."""
    report = _build(run, stages)
    path = run.directory / "report.json"
    page = run.directory / "report.html"
    artifacts = {"report": report.write(path), "report_html": render_html(report, page)}
    tracker = tracker_of(run.profile)
    for name, artifact in artifacts.items():
        tracker.log_artifact(run.mlflow_run_id, name, artifact)
    tracker.log_metrics(run.mlflow_run_id, _metrics(stages))
    if report.weights:
        tags = {f"weights.{stage}": digest for stage, digest in report.weights.found.items()}
        tracker.set_tags(run.mlflow_run_id, tags)
    place = f"`{page}`"
    if run.profile.tracking.rows == "copy":
        place += ", also in MLflow"
    text = f"{result_markdown(report)}\nPlots and examples: {place}.\n"
    create_markdown_artifact(text, key="result", description="The result table")
    return path


def _build(run: Run, stages: Sequence[StageResult]) -> Report:
    """The report, with findings about the thresholds and about the targets."""
    report = build_report(run, stages)
    findings = [*report.findings]
    findings += findings_of(stages, get_recipe(run.profile.recipe), run.profile)
    findings += target_findings(report, run.profile)
    return report.model_copy(update={"findings": findings})


def _metrics(stages: Sequence[StageResult]) -> dict[str, float]:
    """The metrics of the stage that compared the arms; none where no such stage ran."""
    for stage in stages:
        if stage.stage in COMPARING:
            return stage.metrics
    return {}
