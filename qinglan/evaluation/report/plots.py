"""Geometry of the report's plots: nice axes, dots with intervals, curves, all in percent of the plot's box.

The template draws them as inline SVG with its labels in HTML, so that text keeps its size on a phone, colours follow
the reader's light or dark scheme, and no plotting library is loaded.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from qinglan.statistics import quantile, regrouped
from qinglan.text import Both, interval, number, signed

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_VALUES_PER_BIN = 30
"""Fewer, and an outline shows chance rather than shape."""
_FEWEST_BINS, _MOST_BINS = 10, 50


@dataclass(frozen=True)
class Axis:
    """A linear axis; `at` gives percent from its low end."""

    low: float
    high: float
    ticks: tuple[float, ...]

    @classmethod
    def over(cls, values: Iterable[float], ticks: int = 5) -> "Axis":
        """An axis with round ticks that covers the values (finite ones; 0 to 1 if there is none)."""
        finite = [value for value in values if math.isfinite(value)]
        low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
        if high - low < 1e-9:
            low, high = low - 0.5, high + 0.5
        step = _round_step((high - low) / max(ticks - 1, 1))
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        places = tuple(round(i * step, 10) for i in range(first, last + 1))
        return cls(places[0], places[-1], places)

    def at(self, value: float) -> float:
        """Percent from the low end."""
        return round(100 * (value - self.low) / (self.high - self.low), 2)

    def label(self, tick: float) -> str:
        """A tick's text, with as many decimals as the step needs."""
        step = self.ticks[1] - self.ticks[0]
        decimals = next((d for d in range(4) if math.isclose(step, round(step, d))), 4)
        return f"{tick:,.{decimals}f}".replace("-", "−")


@dataclass(frozen=True)
class Dot:
    """One line of a dot plot: a value with its interval, in percent."""

    label: Both
    text: str
    style: str
    at: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class DotPlot:
    """Dots over one axis; `zero` is where a line of no difference stands."""

    axis: Axis
    dots: tuple[Dot, ...]
    zero: float | None


@dataclass(frozen=True)
class Line:
    """One curve as an SVG path in a 100 × 100 box; `faint` for the raw values behind a moving mean.

    `area`: the path of what is filled below it.
    """

    label: Both | None
    path: str
    style: str
    faint: bool = False
    area: str = ""


@dataclass(frozen=True)
class Chart:
    """Curves over common axes; `zero` is where a line of no difference stands."""

    title: Both
    x_label: Both | None
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    zero: float | None = None


Interval = tuple[float, float]
Points = Sequence[tuple[float, float]]
DotRow = tuple[str, Both, float | None, Interval | None]
"""Style, label, value, interval."""
Outline = tuple[str, Both, float, float, Sequence[int]]
"""Style, label, low, high, counts over equal bins."""


def dot_plot(
    rows: Sequence[DotRow], show: Callable[[float | None], str], zero: bool = False, axis: Axis | None = None
) -> DotPlot | None:
    """A dot per row that has a value. With `zero`, rows whose interval includes 0 get the style `open`.

    Args:
        axis: one that several plots share; `axis_of` makes it.
    """
    present = [(style, label, value, ends) for style, label, value, ends in rows if value is not None]
    if not present:
        return None
    axis = axis or axis_of(rows, zero)
    dots = []
    for style, label, value, ends in present:
        low, high = (axis.at(ends[0]), axis.at(ends[1])) if ends else (None, None)
        undecided = zero and (ends is None or ends[0] <= 0 <= ends[1])
        text = show(value) + (f" {interval(ends)}" if ends else "")
        dots.append(Dot(label, text, "open" if undecided else style, axis.at(value), low, high))
    return DotPlot(axis, tuple(dots), axis.at(0.0) if zero else None)


def axis_of(rows: Iterable[DotRow], zero: bool = False) -> Axis:
    """An axis that covers all values and intervals, and 0 where that is asked."""
    values = [v for _, _, value, ends in rows if value is not None for v in (value, *(ends or ()))]
    return Axis.over([*values, 0.0] if zero else values)


def chart(title: Both, x_label: Both, series: Sequence[tuple[Both, Points]]) -> Chart:
    """Curves of (x, y) points; non-finite points are skipped, long curves get a moving mean."""
    clean = [(label, [(x, y) for x, y in points if math.isfinite(y)]) for label, points in series]
    x_axis = Axis.over((x for _, points in clean for x, _ in points), ticks=6)
    y_axis = Axis.over((y for _, points in clean for _, y in points), ticks=5)
    lines: list[Line] = []
    for place, (label, points) in enumerate(clean):
        style, window = f"line-{place % 4}", len(points) // 20
        if window > 1:
            lines.append(Line(None, path(points, x_axis, y_axis), style, faint=True))
            lines.append(Line(label, path(moving_mean(points, window), x_axis, y_axis), style))
        else:
            lines.append(Line(label, path(points, x_axis, y_axis), style))
    return Chart(title, x_label, x_axis, y_axis, tuple(lines))


def histogram(title: Both, parts: Sequence[Outline], is_difference: bool = False) -> Chart | None:
    """Outlines of distributions, in percent of the values of each; those of one plot have the same bins.

    Bins are joined until each holds enough values to show a shape. None where nothing was counted.
    """
    present = [part for part in parts if sum(part[4])]
    if not present:
        return None
    bins = _bins(min(sum(counts) for *_, counts in present), len(present[0][4]))
    steps = [
        (style, label, _steps(low, high, regrouped(counts, bins)), quantile(low, high, counts, 0.5))
        for style, label, low, high, counts in present
    ]
    x = Axis.over([0.0, *(x for *_, points, _ in steps for x, _ in points)], ticks=6)
    y = Axis.over([0.0, *(y for *_, points, _ in steps for _, y in points)], ticks=4)
    show = signed if is_difference else number
    lines = [
        Line(_with_median(label, show(median, 2)), outline := path(points, x, y), style, area=f"{outline} Z")
        for style, label, points, median in steps
    ]
    return Chart(title, None, x, y, tuple(lines), x.at(0.0) if is_difference else None)


def _with_median(label: Both, median: str) -> Both:
    return Both(f"{label.en}, median {median}", f"{label.zh}，中位数 {median}")


def _bins(values: int, bins: int) -> int:
    """How many to draw: a divisor of what was counted in, the largest that leaves enough values in each."""
    possible = [n for n in range(_FEWEST_BINS, _MOST_BINS + 1) if bins % n == 0] or [bins]
    return max((n for n in possible if n * _VALUES_PER_BIN <= values), default=possible[0])


def _steps(low: float, high: float, counts: Sequence[int]) -> list[tuple[float, float]]:
    """The outline of bars, in percent, from the first that is not empty to the last, down to 0 at both ends."""
    filled = [i for i, count in enumerate(counts) if count]
    first, last = filled[0], filled[-1]
    width, total = (high - low) / len(counts), sum(counts)
    points = [(low + first * width, 0.0)]
    for i in range(first, last + 1):
        share = 100 * counts[i] / total
        points += [(low + i * width, share), (low + (i + 1) * width, share)]
    return [*points, (low + (last + 1) * width, 0.0)]


def path(points: Points, x: Axis, y: Axis) -> str:
    """SVG path data; y grows upwards."""
    places = (f"{x.at(px)},{round(100 - y.at(py), 2)}" for px, py in points)
    return "M" + " L".join(places) if points else ""


def moving_mean(points: Points, window: int) -> list[tuple[float, float]]:
    """Centred mean over 2·(window // 2) + 1 points, fewer at the ends."""
    half = window // 2
    means = []
    for i, (x, _) in enumerate(points):
        near = [y for _, y in points[max(0, i - half) : i + half + 1]]
        means.append((x, sum(near) / len(near)))
    return means


def _round_step(raw: float) -> float:
    magnitude = 10.0 ** math.floor(math.log10(raw))
    return next(step * magnitude for step in _STEPS if step * magnitude >= raw * (1 - 1e-9))
