"""The stages that several flows have in common, in their order."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qinglan.rows import ArmName
from qinglan.runs.artifacts import StageResult
from qinglan.tasks.base_model import prepare_base_model
from qinglan.tasks.dataset import build_dataset
from qinglan.tasks.distill import distill_rows
from qinglan.tasks.evaluate import evaluate_arms
from qinglan.tasks.extract import with_extracted
from qinglan.tasks.gate import decide_release
from qinglan.tasks.ingest import ingest_workbook
from qinglan.tasks.publish import note_training, publish_dataset
from qinglan.tasks.register import register_model
from qinglan.tasks.report import reported_without_dataset, write_report
from qinglan.tasks.rl import train_rl
from qinglan.tasks.select import select_rows
from qinglan.tasks.session import Session
from qinglan.tasks.sft import require_enough_rows, train_sft
from qinglan.tasks.validate import validate_rows


@dataclass(frozen=True)
class PreparedData:
    """The dataset that a run made, and the stages that made it."""

    dataset: StageResult
    published: StageResult
    stages: list[StageResult]
    """All of them in their order, `dataset` and `published` last."""


def prepare_data(session: Session) -> PreparedData:
    """Workbook → teacher → RAG → selection → dataset, published as a version."""
    run = session.run
    services = session.services
    ingested = ingest_workbook(run, session.workbook)
    read_stages = with_extracted(run, services, ingested)
    distilled = distill_rows(run, services, read_stages[-1])
    validated = validate_rows(run, services, distilled)
    selected = select_rows(run, validated)
    stages = [*read_stages, distilled, validated, selected]
    with reported_without_dataset(run, stages):
        dataset = build_dataset(run, selected)
    published = publish_dataset(run, dataset)
    return PreparedData(dataset, published, [*stages, dataset, published])


def train_and_release(
    session: Session, dataset: StageResult, data_stages: list[StageResult]
) -> Path:
    """The stages from the base model to the registry; the path of the report of all stages."""
    run = session.run
    require_enough_rows(run, dataset)
    base = prepare_base_model(run)
    sft = train_sft(run, dataset, base)
    rl = train_rl(run, session.services, dataset, base, sft)
    note_training(run, dataset)
    models = {"base": base, "sft": sft, "rl": rl}
    evaluated = evaluate_arms(run, session.services, dataset, models)
    stages = [*data_stages, base, sft, rl, evaluated]
    return decide_and_register(session, evaluated, dataset, models, stages)


def decide_and_register(
    session: Session,
    evaluated: StageResult,
    dataset: StageResult,
    models: Mapping[ArmName, StageResult],
    stages: list[StageResult],
) -> Path:
    """The gate and the registry; the path of the report of all stages."""
    run = session.run
    gated = decide_release(run, evaluated, dataset, models)
    registered = register_model(run, gated, evaluated, dataset, models)
    return write_report(run, [*stages, gated, registered])
