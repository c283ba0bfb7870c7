"""What stands in the report's tables, ready for the template."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from qinglan.evaluation.models import ArmFigures, Report, ScoredMetrics, Slice, StageSummary
from qinglan.evaluation.reasons import TEXTS, Reason, reason, words
from qinglan.evaluation.red_team import RedTeamResult
from qinglan.evaluation.report import verdict
from qinglan.recipes import QUALITY, Metric
from qinglan.rows import ArmName
from qinglan.statistics import Comparison, Interval, between
from qinglan.text import (
    NONE,
    Both,
    Show,
    count,
    duration,
    interval,
    latency,
    number,
    plain,
    signed,
    usd,
)


class Value(NamedTuple):
    """A cell: the value, its interval, and what is to be said with it."""

    text: str
    ends: str = ""
    note: Both | None = None


class TableLine(NamedTuple):
    label: Both
    key: str
    """For the star of what was simulated."""
    cells: list[Value]
    main: bool = False


class SideBySide(NamedTuple):
    """The candidate against its opponent, figure by figure: opponent, candidate, difference."""

    names: tuple[ArmName, ArmName]
    heads: tuple[Both, Both]
    lines: list[TableLine]


class RedTeam(NamedTuple):
    """The red team's cases by kind for every arm, the candidate first, and those that were not
    passed."""

    arms: list[ArmName]
    kinds: list[tuple[Both, list[verdict.RedTeamCounts]]]
    totals: list[tuple[Both, list[verdict.RedTeamCounts]]]
    """Of the cases that must pass, and of those that are compared."""
    open: list[tuple[ArmName, list[RedTeamResult]]]


def side_by_side(report: Report) -> SideBySide | None:
    """Quality, latency and cost side by side; None where there are no two arms to compare."""
    name, other = verdict.candidate(report), verdict.opponent(report)
    if name is None or not {name, other} <= report.arms.keys():
        return None
    mine, theirs = report.arms[name], report.arms[other]
    found = between(report.comparisons, name, other)
    first = next(
        (
            m.name
            for m in report.metrics
            if any(arm.mean(m.name) is not None for arm in (mine, theirs))
        ),
        "",
    )
    lines = []
    for metric in report.metrics:
        # A share of questions or the judge's score says something to a reader who does not know the
        # other metrics.
        if metric.name == first or (
            metric.interval and (metric.proportion or metric.name == QUALITY)
        ):
            cells = [
                _mean(theirs, metric),
                _mean(mine, metric),
                _difference(found.get(metric.name)),
            ]
            lines.append(TableLine(metric.words, metric.name, cells, metric.name == first))
    for part in ("p50", "p95"):
        cells = [_latency(arm, part, loaded=True) for arm in (theirs, mine)]
        ratio = _ratio(*(getattr(arm, f"latency_{part}_ms") for arm in (mine, theirs)))
        lines.append(
            TableLine(Both(f"latency {part}, ms", f"延迟 {part}（毫秒）"), "", [*cells, ratio])
        )
    ratio = _ratio(mine.cost_per_1000_usd, theirs.cost_per_1000_usd)
    lines.append(
        TableLine(Both("cost per 1,000", "每千次成本"), "", [_cost(theirs), _cost(mine), ratio])
    )
    heads = (
        verdict.arm_label_words(other, report, head=True),
        verdict.arm_label_words(name, report, head=True),
    )
    return SideBySide((other, name), heads, _filled(lines))


def arm_lines(report: Report, arms: Sequence[ArmName]) -> list[TableLine]:
    """Every figure of every arm; a figure that no arm has is left out."""
    found = [report.arms[name] for name in arms]
    main = verdict.main_comparison(report)

    def line(label: Both, cell: Callable[[ArmFigures], Value], key: str = "") -> TableLine:
        is_main = main is not None and key == main.metric
        return TableLine(label, key, [cell(arm) for arm in found], is_main)

    called = TEXTS["figures"]
    lines = [
        line(called["questions"], lambda arm: Value(count(arm.n))),
        line(called["failed"], lambda arm: Value(count(arm.failed or None))),
        line(called["empty"], lambda arm: Value(count(arm.empty or None))),
        *(
            line(metric.words, partial(_mean, metric=metric), metric.name)
            for metric in report.metrics
        ),
        line(
            called["judge_consistency"],
            lambda arm: Value(number(arm.judge_consistency)),
            "judge_consistency",
        ),
        line(called["latency_p50"], lambda arm: _latency(arm, "p50")),
        line(called["latency_p95"], lambda arm: _latency(arm, "p95")),
        line(called["timed"], lambda arm: Value(count(arm.latency_n or None))),
        line(called["cost"], lambda arm: _cost(arm, "")),
        line(called["tokens_in"], lambda arm: Value(number(arm.prompt_tokens_per_1000, 0))),
        line(called["tokens_out"], lambda arm: Value(number(arm.completion_tokens_per_1000, 0))),
    ]
    return _filled(lines)


def slice_cell(report: Report, part: Slice, name: ArmName) -> Value:
    """An arm's mean on a slice, on the first metric that has one there."""
    arm = part.arms.get(name)
    metric = next((m for m in report.metrics if arm and arm.mean(m.name) is not None), None)
    return _mean(arm, metric) if arm and metric else Value(NONE)


def loads(report: Report, names: Sequence[ArmName]) -> list[Both]:
    """Which arms' latency was measured how."""
    found: dict[Both, list[Both]] = {}
    for name in names:
        if (load := report.arms[name].latency_load) is not None:
            found.setdefault(load.words, []).append(
                verdict.arm_label_words(name, report, head=True)
            )
    lines = []
    for text, arms in found.items():
        joined = Both(", ".join(arm.en for arm in arms), "、".join(arm.zh for arm in arms))
        lines.append(reason("arms_under_load", arms=joined, load=text).words)
    return lines


def comparisons_by_pair(report: Report) -> list[tuple[Both, list[Comparison]]]:
    """In the order of the report."""
    pairs: dict[tuple[ArmName, ArmName], list[Comparison]] = {}
    for found in report.comparisons:
        pairs.setdefault((found.a, found.b), []).append(found)
    return [(verdict.pair_words(a, b, report), found) for (a, b), found in pairs.items()]


def left_out(found: Comparison) -> Reason | None:
    """Questions that a comparison leaves out, if any."""
    if found.one_sided:
        return reason("left_out_one_sided", questions=found.left_out, one_sided=found.one_sided)
    return reason("left_out", questions=found.left_out) if found.left_out else None


def red_team(report: Report) -> RedTeam | None:
    """None where no arm was tried."""
    first = verdict.candidate(report)
    tried = sorted(
        (item for item in report.red_team.items() if item[1]), key=lambda item: item[0] != first
    )
    if not tried:
        return None

    def counts(field: str, value: object) -> list[verdict.RedTeamCounts]:
        return [
            verdict.RedTeamCounts.of([each for each in found if getattr(each, field) == value])
            for _, found in tried
        ]

    kinds = dict.fromkeys(result.kind for _, found in tried for result in found)
    named = {
        kind: TEXTS["case_kinds"].get(kind) or Both(*[kind.replace("_", " ")] * 2) for kind in kinds
    }
    needed, compared = Both("must pass, each", "必须逐个通过"), Both("compared", "相互比较")
    return RedTeam(
        arms=[name for name, _ in tried],
        kinds=[(label, counts("kind", kind)) for kind, label in named.items()],
        totals=[(needed, counts("must_pass", True)), (compared, counts("must_pass", False))],
        open=[
            (name, missed)
            for name, found in tried
            if (missed := [r for r in found if not r.passed])
        ],
    )


def funnel(stages: Sequence[StageSummary]) -> list[dict[str, Any]]:
    """Stages that count rows, with bar widths in percent of the fullest stage."""
    counted = [stage for stage in stages if stage.rows_in]
    full = max((stage.rows_in for stage in counted), default=1)
    return [
        {
            "stage": stage,
            "kept": 100 * min(stage.rows_out, stage.rows_in) / full,
            "dropped": 100 * sum(stage.dropped.values()) / full,
            "reasons": sorted(stage.dropped.items(), key=lambda item: -item[1]),
        }
        for stage in counted
    ]


def noise(report: Report) -> Both | None:
    """The training questions with noise, which are rows of no stage; None where there are none."""
    made = report.stage("dataset")
    found = {
        name.partition("/")[::2]: int(rows) for name, rows in (made.metrics if made else {}).items()
    }
    sft = {kind: rows for (what, kind), rows in found.items() if what == "augmented_sft"}
    if not sft:
        return None
    kinds = [
        reason("noise_of_kind", kind=words(kind, "noise"), rows=rows) for kind, rows in sft.items()
    ]
    rl = sum(rows for (what, _), rows in found.items() if what == "augmented_rl")
    return reason("questions_with_noise", sft=sum(sft.values()), rl=rl, kinds=kinds).words


def training(report: Report) -> list[tuple[Both, list[tuple[Both, str]]]]:
    """The summaries of the engines."""
    chinese = {metric.name: metric.zh for metric in report.metrics}
    chinese |= {key: text.zh for key, text in TEXTS["training"].items()}

    def fact_words(key: str) -> Both:
        """`reward_first` in words; an engine's own key stays as it is."""
        english = key.replace("_", " ")
        for ending, when in (("_first", "（开始）"), ("_last", "（结束）"), ("", "")):
            if key.endswith(ending) and (name := chinese.get(key.removesuffix(ending))):
                return Both(english, f"{name}{when}")
        return Both(english, english)

    return [
        (
            words(name),
            [
                (fact_words(key), plain(value))
                for key, value in part.model_dump().items()
                if value is not None
            ],
        )
        for name, part in (("SFT", report.training.sft), ("RL", report.training.rl))
        if part is not None
    ]


def duration_words(seconds: float) -> Both:
    english = duration(seconds)
    return Both(english, english.replace(" min", " 分").replace(" s", " 秒"))


def example_values(report: Report, values: Mapping[str, float]) -> list[tuple[Both, str]]:
    """What an answer is worth, metric by metric."""
    return [
        (metric.words, f"{values[metric.name]:.3g}")
        for metric in report.metrics
        if metric.name in values
    ]


def _difference(found: Comparison | None) -> Value:
    if found is None or found.diff is None:
        return Value(NONE)
    basis = reason(
        "questions_in_groups", questions=found.n, groups=found.groups, left_out=left_out(found)
    )
    return Value(signed(found.diff), _ends(found.ci95), basis.words)


def _mean(arm: ScoredMetrics, metric: Metric) -> Value:
    score = arm.score(metric.name)
    return Value(
        number(score.mean, metric.digits), _ends(score.ci95, partial(number, digits=metric.digits))
    )


def _latency(arm: ArmFigures, part: str, *, loaded: bool = False) -> Value:
    """A percentile; `loaded` adds under what load it was measured, and on how many questions."""
    value = Value(
        latency(getattr(arm, f"latency_{part}_ms")),
        _ends(getattr(arm, f"latency_{part}_ci95"), latency),
    )
    if not loaded or arm.latency_load is None or value.text == NONE:
        return value
    load = (
        reason("measured_on", load=arm.latency_load, questions=arm.latency_n)
        if arm.latency_n
        else arm.latency_load
    )
    return value._replace(note=load.words)


def _cost(arm: ArmFigures, sign: str = "$") -> Value:
    cost, ends = usd(arm.cost_per_1000_usd), _ends(arm.cost_ci95, usd)
    return Value(cost.replace("$", sign), ends.replace("$", sign))


def _ends(ends: Interval | None, show: Show = number) -> str:
    return interval(ends, show) if ends else ""


def _ratio(mine: float | None, theirs: float | None) -> Value:
    if mine is None or not theirs:
        return Value(NONE)
    return Value(f"× {number(mine / theirs, 2 if mine >= 0.1 * theirs else 4)}")


def _filled(lines: Iterable[TableLine]) -> list[TableLine]:
    return [line for line in lines if any(cell.text != NONE for cell in line.cells)]
