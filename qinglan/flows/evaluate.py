"""Evaluation of the models that an earlier run trained, and the gate's decision on it."""

from pathlib import Path

from prefect import flow

from qinglan.flows._stages import decide_and_register
from qinglan.tasks.engine import stop_jobs
from qinglan.tasks.evaluate import evaluate_arms
from qinglan.tasks.forms import DecisionChanges, Override, ProfileName, overrides_of
from qinglan.tasks.session import open_session, stages_of


@flow(
    name="evaluate",
    flow_run_name="evaluate {profile}",
    log_prints=True,
    on_cancellation=[stop_jobs],
)
def evaluate(
    profile: ProfileName = "embedded",
    changes: DecisionChanges = DecisionChanges(),
    overrides: tuple[Override, ...] = (),
    fresh: bool = False,
    source: str = "",
) -> Path:
    """All arms on the test split; returns the path of report.json.

    Args:
        profile: Name of a file in configs/, or a path.
        changes: Settings of this run; an empty one stays as the profile says.
        overrides: Any other setting, as `dotted.key=value`; docs/reference/configuration.md lists
            them.
        fresh: Evaluate anew even where nothing changed.
        source: The run whose dataset and models to use, by its id; the newest pipeline or train run
            if not given.
    """
    settings = overrides_of(changes, overrides)
    with open_session(profile, settings, "evaluate", fresh=fresh, source=source) as session:
        dataset, base, sft, rl = stages_of(session, ["dataset", "base_model", "sft", "rl"])
        models = {"base": base, "sft": sft, "rl": rl}
        evaluated = evaluate_arms(session.run, session.services, dataset, models)
        stages = [dataset, base, sft, rl, evaluated]
        return decide_and_register(session, evaluated, dataset, models, stages)
