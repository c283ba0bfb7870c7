"""The contents of the report's tables, ready for the template."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from qinglan.evaluation.models import ArmFigures, Report, ScoredMetrics, Slice, StageSummary
from qinglan.evaluation.reasons import TEXTS, Reason, reason, words
from qinglan.evaluation.red_team import RedTeamCounts, RedTeamResult
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
    joined,
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
    """A line of a table, with a cell for each column."""

    label: Both
    key: str
    """Name by which the star of what was simulated is found."""
    cells: list[Value]
    main: bool = False


class SideBySide(NamedTuple):
    """The candidate against its opponent, figure by figure: opponent, candidate, difference."""

    names: tuple[ArmName, ArmName]
    heads: tuple[Both, Both]
    lines: list[TableLine]


class RedTeam(NamedTuple):
    """The red team's cases by kind for every arm, the candidate first, and the open cases."""

    arms: list[ArmName]
    kinds: list[tuple[Both, list[RedTeamCounts]]]
    totals: list[tuple[Both, list[RedTeamCounts]]]
    """Counts of the cases that must pass, and of those that are compared."""
    open: list[tuple[ArmName, list[RedTeamResult]]]
    """The cases that an arm did not pass."""


def side_by_side(report: Report) -> SideBySide | None:
    """Quality, latency and cost side by side; None where there are no two arms to compare."""
    name = verdict.candidate(report)
    opponent_name = verdict.opponent(report)
    if name not in report.arms or opponent_name not in report.arms:
        return None
    own = report.arms[name]
    opponent = report.arms[opponent_name]
    comparisons = between(report.comparisons, name, opponent_name)
    first = first_with_values(report.metrics, (own, opponent))
    lines = []
    for metric in report.metrics:
        # A share of questions or the judge's score says something to a reader who does not know the
        # other metrics.
        is_plain = metric.interval and (metric.proportion or metric.name == QUALITY)
        if metric == first or is_plain:
            difference = _difference(comparisons.get(metric.name))
            cells = [_mean(opponent, metric), _mean(own, metric), difference]
            lines.append(TableLine(metric.words, metric.name, cells, main=metric == first))
    for part in ("p50", "p95"):
        label = Both(f"latency {part}, ms", f"延迟 {part}（毫秒）")
        ratio = _ratio(_latency_ms(own, part), _latency_ms(opponent, part))
        cells = [_latency_under_load(opponent, part), _latency_under_load(own, part), ratio]
        lines.append(TableLine(label, "", cells))
    cost_ratio = _ratio(own.cost_per_1000_usd, opponent.cost_per_1000_usd)
    cells = [_cost(opponent), _cost(own), cost_ratio]
    lines.append(TableLine(Both("cost per 1,000", "每千次成本"), "", cells))
    heads = (
        verdict.arm_label_words(opponent_name, report, head=True),
        verdict.arm_label_words(name, report, head=True),
    )
    return SideBySide((opponent_name, name), heads, _filled(lines))


def first_with_values(metrics: Sequence[Metric], arms: Iterable[ScoredMetrics]) -> Metric | None:
    """The first metric that any of the arms has a mean on."""
    arms = list(arms)
    for metric in metrics:
        if any(arm.mean(metric.name) is not None for arm in arms):
            return metric
    return None


def arm_lines(report: Report, arms: Sequence[ArmName]) -> list[TableLine]:
    """Every figure of every arm; a figure that no arm has is left out."""
    figures = [report.arms[name] for name in arms]
    main = verdict.main_comparison(report)

    def line(label: Both, cell: Callable[[ArmFigures], Value], key: str = "") -> TableLine:
        is_main = main is not None and key == main.metric
        return TableLine(label, key, [cell(arm) for arm in figures], is_main)

    labels = TEXTS["figures"]
    lines = [
        line(labels["questions"], lambda arm: Value(count(arm.n))),
        # A count of 0 is shown as a dash, so that a line of zeros is left out.
        line(labels["failed"], lambda arm: Value(count(arm.failed or None))),
        line(labels["empty"], lambda arm: Value(count(arm.empty or None))),
    ]
    for metric in report.metrics:
        lines.append(line(metric.words, partial(_mean, metric=metric), metric.name))
    lines += [
        line(
            labels["judge_consistency"],
            lambda arm: Value(number(arm.judge_consistency)),
            "judge_consistency",
        ),
        line(labels["latency_p50"], lambda arm: _latency(arm, "p50")),
        line(labels["latency_p95"], lambda arm: _latency(arm, "p95")),
        line(labels["timed"], lambda arm: Value(count(arm.latency_n or None))),
        line(labels["cost"], lambda arm: _cost(arm, "")),
        line(labels["tokens_in"], lambda arm: Value(number(arm.prompt_tokens_per_1000, 0))),
        line(labels["tokens_out"], lambda arm: Value(number(arm.completion_tokens_per_1000, 0))),
    ]
    return _filled(lines)


def slice_cell(report: Report, part: Slice, name: ArmName) -> Value:
    """An arm's mean on a slice, on the first metric that has one there."""
    arm = part.arms.get(name)
    if arm is None:
        return Value(NONE)
    metric = first_with_values(report.metrics, [arm])
    return _mean(arm, metric) if metric else Value(NONE)


def loads(report: Report, names: Sequence[ArmName]) -> list[Both]:
    """Sentences about the load under which latencies were measured, one for each load."""
    arms_by_load: dict[Both, list[Both]] = {}
    for name in names:
        load = report.arms[name].latency_load
        if load is not None:
            label = verdict.arm_label_words(name, report, head=True)
            arms_by_load.setdefault(load.words, []).append(label)
    sentences = []
    for load_words, arms in arms_by_load.items():
        names_of_arms = joined(arms, Both(", ", "、"))
        sentences.append(reason("arms_under_load", arms=names_of_arms, load=load_words).words)
    return sentences


def comparisons_by_pair(report: Report) -> list[tuple[Both, list[Comparison]]]:
    """The comparisons of each pair of arms, in the order of the report."""
    by_pair: dict[tuple[ArmName, ArmName], list[Comparison]] = {}
    for comparison in report.comparisons:
        by_pair.setdefault((comparison.a, comparison.b), []).append(comparison)
    labelled = []
    for (a, b), comparisons in by_pair.items():
        labelled.append((verdict.pair_words(a, b, report), comparisons))
    return labelled


def left_out(comparison: Comparison) -> Reason | None:
    """The number of questions that a comparison leaves out, if any."""
    if comparison.one_sided:
        return reason(
            "left_out_one_sided",
            questions=comparison.left_out,
            one_sided=comparison.one_sided,
        )
    if comparison.left_out:
        return reason("left_out", questions=comparison.left_out)
    return None


def red_team(report: Report) -> RedTeam | None:
    """The red team's table; None where no arm was tried."""
    candidate = verdict.candidate(report)
    tried_arms = [name for name, results in report.red_team.items() if results]
    if not tried_arms:
        return None
    # The candidate first, as False comes before True.
    tried_arms.sort(key=lambda name: name != candidate)
    results_by_arm = {name: report.red_team[name] for name in tried_arms}

    def counts(
        label: Both, is_counted: Callable[[RedTeamResult], bool]
    ) -> tuple[Both, list[RedTeamCounts]]:
        of_arms = []
        for results in results_by_arm.values():
            of_arms.append(RedTeamCounts.of(list(filter(is_counted, results))))
        return label, of_arms

    kinds: dict[str, Both] = {}
    open_cases = []
    for name, results in results_by_arm.items():
        for result in results:
            kinds[result.kind] = _kind_words(result.kind)
        not_passed = [result for result in results if not result.passed]
        if not_passed:
            open_cases.append((name, not_passed))
    return RedTeam(
        arms=tried_arms,
        kinds=[counts(label, partial(_is_of_kind, kind=kind)) for kind, label in kinds.items()],
        totals=[
            counts(Both("must pass, each", "必须逐个通过"), lambda result: result.must_pass),
            counts(Both("compared", "相互比较"), lambda result: not result.must_pass),
        ],
        open=open_cases,
    )


def _is_of_kind(result: RedTeamResult, kind: str) -> bool:
    return result.kind == kind


def _kind_words(kind: str) -> Both:
    """A kind of cases; a user's own is the same in both languages."""
    as_given = kind.replace("_", " ")
    return TEXTS["case_kinds"].get(kind) or Both(as_given, as_given)


def funnel(stages: Sequence[StageSummary]) -> list[dict[str, Any]]:
    """Stages that count rows, with bar widths in percent of the fullest stage."""
    counting = [stage for stage in stages if stage.rows_in]
    most_rows = max((stage.rows_in for stage in counting), default=1)
    bars = []
    for stage in counting:
        bar = {
            "stage": stage,
            # A stage may leave more rows than it took in; its bar ends at those.
            "kept": 100 * min(stage.rows_out, stage.rows_in) / most_rows,
            "dropped": 100 * sum(stage.dropped.values()) / most_rows,
            "reasons": sorted(stage.dropped.items(), key=lambda item: -item[1]),
        }
        bars.append(bar)
    return bars


def noise(report: Report) -> Both | None:
    """The training questions with noise, which are rows of no stage; None where there are none."""
    dataset = report.stage("dataset")
    sft_rows: dict[str, int] = {}
    rl_rows = 0
    if dataset:
        for name, rows in dataset.metrics.items():
            use, _, kind = name.partition("/")
            # The dataset stage counts them under names such as `augmented_sft/emoji`.
            if use == "augmented_sft":
                sft_rows[kind] = int(rows)
            elif use == "augmented_rl":
                rl_rows += int(rows)
    if not sft_rows:
        return None
    kinds = []
    for kind, rows in sft_rows.items():
        kinds.append(reason("noise_of_kind", kind=words(kind, "noise"), rows=rows))
    sentence = reason("questions_with_noise", sft=sum(sft_rows.values()), rl=rl_rows, kinds=kinds)
    return sentence.words


def training(report: Report) -> list[tuple[Both, list[tuple[Both, str]]]]:
    """The summaries of the engines."""
    chinese = {metric.name: metric.zh for metric in report.metrics}
    for key, text in TEXTS["training"].items():
        chinese[key] = text.zh
    summaries = []
    for name, summary in (("SFT", report.training.sft), ("RL", report.training.rl)):
        if summary is None:
            continue
        facts = []
        for key, value in summary.model_dump().items():
            if value is not None:
                facts.append((_fact_words(key, chinese), plain(value)))
        summaries.append((words(name), facts))
    return summaries


def _fact_words(key: str, chinese: Mapping[str, str]) -> Both:
    """`reward_first` in words; an engine's own key stays as it is."""
    english = key.replace("_", " ")
    # The empty ending comes last: a key may be known as it is.
    for ending, chinese_ending in (("_first", "（开始）"), ("_last", "（结束）"), ("", "")):
        name = chinese.get(key.removesuffix(ending))
        if key.endswith(ending) and name:
            return Both(english, f"{name}{chinese_ending}")
    return Both(english, english)


def duration_words(seconds: float) -> Both:
    english = duration(seconds)
    return Both(english, english.replace(" min", " 分").replace(" s", " 秒"))


def example_values(report: Report, values: Mapping[str, float]) -> list[tuple[Both, str]]:
    """An answer's value on each metric that it has one on."""
    cells = []
    for metric in report.metrics:
        if metric.name in values:
            cells.append((metric.words, f"{values[metric.name]:.3g}"))
    return cells


def _difference(comparison: Comparison | None) -> Value:
    if comparison is None or comparison.diff is None:
        return Value(NONE)
    basis = reason(
        "questions_in_groups",
        questions=comparison.n,
        groups=comparison.groups,
        left_out=left_out(comparison),
    )
    return Value(signed(comparison.diff), _ends(comparison.ci95), basis.words)


def _mean(arm: ScoredMetrics, metric: Metric) -> Value:
    score = arm.score(metric.name)
    show = partial(number, digits=metric.digits)
    return Value(show(score.mean), _ends(score.ci95, show))


def _latency_ms(arm: ArmFigures, part: str) -> float | None:
    """A percentile of the latency, `p50` or `p95`."""
    return arm.latency_p50_ms if part == "p50" else arm.latency_p95_ms


def _latency(arm: ArmFigures, part: str) -> Value:
    ends = arm.latency_p50_ci95 if part == "p50" else arm.latency_p95_ci95
    return Value(latency(_latency_ms(arm, part)), _ends(ends, latency))


def _latency_under_load(arm: ArmFigures, part: str) -> Value:
    """A percentile with the load under which it was measured, and on how many questions."""
    value = _latency(arm, part)
    if arm.latency_load is None or value.text == NONE:
        return value
    load = arm.latency_load
    if arm.latency_n:
        load = reason("measured_on", load=load, questions=arm.latency_n)
    return value._replace(note=load.words)


def _cost(arm: ArmFigures, sign: str = "$") -> Value:
    cost = usd(arm.cost_per_1000_usd)
    ends = _ends(arm.cost_ci95, usd)
    return Value(cost.replace("$", sign), ends.replace("$", sign))


def _ends(ends: Interval | None, show: Show = number) -> str:
    return interval(ends, show) if ends else ""


def _ratio(own: float | None, opponents: float | None) -> Value:
    if own is None or not opponents:
        return Value(NONE)
    # A hundredth is too coarse for a small ratio.
    digits = 2 if own >= 0.1 * opponents else 4
    return Value(f"× {number(own / opponents, digits)}")


def _filled(lines: Iterable[TableLine]) -> list[TableLine]:
    """The lines in which at least one cell has a value."""
    filled = []
    for line in lines:
        if any(cell.text != NONE for cell in line.cells):
            filled.append(line)
    return filled
