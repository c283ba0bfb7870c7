"""What the profile's `targets` plan beside what a run found, and what the student's training has
cost and saves."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from qinglan.config import Profile
from qinglan.config.release import Targets
from qinglan.evaluation.models import Report
from qinglan.evaluation.report.verdict import candidate, opponent
from qinglan.recipes import QUALITY, Finding
from qinglan.recipes.findings import FindingRow
from qinglan.statistics import between
from qinglan.text import Both

_HEADS = (Both("planned", "计划"), Both("found", "实际"), Both("met", "达到"))


class Line(NamedTuple):
    """A target and what was found; `found` is None where the run has nothing about it."""

    label: Both
    planned: float
    found: float | None
    at_least: bool

    @property
    def is_met(self) -> bool | None:
        if self.found is None:
            return None
        return self.found >= self.planned if self.at_least else self.found <= self.planned


def target_lines(report: Report, profile: Profile) -> Iterator[Line]:
    """The profile's targets, each with what the run found; those of models where there are any."""
    targets = profile.targets
    if report.purchase is not None:  # a comparison of teachers, of which the plan says nothing
        return
    if not report.is_of_data:
        yield from _model_lines(report, targets)
    yield from row_lines({stage.name: stage.rows_out for stage in report.stages}, targets)
    if targets.run_usd:
        paid = Both("paid calls, US dollars", "付费调用（美元）")
        yield Line(paid, targets.run_usd, report.api.with_earlier_usd, False)
    if targets.days:
        days = sum(stage.seconds for stage in report.stages if not stage.reused_from) / 86_400
        yield Line(Both("days", "天数"), targets.days, days, False)


def _model_lines(report: Report, targets: Targets) -> Iterator[Line]:
    name, other = candidate(report), opponent(report)
    mine, teacher = report.arms.get(name or ""), report.arms.get("teacher")
    differences = {m: c.diff for m, c in between(report.comparisons, name or "", other).items()}
    if targets.gain:  # on the gate's metric, the first on which the two were compared
        gain = next(
            (differences[metric.name] for metric in report.metrics if metric.name in differences),
            None,
        )
        yield Line(Both(f"gain over {other}", f"相对 {other} 的提升"), targets.gain, gain, True)
    if targets.quality_loss is not None:
        lost = None if (gain := differences.get(QUALITY)) is None else -gain
        yield Line(Both("judge's score lost", "裁判评分下降"), targets.quality_loss, lost, False)
    for planned, figure, label in (
        (targets.cost_saving, "cost_per_1000_usd", Both("share of cost saved", "成本降低比例")),
        (
            targets.latency_saving,
            "latency_p50_ms",
            Both("share of median latency saved", "延迟中位数降低比例"),
        ),
    ):
        if planned is not None:
            own, base = (getattr(arm, figure) if arm else None for arm in (mine, teacher))
            yield Line(label, planned, None if own is None or not base else 1 - own / base, True)


def row_lines(rows: Mapping[str, int], targets: Targets) -> Iterator[Line]:
    """The bands of `targets.rows`, two lines each, beside the rows that each stage has left."""
    for stage, (low, high) in targets.rows.items():
        share = rows[stage] / rows["ingest"] if rows.get("ingest") and stage in rows else None
        yield Line(
            Both(f"share of rows after {stage}, at least", f"{stage} 后保留比例，至少"),
            low,
            share,
            True,
        )
        yield Line(
            Both(f"share of rows after {stage}, at most", f"{stage} 后保留比例，至多"),
            high,
            share,
            False,
        )


def target_findings(report: Report, profile: Profile) -> Iterator[Finding]:
    """The tables that the report shows: targets, and costs where the price of a GPU's hour is
    known."""
    if lines := list(target_lines(report, profile)):
        rows = [
            FindingRow(label=each.label, values=(each.planned, each.found, each.is_met))
            for each in lines
        ]
        yield Finding(title=Both("Targets", "目标"), columns=_HEADS, rows=tuple(rows))
    if costs := list(_costs(report, profile)):
        heads = (Both("US dollars, or questions", "美元，或问题数"),)
        yield Finding(
            title=Both("What it has cost and saves", "投入与节省"), columns=heads, rows=tuple(costs)
        )


def _costs(report: Report, profile: Profile) -> Iterator[FindingRow]:
    hour_usd, name = profile.student.gpu_hour_usd, candidate(report)
    trained = [stage for stage in report.stages if stage.name in ("sft", "rl")]
    if hour_usd is None or name is None or not trained:
        return
    hours = sum(profile.trainer.gpus_of[stage.name] * stage.seconds / 3600 for stage in trained)
    paid_usd = report.api.with_earlier_usd
    training = Both(
        "training, GPU-hours at student.gpu_hour_usd, also of reused stages",
        "训练（GPU 小时费，含被复用阶段）",
    )
    paid = Both("paid calls, of runs whose stages are reused too", "付费调用（含被复用阶段的运行）")
    yield FindingRow(label=training, values=(hours * hour_usd,))
    yield FindingRow(label=paid, values=(paid_usd,))
    own, teacher = (
        report.arms[arm].cost_per_1000_usd if arm in report.arms else None
        for arm in (name, "teacher")
    )
    if own is None or teacher is None:
        return
    yield FindingRow(
        label=Both("saved per 1,000 questions", "每千次问题节省"), values=(teacher - own,)
    )
    if teacher > own:
        volume = Both("questions until the saving has paid for it", "收回投入所需问题数")
        yield FindingRow(
            label=volume, values=(1000 * (hours * hour_usd + paid_usd) / (teacher - own),)
        )
