"""The last stages: evaluate the arms on the test split, then write the report."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from qinglan.artifacts import Artifact, StageResult, read_jsonl, write_json, write_jsonl
from qinglan.chat import cost_usd
from qinglan.clients import ledger_path, open_clients, scoring_identity
from qinglan.config import EMBEDDED, Evaluate, Price
from qinglan.embedded.services import Services
from qinglan.engines.generate import generate_command
from qinglan.engines.launcher import launch
from qinglan.evaluation import (
    ArmRow,
    Evaluation,
    compare_arms,
    examples,
    original_rows,
    retrieve_and_judge,
    shared_between,
    summarise,
    teacher_rows,
)
from qinglan.formats import latency, number, usd
from qinglan.ledger import open_ledger
from qinglan.recipes import get_recipe
from qinglan.report import (
    Api,
    ArmName,
    PaidCalls,
    RagCalls,
    Report,
    RlTraining,
    Series,
    SftTraining,
    Training,
    render_html,
    stand_ins_of,
    verdict,
)
from qinglan.report import Stage as ReportStage
from qinglan.rows import Row
from qinglan.runs import Run
from tasks.data import call_counts
from tasks.stage import Outcome, Stage, perform, tracker_of

REPORTED_PACKAGES = ("qinglan", "prefect", "mlflow", "ms-swift", "verl", "ray", "torch", "transformers")


@task(name="evaluate", task_run_name="evaluate", cache_policy=NO_CACHE)
def evaluate_arms(
    run: Run, services: Services, dataset: StageResult, models: Mapping[ArmName, StageResult]
) -> StageResult:
    """Every arm on the test split: generate, retrieve, judge, compare."""
    profile = run.profile

    def work(stage: Stage) -> Outcome:
        rows = list(read_jsonl(dataset.path("test"), Row))
        texts = _generate(stage, rows, {name: _folder(result) for name, result in models.items()})
        arms: dict[ArmName, list[ArmRow]] = {"original": original_rows(rows), "teacher": teacher_rows(rows)}
        arms |= texts
        stage.say(f"retrieving and judging {len(arms)} arms on {len(rows):,} questions")
        arms, calls = asyncio.run(_complete(stage.run, services, arms, rows))
        train = [row for row in read_jsonl(dataset.path("rows"), Row) if row.split == "train" and row.status == "ok"]
        evaluation = Evaluation(
            arms={name: summarise(arm, rows, profile.evaluate) for name, arm in arms.items()},
            comparisons=compare_arms(arms, rows, profile.evaluate),
            examples=examples(arms, rows),
            shared=shared_between(train, rows),
        )
        write_json(stage.directory / "evaluation.json", evaluation.model_dump(mode="json"))
        artifacts = {
            f"arm_{name}": write_jsonl(stage.directory / f"arm_{name}.jsonl", arm) for name, arm in arms.items()
        }
        artifacts["evaluation"] = Artifact.of(stage.directory / "evaluation.json")
        metrics = {
            f"{name}/{key}": value
            for name, arm in evaluation.arms.items()
            for key, value in arm.model_dump().items()
            if isinstance(value, int | float)
        }
        return Outcome(len(rows), len(rows), {}, artifacts, metrics, {"api": calls})

    depends_on = {
        "test_sha256": dataset.artifacts["test"].sha256,
        "models": {name: _identity(result) for name, result in models.items()},
        "evaluate": profile.evaluate.model_dump(mode="json"),
        "student": profile.student.model_dump(mode="json"),
        "prices": {name: price.model_dump() for name, price in profile.prices.items()},
        **scoring_identity(profile),
        # As in validation: a live service's knowledge base changes unseen.
        "knowledge_base": profile.rag.knowledge_base if profile.rag.url == EMBEDDED else run.id,
    }
    return perform(run, "evaluate", depends_on, work)


@task(name="report", task_run_name="report", cache_policy=NO_CACHE)
def write_report(run: Run, stages: Sequence[StageResult]) -> Path:
    """report.json and report.html, in the run's directory, MLflow and Prefect."""
    profile, by_name = run.profile, {result.stage: result for result in stages}
    evaluation = _evaluation_of(by_name, profile.evaluate)
    report = Report(
        run_id=run.id,
        profile=profile.name,
        recipe=profile.recipe,
        versions={name: _version(name) for name in REPORTED_PACKAGES},
        stages=[ReportStage.of(result, run.id) for result in stages],
        api=_api(run, stages),
        arms=evaluation.arms,
        comparisons=evaluation.comparisons,
        training=_training(by_name),
        stand_ins=stand_ins_of(profile),
        examples=evaluation.examples,
        shared=evaluation.shared,
        curves=_curves(by_name),
    )
    path = run.directory / "report.json"
    artifacts = {"report": report.write(path), "report_html": render_html(report, run.directory / "report.html")}
    tracker = tracker_of(profile)
    for name, artifact in artifacts.items():
        tracker.log_artifact(run.mlflow_run_id, name, artifact)
    tracker.log_metrics(run.mlflow_run_id, by_name["evaluate"].metrics if "evaluate" in by_name else {})
    text = _result_markdown(report) + f"\nPlots and examples: `{run.directory / 'report.html'}`, also in MLflow.\n"
    create_markdown_artifact(text, key="result", description="The result table")
    return path


def _evaluation_of(by_name: Mapping[str, StageResult], config: Evaluate) -> Evaluation:
    if "evaluate" in by_name:
        return Evaluation.model_validate_json(by_name["evaluate"].path("evaluation").read_text(encoding="utf-8"))
    rows = [row for row in read_jsonl(by_name["validate"].path("rows"), Row) if row.rewrite_retrieved]
    arms: dict[ArmName, list[ArmRow]] = {"original": original_rows(rows), "teacher": teacher_rows(rows)}
    return Evaluation(
        arms={name: summarise(arm, rows, config) for name, arm in arms.items()},
        comparisons=compare_arms(arms, rows, config),
        examples=examples(arms, rows),
        shared=[],
    )


def _generate(stage: Stage, rows: Sequence[Row], folders: Mapping[ArmName, str]) -> dict[ArmName, list[ArmRow]]:
    profile = stage.run.profile
    recipe, price = get_recipe(profile.recipe), profile.prices.get(profile.student.name)
    prompts = stage.directory / "prompts.jsonl"
    write_jsonl(prompts, ({"id": row.id, "messages": recipe.student_messages(row, profile.tenant)} for row in rows))
    stage.say(f"generating with {', '.join(folders)}")
    command = generate_command(profile, folders, prompts, stage.directory)
    launch(command, name="generation", log=stage.directory / "generate.log")
    arms: dict[ArmName, list[ArmRow]] = {}
    for name in folders:
        answers = (stage.directory / f"{name}.answers.jsonl").read_text(encoding="utf-8").splitlines()
        arms[name] = [_student_row(json.loads(line), price) for line in answers]
    return arms


def _student_row(answer: dict[str, Any], price: Price | None) -> ArmRow:
    text = " ".join(answer["text"].split())
    return ArmRow(
        row_id=answer["id"],
        text=text or None,
        reason=None if text else "empty_rewrite",
        latency_ms=answer.get("latency_ms"),
        cost_usd=cost_usd(price, answer["prompt_tokens"], answer["completion_tokens"]) if price else None,
    )


async def _complete(
    run: Run, services: Services, arms: Mapping[ArmName, Sequence[ArmRow]], rows: Sequence[Row]
) -> tuple[dict[ArmName, list[ArmRow]], dict[str, dict[str, int]]]:
    async with open_clients(run, services) as clients:
        done: dict[ArmName, list[ArmRow]] = {
            name: await retrieve_and_judge(
                arm, rows, clients, run.profile.tenant, run.profile.evaluate.max_failed_share
            )
            for name, arm in arms.items()
        }
        return done, call_counts(clients)


def _folder(result: StageResult) -> str:
    return str(result.path("model")) if "model" in result.artifacts else str(result.details["model"])


def _identity(result: StageResult) -> str:
    return result.artifacts["model"].sha256 if "model" in result.artifacts else str(result.details["model"])


def _api(run: Run, stages: Sequence[StageResult]) -> Api:
    ours = [result.details.get("api", {}) for result in stages if result.run_id == run.id]

    def total(role: str, name: str) -> int:
        return sum(counts.get(role, {}).get(name, 0) for counts in ours)

    with open_ledger(ledger_path(run.profile)) as ledger:
        paid = {
            role: PaidCalls(**ledger.usage(run.id, role).model_dump() | {"cached": total(role, "cached")})
            for role in ("teacher", "judge")
        }
    rag = RagCalls(calls=total("rag", "calls"), cached=total("rag", "cached"), failed=total("rag", "failed"))
    return Api(teacher=paid["teacher"], judge=paid["judge"], rag=rag)


def _training(by_name: Mapping[str, StageResult]) -> Training:
    sft = SftTraining(**by_name["sft"].details["summary"]) if "sft" in by_name else None
    rl = RlTraining(**by_name["rl"].details["summary"]) if "rl" in by_name else None
    return Training(sft=sft, rl=rl)


def _curves(by_name: Mapping[str, StageResult]) -> dict[str, list[Series]]:
    wanted = {
        "rl_reward": (("rl", "curve", "mean reward of a step"),),
        "rl_dev": (("rl", "dev_curve", "dev split"),),
        "sft_loss": (("sft", "curve", "training"), ("sft", "eval_curve", "dev split")),
        "pretrain_loss": (("base_model", "curve", "training"),),
    }
    curves = {}
    for name, parts in wanted.items():
        series = [
            Series(label=label, x=[x for x, _ in points], y=[y for _, y in points])
            for stage, key, label in parts
            if stage in by_name and (points := by_name[stage].details.get(key))
        ]
        if series:
            curves[name] = series
    return curves


def _result_markdown(report: Report) -> str:
    lines = [f"## {verdict(report).sentence}", "", verdict(report).reading, ""]
    lines += ["| Arm | n | top-1 | MRR@10 | mean top-1 score | judge | p50 ms | 1,000 cost |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for name, arm in report.arms.items():
        cells = [*map(number, (arm.top1, arm.mrr10, arm.mean_top1_score)), number(arm.quality, 2)]
        cells += [latency(arm.latency_p50_ms), usd(arm.cost_per_1000_usd)]
        lines.append(f"| {name} | {arm.n:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _version(name: str) -> str:
    try:
        return version(name)
    except ModuleNotFoundError:  # the orchestrator's image has no trainer
        return "not installed"
