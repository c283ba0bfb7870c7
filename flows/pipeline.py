"""All stages: workbook → teacher → RAG → selection → SFT → RL → evaluation → gate → registry →
report."""

from pathlib import Path

from prefect import flow

from qinglan.flows.train import train_and_release
from qinglan.tasks.dataset import build_dataset
from qinglan.tasks.distill import distill_rows
from qinglan.tasks.engine import stop_jobs
from qinglan.tasks.extract import with_extracted
from qinglan.tasks.forms import Override, PipelineChanges, ProfileName, overrides_of
from qinglan.tasks.ingest import ingest_workbook
from qinglan.tasks.publish import publish_dataset
from qinglan.tasks.report import reported_without_dataset
from qinglan.tasks.select import select_rows
from qinglan.tasks.session import open_session
from qinglan.tasks.validate import validate_rows


@flow(
    name="pipeline",
    flow_run_name="pipeline {profile}",
    log_prints=True,
    on_cancellation=[stop_jobs],
)
def pipeline(
    profile: ProfileName = "embedded",
    changes: PipelineChanges = PipelineChanges(),
    overrides: tuple[Override, ...] = (),
    fresh: bool = False,
    continue_anyway: bool = False,
) -> Path:
    """Run every stage; returns the path of report.json.

    Args:
        profile: Name of a file in configs/, or a path.
        changes: Settings of this run; an empty one stays as the profile says.
        overrides: Any other setting, as `dotted.key=value`; docs/reference/configuration.md lists
            them.
        fresh: Compute every stage anew instead of reusing what earlier runs left unchanged.
        continue_anyway: Continue an interrupted SFT or RL from its checkpoint although its code
            changed since; the report says so.
    """
    settings = overrides_of(changes, overrides)
    with open_session(
        profile, settings, "pipeline", fresh=fresh, continue_anyway=continue_anyway
    ) as session:
        run, services = session.run, session.services
        read = with_extracted(run, services, ingest_workbook(run, session.workbook))
        distilled = distill_rows(run, services, read[-1])
        validated = validate_rows(run, services, distilled)
        selected = select_rows(run, validated)
        with reported_without_dataset(run, [*read, distilled, validated, selected]):
            dataset = build_dataset(run, selected)
        published = publish_dataset(run, dataset)
        return train_and_release(
            session, dataset, [*read, distilled, validated, selected, dataset, published]
        )
