"""All stages, from the workbook to a released model and the report."""

from pathlib import Path

from prefect import flow

from qinglan.flows._stages import prepare_data, train_and_release
from qinglan.tasks.engine import stop_jobs
from qinglan.tasks.forms import Override, PipelineChanges, ProfileName, overrides_of
from qinglan.tasks.session import open_session


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
        data = prepare_data(session)
        return train_and_release(session, data.dataset, data.stages)
