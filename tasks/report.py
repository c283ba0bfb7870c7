"""The report stage: report.json and report.html."""

from collections.abc import Sequence
from pathlib import Path

from prefect.artifacts import create_markdown_artifact

from qinglan.evaluation.report.html import render_html
from qinglan.evaluation.summary import COMPARING, build_report, result_markdown
from qinglan.runs.artifacts import StageResult
from qinglan.runs.run import Run
from qinglan.tasks.stage import stage_task, tracker_of


@stage_task("report")
def write_report(run: Run, stages: Sequence[StageResult]) -> Path:
    """report.json and report.html, in the run's directory, MLflow and Prefect."""
    report = build_report(run, stages)
    path = run.directory / "report.json"
    artifacts = {"report": report.write(path), "report_html": render_html(report, run.directory / "report.html")}
    tracker = tracker_of(run.profile)
    for name, artifact in artifacts.items():
        tracker.log_artifact(run.mlflow_run_id, name, artifact)
    tracker.log_metrics(run.mlflow_run_id, next((s.metrics for s in stages if s.stage in COMPARING), {}))
    if report.weights:
        tags = {f"weights.{stage}": digest for stage, digest in report.weights.found.items()}
        tracker.set_tags(run.mlflow_run_id, tags)
    text = result_markdown(report) + f"\nPlots and examples: `{run.directory / 'report.html'}`, also in MLflow.\n"
    create_markdown_artifact(text, key="result", description="The result table")
    return path
