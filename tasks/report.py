"""The report stage: report.json and report.html."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from prefect.artifacts import create_markdown_artifact

from qinglan.data.dataset.thresholds import findings_of
from qinglan.errors import StageError
from qinglan.evaluation.report.html import render_html
from qinglan.evaluation.report.summary import COMPARING, build_report, result_markdown
from qinglan.evaluation.targets import target_findings
from qinglan.recipes import get_recipe
from qinglan.runs.artifacts import StageResult
from qinglan.runs.run import Run
from qinglan.tasks.stage import stage_task, tracker_of


@contextmanager
def reported_without_dataset(run: Run, stages: Sequence[StageResult]) -> Iterator[None]:
    """Where too few rows may teach, the run ends, with a report of what was found and paid for
    until then."""
    try:
        yield
    except StageError as error:
        error.report = write_report(run, stages)
        raise


@stage_task("report")
def write_report(run: Run, stages: Sequence[StageResult]) -> Path:
    """report.json and report.html, in the run's directory, MLflow and Prefect."""
    report = build_report(run, stages)
    found = findings_of(stages, get_recipe(run.profile.recipe), run.profile)
    found += target_findings(report, run.profile)
    report = report.model_copy(update={"findings": [*report.findings, *found]})
    path = run.directory / "report.json"
    artifacts = {
        "report": report.write(path),
        "report_html": render_html(report, run.directory / "report.html"),
    }
    tracker = tracker_of(run.profile)
    for name, artifact in artifacts.items():
        tracker.log_artifact(run.mlflow_run_id, name, artifact)
    tracker.log_metrics(
        run.mlflow_run_id, next((s.metrics for s in stages if s.stage in COMPARING), {})
    )
    if report.weights:
        tags = {f"weights.{stage}": digest for stage, digest in report.weights.found.items()}
        tracker.set_tags(run.mlflow_run_id, tags)
    in_mlflow = ", also in MLflow" if run.profile.tracking.rows == "copy" else ""
    text = (
        result_markdown(report)
        + f"\nPlots and examples: `{run.directory / 'report.html'}`{in_mlflow}.\n"
    )
    create_markdown_artifact(text, key="result", description="The result table")
    return path
