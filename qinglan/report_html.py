"""The report as one self-contained HTML page.

Every text that came from a workbook, a model or the RAG is untrusted: the template escapes it, and the page's
content policy allows no script and no network.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jinja2

from qinglan import formats
from qinglan.artifacts import Artifact
from qinglan.formats import capitalised, count, interval, number, p_value, signed, usd
from qinglan.plots import Chart, DotPlot, chart, dot_plot, histogram
from qinglan.report import (
    ARMS,
    METRICS,
    ArmName,
    Distribution,
    Report,
    Series,
    Stage,
    Training,
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

CURVES = {
    "rl_reward": ("RL: reward", "step"),
    "rl_dev": ("RL: dev split, by which the checkpoint was chosen", "step"),
    "sft_loss": ("SFT: loss", "step"),
    "pretrain_loss": ("Pretraining of the embedded base model: loss", "step"),
}
DISTRIBUTIONS = {
    "top1_score": ("Top-1 score, % of rows", ("line-3", "line-1", "line-0", "line-2"), False),
    "gain": ("Gain in top-1 score, % of rows", ("line-0",), True),
}
"""Title, styles of the outlines, whether it is a difference."""
DETECTABLE = "the smallest true difference that four of five such test sets would show"
_TEMPLATES = Path(__file__).parent / "templates"


def render_html(report: Report, out: Path) -> Artifact:
    """Write the report as one HTML file that needs nothing else."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown = (number, signed, interval, count, usd, p_value, formats.latency, formats.duration)
    environment.filters |= {helper.__name__: helper for helper in (*shown, metric_label)}
    environment.filters |= {helper.__name__: partial(helper, report=report) for helper in (arm_label, arm_head, pair)}
    page = environment.get_template("report.html.j2").render(_view(report))
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_suffix(out.suffix + ".partial")
    unfinished.write_text(page, encoding="utf-8")
    unfinished.replace(out)
    return Artifact.of(out)


def _view(report: Report) -> dict[str, Any]:
    arms = list(arms_of(report))
    return {
        "report": report,
        "verdict": verdict(report),
        "headline": headline(report),
        "warning": stand_in_warning(report),
        "alarms": alarm_warning(report),
        "star": lambda key: "*" if starred(report, key) else "",
        "arms": arms,
        "arm_dots": _arm_dots(report, arms),
        "difference_dots": _difference_dots(report),
        "charts": _charts(report.curves),
        "distributions": _distributions(report.distributions),
        "gain_shares": _gain_shares(report.distributions.get("gain", [])),
        "funnel": _funnel(report.stages),
        "training": _training(report.training),
        "detectable": DETECTABLE,
    }


def _arm_dots(report: Report, arms: Sequence[ArmName]) -> DotPlot | None:
    """One dot per arm on the best metric there is; only top-1 has intervals."""
    metric = next((m for m in METRICS if any(getattr(report.arms[a], m) is not None for a in arms)), None)
    if metric is None:
        return None
    shown = [(n if n in ARMS else "rival", _dot_label(n, report), report.arms[n]) for n in arms]
    rows = [(n, label, getattr(arm, metric), arm.top1_ci95 if metric == "top1" else None) for n, label, arm in shown]
    return dot_plot(metric_label(metric), rows, number)


def _dot_label(name: ArmName, report: Report) -> str:
    """At the start of a line; a name that somebody gave stays as it was given."""
    label = arm_label(name, report)
    return capitalised(label) if label in ARMS.values() else label


def _difference_dots(report: Report) -> DotPlot | None:
    """One dot per comparison on the headline's metric, around 0."""
    main = headline(report)
    if main is None:
        return None
    shown = [c for c in report.comparisons if c.metric == main.metric and (not report.purchase or c.b == main.b)]
    rows = [(c.a if c.a in ARMS else "rival", pair(c, report), c.diff, c.ci95) for c in shown]
    return dot_plot(metric_label(main.metric), rows, signed, zero=True)


def _charts(curves: Mapping[str, Sequence[Series]]) -> list[Chart]:
    order = sorted(curves, key=lambda name: (list(CURVES).index(name) if name in CURVES else len(CURVES), name))
    charts = []
    for name in order:
        title, x_label = CURVES.get(name, (name, "step"))
        series = [(s.label, [(x, y) for x, y in zip(s.x, s.y, strict=True) if y is not None]) for s in curves[name]]
        if any(points for _, points in series):
            charts.append(chart(title, x_label, series))
    return charts


def _distributions(found: Mapping[str, Sequence[Distribution]]) -> list[Chart]:
    drawn = []
    for name, (title, styles, is_difference) in DISTRIBUTIONS.items():
        outlines = zip(styles, found.get(name, ()), strict=False)
        parts = [(style, part.label, part.low, part.high, part.counts) for style, part in outlines]
        drawn.append(histogram(title, parts, is_difference))
    return [plot for plot in drawn if plot is not None]


def _gain_shares(gains: Sequence[Distribution]) -> dict[str, Any] | None:
    """Share of rows above, in and below the bin that holds no gain, and half that bin's width."""
    if not gains or not sum(gains[0].counts):
        return None
    found = gains[0]
    total, width = sum(found.counts), (found.high - found.low) / len(found.counts)
    middle = int(-found.low / width)
    below, same = sum(found.counts[:middle]), found.counts[middle]
    return {
        "rows": total,
        "better": (total - below - same) / total,
        "equal": same / total,
        "worse": below / total,
        "within": width / 2,
    }


def _funnel(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    """Stages that count rows, with bar widths in percent of the fullest stage."""
    counted = [stage for stage in stages if stage.rows_in]
    full = max((stage.rows_in for stage in counted), default=1)
    return [
        {
            "stage": stage,
            "kept": 100 * min(stage.rows_out, stage.rows_in) / full,
            "fell": 100 * sum(stage.dropped.values()) / full,
            "reasons": sorted(stage.dropped.items(), key=lambda item: -item[1]),
        }
        for stage in counted
    ]


def _training(training: Training) -> list[tuple[str, list[tuple[str, str]]]]:
    blocks = []
    for title, part in (("SFT", training.sft), ("RL", training.rl)):
        if part is not None:
            facts = [(key.replace("_", " "), value) for key, value in part.model_dump().items() if value is not None]
            blocks.append((title, [(key, formats.plain(value)) for key, value in facts]))
    return blocks
