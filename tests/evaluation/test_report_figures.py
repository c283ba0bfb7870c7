"""What the report draws: axes, curves, dots and distributions."""

import math

import letters
import pytest
from report_fixture import full, report, scores

from qinglan.evaluation.models import Distribution
from qinglan.evaluation.report.plots import (
    DISTRIBUTIONS,
    Axis,
    arm_dots,
    chart,
    distributions,
    histogram,
    slice_plots,
)
from qinglan.recipes.kinds.validation import AnswerStatistics, RetrievalStatistics
from qinglan.rows import Row
from qinglan.text import Both

NAME = Both("a", "甲")


def test_axis_has_round_ticks_that_cover_the_values() -> None:
    axis = Axis.over([-0.045, 0.135])
    assert axis.low <= -0.045 and axis.high >= 0.135
    assert [axis.label(tick) for tick in axis.ticks] == ["−0.05", "0.00", "0.05", "0.10", "0.15"]
    assert axis.at(axis.low) == 0 and axis.at(axis.high) == 100


@pytest.mark.parametrize("values", [[], [math.nan], [3.0], [0.0, 0.0]])
def test_axis_of_nothing_much(values: list[float]) -> None:
    axis = Axis.over(values)
    assert axis.high > axis.low and len(axis.ticks) >= 2


def test_chart_skips_what_is_not_finite() -> None:
    drawn = chart(NAME, NAME, [(NAME, [(1, 2.0), (2, math.nan), (3, math.inf), (4, 1.0)])])
    assert [line.path for line in drawn.lines] == ["M0.0,0.0 L100.0,100.0"]


def test_an_outline_adds_up_to_all_and_ends_at_the_last_value() -> None:
    counts = [0] * 100
    counts[10], counts[11], counts[99] = 300, 200, 500
    drawn = histogram(NAME, [("line-0", NAME, 0.0, 1.0, counts)])
    assert drawn is not None
    points = [tuple(map(float, point.split(","))) for point in drawn.lines[0].path[1:].split(" L")]
    heights = [drawn.y.high * (100 - y) / 100 for _, y in points]
    assert max(heights) == pytest.approx(50, rel=1e-3) and (heights[0], heights[-1]) == (0, 0)
    assert sum(heights[1:-1]) / 2 == pytest.approx(100, rel=1e-3)
    assert (points[0][0], points[-1][0]) == (8, 100)  # 1,000 values are drawn in 25 bins


def test_every_histogram_of_validation_is_drawn() -> None:
    judged = AnswerStatistics(letters.JudgedLetters())
    judged.add(Row(id="1", tenant="t", query="q", source="s", parts={"format": 1.0}, judge_score=4.0))
    for found in (judged.histograms(), RetrievalStatistics().histograms()):
        assert found and found.keys() <= DISTRIBUTIONS.keys()
    one = {name: [Distribution.model_validate(each) for each in plot] for name, plot in judged.histograms().items()}
    assert [plot.title.en for plot in distributions(one)] == ["Judge's score, 0–5, % of rows"]


def test_slices_are_drawn_by_kind_on_the_headlines_metric() -> None:
    plots = slice_plots(full())
    assert [plot.by.en for plot in plots] == ["tenant", "intent", "length in characters", "history"]
    assert plots[0].pair == Both("RL − Teacher", "RL − 教师") and plots[3].plot.dots[0].label == Both(
        "with (400)", "有（400）"
    )
    assert slice_plots(full(comparisons=[])) == []
    one = full().slices[1]
    many = [one.model_copy(update={"value": str(i)}) for i in range(40)]
    assert len(slice_plots(full(slices=many))[0].plot.dots) == 12, "only the largest"


def test_arms_are_drawn_on_the_best_metric_with_its_interval() -> None:
    arms = {"teacher": {"n": 9, **scores(mean_top1_score=(0.8, [0.7, 0.9]))}, "original": {"n": 9}}
    metric, plot = arm_dots(report(arms=arms), ["original", "teacher"]) or (NAME, None)
    assert metric.en == "mean top-1 score" and plot and plot.dots[0].text == "0.800 [0.700, 0.900]"
