"""The contents of an evaluation, worked out from finished arms.

These are figures, paired comparisons, slices and examples. A recipe's grader declares the metrics
and computes them (`Grader.values_of`). A row has no value where nothing was retrieved or graded,
where it has no label, or no judgement.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np

from qinglan.config import Evaluate
from qinglan.evaluation import models
from qinglan.evaluation.arms import Arms, by_question, panel_consistency
from qinglan.evaluation.reasons import Reason
from qinglan.recipes import Metric, Recipe, identifying
from qinglan.rows import ArmName, ArmRow, Retrieved, Row, documents_of, groups_of, normalise
from qinglan.statistics import (
    ArmScores,
    Comparison,
    MeanCi,
    compare,
    holm_corrected,
    mean_ci,
    percentile_ci,
    ratio_ci,
)
from qinglan.text import ARMS

Scores = Mapping[str, Mapping[str, float | None]]
"""One arm's values: by metric of the recipe, then by row id."""
_PAIRS: tuple[tuple[ArmName, ArmName], ...] = (
    ("rl", "teacher"),
    ("sft", "teacher"),
    ("rl", "sft"),
    ("teacher", "original"),
    ("sft", "base"),
    ("rl", "champion"),
    ("sft", "champion"),
    ("champion", "teacher"),
    ("rl", "original"),
    ("sft", "original"),
    ("rl", "base"),
)
"""Arms that are compared: a student with each arm that may be its rival at the gate."""
_STUDENTS = ("rl", "sft")
_MIN_ROWS = 20
"""A smaller slice is listed without intervals."""
_MOST_VALUES = 40
"""Most slices of one kind; the rarer values, as of intents in free text, are left out."""
_SHOWN_PASSAGES = 3
"""Passages of an example that are kept."""


def scores_of(arm: Sequence[ArmRow], rows: Iterable[Row], recipe: Recipe) -> Scores:
    """An arm's value on each of the recipe's metrics; None where a row has none."""
    by_id = {row.id: row for row in rows}
    grader = recipe.grader
    values = {entry.row_id: grader.values_of(entry, by_id[entry.row_id]) for entry in arm}
    scores: dict[str, dict[str, float | None]] = {}
    for metric in grader.metrics:
        # A row without a value stays, so that comparisons count it as left out.
        scores[metric.name] = {row_id: values[row_id].get(metric.name) for row_id in values}
    return scores


def summarise(
    arm: Sequence[ArmRow],
    rows: Sequence[Row],
    config: Evaluate,
    recipe: Recipe,
    load: Reason | None = None,
) -> models.ArmFigures:
    """The figures of one arm.

    Args:
        load: what else the arm's model had to do while its latency was measured.
    """
    resamples = config.bootstrap_resamples
    seed = config.seed
    scores = scores_of(arm, rows, recipe)
    latencies = _recorded(arm, "latency_ms")
    costs = _recorded(arm, "cost_usd")
    return models.ArmFigures(
        n=len(arm),
        scores=_means(scores, recipe.grader.metrics, groups_of(rows), resamples, seed),
        judge_consistency=panel_consistency(arm),
        latency_p50_ms=_percentile(latencies, 50),
        latency_p95_ms=_percentile(latencies, 95),
        latency_p50_ci95=percentile_ci(latencies, 50, seed=seed),
        latency_p95_ci95=percentile_ci(latencies, 95, seed=seed),
        latency_n=len(latencies),
        latency_load=load if latencies else None,
        cost_per_1000_usd=_per_1000(costs),
        cost_ci95=ratio_ci([(1000 * cost, 1.0) for cost in costs], resamples, seed),
        prompt_tokens_per_1000=_per_1000(_recorded(arm, "prompt_tokens")),
        completion_tokens_per_1000=_per_1000(_recorded(arm, "completion_tokens")),
        failed=sum(not entry.measured for entry in arm),
        empty=sum(entry.measured and entry.text is None for entry in arm),
    )


def _recorded(arm: Sequence[ArmRow], field: str) -> list[float]:
    """The values of a field of `ArmRow`, of the questions that have one."""
    values = []
    for entry in arm:
        value = getattr(entry, field)
        if value is not None:
            values.append(value)
    return values


def _per_1000(values: Sequence[float]) -> float | None:
    """The sum over 1,000 questions of the mean value; None where no question has one."""
    if not values:
        return None
    return 1000 * sum(values) / len(values)


def _percentile(values: Sequence[float], percent: float) -> float | None:
    if not values:
        return None
    return float(np.percentile(values, percent))


def _means(
    scores: Scores, metrics: Iterable[Metric], groups: Mapping[str, str], resamples: int, seed: int
) -> dict[str, MeanCi]:
    """The mean on each metric that has values, with an interval where the metric has one."""
    means = {}
    for metric in metrics:
        metric_resamples = resamples if metric.interval else 0
        mean = mean_ci(scores[metric.name], groups, metric_resamples, seed)
        if mean.n:
            means[metric.name] = mean
    return means


def pairs_of(arms: Collection[ArmName]) -> list[tuple[ArmName, ArmName]]:
    """The pairs of these arms that are compared.

    A further teacher is compared with the original question, and the students with it.
    """
    further_teachers = [name for name in arms if name not in ARMS]
    pairs = list(_PAIRS)
    pairs += [(teacher, "original") for teacher in further_teachers]
    for teacher in further_teachers:
        pairs += [(student, teacher) for student in _STUDENTS]
    return [(a, b) for a, b in pairs if a in arms and b in arms]


def compare_arms(
    arms: Arms, rows: Sequence[Row], config: Evaluate, recipe: Recipe
) -> list[Comparison]:
    """Compare all pairs on every metric that has values.

    p-values are corrected for all comparisons on the same metric.
    """
    groups = groups_of(rows)
    scores = {}
    for name, arm in arms.items():
        scores[name] = ArmScores(arm=name, scores=scores_of(arm, rows, recipe))
    metrics = [metric for metric in recipe.grader.metrics if metric.compared]
    comparisons = []
    for a, b in pairs_of(arms):
        for metric in metrics:
            comparison = compared(scores[a], scores[b], metric, groups, config)
            # A comparison without a common row doesn't count for the correction.
            if comparison.n:
                comparisons.append(comparison)
    return holm_corrected(comparisons)


def compared(
    a: ArmScores, b: ArmScores, metric: Metric, groups: Mapping[str, str], config: Evaluate
) -> Comparison:
    """The comparison of two arms on one metric, by the profile's settings."""
    return compare(
        a,
        b,
        metric.name,
        groups,
        config.bootstrap_resamples,
        config.seed,
        proportion=metric.proportion,
    )


def slices_of(
    arms: Arms, rows: Sequence[Row], config: Evaluate, recipe: Recipe
) -> list[models.Slice]:
    """Each arm's means per slice, and what students gain on the arms that they are compared with.

    Without a student, it is what the teacher gains. Only metrics with intervals are shown. Slices
    are many and small: an interval here is for reading and decides nothing.
    """
    metrics = [metric for metric in recipe.grader.metrics if metric.interval]
    scores = {name: scores_of(arm, rows, recipe) for name, arm in arms.items()}
    groups = groups_of(rows)
    pairs = _pairs_in_slices(arms)
    slices = []
    for kind, value, row_ids in _cut(rows):
        # A small slice shows means alone, which need no resamples.
        resamples = config.bootstrap_resamples if len(row_ids) >= _MIN_ROWS else 0
        scores_within = {name: _within(arm, row_ids, metrics) for name, arm in scores.items()}
        figures = {}
        for name, arm_scores in scores_within.items():
            means = _means(arm_scores, metrics, groups, resamples, config.seed)
            n = max((mean.n for mean in means.values()), default=0)
            figures[name] = models.SliceArm(n=n, scores=means)
        diffs = []
        for a, b in pairs:
            for metric in metrics:
                scores_a = scores_within[a][metric.name]
                scores_b = scores_within[b][metric.name]
                mean = _mean_difference(scores_a, scores_b, groups, resamples, config.seed)
                if mean.n:
                    diff = models.SliceDiff(
                        a=a, b=b, metric=metric.name, n=mean.n, diff=mean.mean, ci95=mean.ci95
                    )
                    diffs.append(diff)
        part = models.Slice(by=kind, value=value, n=len(row_ids), arms=figures, diffs=diffs)
        slices.append(part)
    return slices


def _pairs_in_slices(arms: Arms) -> list[tuple[ArmName, ArmName]]:
    """The students' pairs; without a student, the teacher's."""
    pairs = pairs_of(arms)
    of_students = [(a, b) for a, b in pairs if a in _STUDENTS]
    return of_students or [(a, b) for a, b in pairs if a == "teacher"]


def _within(
    scores: Scores, row_ids: Iterable[str], metrics: Iterable[Metric]
) -> dict[str, dict[str, float]]:
    """An arm's values on these rows, by metric and row id."""
    within: dict[str, dict[str, float]] = {}
    for metric in metrics:
        values = {}
        for row_id in row_ids:
            value = scores[metric.name].get(row_id)
            if value is not None:
                values[row_id] = value
        within[metric.name] = values
    return within


def _mean_difference(
    scores_a: Mapping[str, float],
    scores_b: Mapping[str, float],
    groups: Mapping[str, str],
    resamples: int,
    seed: int,
) -> MeanCi:
    """Mean of a − b over the rows where both have a value."""
    # In no order, as `mean_ci` sorts the rows.
    common = scores_a.keys() & scores_b.keys()
    differences = {row_id: scores_a[row_id] - scores_b[row_id] for row_id in common}
    return mean_ci(differences, groups, resamples, seed)


def _length_of(row: Row) -> str:
    """The slice of a question's length, in characters."""
    if len(row.query) <= 10:
        return "≤10"
    if len(row.query) <= 20:
        return "11–20"
    return "21+"


_SLICES: dict[str, Callable[[Row], str | None]] = {
    "tenant": lambda row: row.tenant,
    "intent": lambda row: row.intent,
    "length": _length_of,
    "history": lambda row: "with" if row.history else "without",
    "pool": lambda row: row.pool,
}
"""The kinds of slices, each with the value by which it cuts."""


def _cut(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[str]]]:
    """The slices of each kind, the largest first: kind, value and row ids.

    Rows without an intent or a pool are in no slice of those.
    """
    for kind, value_of in _SLICES.items():
        row_ids: defaultdict[str, list[str]] = defaultdict(list)
        for row in rows:
            value = value_of(row)
            if value:
                row_ids[value].append(row.id)
        # Stable: of slices of one size, the first one in the rows comes first.
        largest_first = sorted(row_ids, key=lambda value: -len(row_ids[value]))
        for value in largest_first[:_MOST_VALUES]:
            yield kind, value, row_ids[value]


def examples(
    arms: Arms, rows: Sequence[Row], recipe: Recipe, count: int = 10
) -> list[models.ReportExample]:
    """Questions through all arms, spread over the groups of questions."""
    entries = by_question(arms)
    chosen_rows = _spread_over_groups(rows, count)
    return [_example(row, entries.get(row.id, {}), recipe) for row in chosen_rows]


def _spread_over_groups(rows: Sequence[Row], count: int) -> list[Row]:
    """The first row of every k-th group, in the order of row ids; then further rows, if too few."""
    ordered = sorted(rows, key=lambda row: row.id)
    groups = groups_of(rows)
    first_of_group: dict[str, Row] = {}
    for row in ordered:
        first_of_group.setdefault(groups[row.id], row)
    spread = sorted(first_of_group.values(), key=lambda row: row.id)
    # Every k-th, so that the examples are not all from the beginning.
    chosen = spread[:: max(1, len(spread) // count)][:count]
    # Lazy, as a refresh has very many rows, and few of them are needed.
    further = (row for row in ordered if row not in chosen)
    return [*chosen, *islice(further, count - len(chosen))]


def _example(row: Row, entries: Mapping[ArmName, ArmRow], recipe: Recipe) -> models.ReportExample:
    inputs = {}
    for further_input in recipe.INPUTS:
        if further_input.name in row.inputs:
            inputs[further_input.column] = row.inputs[further_input.name]
    example_arms = {}
    for name, entry in entries.items():
        values: dict[str, float] = {}
        # A text that was retrieved with shows its worth in the passages.
        if entry.retrieved is None:
            values = recipe.grader.values_of(entry, row)
        example_arms[name] = models.ExampleArm(
            text=entry.text,
            reason=entry.reason,
            retrieved=_shown_passages(entry.retrieved),
            values=values,
        )
    return models.ReportExample(
        query=row.query,
        profile=row.profile,
        history=row.history,
        inputs=inputs,
        gold_id=row.gold_id,
        gold_title=_title_of(row.gold_id, entries.values()),
        arms=example_arms,
    )


def _shown_passages(retrieved: Retrieved | None) -> Retrieved | None:
    if retrieved is None:
        return None
    return Retrieved(
        ids=retrieved.ids[:_SHOWN_PASSAGES],
        scores=retrieved.scores[:_SHOWN_PASSAGES],
        titles=retrieved.titles[:_SHOWN_PASSAGES],
    )


def _title_of(document_id: str | None, entries: Iterable[ArmRow]) -> str | None:
    """A document's title, if any arm found it."""
    for entry in entries:
        if entry.retrieved:
            rank = entry.retrieved.rank(document_id)
            if 0 < rank <= len(entry.retrieved.titles):
                return entry.retrieved.titles[rank - 1]
    return None


def shared_between(
    train: Sequence[Row], test: Sequence[Row], recipe: Recipe
) -> list[models.Shared]:
    """Overlap of the test split with training rows."""

    def overlap(
        thing: models.SharedThing, keys_of: Callable[[Row], Sequence[str]]
    ) -> models.Shared:
        train_keys = {key for row in train for key in keys_of(row)}
        test_keys = {key for row in test for key in keys_of(row)}
        return models.Shared(what=thing, test=len(test_keys), in_train=len(test_keys & train_keys))

    def with_context(row: Row) -> list[str]:
        inputs = "".join(identifying(row.inputs, recipe.INPUTS).values())
        return [normalise(row.query + row.history + row.profile + inputs)]

    shared = [
        overlap("row_ids", lambda row: [row.id]),
        overlap("questions_with_context", with_context),
        overlap("bare_questions", lambda row: [normalise(row.query)]),
    ]
    # Where nothing is retrieved, a document that both name gives nothing away.
    if recipe.grader.retrieves:
        shared.append(overlap("gold_documents", lambda row: documents_of(row.gold_id)))
    return shared
