"""The report's plots: arms, differences, slices, curves and distributions.

All places are in percent of the plot's box. The template draws them as inline SVG with its labels
in HTML, so that text keeps its size on a phone, colours follow the reader's light or dark scheme,
and no plotting library is loaded.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, cycle, pairwise
from statistics import fmean
from typing import NamedTuple

from qinglan.evaluation.models import Distribution, Report, Series
from qinglan.evaluation.reasons import TEXTS, words
from qinglan.evaluation.report.tables import first_with_values
from qinglan.evaluation.report.verdict import arm_label_words, main_comparison, pair_words
from qinglan.rows import ArmName
from qinglan.statistics import Interval, quantile, regrouped
from qinglan.text import ARMS, Both, Show, capitalised, count, number, signed, with_interval

DISTRIBUTIONS = {
    "top1_score": (("line-3", "line-1", "line-0", "line-2"), False),
    "gain": (("line-0",), True),
    "judge_score": (("line-1",), False),
}
"""Styles of a plot's outlines, and True where its values are differences."""
_STEP = Both("step", "步")
_MOST_SLICES = 12
"""Most slices of one kind that are drawn, the largest; the table has all."""
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
"""Round distances between two ticks, times a power of ten."""
_VALUES_PER_BIN = 30
"""Values that a bin holds on average; with fewer, an outline shows chance rather than shape."""
_FEWEST_BINS = 10
_MOST_BINS = 50
_NO_RANGE = 1e-9
_ROUNDING = 1e-9
_MOST_DECIMALS = 4
_LINE_STYLES = 4


class Axis(NamedTuple):
    """A linear axis; `at` gives percent from its low end."""

    low: float
    high: float
    ticks: tuple[float, ...]

    @classmethod
    def over(cls, values: Iterable[float], ticks: int = 5) -> "Axis":
        """An axis with round ticks that covers the finite values; 0 to 1 if there is none."""
        finite = [value for value in values if math.isfinite(value)]
        low = min(finite, default=0.0)
        high = max(finite, default=1.0)
        # A single value stands in the middle of its axis.
        if high - low < _NO_RANGE:
            low -= 0.5
            high += 0.5
        step = _round_step((high - low) / (ticks - 1))
        # A value that is on a tick but for rounding needs no further one.
        first = math.floor(low / step + _ROUNDING)
        last = math.ceil(high / step - _ROUNDING)
        # Rounded, as 3 · 0.1 is a little more than 0.3.
        places = tuple(round(number * step, 10) for number in range(first, last + 1))
        return cls(places[0], places[-1], places)

    def at(self, value: float) -> float:
        return round(100 * (value - self.low) / (self.high - self.low), 2)

    def label(self, tick: float) -> str:
        """A tick's text, with as many decimals as the step needs."""
        step = self.ticks[1] - self.ticks[0]
        decimals = 0
        while decimals < _MOST_DECIMALS and not math.isclose(step, round(step, decimals)):
            decimals += 1
        return f"{tick:,.{decimals}f}".replace("-", "−")


def _round_step(least: float) -> float:
    """The smallest round number that is not below this one."""
    magnitude = 10.0 ** math.floor(math.log10(least))
    # The last of the steps always is large enough.
    return next(s * magnitude for s in _STEPS if s * magnitude >= least * (1 - _ROUNDING))


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
    """One curve as an SVG path in a 100 × 100 box."""

    label: Both | None
    path: str
    style: str
    faint: bool = False
    """True for the raw values behind a moving mean."""
    area: str = ""
    """Path of the area that is filled below the curve."""


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
    show: Show,
    zero: bool = False,
    axis: Axis | None = None,
) -> DotPlot | None:
    """A dot per row that has a value; None where none has one.

    Args:
        zero: values are differences, and those whose interval includes 0 get the style `open`.
        axis: one that several plots share; `axis_of` makes it.
    """
    axis = axis or axis_of(rows, zero)
    dots = []
    for style, label, value, ends in rows:
        if value is None:
            continue
        low: float | None = None
        high: float | None = None
        includes_zero = True
        if ends:
            low = axis.at(ends[0])
            high = axis.at(ends[1])
            includes_zero = ends[0] <= 0 <= ends[1]
        text = with_interval(value, ends, show)
        dot_style = "open" if zero and includes_zero else style
        dots.append(Dot(label, text, dot_style, axis.at(value), low, high))
    if not dots:
        return None
    return DotPlot(axis, tuple(dots), axis.at(0.0) if zero else None)


def axis_of(rows: Iterable[DotRow], zero: bool = False) -> Axis:
    """An axis that covers the values and their intervals; with `zero`, also 0."""
    covered = []
    for _, _, value, ends in rows:
        if value is not None:
            covered += [value, *(ends or ())]
    if zero:
        covered.append(0.0)
    return Axis.over(covered)


def chart(title: Both, series: Sequence[tuple[Both, Points]]) -> Chart:
    """Curves of (x, y) points; non-finite points are skipped, long curves get a moving mean."""
    finite_series = []
    all_points: list[tuple[float, float]] = []
    for label, points in series:
        finite = [(x, y) for x, y in points if math.isfinite(y)]
        finite_series.append((label, finite))
        all_points += finite
    x_axis, y_axis = _axes_over(all_points, x_ticks=6, y_ticks=5)
    lines: list[Curve] = []
    for place, (label, points) in enumerate(finite_series):
        style = f"line-{place % _LINE_STYLES}"
        window = len(points) // 20
        if window > 1:
            lines.append(Curve(None, path(points, x_axis, y_axis), style, faint=True))
        means = _moving_means(points, half_window=window // 2)
        lines.append(Curve(label, path(means, x_axis, y_axis), style))
    return Chart(title, _STEP, x_axis, y_axis, tuple(lines))


def _axes_over(points: Points, x_ticks: int, y_ticks: int) -> tuple[Axis, Axis]:
    """Axes that cover the points."""
    x_axis = Axis.over([x for x, _ in points], ticks=x_ticks)
    y_axis = Axis.over([y for _, y in points], ticks=y_ticks)
    return x_axis, y_axis


def _moving_means(points: Points, half_window: int) -> list[tuple[float, float]]:
    """A centred mean over 2 · half_window + 1 points, fewer at the ends."""
    means = []
    for place, (x, _) in enumerate(points):
        around = points[max(0, place - half_window) : place + half_window + 1]
        means.append((x, fmean(y for _, y in around)))
    return means


def histogram(
    title: Both, parts: Iterable[tuple[str, Distribution]], is_difference: bool = False
) -> Chart | None:
    """Outlines of distributions, in percent of their values; those of one plot have the same bins.

    Bins are joined until each holds enough values to show a shape. None where nothing was counted.

    Args:
        parts: the distributions, each after its style.
    """
    filled = [(style, part) for style, part in parts if sum(part.counts)]
    if not filled:
        return None
    bins = _bins_of([part for _, part in filled])
    outlines = [_outline(part.low, part.high, regrouped(part.counts, bins)) for _, part in filled]
    # Both axes include 0.
    all_points = [(0.0, 0.0), *chain.from_iterable(outlines)]
    x_axis, y_axis = _axes_over(all_points, x_ticks=6, y_ticks=4)
    show = signed if is_difference else number
    lines = []
    for (style, part), points in zip(filled, outlines, strict=True):
        label = words(part.label)
        # From the bins as they were counted, which are finer than those drawn.
        median = show(quantile(part.low, part.high, part.counts, 0.5), 2)
        label_with_median = Both(f"{label.en}, median {median}", f"{label.zh}，中位数 {median}")
        outline = path(points, x_axis, y_axis)
        lines.append(Curve(label_with_median, outline, style, area=f"{outline} Z"))
    zero = x_axis.at(0.0) if is_difference else None
    return Chart(title, None, x_axis, y_axis, tuple(lines), zero)


def _bins_of(parts: Sequence[Distribution]) -> int:
    """Most bins, of those that the counted ones can be joined to, that hold enough values."""
    fewest_values = min(sum(part.counts) for part in parts)
    counted_bins = len(parts[0].counts)
    possible = [n for n in range(_FEWEST_BINS, _MOST_BINS + 1) if counted_bins % n == 0]
    if not possible:
        return counted_bins
    enough = [n for n in possible if n * _VALUES_PER_BIN <= fewest_values]
    return max(enough, default=possible[0])


def _outline(low: float, high: float, counts: Sequence[int]) -> list[tuple[float, float]]:
    """The outline of bars, in percent of all values.

    It goes from the first bar that is not empty to the last, down to 0 at both ends.
    """
    filled = [place for place, count in enumerate(counts) if count]
    first = filled[0]
    end = filled[-1] + 1
    width = (high - low) / len(counts)
    total = sum(counts)
    shares = [0.0, *(100 * count / total for count in counts[first:end]), 0.0]
    points = []
    # At each edge between two bars, the outline steps from one's height to the next one's.
    for edge, (share_before, share_after) in enumerate(pairwise(shares), first):
        x = low + edge * width
        points += [(x, share_before), (x, share_after)]
    return points


def path(points: Points, x: Axis, y: Axis) -> str:
    """An SVG path through the points, in a 100 × 100 box whose y grows downwards."""
    if not points:
        return ""
    places = [f"{x.at(px)},{round(100 - y.at(py), 2)}" for px, py in points]
    return "M" + " L".join(places)


class SlicePlot(NamedTuple):
    """The difference in the slices by one thing."""

    by: Both
    metric: Both
    pair: Both
    plot: DotPlot


def arm_dots(report: Report, arms: Sequence[ArmName]) -> tuple[Both, DotPlot] | None:
    """One dot per arm on the best metric there is."""
    metric = first_with_values(report.metrics, [report.arms[name] for name in arms])
    if metric is None:
        return None
    rows: list[DotRow] = []
    for name in arms:
        score = report.arms[name].score(metric.name)
        label = arm_label_words(name, report)
        # A name that a user gave stays as it is; ours stand at the start of a line.
        if label in ARMS.values():
            label = Both(capitalised(label.en), label.zh)
        rows.append((_style(name), label, score.mean, score.ci95))
    plot = dot_plot(rows, number)
    return (metric.words, plot) if plot else None


def difference_dots(report: Report) -> tuple[Both, DotPlot] | None:
    """One dot per comparison on the metric of the main one, around 0."""
    main = main_comparison(report)
    if main is None:
        return None
    rows: list[DotRow] = []
    for comparison in report.comparisons:
        # In a comparison of teachers, all are held against the main one's arm.
        is_of_interest = not report.purchase or comparison.b == main.b
        if comparison.metric == main.metric and is_of_interest:
            label = pair_words(comparison.a, comparison.b, report)
            rows.append((_style(comparison.a), label, comparison.diff, comparison.ci95))
    plot = dot_plot(rows, signed, zero=True)
    return (report.metric(main.metric).words, plot) if plot else None


def slice_plots(report: Report) -> list[SlicePlot]:
    """The main comparison's difference by slice; all plots share an axis."""
    main = main_comparison(report)
    if main is None:
        return []
    rows_by_kind: dict[str, list[DotRow]] = {}
    for part in report.slices:
        diff = part.diff(main.a, main.b, main.metric)
        rows = rows_by_kind.setdefault(part.by, [])
        if diff and len(rows) < _MOST_SLICES:
            name = words(part.value)
            questions = count(part.n)
            label = Both(f"{name.en} ({questions})", f"{name.zh}（{questions}）")
            rows.append((_style(main.a), label, diff.diff, diff.ci95))
    axis = axis_of(chain.from_iterable(rows_by_kind.values()), zero=True)
    pair = pair_words(main.a, main.b, report)
    metric = report.metric(main.metric).words
    plots = []
    for kind, rows in rows_by_kind.items():
        plot = dot_plot(rows, signed, zero=True, axis=axis)
        if plot:
            plots.append(SlicePlot(words(kind, "slices"), metric, pair, plot))
    return plots


def charts(curves: Mapping[str, Sequence[Series]]) -> list[Chart]:
    """Known curves in their order, then others under their own names."""
    titles = TEXTS["curves"]
    names = [name for name in titles if name in curves]
    names += sorted(curves.keys() - titles.keys())
    drawn = []
    for name in names:
        series = [(words(part.label), _points_of(part)) for part in curves[name]]
        if any(points for _, points in series):
            title = titles.get(name) or words(name)
            drawn.append(chart(title, series))
    return drawn


def _points_of(series: Series) -> list[tuple[float, float]]:
    return [(x, y) for x, y in zip(series.x, series.y, strict=True) if y is not None]


def distributions(by_name: Mapping[str, Sequence[Distribution]]) -> list[Chart]:
    """Outlines of what validation counted."""
    drawn = []
    for name, (styles, is_difference) in DISTRIBUTIONS.items():
        parts = zip(cycle(styles), by_name.get(name, ()), strict=False)
        plot = histogram(TEXTS["distributions"][name], parts, is_difference)
        if plot:
            drawn.append(plot)
    return drawn


def _style(name: ArmName) -> str:
    return name if name in ARMS else "rival"
