"""The results of a run's stages, put together: an evaluation of arms, and the report.

A refresh trains nothing: its report compares the original question and the teacher over every row
that was a question.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Any

from qinglan.clients.roles import site_ledger
from qinglan.config import Gate, Profile
from qinglan.evaluation import models
from qinglan.evaluation.evaluating import evaluate_baselines
from qinglan.evaluation.report.verdict import simulated_roles_of, verdict
from qinglan.evaluation.teacher_comparison import stage_of_teacher
from qinglan.evaluation.weights import weights_of
from qinglan.recipes import Finding, get_recipe
from qinglan.rows import BottomK, Row
from qinglan.runs.artifacts import StageResult, read_jsonl
from qinglan.runs.run import Run
from qinglan.statistics import Comparison, rows_needed
from qinglan.text import latency, markdown_table, number, usd

COMPARING = ("evaluate", "compare")
"""Stages that leave an evaluation behind."""
_MOST_ROWS = 100_000
"""Most rows that a refresh's report is made from, as it is made in memory; of more rows, a
sample."""
_PAID_ROLES = {
    "teacher": "teacher",
    "answerer": "answerer",
    "judge": "judge",
    "local_judge": "judge.local",
}
"""The ledger's role for each field of the report's `api`."""
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

Details = Mapping[str, Mapping[str, Any]]
"""The details of each stage; empty for a stage that was not done."""


def build_report(run: Run, stages: Sequence[StageResult]) -> models.Report:
    """The report of a run, from the stages that it did or reused."""
    profile = run.profile
    recipe = get_recipe(profile.recipe)
    by_name = {result.stage: result for result in stages}
    evaluation = _evaluation_of(by_name, profile)
    versions = installed_versions()
    # A stage that was not done has no details.
    details = defaultdict[str, dict[str, Any]](dict)
    for result in stages:
        details[result.stage] = result.details

    decision = details["gate"].get("decision")
    # The rules may have been asked about `gate.fallback`, whose rivals are other ones.
    gate = profile.gate.about(decision["challenger"]) if decision else profile.gate
    # Only evaluated models are held against the gate's gain.
    asked_gate = profile.gate if "evaluate" in by_name else None
    purchase = None
    if details["compare"].get("purchase"):
        purchase = models.Purchase.model_validate(details["compare"]["purchase"])
    rl_findings = [Finding.model_validate(table) for table in details["rl"].get("findings", [])]
    return models.Report(
        run_id=run.id,
        profile=profile.name,
        recipe=recipe.NAME,
        retrieves=recipe.grader.asks_rag,
        metrics=evaluation.metrics,
        arms=evaluation.arms,
        comparisons=_with_rows_needed(evaluation, asked_gate),
        slices=evaluation.slices,
        red_team=evaluation.red_team,
        findings=[*evaluation.findings, *rl_findings],
        unjudged=evaluation.unjudged,
        examples=evaluation.examples,
        shared=evaluation.shared,
        parity=evaluation.parity,
        rivals=list(gate.rivals),
        command=_command_of(run),
        versions=versions,
        stages=[models.StageSummary.of(result, run.id) for result in stages],
        api=_api(run, stages),
        purchase=purchase,
        training=models.TrainingSummary(
            sft=details["sft"].get("summary"), rl=details["rl"].get("summary")
        ),
        weights=weights_of(profile, by_name, versions),
        alarms=details["rl"].get("alarms", []),
        simulated=simulated_roles_of(profile),
        decision=decision,
        released=details["register"].get("released"),
        curves=_curves(details),
        distributions=_distributions(details, purchase),
    )


def _evaluation_of(stages: Mapping[str, StageResult], profile: Profile) -> models.Evaluation:
    """The evaluation that a stage left behind; of a refresh, the baselines'."""
    for name in COMPARING:
        if name in stages:
            return stages[name].load("evaluation", models.Evaluation)
    sample = BottomK[Row](_MOST_ROWS)
    for row in read_jsonl(stages["validate"].path("rows"), Row):
        sample.add(row.id, row)
    return evaluate_baselines(sample.items(), profile)


def _command_of(run: Run) -> str:
    """The command that does the run again."""
    command = f"qinglan run {run.flow} --profile {run.profile.name}"
    if run.source:
        command += f" --from {run.source.name}"
    return command


def result_markdown(report: models.Report) -> str:
    """The verdict and the table of arms; for a refresh, also what became of the rows."""
    conclusion = verdict(report)
    lines = [f"## {conclusion.sentence.en}", "", conclusion.reading.en]
    if report.arms:
        lines += ["", _arms_markdown(report)]
    if report.is_of_data:
        lines += ["", _stages_markdown(report)]
    return "\n".join(lines) + "\n"


def _arms_markdown(report: models.Report) -> str:
    metrics = [metric for metric in report.metrics if metric.compared]
    heads = ["Arm", "n", "failed", *(metric.en for metric in metrics), "p50 ms", "1,000 cost"]
    rows = []
    for name, arm in report.arms.items():
        cells = [name, f"{arm.n:,}", f"{arm.failed:,}"]
        cells += [number(arm.mean(metric.name), metric.digits) for metric in metrics]
        cells += [latency(arm.latency_p50_ms), usd(arm.cost_per_1000_usd)]
        rows.append(cells)
    return markdown_table(heads, rows, " ".ljust(len(heads), "r"))


def _stages_markdown(report: models.Report) -> str:
    rows = []
    for stage in report.stages:
        dropped = ", ".join(f"{reason} {count:,}" for reason, count in stage.dropped.items())
        rows.append((stage.name, f"{stage.rows_in:,}", f"{stage.rows_out:,}", dropped))
    return markdown_table(("Stage", "in", "out", "dropped"), rows, " rr")


def _with_rows_needed(evaluation: models.Evaluation, gate: Gate | None) -> list[Comparison]:
    """The comparisons with the rows that it would take to find the gain worth finding.

    That gain is one on a scale of 0 to 1, so only such metrics with intervals are filled in.
    """
    # Worked out for the report, as an evaluation outlives the settings of the day.
    on_gains_scale = set()
    for metric in evaluation.metrics:
        if metric.interval and metric.maximum == 1:
            on_gains_scale.add(metric.name)
    comparisons = []
    for comparison in evaluation.comparisons:
        gain = None
        if gate and comparison.metric in on_gains_scale:
            gain = gate.smallest_gain - gate.min_gain
        rows = rows_needed(comparison.n, comparison.detectable_diff, gain)
        comparisons.append(comparison.with_rows_needed(rows))
    return comparisons


def installed_versions() -> dict[str, str]:
    """Versions of the packages that a result depends on.

    The orchestrator's image has no trainer.
    """
    versions = dict.fromkeys(_REPORTED_PACKAGES, "not installed")
    for name in _REPORTED_PACKAGES:
        with suppress(ModuleNotFoundError):
            versions[name] = version(name)
    return versions


def _api(run: Run, stages: Sequence[StageResult]) -> models.Api:
    """The calls that this run made, and what the runs paid whose stages it reuses."""
    counts_by_role: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for result in stages:
        if result.run_id == run.id:
            for role, counts in result.details.get("api", {}).items():
                counts_by_role[role].update(counts)
    earlier_runs = {result.run_id for result in stages} - {run.id}
    paid = {}
    with site_ledger(run.profile) as ledger:
        for field, role in _PAID_ROLES.items():
            usage = ledger.usage(run.id, role)
            # The ledger doesn't know of the answers that were taken from it.
            paid[field] = usage.model_copy(update={"cached": counts_by_role[role]["cached"]})
        earlier_usd = sum(ledger.spent_usd(run_id)[0] for run_id in earlier_runs)
    rag = {name: counts_by_role["rag"][name] for name in models.RagCalls.model_fields}
    return models.Api(**paid, rag=rag, earlier_usd=earlier_usd)


def _curves(details: Details) -> dict[str, list[models.Series]]:
    """Curves by the name of their plot."""
    labelled = []
    for name, stage, key, label in _CURVES:
        labelled.append((name, label, details[stage].get(key)))
    for name, points in details["rl"].get("curves", {}).items():
        labelled.append((f"rl_{name}", "mean of a step", points))
    curves: dict[str, list[models.Series]] = {}
    for name, label, points in labelled:
        if points:
            x, y = zip(*points, strict=True)
            curves.setdefault(name, []).append(models.Series(label=label, x=x, y=y))
    return curves


def _distributions(
    details: Details, purchase: models.Purchase | None
) -> dict[str, list[models.Distribution]]:
    histograms = details["validate"].get("histograms", {})
    if purchase and "top1_score" in histograms:
        # The original question's, then those of every teacher's rewrites.
        top1_scores = histograms["top1_score"][:1]
        for arm, label in purchase.labels.items():
            of_rewrites = details[stage_of_teacher("validate", arm)]["histograms"]["top1_score"][1]
            top1_scores.append({**of_rewrites, "label": label})
        histograms = {"top1_score": top1_scores}
    distributions = {}
    for name, parts in histograms.items():
        distributions[name] = [models.Distribution.model_validate(part) for part in parts]
    return distributions
