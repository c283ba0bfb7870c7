"""The gate and the registry alone, for a run that is evaluated: after a rule was changed, or an
approval missed."""

from pathlib import Path

from prefect import flow

from qinglan.flows._stages import decide_and_register
from qinglan.tasks.engine import stop_jobs
from qinglan.tasks.forms import DecisionChanges, Override, ProfileName, overrides_of
from qinglan.tasks.session import open_session, stages_of


@flow(
    name="release", flow_run_name="release {profile}", log_prints=True, on_cancellation=[stop_jobs]
)
def release(
    profile: ProfileName = "embedded",
    changes: DecisionChanges = DecisionChanges(),
    overrides: tuple[Override, ...] = (),
    fresh: bool = False,
    source: str = "",
) -> Path:
    """Decide on the challenger of an evaluated run and register it.

    Returns the path of report.json.

    Args:
        profile: Name of a file in configs/, or a path.
        changes: Settings of this run; an empty one stays as the profile says.
        overrides: Any other setting, as `dotted.key=value`; docs/reference/configuration.md lists
            them.
        fresh: Decide anew even where nothing changed.
        source: The run whose evaluation to use, by its id; the newest pipeline, train or evaluate
            run if not given.
    """
    with open_session(
        profile, overrides_of(changes, overrides), "release", fresh=fresh, source=source
    ) as session:
        stages = stages_of(session, ["dataset", "base_model", "sft", "rl", "evaluate"])
        dataset, base, sft, rl, evaluated = stages
        models = {"base": base, "sft": sft, "rl": rl}
        return decide_and_register(session, evaluated, dataset, models, stages)
