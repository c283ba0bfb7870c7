"""The data stages alone: workbook → teacher → RAG → selection → dataset, published as a version."""

from pathlib import Path

from prefect import flow

from qinglan.flows._stages import prepare_data
from qinglan.tasks.engine import stop_jobs
from qinglan.tasks.forms import Override, ProfileName, RefreshChanges, overrides_of
from qinglan.tasks.report import write_report
from qinglan.tasks.session import open_session, skip_if_running
from qinglan.tasks.trigger_training import trigger_training


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
        data = prepare_data(session)
        report = write_report(session.run, data.stages)
        trigger_training(session.run, data.published)
        return report
