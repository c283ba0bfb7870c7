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

from qinglan.evaluation.models import (
    Decision,
    Purchase,
    RagCalls,
    RegisteredVersion,
    Report,
    StageSummary,
)
from qinglan.evaluation.report import tables, verdict
from qinglan.ledger import Usage
from qinglan.rows import top1_of
from qinglan.statistics import Comparison
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
"""Metrics for which 100 columns have room."""
_HEAD_WIDTH = 10
_VERDICT_STYLES = {"better": "bold green", "worse": "bold red"}
_GATE_STYLES = {"promote": "bold green", "refuse": "bold red"}


def print_table(report: Report) -> RenderableType:
    """The result for a terminal of 100 columns.

    It shows the verdict, arms, comparisons, the gate's decision, and what was simulated.
    """
    conclusion = verdict.verdict(report)
    parts: list[RenderableType] = [
        Text(conclusion.sentence.en, _VERDICT_STYLES.get(conclusion.tone, "bold")),
        Text(conclusion.reading.en, "dim"),
    ]
    if report.arms:
        parts += [_arms_table(report), _comparisons_table(report)]
    parts += _finding_tables(report)
    if report.is_of_data:
        parts += _data_parts(report)
    if report.purchase:
        parts += _purchase_parts(report.purchase)
    if report.stage("compare"):
        parts.append(Text(_calls_line(report)))
    parts += _row_count_lines(report)
    if report.decision:
        parts += _decision_parts(report, report.decision)
    if report.released:
        parts.append(Text(_released_line(report.released)))
    for note, style in (
        (verdict.weights_words(report), "dim"),
        (verdict.alarm_warning(report), "bold red"),
        (verdict.continued_warning(report), "yellow"),
    ):
        if note:
            parts.append(Text(note.en, style))
    warning = verdict.simulator_warning(report)
    if warning:
        parts.append(Text(f"* {warning.en}", "yellow"))
    return Group(*parts)


def _finding_tables(report: Report) -> list[RenderableType]:
    finding_tables: list[RenderableType] = []
    for finding in report.findings:
        if not finding.columns:
            continue
        heads = [column.en for column in finding.columns]
        table = _table(finding.title.en, heads, no_wrap=False)
        for row in finding.rows:
            values = [number(value, finding.digits) for value in row.values]
            table.add_row(row.label.en, *values)
        finding_tables.append(table)
    return finding_tables


def _purchase_parts(purchase: Purchase) -> list[RenderableType]:
    parts: list[RenderableType] = []
    # The verdict has said everything about an only rival.
    if len(purchase.offers) > 1:
        parts += [Text(offer.render()) for offer in purchase.offers]
    parts += [Text(f"– {note.render()}", "dim") for note in purchase.notes]
    return parts


def _row_count_lines(report: Report) -> list[RenderableType]:
    """Rows that failed, and rows with an empty text, by arm."""
    lines: list[RenderableType] = []
    for words, field in (
        ("Failed, left out of the means", "failed"),
        ("Empty, counted as wrong", "empty"),
    ):
        counts = []
        for name, arm in report.arms.items():
            rows = getattr(arm, field)
            if rows:
                counts.append(f"{verdict.arm_label_words(name, report).en} {rows}")
        if counts:
            lines.append(Text(f"{words}: {', '.join(counts)}"))
    return lines


def _decision_parts(report: Report, decision: Decision) -> list[RenderableType]:
    style = _GATE_STYLES.get(decision.verdict, "bold yellow")
    parts: list[RenderableType] = [Text(f"Gate: {decision.sentence}", style)]
    if decision.note:
        parts.append(Text(decision.note.render()))
    step = verdict.next_step(report)
    if step:
        parts.append(Text(step.en, "bold"))
    return parts


def _released_line(released: RegisteredVersion) -> str:
    line = f"Registered as {released.name}, version {released.version}"
    if released.aliases:
        line += f" ({', '.join(released.aliases)})"
    return line


def print_intervals(report: Report) -> RenderableType:
    """The candidate against its opponent, figure by figure, each with its 95% interval."""
    comparison = tables.side_by_side(report)
    if comparison is None:
        return Text(
            "Nothing to hold against each other: this run has no student and teacher.", "yellow"
        )
    heads = [head.en for head in comparison.heads]
    table = _table("[95% CI]", [*heads, "difference"])
    for line in comparison.lines:
        cells = [Text(f"{cell.text} {cell.ends}".strip()) for cell in line.cells]
        table.add_row(line.label.en, *cells)
    warning = verdict.simulator_warning(report, marked=False)
    if warning is None:
        return table
    return Group(table, Text(warning.en, "yellow"))


def stages_table(stages: Sequence[StageSummary]) -> Table:
    """Rows of each stage: in, out and dropped by reason, the most frequent reason first."""
    table = _table("stage", ("in", "out", "time"))
    table.add_column("dropped, and why")
    for stage in stages:
        rows_in = NONE
        rows_out = NONE
        # A stage that takes no rows leaves none either.
        if stage.rows_in:
            rows_in = count(stage.rows_in)
            rows_out = count(stage.rows_out)
        notes = []
        if stage.dropped:
            most_frequent_first = sorted(stage.dropped.items(), key=lambda item: -item[1])
            notes.append(
                ", ".join(f"{reason} {count(rows)}" for reason, rows in most_frequent_first)
            )
        if stage.reused_from:
            notes.append(f"from run {stage.reused_from}")
        table.add_row(
            stage.name, rows_in, rows_out, duration(stage.seconds), Text("; ".join(notes))
        )
    return table


def _table(
    first_head: str,
    heads: Iterable[str],
    *,
    no_wrap: bool = True,
    vertical: VerticalAlignMethod = "top",
    **options: Any,
) -> Table:
    """An empty table whose further columns are numbers."""
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1), **options)
    table.add_column(first_head, no_wrap=no_wrap, vertical=vertical)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=no_wrap, vertical=vertical)
    return table


def _data_parts(report: Report) -> list[RenderableType]:
    """A refresh's rows by stage, their worth where no arm shows it, the cost, and the dataset."""
    parts: list[RenderableType] = [stages_table(report.stages)]
    noise = tables.noise(report)
    if noise:
        parts.append(Text(noise.en))
    validated = report.stage("validate")
    if validated and validated.metrics and not report.arms:
        means = {}
        for name, value in validated.metrics.items():
            words = name.removesuffix("_mean").replace("_", " ")
            means[words] = f"{words} {number(value)}"
        parts.append(Text(f"Answers, on average: {', '.join(means.values())}"))
    parts.append(Text(_calls_line(report)))
    if report.stage("dataset") is None:
        parts.append(_examples_table(report))
    published = report.stage("publish")
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
            text = arm.text if arm else None
            score = top1_of(arm.retrieved) if arm else None
            # A user's or a model's text could steer the terminal.
            cells.append(Text(one_line(text or NONE)))
            cells.append(Text(number(score)))
        table.add_row(*cells)
    return table


def _calls_line(report: Report) -> str:
    """The calls to each role, and their cost; answers of earlier runs cost nothing."""
    roles = []
    for role, usage in report.api:
        if isinstance(usage, Usage | RagCalls) and (usage.calls or usage.cached):
            name = "RAG" if role == "rag" else role.replace("_", " ")
            # A star marks what a simulator answered.
            mark = "*" if role in report.simulated else ""
            roles.append(f"{name}{mark} {', '.join(_usage_words(usage))}")
    asked_roles = "; ".join(roles) or "nobody"
    return f"Asked: {asked_roles}. Cost of this run: {usd(report.api.cost_usd)}"


def _usage_words(usage: Usage | RagCalls) -> list[str]:
    words = []
    if usage.calls:
        words.append(_with_noun(usage.calls, "call"))
    if usage.cached:
        words.append(_with_noun(usage.cached, "known answer"))
    if usage.failed:
        words.append(f"{count(usage.failed)} failed")
    # Calls of the RAG have no price.
    if isinstance(usage, Usage):
        words.append(usd(usage.cost_usd))
    return words


def _with_noun(number_of: int, noun: str) -> str:
    """`1 call`, `2 calls`."""
    if number_of == 1:
        return f"1 {noun}"
    return f"{count(number_of)} {noun}s"


def _arms_table(report: Report) -> Table:
    metrics = [metric for metric in report.metrics if metric.compared][:_MOST_METRICS]
    # There is room for one metric's interval.
    first = tables.first_with_values(metrics, report.arms.values())
    heads = []
    for metric in metrics:
        # A column has no room for an explanation in brackets.
        name = re.sub(r" ?\(.*\)", "", metric.en) + verdict.star(report, metric.name)
        head = fill(name, _HEAD_WIDTH)
        heads.append(f"{head} [95% CI]" if metric == first else head)
    table = _table("arm", ("n", *heads, "p50/p95 ms", "$/1000"), vertical="bottom")
    for name, arm in verdict.arms_of(report).items():
        label = verdict.arm_label_words(name, report, head=True).en + verdict.star(report, name)
        means = []
        for metric in metrics:
            score = arm.score(metric.name)
            ends = score.ci95 if metric == first else None
            means.append(with_interval(score.mean, ends, partial(number, digits=metric.digits)))
        speed = f"{latency(arm.latency_p50_ms)}/{latency(arm.latency_p95_ms)}"
        # The column's head has the sign.
        cost = usd(arm.cost_per_1000_usd).removeprefix("$")
        table.add_row(label, count(arm.n), *means, speed, cost)
    return table


def _comparisons_table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_header=False)
    if report.purchase:
        label = verdict.arm_label_words("teacher", report, head=True)
        # Every line is against the same arm, which is named once.
        table.title = f"Against {label.en}:"
        table.title_justify = "left"
    for comparison in _comparisons_in_table(report):
        if report.purchase:
            arms = verdict.arm_label_words(comparison.a, report, head=True)
        else:
            arms = verdict.pair_words(comparison.a, comparison.b, report)
        table.add_row(
            arms.en,
            report.metric(comparison.metric).en,
            with_interval(comparison.diff, comparison.ci95, signed),
            f"p {p_value(comparison.corrected_p)}",
            f"{comparison.wins}/{comparison.ties}/{comparison.losses} w/t/l",
            f"detects {number(comparison.detectable_diff)}",
        )
    return table


def _comparisons_in_table(report: Report) -> list[Comparison]:
    """The teachers against the main one, or the comparisons on the verdict's metric.

    Of the latter, those with the base model or the original question are left out, unless they are
    the verdict's, or they or the verdict are about the teacher.
    """
    if report.purchase:
        return [comparison for comparison in report.comparisons if comparison.b == "teacher"]
    main = verdict.main_comparison(report)
    if main is None:
        return []
    comparisons = []
    for comparison in report.comparisons:
        if comparison.metric != main.metric or comparison.diff is None:
            continue
        is_with_baseline = comparison.b in ("base", "original")
        is_about_teacher = "teacher" in (comparison.a, main.a)
        if not is_with_baseline or is_about_teacher or comparison == main:
            comparisons.append(comparison)
    return comparisons
