"""All stages: workbook → teacher → RAG → selection → SFT → RL → evaluation → gate → registry → report."""

from pathlib import Path

from prefect import flow

from qinglan.tasks.base_model import prepare_base_model
from qinglan.tasks.dataset import build_dataset
from qinglan.tasks.distill import distill_rows
from qinglan.tasks.engine import stop_jobs
from qinglan.tasks.evaluate import evaluate_arms
from qinglan.tasks.extract import with_extracted
from qinglan.tasks.forms import Override, PipelineChanges, ProfileName, overrides_of
from qinglan.tasks.gate import decide_release
from qinglan.tasks.ingest import ingest_workbook
from qinglan.tasks.publish import note_training, publish_dataset
from qinglan.tasks.register import register_model
from qinglan.tasks.report import reported_without_dataset, write_report
from qinglan.tasks.rl import train_rl
from qinglan.tasks.select import select_rows
from qinglan.tasks.session import open_session
from qinglan.tasks.sft import require_enough_rows, train_sft
from qinglan.tasks.validate import validate_rows


@flow(name="pipeline", flow_run_name="pipeline {profile}", log_prints=True, on_cancellation=[stop_jobs])
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
        overrides: Any other setting, as `dotted.key=value`; docs/reference/configuration.md lists them.
        fresh: Compute every stage anew instead of reusing what earlier runs left unchanged.
        continue_anyway: Continue an interrupted SFT or RL from its checkpoint although its code changed since; the
            report says so.
    """
    settings = overrides_of(changes, overrides)
    with open_session(profile, settings, "pipeline", fresh=fresh, continue_anyway=continue_anyway) as session:
        run, services = session.run, session.services
        read = with_extracted(run, services, ingest_workbook(run, session.workbook))
        distilled = distill_rows(run, services, read[-1])
        validated = validate_rows(run, services, distilled)
        selected = select_rows(run, validated)
        with reported_without_dataset(run, [*read, distilled, validated, selected]):
            dataset = build_dataset(run, selected)
        published = publish_dataset(run, dataset)
        require_enough_rows(run, dataset)
        base = prepare_base_model(run)
        sft = train_sft(run, dataset, base)
        rl = train_rl(run, services, dataset, base, sft)
        note_training(run, dataset)
        models = {"base": base, "sft": sft, "rl": rl}
        evaluated = evaluate_arms(run, services, dataset, models)
        gated = decide_release(run, evaluated, dataset, models)
        registered = register_model(run, gated, evaluated, dataset, models)
        data = [*read, distilled, validated, selected, dataset, published]
        return write_report(run, [*data, base, sft, rl, evaluated, gated, registered])
