"""The last stages: evaluate the arms on the test split, then write the report."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from qinglan.artifacts import Artifact, StageResult, read_jsonl, write_json, write_jsonl
from qinglan.clients import open_clients, scoring_identity
from qinglan.config import EMBEDDED
from qinglan.embedded.services import Services
from qinglan.engines.generate import generate_commands
from qinglan.evaluation import (
    ArmRow,
    not_retrieved,
    original_rows,
    retrieve_and_judge,
    student_rows,
    teacher_rows,
)
from qinglan.recipes import get_recipe
from qinglan.report import ArmName
from qinglan.report_html import render_html
from qinglan.rows import Row
from qinglan.runs import Run
from qinglan.summary import COMPARING, build_report, evaluate, metrics_of, result_markdown
from tasks.engine import run_engine
from tasks.stage import Outcome, Stage, perform, tracker_of


@task(name="evaluate", task_run_name="evaluate", cache_policy=NO_CACHE)
def evaluate_arms(
    run: Run, services: Services, dataset: StageResult, models: Mapping[ArmName, StageResult]
) -> StageResult:
    """Every arm on the test split: generate, retrieve, judge, compare."""
    profile = run.profile
    live = profile.rag.url != EMBEDDED

    def work(stage: Stage) -> Outcome:
        rows = list(read_jsonl(dataset.path("test"), Row))
        arms: dict[ArmName, list[ArmRow]] = {"original": original_rows(rows), "teacher": teacher_rows(rows)}
        if live and dataset.run_id != run.id:
            arms = {name: not_retrieved(arm) for name, arm in arms.items()}
        arms |= _generate(stage, rows, {name: _folder(result) for name, result in models.items()})
        stage.say(f"retrieving and judging {len(arms)} arms on {len(rows):,} questions")
        arms, calls = asyncio.run(_complete(stage.run, services, arms, rows))
        train = [row for row in read_jsonl(dataset.path("rows"), Row) if row.split == "train" and row.status == "ok"]
        evaluation = evaluate(arms, rows, profile.evaluate, train)
        write_json(stage.directory / "evaluation.json", evaluation.model_dump(mode="json"))
        artifacts = {
            f"arm_{name}": write_jsonl(stage.directory / f"arm_{name}.jsonl", arm) for name, arm in arms.items()
        }
        artifacts["evaluation"] = Artifact.of(stage.directory / "evaluation.json")
        return Outcome(len(rows), len(rows), {}, artifacts, metrics_of(evaluation), {"api": calls})

    depends_on = {
        "test_sha256": dataset.artifacts["test"].sha256,
        "models": {name: _identity(result) for name, result in models.items()},
        "evaluate": profile.evaluate.model_dump(mode="json"),
        "student": profile.student.model_dump(mode="json"),
        "prices": {name: price.model_dump() for name, price in profile.prices.items()},
        **scoring_identity(profile),
        # As in validation: a live service's knowledge base changes unseen.
        "knowledge_base": run.id if live else run.knowledge_base_sha256,
    }
    return perform(run, "evaluate", depends_on, work)


@task(name="report", task_run_name="report", cache_policy=NO_CACHE)
def write_report(run: Run, stages: Sequence[StageResult]) -> Path:
    """report.json and report.html, in the run's directory, MLflow and Prefect."""
    report = build_report(run, stages)
    path = run.directory / "report.json"
    artifacts = {"report": report.write(path), "report_html": render_html(report, run.directory / "report.html")}
    tracker = tracker_of(run.profile)
    for name, artifact in artifacts.items():
        tracker.log_artifact(run.mlflow_run_id, name, artifact)
    tracker.log_metrics(run.mlflow_run_id, next((s.metrics for s in stages if s.stage in COMPARING), {}))
    text = result_markdown(report) + f"\nPlots and examples: `{run.directory / 'report.html'}`, also in MLflow.\n"
    create_markdown_artifact(text, key="result", description="The result table")
    return path


def _generate(stage: Stage, rows: Sequence[Row], folders: Mapping[ArmName, str]) -> dict[ArmName, list[ArmRow]]:
    profile = stage.run.profile
    recipe, price = get_recipe(profile.recipe), profile.prices.get(profile.student.name)
    prompts = stage.directory / "prompts.jsonl"
    write_jsonl(prompts, ({"id": row.id, "messages": recipe.student_messages(row, profile.tenant)} for row in rows))
    stage.say(f"generating with {', '.join(folders)}")
    for number, command in enumerate(generate_commands(profile, folders, prompts, stage.directory), 1):
        run_engine(stage, command, name=f"generation {number}", log="generate.log")
    arms: dict[ArmName, list[ArmRow]] = {}
    for name in folders:
        answers = (stage.directory / f"{name}.answers.jsonl").read_text(encoding="utf-8").splitlines()
        arms[name] = student_rows(answers, price)
    return arms


async def _complete(
    run: Run, services: Services, arms: Mapping[ArmName, Sequence[ArmRow]], rows: Sequence[Row]
) -> tuple[dict[ArmName, list[ArmRow]], dict[str, dict[str, int]]]:
    recipe = get_recipe(run.profile.recipe)
    async with open_clients(run, services, ("judge", "rag")) as clients:
        done: dict[ArmName, list[ArmRow]] = {
            name: await retrieve_and_judge(
                arm, rows, recipe, clients, run.profile.tenant, run.profile.evaluate.max_failed_share
            )
            for name, arm in arms.items()
        }
        return done, clients.call_counts()


def _folder(result: StageResult) -> str:
    return str(result.path("model")) if "model" in result.artifacts else str(result.details["model"])


def _identity(result: StageResult) -> str:
    return result.artifacts["model"].sha256 if "model" in result.artifacts else str(result.details["model"])
