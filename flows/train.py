"""Training and evaluation on a dataset that an earlier run made."""

from pathlib import Path

from prefect import flow

from qinglan.tasks.engine import stop_jobs
from qinglan.tasks.evaluation import evaluate_arms, write_report
from qinglan.tasks.forms import Override, ProfileName, TrainChanges, overrides_of
from qinglan.tasks.reinforcement import train_rl
from qinglan.tasks.release import decide_release, register_model
from qinglan.tasks.session import open_session, stages_of
from qinglan.tasks.training import prepare_base_model, require_enough_rows, train_sft
from qinglan.tasks.versions import note_training


@flow(name="train", flow_run_name="train {profile}", log_prints=True, on_cancellation=[stop_jobs])
def train(
    profile: ProfileName = "embedded",
    changes: TrainChanges = TrainChanges(),
    overrides: tuple[Override, ...] = (),
    fresh: bool = False,
    source: str = "",
) -> Path:
    """SFT, RL, evaluation and release; returns the path of report.json.

    Args:
        profile: Name of a file in configs/, or a path.
        changes: Settings of this run; an empty one stays as the profile says.
        overrides: Any other setting, as `dotted.key=value`; docs/configuration.md lists them.
        fresh: Compute every stage anew instead of reusing what earlier runs left unchanged.
        source: The run whose dataset to use, by its id; the newest pipeline or refresh run if not given.
    """
    with open_session(profile, overrides_of(changes, overrides), "train", fresh=fresh, source=source) as session:
        run, services = session.run, session.services
        (dataset,) = stages_of(session, ["dataset"])
        require_enough_rows(run, dataset)
        base = prepare_base_model(run)
        sft = train_sft(run, dataset, base)
        rl = train_rl(run, services, dataset, base, sft)
        note_training(run, dataset)
        models = {"base": base, "sft": sft, "rl": rl}
        evaluated = evaluate_arms(run, services, dataset, models)
        gated = decide_release(run, evaluated, dataset, models)
        registered = register_model(run, gated, evaluated, dataset, models)
        return write_report(run, [dataset, base, sft, rl, evaluated, gated, registered])
