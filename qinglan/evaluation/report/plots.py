"""What the report draws: arms, differences, slices, curves and distributions, all in percent of the
plot's box.

The template draws them as inline SVG with its labels in HTML, so that text keeps its size on a
phone, colours follow the reader's light or dark scheme, and no plotting library is loaded.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle, pairwise
from statistics import fmean
from typing import NamedTuple

from qinglan.evaluation.models import Distribution, Report, Series
from qinglan.evaluation.reasons import TEXTS, words
from qinglan.evaluation.report.verdict import arm_label_words, main_comparison, pair_words
from qinglan.rows import ArmName
from qinglan.statistics import Interval, quantile, regrouped
from qinglan.text import ARMS, Both, capitalised, count, number, signed, with_interval

DISTRIBUTIONS = {
    "top1_score": (("line-3", "line-1", "line-0", "line-2"), False),
    "gain": (("line-0",), True),
    "judge_score": (("line-1",), False),
}
"""Styles of the outlines, and whether it is a difference."""
_STEP = Both("step", "步")
_MOST_SLICES = 12
"""Of one kind are drawn, the largest; the table has all."""
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_VALUES_PER_BIN = 30
"""Fewer, and an outline shows chance rather than shape."""
_FEWEST_BINS, _MOST_BINS = 10, 50


class Axis(NamedTuple):
    """A linear axis; `at` gives percent from its low end."""

    low: float
    high: float
    ticks: tuple[float, ...]

    @classmethod
    def over(cls, values: Iterable[float], ticks: int = 5) -> "Axis":
        """An axis with round ticks that covers the values (finite ones; 0 to 1 if there is
        none)."""
        finite = [value for value in values if math.isfinite(value)]
        low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
        if high - low < 1e-9:
            low, high = low - 0.5, high + 0.5
        raw = (high - low) / (ticks - 1)
        magnitude = 10.0 ** math.floor(math.log10(raw))
        step = next(each * magnitude for each in _STEPS if each * magnitude >= raw * (1 - 1e-9))
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        places = tuple(round(i * step, 10) for i in range(first, last + 1))
        return cls(places[0], places[-1], places)

    def at(self, value: float) -> float:
        return round(100 * (value - self.low) / (self.high - self.low), 2)

    def label(self, tick: float) -> str:
        """A tick's text, with as many decimals as the step needs."""
        step = self.ticks[1] - self.ticks[0]
        decimals = next((d for d in range(4) if math.isclose(step, round(step, d))), 4)
        return f"{tick:,.{decimals}f}".replace("-", "−")


class Dot(NamedTuple):
    """A value with its interval, in percent of the axis."""

    label: Both
    text: str
    style: str
    at: float
    low: float | None
    high: float | None


class DotPlot(NamedTuple):
    """Dots over one axis; `zero` is where a line of no difference stands."""

    axis: Axis
    dots: tuple[Dot, ...]
    zero: float | None


class Curve(NamedTuple):
    """One curve as an SVG path in a 100 × 100 box; `faint` for the raw values behind a moving mean;
    `area` is the path of what is filled below it."""

    label: Both | None
    path: str
    style: str
    faint: bool = False
    area: str = ""


class Chart(NamedTuple):
    """Curves over common axes; `zero` is where a line of no difference stands."""

    title: Both
    x_label: Both | None
    x: Axis
    y: Axis
    lines: tuple[Curve, ...]
    zero: float | None = None


Points = Sequence[tuple[float, float]]
DotRow = tuple[str, Both, float | None, Interval | None]
"""Style, label, value, interval."""


def dot_plot(
    rows: Sequence[DotRow],
    show: Callable[[float | None], str],
    zero: bool = False,
    axis: Axis | None = None,
) -> DotPlot | None:
    """A dot per row that has a value. With `zero`, rows whose interval includes 0 get the style
    `open`.

    `axis`: one that several plots share; `axis_of` makes it.
    """
    present = [
        (style, label, value, ends) for style, label, value, ends in rows if value is not None
    ]
    if not present:
        return None
    axis = axis or axis_of(rows, zero)
    dots = []
    for style, label, value, ends in present:
        low, high = (axis.at(ends[0]), axis.at(ends[1])) if ends else (None, None)
        undecided = zero and (ends is None or ends[0] <= 0 <= ends[1])
        text = with_interval(value, ends, show)
        dots.append(Dot(label, text, "open" if undecided else style, axis.at(value), low, high))
    return DotPlot(axis, tuple(dots), axis.at(0.0) if zero else None)


def axis_of(rows: Iterable[DotRow], zero: bool = False) -> Axis:
    values = [v for _, _, value, ends in rows if value is not None for v in (value, *(ends or ()))]
    return Axis.over([*values, 0.0] if zero else values)


def chart(title: Both, series: Sequence[tuple[Both, Points]]) -> Chart:
    """Curves of (x, y) points; non-finite points are skipped, long curves get a moving mean."""
    clean = [(label, [(x, y) for x, y in points if math.isfinite(y)]) for label, points in series]
    x_axis = Axis.over((x for _, points in clean for x, _ in points), ticks=6)
    y_axis = Axis.over((y for _, points in clean for _, y in points), ticks=5)
    lines: list[Curve] = []
    for place, (label, points) in enumerate(clean):
        style, window = f"line-{place % 4}", len(points) // 20
        if window > 1:
            lines.append(Curve(None, path(points, x_axis, y_axis), style, faint=True))
        half = window // 2  # a centred mean over 2·half + 1 points, fewer at the ends
        means = [
            (x, fmean(y for _, y in points[max(0, i - half) : i + half + 1]))
            for i, (x, _) in enumerate(points)
        ]
        lines.append(Curve(label, path(means, x_axis, y_axis), style))
    return Chart(title, _STEP, x_axis, y_axis, tuple(lines))


def histogram(
    title: Both, parts: Iterable[tuple[str, Distribution]], is_difference: bool = False
) -> Chart | None:
    """Outlines of distributions, each after its style, in percent of its values; those of one plot
    have the same bins.

    Bins are joined until each holds enough values to show a shape. None where nothing was counted.
    """
    present = [(style, part) for style, part in parts if sum(part.counts)]
    if not present:
        return None
    fewest, counted = min(sum(part.counts) for _, part in present), len(present[0][1].counts)
    possible = [n for n in range(_FEWEST_BINS, _MOST_BINS + 1) if counted % n == 0] or [counted]
    bins = max((n for n in possible if n * _VALUES_PER_BIN <= fewest), default=possible[0])
    outlines = [_steps(part.low, part.high, regrouped(part.counts, bins)) for _, part in present]
    x = Axis.over([0.0, *(x for points in outlines for x, _ in points)], ticks=6)
    y = Axis.over([0.0, *(y for points in outlines for _, y in points)], ticks=4)
    show = signed if is_difference else number
    lines = []
    for (style, part), points in zip(present, outlines, strict=True):
        label, outline = words(part.label), path(points, x, y)
        median = show(quantile(part.low, part.high, part.counts, 0.5), 2)
        named = Both(f"{label.en}, median {median}", f"{label.zh}，中位数 {median}")
        lines.append(Curve(named, outline, style, area=f"{outline} Z"))
    return Chart(title, None, x, y, tuple(lines), x.at(0.0) if is_difference else None)


def _steps(low: float, high: float, counts: Sequence[int]) -> list[tuple[float, float]]:
    """The outline of bars, in percent, from the first that is not empty to the last, down to 0 at
    both ends."""
    filled = [i for i, count in enumerate(counts) if count]
    first, end = filled[0], filled[-1] + 1
    width, total = (high - low) / len(counts), sum(counts)
    shares = [0.0, *(100 * count / total for count in counts[first:end]), 0.0]
    return [
        (low + i * width, share)
        for i, sides in enumerate(pairwise(shares), first)
        for share in sides
    ]


def path(points: Points, x: Axis, y: Axis) -> str:
    places = (f"{x.at(px)},{round(100 - y.at(py), 2)}" for px, py in points)
    return "M" + " L".join(places) if points else ""


class SlicePlot(NamedTuple):
    """The difference in the slices by one thing."""

    by: Both
    metric: Both
    pair: Both
    plot: DotPlot


def arm_dots(report: Report, arms: Sequence[ArmName]) -> tuple[Both, DotPlot] | None:
    """One dot per arm on the best metric there is."""
    present = (
        m
        for m in report.metrics
        if any(report.arms[name].mean(m.name) is not None for name in arms)
    )
    if (metric := next(present, None)) is None:
        return None
    rows: list[DotRow] = []
    for name in arms:
        score = report.arms[name].score(metric.name)
        label = arm_label_words(name, report)
        if (
            label in ARMS.values()
        ):  # at the start of a line; a name that a user gave stays as it was given
            label = Both(capitalised(label.en), label.zh)
        rows.append((_style(name), label, score.mean, score.ci95))
    plot = dot_plot(rows, number)
    return (metric.words, plot) if plot else None


def difference_dots(report: Report) -> tuple[Both, DotPlot] | None:
    """One dot per comparison on the metric of the main one, around 0."""
    main = main_comparison(report)
    if main is None:
        return None
    shown = [
        c
        for c in report.comparisons
        if c.metric == main.metric and (not report.purchase or c.b == main.b)
    ]
    plot = dot_plot(
        [(_style(c.a), pair_words(c.a, c.b, report), c.diff, c.ci95) for c in shown],
        signed,
        zero=True,
    )
    return (report.metric(main.metric).words, plot) if plot else None


def slice_plots(report: Report) -> list[SlicePlot]:
    """The main comparison's difference by slice; all plots share an axis."""
    main = main_comparison(report)
    if main is None:
        return []
    rows: dict[str, list[DotRow]] = {}
    for part in report.slices:
        found, drawn = part.diff(main.a, main.b, main.metric), rows.setdefault(part.by, [])
        if found and len(drawn) < _MOST_SLICES:
            name, questions = words(part.value), count(part.n)
            label = Both(f"{name.en} ({questions})", f"{name.zh}（{questions}）")
            drawn.append((_style(main.a), label, found.diff, found.ci95))
    axis = axis_of([row for each in rows.values() for row in each], zero=True)
    pair = pair_words(main.a, main.b, report)
    plots = ((by, dot_plot(each, signed, zero=True, axis=axis)) for by, each in rows.items())
    return [
        SlicePlot(words(by, "slices"), report.metric(main.metric).words, pair, plot)
        for by, plot in plots
        if plot
    ]


def charts(curves: Mapping[str, Sequence[Series]]) -> list[Chart]:
    """Known curves in their order, then others under their own names."""
    known = TEXTS["curves"]
    drawn = []
    for name in (
        *(name for name in known if name in curves),
        *sorted(curves.keys() - known.keys()),
    ):
        series = [
            (words(s.label), [(x, y) for x, y in zip(s.x, s.y, strict=True) if y is not None])
            for s in curves[name]
        ]
        if any(points for _, points in series):
            drawn.append(chart(known.get(name) or words(name), series))
    return drawn


def distributions(found: Mapping[str, Sequence[Distribution]]) -> list[Chart]:
    """What validation counted, as outlines."""
    drawn = (
        histogram(
            TEXTS["distributions"][name],
            zip(cycle(styles), found.get(name, ()), strict=False),
            is_difference,
        )
        for name, (styles, is_difference) in DISTRIBUTIONS.items()
    )
    return [plot for plot in drawn if plot]


def _style(name: ArmName) -> str:
    return name if name in ARMS else "rival"
