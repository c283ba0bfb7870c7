"""The report as a table for the terminal."""

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from qinglan import formats
from qinglan.formats import count, number, p_value, signed, usd, with_interval
from qinglan.report import (
    Report,
    alarm_warning,
    arm_head,
    arm_label,
    arms_of,
    headline,
    metric_label,
    pair,
    stand_in_warning,
    starred,
    verdict,
)
from qinglan.report_tables import Plan, Value, plan
from qinglan.statistics import Comparison

_PAIRS = (
    *(("rl", "teacher"), ("sft", "teacher"), ("rl", "sft"), ("rl", "champion"), ("sft", "champion")),
    ("teacher", "original"),
)


def print_table(report: Report) -> RenderableType:
    """The result for a terminal of 100 columns: headline, arms, comparisons, and what came from stand-ins."""
    result = verdict(report)
    style = {"better": "bold green", "worse": "bold red"}.get(result.tone, "bold")
    parts: list[RenderableType] = [Text(result.sentence, style), Text(result.reading, "dim")]
    parts += [_arms_table(report), _comparisons_table(report)] if report.arms else []
    if report.purchase:
        parts += [Text(text) for text in report.purchase.offers if len(report.purchase.offers) > 1]
        parts += [Text(f"– {note}", "dim") for note in report.purchase.notes]
    if failed := [f"{arm_label(name, report)} {arm.failed}" for name, arm in report.arms.items() if arm.failed]:
        parts.append(Text(f"Failed, left out of the means: {', '.join(failed)}"))
    parts += _release_lines(report)
    if alarms := alarm_warning(report):
        parts.append(Text(alarms, "bold red"))
    if warning := stand_in_warning(report):
        parts.append(Text(f"* {warning}", "yellow"))
    return Group(*parts)


def print_intervals(report: Report) -> RenderableType:
    """The candidate against its opponent, figure by figure, each with its 95% interval."""
    found = plan(report)
    if found is None:
        return Text("Nothing to hold against each other: this run has no student and teacher.", "yellow")
    parts: list[RenderableType] = [_intervals_table(found)]
    if warning := stand_in_warning(report, marked=False):
        parts.append(Text(warning, "yellow"))
    return Group(*parts)


def _intervals_table(found: Plan) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1))
    table.add_column("[95% CI]", no_wrap=True)
    for head in (*found.heads, None):
        table.add_column(head.en if head else "difference", justify="right", no_wrap=True)
    for line in found.lines:
        table.add_row(line.label.en, *(Text(_with_ends(cell)) for cell in line.cells))
    return table


def _with_ends(cell: Value) -> str:
    return f"{cell.text} {cell.ends}".strip()


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
    table.add_column("arm", no_wrap=True)
    heads = ("n", f"top-1{star('top1')} [95% CI]", f"MRR@10{star('mrr10')}", f"score{star('mean_top1_score')}")
    for head in (*heads, f"judge{star('quality')}", "p50/p95 ms", "$/1000"):
        table.add_column(head, justify="right", no_wrap=True)
    for name, arm in arms_of(report).items():
        table.add_row(
            arm_head(name, report) + star(name),
            count(arm.n),
            with_interval(arm.top1, arm.top1_ci95, number),
            number(arm.mrr10),
            number(arm.mean_top1_score),
            number(arm.quality, 2),
            f"{formats.latency(arm.latency_p50_ms)}/{formats.latency(arm.latency_p95_ms)}",
            usd(arm.cost_per_1000_usd).removeprefix("$"),
        )
    return table


def _comparisons_table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_header=False)
    main = headline(report)
    shown = [c for c in _in_order(report.comparisons, _PAIRS) if main and c.metric == main.metric]
    if report.purchase:
        table.title, table.title_justify = f"Against {arm_head('teacher', report)}:", "left"
        shown = [c for c in report.comparisons if c.b == "teacher"]
    for c in shown:
        table.add_row(
            arm_head(c.a, report) if report.purchase else pair(c, report),
            metric_label(c.metric),
            with_interval(c.diff, c.ci95, signed),
            f"p {p_value(c.p_value if c.p_holm is None else c.p_holm)}",
            f"{c.wins}/{c.ties}/{c.losses} w/t/l",
            f"detects {number(c.detectable_diff)}",
        )
    return table


def _in_order(comparisons: Sequence[Comparison], pairs: Sequence[tuple[str, str]]) -> list[Comparison]:
    places = {pair: place for place, pair in enumerate(pairs)}
    return sorted(
        (c for c in comparisons if (c.a, c.b) in places and c.diff is not None), key=lambda c: places[c.a, c.b]
    )
