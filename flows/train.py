"""Training and evaluation on a dataset that an earlier run made."""

from collections.abc import Sequence
from pathlib import Path

from prefect import flow

from qinglan.runs.artifacts import StageResult
from qinglan.tasks.base_model import prepare_base_model
from qinglan.tasks.engine import stop_jobs
from qinglan.tasks.evaluate import evaluate_arms
from qinglan.tasks.forms import Override, ProfileName, TrainChanges, overrides_of
from qinglan.tasks.gate import decide_release
from qinglan.tasks.publish import note_training
from qinglan.tasks.register import register_model
from qinglan.tasks.report import write_report
from qinglan.tasks.rl import train_rl
from qinglan.tasks.session import Session, open_session, stages_of
from qinglan.tasks.sft import require_enough_rows, train_sft


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


def train_and_release(session: Session, dataset: StageResult, data: Sequence[StageResult]) -> Path:
    """The stages from the base model to the registry, and the report of them and of `data`; that
    report's path."""
    run, services = session.run, session.services
    require_enough_rows(run, dataset)
    base = prepare_base_model(run)
    sft = train_sft(run, dataset, base)
    rl = train_rl(run, services, dataset, base, sft)
    note_training(run, dataset)
    models = {"base": base, "sft": sft, "rl": rl}
    evaluated = evaluate_arms(run, services, dataset, models)
    gated = decide_release(run, evaluated, dataset, models)
    registered = register_model(run, gated, evaluated, dataset, models)
    return write_report(run, [*data, base, sft, rl, evaluated, gated, registered])
