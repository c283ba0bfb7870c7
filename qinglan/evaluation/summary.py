"""What a run's stages found, put together: the arms with their comparisons, and the report.

A refresh trains nothing: its report compares the original question and the teacher over every row
that was a question.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Any

from qinglan.clients.roles import site_ledger
from qinglan.config import Evaluate, Gate, Profile
from qinglan.data.dataset.splits import was_question, with_groups
from qinglan.evaluation import models
from qinglan.evaluation.arms import baseline_arms
from qinglan.evaluation.figures import compare_arms, examples, shared_between, slices_of, summarise
from qinglan.evaluation.reasons import Reason
from qinglan.evaluation.report.verdict import simulated_roles_of, verdict
from qinglan.evaluation.weights import weights_of
from qinglan.recipes import Finding, Recipe, get_recipe
from qinglan.rows import ArmName, ArmRow, BottomK, Row
from qinglan.runs.artifacts import StageResult, read_jsonl
from qinglan.runs.run import Run
from qinglan.statistics import Comparison, rows_needed
from qinglan.text import latency, markdown_table, number, usd

COMPARING = ("evaluate", "compare")
"""Stages that leave an evaluation behind."""
_MOST_ROWS = 100_000
"""Of a refresh's report, which is made in memory; of more rows a sample."""
_PAID_ROLES = {
    "teacher": "teacher",
    "answerer": "answerer",
    "judge": "judge",
    "local_judge": "judge.local",
}
"""By field of the report's `api`, the ledger's role."""
_REPORTED_PACKAGES = (
    "qinglan",
    "prefect",
    "mlflow",
    "ms-swift",
    "verl",
    "ray",
    "torch",
    "transformers",
)
_CURVES = (
    ("rl_reward", "rl", "curve", "mean reward of a step"),
    ("rl_dev", "rl", "dev_curve", "dev split"),
    ("sft_loss", "sft", "curve", "training"),
    ("sft_loss", "sft", "eval_curve", "dev split"),
    ("pretrain_loss", "base_model", "curve", "training"),
)
"""The report's name of the plot, stage, key of its details, label."""


def evaluate(
    arms: Mapping[ArmName, Sequence[ArmRow]],
    rows: Sequence[Row],
    config: Evaluate,
    recipe: Recipe,
    train: Sequence[Row] = (),
    *,
    loads: Mapping[ArmName, Reason] | None = None,
    probed: Mapping[ArmName, Sequence[ArmRow]] | None = None,
) -> models.Evaluation:
    """Figures, comparisons, slices and examples of finished arms, the recipe's findings, and what
    `rows` share with the training rows.

    Args:
        loads: by arm, what else its model had to do while its latency was measured.
        probed: by arm, what it answered to the recipe's probes.
    """
    loads, probed = loads or {}, probed or {}
    return models.Evaluation(
        metrics=list(recipe.grader.metrics),
        arms={
            name: summarise(arm, rows, config, recipe, loads.get(name))
            for name, arm in arms.items()
        },
        comparisons=compare_arms(arms, rows, config, recipe),
        slices=slices_of(arms, rows, config, recipe),
        examples=examples(arms, rows, recipe),
        shared=shared_between(train, rows, recipe) if train else [],
        # Of no arm there is nothing to find: a table without a column.
        findings=recipe.findings(
            {name: [*arm, *probed.get(name, ())] for name, arm in arms.items()}, rows
        )
        if arms
        else [],
    )


def evaluate_baselines(rows: Sequence[Row], profile: Profile) -> models.Evaluation:
    """What needs no model of ours, such as the teacher, as validation found it; over every row that
    was a question."""
    recipe = get_recipe(profile.recipe)
    questions = with_groups(list(filter(was_question, rows)), profile.dataset)
    return evaluate(
        baseline_arms(questions, recipe.grader, profile), questions, profile.evaluate, recipe
    )


def metrics_of(evaluation: models.Evaluation) -> dict[str, float]:
    """Figures of all arms under names such as `rl/top1`."""
    figures = {
        f"{name}/{key}": value
        for name, arm in evaluation.arms.items()
        for key, value in arm.figures.items()
    }
    for name, results in evaluation.red_team.items():
        figures[f"{name}/red_team_failed"] = sum(result.passed is False for result in results)
        figures[f"{name}/red_team_unchecked"] = sum(result.passed is None for result in results)
    return figures


def build_report(run: Run, stages: Sequence[StageResult]) -> models.Report:
    """The report of a run, from the stages that it did or reused."""
    profile, by_name = run.profile, {result.stage: result for result in stages}
    recipe = get_recipe(profile.recipe)
    if compared := next((by_name[stage] for stage in COMPARING if stage in by_name), None):
        evaluation = compared.load("evaluation", models.Evaluation)
    else:
        sample = BottomK[Row](_MOST_ROWS)
        for row in read_jsonl(by_name["validate"].path("rows"), Row):
            sample.add(row.id, row)
        evaluation = evaluate_baselines(sample.items(), profile)
    details = defaultdict[str, dict[str, Any]](
        dict, {result.stage: result.details for result in stages}
    )
    bought, decided, rl = (
        details["compare"].get("purchase"),
        details["gate"].get("decision"),
        details["rl"],
    )
    purchase = models.Purchase.model_validate(bought) if bought else None
    return models.Report(
        run_id=run.id,
        profile=profile.name,
        recipe=recipe.NAME,
        retrieves=recipe.grader.retrieves,
        **{
            name: getattr(evaluation, name)
            for name in models.EvaluatedArms.model_fields.keys() - {"comparisons", "findings"}
        },
        rivals=list(
            (profile.gate.about(decided["challenger"]) if decided else profile.gate).rivals
        ),
        command=f"qinglan run {run.flow} --profile {profile.name}{f' --from {run.source.name}' if run.source else ''}",
        versions=installed_versions(),
        stages=[models.StageSummary.of(result, run.id) for result in stages],
        api=_api(run, stages),
        comparisons=_with_rows_needed(evaluation, profile.gate if "evaluate" in by_name else None),
        purchase=purchase,
        training=models.TrainingSummary(sft=details["sft"].get("summary"), rl=rl.get("summary")),
        weights=weights_of(profile, by_name, installed_versions()),
        alarms=rl.get("alarms", []),
        simulated=simulated_roles_of(profile),
        decision=decided,
        released=details["register"].get("released"),
        findings=[*evaluation.findings, *map(Finding.model_validate, rl.get("findings", []))],
        curves=_curves(details),
        distributions=_distributions(details, purchase),
    )


def result_markdown(report: models.Report) -> str:
    """The verdict and the table of arms; of a refresh the way of the rows, too."""
    found = verdict(report)
    lines = [f"## {found.sentence.en}", "", found.reading.en]
    if report.arms:
        metrics = [metric for metric in report.metrics if metric.compared]
        heads = ["Arm", "n", "failed", *(metric.en for metric in metrics), "p50 ms", "1,000 cost"]
        rows = []
        for name, arm in report.arms.items():
            cells = [number(arm.mean(metric.name), metric.digits) for metric in metrics]
            cells += [latency(arm.latency_p50_ms), usd(arm.cost_per_1000_usd)]
            rows.append((name, f"{arm.n:,}", f"{arm.failed:,}", *cells))
        lines += ["", markdown_table(heads, rows, " ".ljust(len(heads), "r"))]
    if report.is_of_data:
        rows = []
        for stage in report.stages:
            dropped = ", ".join(f"{reason} {n:,}" for reason, n in stage.dropped.items())
            rows.append((stage.name, f"{stage.rows_in:,}", f"{stage.rows_out:,}", dropped))
        lines += ["", markdown_table(("Stage", "in", "out", "dropped"), rows, " rr")]
    return "\n".join(lines) + "\n"


def _with_rows_needed(evaluation: models.Evaluation, gate: Gate | None) -> list[Comparison]:
    """With the rows that the gain would take which is worth finding today: an evaluation outlives
    that setting.

    Of metrics on a scale of 0 to 1 that have intervals: the gain is one of those.
    """
    shares = {
        metric.name for metric in evaluation.metrics if metric.interval and metric.maximum == 1
    }
    filled = []
    for found in evaluation.comparisons:
        gain = gate.smallest_gain - gate.min_gain if gate and found.metric in shares else None
        needed = rows_needed(found.n, found.detectable_diff, gain)
        filled.append(found.model_copy(update={"rows_needed": needed}))
    return filled


def installed_versions() -> dict[str, str]:
    """Of the packages that a result depends on; the orchestrator's image has no trainer."""
    versions = dict.fromkeys(_REPORTED_PACKAGES, "not installed")
    for name in _REPORTED_PACKAGES:
        with suppress(ModuleNotFoundError):
            versions[name] = version(name)
    return versions


def _api(run: Run, stages: Sequence[StageResult]) -> models.Api:
    totals: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for result in stages:
        if result.run_id == run.id:
            for role, counts in result.details.get("api", {}).items():
                totals[role].update(counts)
    with site_ledger(run.profile) as ledger:
        paid = {
            name: ledger.usage(run.id, role).model_copy(update={"cached": totals[role]["cached"]})
            for name, role in _PAID_ROLES.items()
        }
        earlier_usd = sum(
            ledger.spent_usd(each)[0] for each in {result.run_id for result in stages} - {run.id}
        )
    rag = {name: totals["rag"][name] for name in models.RagCalls.model_fields}
    return models.Api(**paid, rag=rag, earlier_usd=earlier_usd)


def _curves(details: Mapping[str, Mapping[str, Any]]) -> dict[str, list[models.Series]]:
    drawn = [(name, label, details[stage].get(key)) for name, stage, key, label in _CURVES]
    drawn += [
        (f"rl_{name}", "mean of a step", points)
        for name, points in details["rl"].get("curves", {}).items()
    ]
    curves: dict[str, list[models.Series]] = {}
    for name, label, points in drawn:
        if points:
            x, y = zip(*points, strict=True)
            curves.setdefault(name, []).append(models.Series(label=label, x=x, y=y))
    return curves


def _distributions(
    details: Mapping[str, Mapping[str, Any]], purchase: models.Purchase | None
) -> dict[str, list[models.Distribution]]:
    found = details["validate"].get("histograms", {})
    if (
        purchase and "top1_score" in found
    ):  # the original question's, then those of every teacher's rewrites
        drawn = found["top1_score"][:1]
        for arm, label in purchase.labels.items():
            stage = "validate" if arm == "teacher" else f"validate-{arm}"
            drawn.append(details[stage]["histograms"]["top1_score"][1] | {"label": label})
        found = {"top1_score": drawn}
    return {
        name: [models.Distribution.model_validate(part) for part in parts]
        for name, parts in found.items()
    }
