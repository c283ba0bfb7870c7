"""Training and evaluation on a dataset that an earlier run made."""

from pathlib import Path

from prefect import flow

from qinglan.flows._stages import train_and_release
from qinglan.tasks.engine import stop_jobs
from qinglan.tasks.forms import Override, ProfileName, TrainChanges, overrides_of
from qinglan.tasks.session import open_session, stages_of


@flow(name="train", flow_run_name="train {profile}", log_prints=True, on_cancellation=[stop_jobs])
def train(
    profile: ProfileName = "embedded",
    changes: TrainChanges = TrainChanges(),
    overrides: tuple[Override, ...] = (),
    fresh: bool = False,
    continue_anyway: bool = False,
    source: str = "",
) -> Path:
    """SFT, RL, evaluation and release; returns the path of report.json.

    Args:
        profile: Name of a file in configs/, or a path.
        changes: Settings of this run; an empty one stays as the profile says.
        overrides: Any other setting, as `dotted.key=value`; docs/reference/configuration.md lists
            them.
        fresh: Compute every stage anew instead of reusing what earlier runs left unchanged.
        continue_anyway: Continue an interrupted SFT or RL from its checkpoint although its code
            changed since; the report says so.
        source: The run whose dataset to use, by its id; the newest pipeline or refresh run if not
            given.
    """
    settings = overrides_of(changes, overrides)
    with open_session(
        profile, settings, "train", fresh=fresh, continue_anyway=continue_anyway, source=source
    ) as session:
        (dataset,) = stages_of(session, ["dataset"])
        return train_and_release(session, dataset, [dataset])
