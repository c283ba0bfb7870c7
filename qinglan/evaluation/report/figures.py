"""What the report draws: arms, differences, slices, curves and distributions."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from qinglan.evaluation.models import Distribution, Report, Series, Slice
from qinglan.evaluation.report.plots import Chart, DotPlot, DotRow, axis_of, chart, dot_plot, histogram
from qinglan.evaluation.report.verdict import arm_label_words, by_preference, headline, metric_words, pair_words
from qinglan.evaluation.report.words import SLICES, words
from qinglan.rows import ArmName
from qinglan.text import ARMS, Both, capitalised, count, number, signed

CURVES = {
    "rl_reward": Both("RL: reward", "RL：奖励"),
    "rl_dev": Both("RL: dev split, by which the checkpoint was chosen", "RL：开发集得分（检查点据此选定）"),
    "sft_loss": Both("SFT: loss", "SFT：损失"),
    "pretrain_loss": Both("Pretraining of the embedded base model: loss", "内置基座模型的预训练：损失"),
}
DISTRIBUTIONS = {
    "top1_score": (
        Both("Top-1 score, % of rows", "首位得分，占行数的 %"),
        ("line-3", "line-1", "line-0", "line-2"),
        False,
    ),
    "gain": (Both("Gain in top-1 score, % of rows", "首位得分的提升，占行数的 %"), ("line-0",), True),
    "judge_score": (Both("Judge's score, 0–5, % of rows", "裁判评分（0–5），占行数的 %"), ("line-1",), False),
}
"""Title, styles of the outlines, whether it is a difference."""
_STEP = Both("step", "步")
_MOST_SLICES = 12
"""Of one kind are drawn, the largest; the table has all."""


class SlicePlot(NamedTuple):
    """The difference in the slices by one thing."""

    by: Both
    metric: Both
    pair: Both
    plot: DotPlot


def arm_dots(report: Report, arms: Sequence[ArmName]) -> tuple[Both, DotPlot] | None:
    """One dot per arm on the best metric there is."""
    metric = next(
        (m for m in by_preference(report) if any(report.arms[a].mean(m.name) is not None for a in arms)), None
    )
    if metric is None:
        return None
    rows: list[DotRow] = []
    for name in arms:
        score = report.arms[name].score(metric.name)
        rows.append((_style(name), _dot_label(name, report), score.mean, score.ci95))
    plot = dot_plot(rows, number)
    return (metric_words(metric.name, report), plot) if plot else None


def difference_dots(report: Report) -> tuple[Both, DotPlot] | None:
    """One dot per comparison on the headline's metric, around 0."""
    main = headline(report)
    if main is None:
        return None
    shown = [c for c in report.comparisons if c.metric == main.metric and (not report.purchase or c.b == main.b)]
    plot = dot_plot([(_style(c.a), pair_words(c.a, c.b, report), c.diff, c.ci95) for c in shown], signed, zero=True)
    return (metric_words(main.metric, report), plot) if plot else None


def slice_plots(report: Report) -> list[SlicePlot]:
    """The difference by slice on the headline's metric; all plots share an axis."""
    main = headline(report)
    if main is None:
        return []
    key = (main.a, main.b, main.metric)
    parts = [(part, found) for part in report.slices if (found := part.diff(*key)) is not None]
    if not parts:
        return []
    rows: dict[str, list[DotRow]] = {}
    for part, found in parts:
        drawn = rows.setdefault(part.by, [])
        if len(drawn) < _MOST_SLICES:
            drawn.append((_style(found.a), _slice_label(part), found.diff, found.ci95))
    axis = axis_of([row for each in rows.values() for row in each], zero=True)
    pair = pair_words(parts[0][1].a, parts[0][1].b, report)
    plots = ((by, dot_plot(each, signed, zero=True, axis=axis)) for by, each in rows.items())
    return [SlicePlot(slice_words(by), metric_words(main.metric, report), pair, plot) for by, plot in plots if plot]


def slice_words(by: str) -> Both:
    """What the slices are made by."""
    return SLICES.get(by) or Both(by, by)


def charts(curves: Mapping[str, Sequence[Series]]) -> list[Chart]:
    """Known curves in their order, then others under their own names."""
    order = sorted(curves, key=lambda name: (list(CURVES).index(name) if name in CURVES else len(CURVES), name))
    drawn = []
    for name in order:
        series = [
            (words(s.label), [(x, y) for x, y in zip(s.x, s.y, strict=True) if y is not None]) for s in curves[name]
        ]
        if any(points for _, points in series):
            drawn.append(chart(CURVES.get(name) or words(name), _STEP, series))
    return drawn


def distributions(found: Mapping[str, Sequence[Distribution]]) -> list[Chart]:
    """What validation counted, as outlines."""
    drawn = []
    for name, (title, styles, is_difference) in DISTRIBUTIONS.items():
        outlines = zip(styles, found.get(name, ()), strict=False)
        parts = [(style, words(part.label), part.low, part.high, part.counts) for style, part in outlines]
        drawn.append(histogram(title, parts, is_difference))
    return [plot for plot in drawn if plot is not None]


def gain_shares(gains: Sequence[Distribution]) -> Both | None:
    """Share of rows above, in and below the bin that holds no gain, and half that bin's width."""
    if not gains or not sum(gains[0].counts):
        return None
    found = gains[0]
    total, width = sum(found.counts), (found.high - found.low) / len(found.counts)
    middle = int(-found.low / width)
    below, same = sum(found.counts[:middle]), found.counts[middle]
    better, equal, worse = (f"{part / total:.0%}" for part in (total - below - same, same, below))
    within = number(width / 2, 2)
    return Both(
        f"Of {count(total)} rows, {better} score higher with the rewrite, {equal} the same (within {within}) "
        f"and {worse} lower.",
        f"{count(total)} 行中，{better} 用改写后得分更高，{equal} 相同（相差不超过 {within}），{worse} 更低。",
    )


def _slice_label(part: Slice) -> Both:
    name = words(part.value)
    return Both(f"{name.en} ({count(part.n)})", f"{name.zh}（{count(part.n)}）")


def _style(name: ArmName) -> str:
    return name if name in ARMS else "rival"


def _dot_label(name: ArmName, report: Report) -> Both:
    """At the start of a line; a name that somebody gave stays as it was given."""
    label = arm_label_words(name, report)
    return Both(capitalised(label.en), label.zh) if label in ARMS.values() else label
