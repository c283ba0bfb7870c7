"""The report as a table for the terminal."""

import re
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

from rich import box
from rich.align import VerticalAlignMethod
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from qinglan.evaluation.models import RagCalls, Report, StageSummary
from qinglan.evaluation.report import tables, verdict
from qinglan.ledger import Usage
from qinglan.text import (
    NONE,
    count,
    duration,
    latency,
    number,
    one_line,
    p_value,
    signed,
    usd,
    with_interval,
)

_MOST_METRICS = 4
"""That 100 columns hold."""
_HEAD_WIDTH = 10


def print_table(report: Report) -> RenderableType:
    """The result for a terminal of 100 columns: verdict, arms, comparisons, and what was
    simulated."""
    result = verdict.verdict(report)
    style = {"better": "bold green", "worse": "bold red"}.get(result.tone, "bold")
    parts: list[RenderableType] = [Text(result.sentence.en, style), Text(result.reading.en, "dim")]
    parts += [_arms_table(report), _comparisons_table(report)] if report.arms else []
    for finding in report.findings:
        if finding.columns:
            heads = [column.en for column in finding.columns]
            table = _table(finding.title.en, heads, no_wrap=False)
            for row in finding.rows:
                table.add_row(
                    row.label.en, *(number(value, finding.digits) for value in row.values)
                )
            parts.append(table)
    parts += _data_parts(report) if report.is_of_data else []
    if report.purchase:
        parts += [
            Text(offer.render())
            for offer in report.purchase.offers
            if len(report.purchase.offers) > 1
        ]
        parts += [Text(f"– {note.render()}", "dim") for note in report.purchase.notes]
    parts += [Text(_asked(report))] if report.stage("compare") else []
    for words, field in (
        ("Failed, left out of the means", "failed"),
        ("Empty, counted as wrong", "empty"),
    ):
        if found := {
            name: rows for name, arm in report.arms.items() if (rows := getattr(arm, field))
        }:
            named = ", ".join(
                f"{verdict.arm_label_words(name, report).en} {rows}" for name, rows in found.items()
            )
            parts.append(Text(f"{words}: {named}"))
    if report.decision:
        style = {"promote": "bold green", "refuse": "bold red"}.get(
            report.decision.verdict, "bold yellow"
        )
        parts.append(Text(f"Gate: {report.decision.sentence}", style))
        parts += [Text(report.decision.note.render())] if report.decision.note else []
        if step := verdict.next_step(report):
            parts.append(Text(step.en, "bold"))
    if model := report.released:
        aliases = f" ({', '.join(model.aliases)})" if model.aliases else ""
        parts.append(Text(f"Registered as {model.name}, version {model.version}{aliases}"))
    notes = (
        (verdict.weights_words, "dim"),
        (verdict.alarm_warning, "bold red"),
        (verdict.continued_warning, "yellow"),
    )
    parts += [Text(note.en, style) for find, style in notes if (note := find(report))]
    if warning := verdict.simulator_warning(report):
        parts.append(Text(f"* {warning.en}", "yellow"))
    return Group(*parts)


def print_intervals(report: Report) -> RenderableType:
    """The candidate against its opponent, figure by figure, each with its 95% interval."""
    found = tables.side_by_side(report)
    if found is None:
        return Text(
            "Nothing to hold against each other: this run has no student and teacher.", "yellow"
        )
    table = _table("[95% CI]", [*(head.en for head in found.heads), "difference"])
    for line in found.lines:
        table.add_row(
            line.label.en, *(Text(f"{cell.text} {cell.ends}".strip()) for cell in line.cells)
        )
    warning = verdict.simulator_warning(report, marked=False)
    return Group(table, Text(warning.en, "yellow")) if warning else table


def stages_table(stages: Sequence[StageSummary]) -> Table:
    """What came in, what came out and why rows were dropped, the most frequent reason first."""
    table = _table("stage", ("in", "out", "time"))
    table.add_column("dropped, and why")
    for stage in stages:
        rows = (count(stage.rows_in), count(stage.rows_out)) if stage.rows_in else (NONE, NONE)
        dropped = sorted(stage.dropped.items(), key=lambda item: -item[1])
        notes = (
            [", ".join(f"{reason} {count(rows)}" for reason, rows in dropped)] if dropped else []
        )
        notes += [f"from run {stage.reused_from}"] if stage.reused_from else []
        table.add_row(stage.name, *rows, duration(stage.seconds), Text("; ".join(notes)))
    return table


def _table(
    first: str,
    others: Iterable[str],
    *,
    no_wrap: bool = True,
    vertical: VerticalAlignMethod = "top",
    **options: Any,
) -> Table:
    """An empty table whose further columns are numbers."""
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1), **options)
    table.add_column(first, no_wrap=no_wrap, vertical=vertical)
    for head in others:
        table.add_column(head, justify="right", no_wrap=no_wrap, vertical=vertical)
    return table


def _data_parts(report: Report) -> list[RenderableType]:
    """Of a refresh: the way of the rows, what they are worth where no arm says so, the cost, and
    the dataset."""
    parts: list[RenderableType] = [stages_table(report.stages)]
    if noise := tables.noise(report):
        parts.append(Text(noise.en))
    found, published = report.stage("validate"), report.stage("publish")
    if found and found.metrics and not report.arms:
        means = {
            name.removesuffix("_mean").replace("_", " "): value
            for name, value in found.metrics.items()
        }
        parts.append(
            Text(
                f"Answers, on average: {', '.join(f'{name} {number(means[name])}' for name in means)}"
            )
        )
    parts.append(Text(_asked(report)))
    if report.stage("dataset") is None:
        parts.append(_examples_table(report))
    if published and published.artifacts:
        parts.append(Text(f"Dataset: {Path(published.artifacts[0].path).parent}"))
    return parts


def _examples_table(report: Report) -> Table:
    """Rows to look at where none may teach: each text with the score of its best passage."""
    table = _table("question", (), no_wrap=False, title="Rows to look at", title_justify="left")
    table.add_column("score", justify="right")
    table.add_column("rewrite")
    table.add_column("score", justify="right")
    for example in report.examples:
        cells: list[Text] = []
        for name in ("original", "teacher"):
            arm = example.arms.get(name)
            score = arm.retrieved.top1_score if arm and arm.retrieved else None
            cells += [Text(one_line((arm and arm.text) or NONE)), Text(number(score))]
        table.add_row(*cells)
    return table


def _asked(report: Report) -> str:
    """Who was asked how often, and what it cost; answers of earlier runs cost nothing."""
    api, lines = report.api, []
    for role, usage in api:
        if isinstance(usage, Usage | RagCalls) and (usage.calls or usage.cached):
            calls, cached, failed = usage.calls, usage.cached, usage.failed
            parts = [f"{count(calls)} call{'' if calls == 1 else 's'}"] if calls else []
            parts += [f"{count(cached)} known answer{'' if cached == 1 else 's'}"] if cached else []
            parts += [f"{count(failed)} failed"] if failed else []
            parts += [usd(usage.cost_usd)] if isinstance(usage, Usage) else []
            mark = "*" if role in report.simulated else ""
            lines.append(
                f"{'RAG' if role == 'rag' else role.replace('_', ' ')}{mark} {', '.join(parts)}"
            )
    return f"Asked: {'; '.join(lines) or 'nobody'}. Cost of this run: {usd(api.cost_usd)}"


def _arms_table(report: Report) -> Table:
    metrics = [metric for metric in report.metrics if metric.compared][:_MOST_METRICS]
    first = next(
        (
            m.name
            for m in metrics
            if any(arm.mean(m.name) is not None for arm in report.arms.values())
        ),
        "",
    )
    heads = [
        fill(re.sub(r" ?\(.*\)", "", metric.en) + verdict.star(report, metric.name), _HEAD_WIDTH)
        + (" [95% CI]" if metric.name == first else "")
        for metric in metrics
    ]
    table = _table("arm", ("n", *heads, "p50/p95 ms", "$/1000"), vertical="bottom")
    for name, arm in verdict.arms_of(report).items():
        means = []
        for metric in metrics:
            ends = arm.score(metric.name).ci95 if metric.name == first else None
            means.append(
                with_interval(arm.mean(metric.name), ends, partial(number, digits=metric.digits))
            )
        table.add_row(
            verdict.arm_label_words(name, report, head=True).en + verdict.star(report, name),
            count(arm.n),
            *means,
            f"{latency(arm.latency_p50_ms)}/{latency(arm.latency_p95_ms)}",
            usd(arm.cost_per_1000_usd).removeprefix("$"),
        )
    return table


def _comparisons_table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_header=False)
    if report.purchase:
        label = verdict.arm_label_words("teacher", report, head=True)
        table.title, table.title_justify = f"Against {label.en}:", "left"
        shown = [c for c in report.comparisons if c.b == "teacher"]
    elif main := verdict.main_comparison(report):
        found = [c for c in report.comparisons if c.metric == main.metric and c.diff is not None]
        shown = [
            c
            for c in found
            if c.b not in ("base", "original") or "teacher" in (c.a, main.a) or c == main
        ]
    else:
        shown = []
    for c in shown:
        own = verdict.arm_label_words(c.a, report, head=True)
        table.add_row(
            (own if report.purchase else verdict.pair_words(c.a, c.b, report)).en,
            report.metric(c.metric).en,
            with_interval(c.diff, c.ci95, signed),
            f"p {p_value(c.p_value if c.p_holm is None else c.p_holm)}",
            f"{c.wins}/{c.ties}/{c.losses} w/t/l",
            f"detects {number(c.detectable_diff)}",
        )
    return table
