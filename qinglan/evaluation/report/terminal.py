"""The report as a table for the terminal."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from qinglan import text as formats
from qinglan.evaluation.models import ArmFigures, Report, StageSummary
from qinglan.evaluation.report.tables import SideBySide, plan
from qinglan.evaluation.report.verdict import (
    alarm_warning,
    arm_label_words,
    arms_of,
    continued_warning,
    headline,
    pair_words,
    simulator_warning,
    starred,
    verdict,
)
from qinglan.recipes import Finding, Metric
from qinglan.statistics import Comparison
from qinglan.text import count, number, p_value, signed, usd, with_interval

_PAIRS = (
    *(("rl", "teacher"), ("sft", "teacher"), ("rl", "sft"), ("rl", "champion"), ("sft", "champion")),
    ("teacher", "original"),
)
_MOST_METRICS = 4
"""That the terminal has room for."""
_HEAD_WIDTH = 10


def print_table(report: Report) -> RenderableType:
    """The result for a terminal of 100 columns: headline, arms, comparisons, and what was simulated."""
    result = verdict(report)
    style = {"better": "bold green", "worse": "bold red"}.get(result.tone, "bold")
    parts: list[RenderableType] = [Text(result.sentence.en, style), Text(result.reading.en, "dim")]
    parts += [_arms_table(report), _comparisons_table(report)] if report.arms else []
    parts += [_finding_table(finding) for finding in report.findings if finding.columns]
    parts += _data_parts(report) if report.is_of_data else []
    if report.purchase:
        parts += [Text(text) for text in report.purchase.offers if len(report.purchase.offers) > 1]
        parts += [Text(f"– {note}", "dim") for note in report.purchase.notes]
    if failed := {name: arm.failed for name, arm in report.arms.items() if arm.failed}:
        named = ", ".join(f"{arm_label_words(name, report).en} {rows}" for name, rows in failed.items())
        parts.append(Text(f"Failed, left out of the means: {named}"))
    parts += _release_lines(report)
    if alarms := alarm_warning(report):
        parts.append(Text(alarms.en, "bold red"))
    if continued := continued_warning(report):
        parts.append(Text(continued.en, "yellow"))
    if warning := simulator_warning(report):
        parts.append(Text(f"* {warning.en}", "yellow"))
    return Group(*parts)


def print_intervals(report: Report) -> RenderableType:
    """The candidate against its opponent, figure by figure, each with its 95% interval."""
    found = plan(report)
    if found is None:
        return Text("Nothing to hold against each other: this run has no student and teacher.", "yellow")
    parts: list[RenderableType] = [_intervals_table(found)]
    if warning := simulator_warning(report, marked=False):
        parts.append(Text(warning.en, "yellow"))
    return Group(*parts)


def _intervals_table(found: SideBySide) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1))
    table.add_column("[95% CI]", no_wrap=True)
    for head in (*found.heads, None):
        table.add_column(head.en if head else "difference", justify="right", no_wrap=True)
    for line in found.lines:
        table.add_row(line.label.en, *(Text(f"{cell.text} {cell.ends}".strip()) for cell in line.cells))
    return table


def stages_table(stages: Sequence[StageSummary]) -> Table:
    """What came in, what came out and why rows were dropped, stage by stage."""
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1))
    table.add_column("stage", no_wrap=True)
    for head in ("in", "out", "time"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("dropped, and why")
    for stage in stages:
        rows = (count(stage.rows_in), count(stage.rows_out)) if stage.rows_in else (formats.NONE, formats.NONE)
        table.add_row(stage.name, *rows, formats.duration(stage.seconds), Text(_dropped(stage)))
    return table


def _dropped(stage: StageSummary) -> str:
    """The reasons why rows were dropped, the most frequent first; and whether the work was an earlier run's."""
    dropped = sorted(stage.dropped.items(), key=lambda item: -item[1])
    parts = [", ".join(f"{reason} {count(rows)}" for reason, rows in dropped)]
    parts += [f"from run {stage.reused_from}"] if stage.reused_from else []
    return "; ".join(filter(None, parts))


def _data_parts(report: Report) -> list[RenderableType]:
    """Of a refresh: the way of the rows, what they are worth where no arm says so, the cost, and the dataset."""
    parts: list[RenderableType] = [stages_table(report.stages)]
    found = report.stage("validate")
    if found and found.metrics and not report.arms:
        parts.append(Text(f"Answers, on average: {_measured(found.metrics)}"))
    parts.append(Text(_asked(report)))
    published = report.stage("publish")
    if published and (paths := [artifact.path for artifact in published.artifacts]):
        parts.append(Text(f"Dataset: {Path(paths[0]).parent}"))
    return parts


def _measured(metrics: Mapping[str, float]) -> str:
    """Means without their ending: `judge 4.383`; what is no mean under its own name."""
    return ", ".join(
        f"{name.removesuffix('_mean').replace('_', ' ')} {number(value)}" for name, value in metrics.items()
    )


def _asked(report: Report) -> str:
    """Who was asked how often, and what it cost; answers of earlier runs cost nothing."""
    api, lines = report.api, list[str]()

    def named(role: str) -> str:
        return f"{'RAG' if role == 'rag' else role}{'*' if role in report.simulated else ''}"

    paid = {"teacher": api.teacher, "answerer": api.answerer, "judge": api.judge}
    for role, usage in paid.items():
        if usage.calls or usage.cached:
            lines.append(f"{named(role)} {_calls(usage.calls, usage.cached, usage.failed)}, {usd(usage.cost_usd)}")
    if api.rag.calls or api.rag.cached:
        lines.append(f"{named('rag')} {_calls(api.rag.calls, api.rag.cached, api.rag.failed)}")
    total = sum(usage.cost_usd for usage in paid.values())
    return f"Asked: {'; '.join(lines) or 'nobody'}. Cost of this run: {usd(total)}"


def _calls(calls: int, cached: int, failed: int) -> str:
    parts = [f"{count(calls)} call{'' if calls == 1 else 's'}"] if calls or not cached else []
    parts += [f"{count(cached)} known answer{'' if cached == 1 else 's'}"] if cached else []
    parts += [f"{count(failed)} failed"] if failed else []
    return ", ".join(parts)


def _release_lines(report: Report) -> list[Text]:
    """What the gate decided, and under which version the model is kept."""
    lines = []
    if report.decision:
        style = {"promote": "bold green", "refuse": "bold red"}.get(report.decision.verdict, "bold yellow")
        lines.append(Text(f"Gate: {report.decision.sentence}", style))
    if report.released:
        aliases = f" ({', '.join(report.released.aliases)})" if report.released.aliases else ""
        lines.append(Text(f"Registered as {report.released.name}, version {report.released.version}{aliases}"))
    return lines


def _arms_table(report: Report) -> Table:
    def star(key: str) -> str:
        return "*" if starred(report, key) else ""

    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1))
    table.add_column("arm", no_wrap=True, vertical="bottom")
    metrics = [metric for metric in report.metrics if metric.compared][:_MOST_METRICS]
    first = next((m.name for m in metrics if any(arm.mean(m.name) is not None for arm in report.arms.values())), "")
    heads = [
        fill(re.sub(r" ?\(.*\)", "", metric.en) + star(metric.name), _HEAD_WIDTH)
        + (" [95% CI]" if metric.name == first else "")
        for metric in metrics
    ]
    for head in ("n", *heads, "p50/p95 ms", "$/1000"):
        table.add_column(head, justify="right", no_wrap=True, vertical="bottom")
    for name, arm in arms_of(report).items():
        table.add_row(
            arm_label_words(name, report, head=True).en + star(name),
            count(arm.n),
            *(_mean(arm, metric, with_ends=metric.name == first) for metric in metrics),
            f"{formats.latency(arm.latency_p50_ms)}/{formats.latency(arm.latency_p95_ms)}",
            usd(arm.cost_per_1000_usd).removeprefix("$"),
        )
    return table


def _mean(arm: ArmFigures, metric: Metric, *, with_ends: bool) -> str:
    score = arm.score(metric.name)
    return with_interval(score.mean, score.ci95 if with_ends else None, lambda value: number(value, metric.digits))


def _finding_table(finding: Finding) -> Table:
    """A table of the recipe's own."""
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1), title=finding.title.en, title_justify="left")
    table.add_column("")
    for column in finding.columns:
        table.add_column(column.en, justify="right")
    for row in finding.rows:
        table.add_row(row.label.en, *(number(value, finding.digits) for value in row.values))
    return table


def _comparisons_table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_header=False)
    main = headline(report)
    pairs = (*_PAIRS, (main.a, main.b)) if main else ()
    shown = [c for c in _in_order(report.comparisons, pairs) if main and c.metric == main.metric]
    if report.purchase:
        table.title, table.title_justify = f"Against {arm_label_words('teacher', report, head=True).en}:", "left"
        shown = [c for c in report.comparisons if c.b == "teacher"]
    for c in shown:
        table.add_row(
            (arm_label_words(c.a, report, head=True) if report.purchase else pair_words(c.a, c.b, report)).en,
            report.metric(c.metric).en,
            with_interval(c.diff, c.ci95, signed),
            f"p {p_value(c.p_value if c.p_holm is None else c.p_holm)}",
            f"{c.wins}/{c.ties}/{c.losses} w/t/l",
            f"detects {number(c.detectable_diff)}",
        )
    return table


def _in_order(comparisons: Sequence[Comparison], pairs: Sequence[tuple[str, str]]) -> list[Comparison]:
    places = {pair: place for place, pair in enumerate(dict.fromkeys(pairs))}
    return sorted(
        (c for c in comparisons if (c.a, c.b) in places and c.diff is not None), key=lambda c: places[c.a, c.b]
    )
