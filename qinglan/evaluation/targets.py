"""A run's results beside the profile's `targets`, and the cost and savings of the student."""

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
    # The plan says nothing of a comparison of teachers.
    if report.purchase is not None:
        return
    if not report.is_of_data:
        yield from _model_lines(report, targets)
    yield from row_lines({stage.name: stage.rows_out for stage in report.stages}, targets)
    if targets.run_usd:
        label = Both("paid calls, US dollars", "付费调用（美元）")
        yield Line(label, targets.run_usd, report.api.with_earlier_usd, at_least=False)
    if targets.days:
        # A reused stage took its time in another run.
        seconds = sum(stage.seconds for stage in report.stages if not stage.reused_from)
        yield Line(Both("days", "天数"), targets.days, seconds / 86_400, at_least=False)


def _model_lines(report: Report, targets: Targets) -> Iterator[Line]:
    name = candidate(report) or ""
    rival = opponent(report)
    own = report.arm(name)
    teacher = report.arm("teacher")
    differences: dict[str, float | None] = {}
    for metric_name, comparison in between(report.comparisons, name, rival).items():
        differences[metric_name] = comparison.diff
    if targets.gain:
        label = Both(f"gain over {rival}", f"相对 {rival} 的提升")
        gain = _first_difference(report, differences)
        yield Line(label, targets.gain, gain, at_least=True)
    if targets.quality_loss is not None:
        quality_gain = differences.get(QUALITY)
        loss = None if quality_gain is None else -quality_gain
        label = Both("judge's score lost", "裁判评分下降")
        yield Line(label, targets.quality_loss, loss, at_least=False)
    if targets.cost_saving is not None:
        label = Both("share of cost saved", "成本降低比例")
        saved = _saved_share(own.cost_per_1000_usd, teacher.cost_per_1000_usd)
        yield Line(label, targets.cost_saving, saved, at_least=True)
    if targets.latency_saving is not None:
        label = Both("share of median latency saved", "延迟中位数降低比例")
        saved = _saved_share(own.latency_p50_ms, teacher.latency_p50_ms)
        yield Line(label, targets.latency_saving, saved, at_least=True)


def _first_difference(report: Report, differences: Mapping[str, float | None]) -> float | None:
    """The difference on the gate's metric, the first on which the two arms were compared."""
    for metric in report.metrics:
        if metric.name in differences:
            return differences[metric.name]
    return None


def _saved_share(own: float | None, teacher: float | None) -> float | None:
    if own is None or not teacher:
        return None
    return 1 - own / teacher


def row_lines(rows: Mapping[str, int], targets: Targets) -> Iterator[Line]:
    """The bands of `targets.rows`, two lines each, beside the rows that each stage has left."""
    for stage, (low, high) in targets.rows.items():
        # A run of a few stages has no share of the others.
        share = None
        if rows.get("ingest") and stage in rows:
            share = rows[stage] / rows["ingest"]
        at_least = Both(f"share of rows after {stage}, at least", f"{stage} 后保留比例，至少")
        at_most = Both(f"share of rows after {stage}, at most", f"{stage} 后保留比例，至多")
        yield Line(at_least, low, share, at_least=True)
        yield Line(at_most, high, share, at_least=False)


def target_findings(report: Report, profile: Profile) -> Iterator[Finding]:
    """The report's tables of targets, and of costs where the price of a GPU's hour is known."""
    target_rows = []
    for line in target_lines(report, profile):
        values = (line.planned, line.found, line.is_met)
        target_rows.append(FindingRow(label=line.label, values=values))
    if target_rows:
        yield Finding(title=Both("Targets", "目标"), columns=_HEADS, rows=tuple(target_rows))
    cost_rows = tuple(_cost_rows(report, profile))
    if cost_rows:
        title = Both("What it has cost and saves", "投入与节省")
        heads = (Both("US dollars, or questions", "美元，或问题数"),)
        yield Finding(title=title, columns=heads, rows=cost_rows)


def _cost_rows(report: Report, profile: Profile) -> Iterator[FindingRow]:
    hour_usd = profile.student.gpu_hour_usd
    name = candidate(report)
    # The candidate may have been trained by a run whose stages this one reuses.
    trainings = [stage for stage in report.stages if stage.name in ("sft", "rl")]
    if hour_usd is None or name is None or not trainings:
        return
    hours = sum(profile.trainer.gpus_of[stage.name] * stage.seconds / 3600 for stage in trainings)
    training_usd = hours * hour_usd
    paid_usd = report.api.with_earlier_usd
    label = Both(
        "training, GPU-hours at student.gpu_hour_usd, also of reused stages",
        "训练（GPU 小时费，含被复用阶段）",
    )
    yield FindingRow(label=label, values=(training_usd,))
    label = Both(
        "paid calls, of runs whose stages are reused too", "付费调用（含被复用阶段的运行）"
    )
    yield FindingRow(label=label, values=(paid_usd,))
    own_usd = report.arm(name).cost_per_1000_usd
    teacher_usd = report.arm("teacher").cost_per_1000_usd
    if own_usd is None or teacher_usd is None:
        return
    saved_usd = teacher_usd - own_usd
    label = Both("saved per 1,000 questions", "每千次问题节省")
    yield FindingRow(label=label, values=(saved_usd,))
    if teacher_usd > own_usd:
        label = Both("questions until the saving has paid for it", "收回投入所需问题数")
        questions = 1000 * (training_usd + paid_usd) / saved_usd
        yield FindingRow(label=label, values=(questions,))
