"""The data stages alone: workbook → teacher → RAG → selection → dataset, published as a version."""

from pathlib import Path

from prefect import flow

from qinglan.tasks.dataset import build_dataset
from qinglan.tasks.distill import distill_rows
from qinglan.tasks.engine import stop_jobs
from qinglan.tasks.extract import with_extracted
from qinglan.tasks.forms import Override, ProfileName, RefreshChanges, overrides_of
from qinglan.tasks.ingest import ingest_workbook
from qinglan.tasks.publish import publish_dataset
from qinglan.tasks.report import reported_without_dataset, write_report
from qinglan.tasks.select import select_rows
from qinglan.tasks.session import open_session, skip_if_running
from qinglan.tasks.trigger_training import trigger_training
from qinglan.tasks.validate import validate_rows


@flow(
    name="refresh", flow_run_name="refresh {profile}", log_prints=True, on_cancellation=[stop_jobs]
)
@skip_if_running
def refresh(
    profile: ProfileName = "embedded",
    changes: RefreshChanges = RefreshChanges(),
    overrides: tuple[Override, ...] = (),
    fresh: bool = False,
) -> Path:
    """Make a dataset of a workbook; returns the path of report.json.

    Args:
        profile: Name of a file in configs/, or a path.
        changes: Settings of this run; an empty one stays as the profile says.
        overrides: Any other setting, as `dotted.key=value`; docs/reference/configuration.md lists
            them.
        fresh: Compute every stage anew instead of reusing what earlier runs left unchanged.
    """
    with open_session(profile, overrides_of(changes, overrides), "refresh", fresh=fresh) as session:
        run, services = session.run, session.services
        read = with_extracted(run, services, ingest_workbook(run, session.workbook))
        distilled = distill_rows(run, services, read[-1])
        validated = validate_rows(run, services, distilled)
        selected = select_rows(run, validated)
        with reported_without_dataset(run, [*read, distilled, validated, selected]):
            dataset = build_dataset(run, selected)
        published = publish_dataset(run, dataset)
        report = write_report(run, [*read, distilled, validated, selected, dataset, published])
        trigger_training(run, published)
        return report
