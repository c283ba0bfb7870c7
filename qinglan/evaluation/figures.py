"""What an evaluation holds, worked out from finished arms: figures, paired comparisons, slices and
examples.

A recipe declares its metrics (`Recipe.grader.metrics`) and computes them (`Recipe.measured_values`), all
but `quality`, which is the judge's score. A row has no value where nothing was retrieved or graded,
where it has no label, or no judgement.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np

from qinglan.config import Evaluate
from qinglan.evaluation import models
from qinglan.evaluation.arms import Arms, panel_consistency
from qinglan.evaluation.reasons import Reason
from qinglan.recipes import QUALITY, Metric, Recipe, identifying
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
"""Of one arm: each of the recipe's metrics by row id."""
_PAIRS: tuple[tuple[ArmName, ArmName], ...] = (
    *(
        ("rl", "teacher"),
        ("sft", "teacher"),
        ("rl", "sft"),
        ("teacher", "original"),
        ("sft", "base"),
    ),
    *(("rl", "champion"), ("sft", "champion"), ("champion", "teacher")),
    *(("rl", "original"), ("sft", "original"), ("rl", "base")),
)
"""Arms that are compared: a student with each arm that may be its rival at the gate."""
_MIN_ROWS = 20
"""A smaller slice is listed without intervals."""
_MOST_VALUES = 40
"""Of one kind of slice; the rarer ones, as of intents in free text, are left out."""
_SLICES: dict[str, Callable[[Row], str | None]] = {
    "tenant": lambda row: row.tenant,
    "intent": lambda row: row.intent,
    "length": lambda row: (
        "≤10" if len(row.query) <= 10 else "11–20" if len(row.query) <= 20 else "21+"
    ),
    "history": lambda row: "with" if row.history else "without",
    "pool": lambda row: row.pool,
}


def scores_of(arm: Sequence[ArmRow], rows: Iterable[Row], recipe: Recipe) -> Scores:
    by_id = {row.id: row for row in rows}
    found = {entry.row_id: values_of(entry, by_id[entry.row_id], recipe) for entry in arm}
    return {
        metric.name: {row: found[row].get(metric.name) for row in found}
        for metric in recipe.grader.metrics
    }


def values_of(entry: ArmRow, row: Row, recipe: Recipe) -> dict[str, float]:
    """One text's values by metric."""
    if not entry.measured:
        return {}
    judged = {} if entry.judge_score is None else {QUALITY: entry.judge_score}
    return recipe.grader.metric_values(entry, row) | judged


def summarise(
    arm: Sequence[ArmRow],
    rows: Sequence[Row],
    config: Evaluate,
    recipe: Recipe,
    load: Reason | None = None,
) -> models.ArmFigures:
    """The figures of one arm; `load`: what else its model had to do while its latency was
    measured."""
    values = scores_of(arm, rows, recipe)
    measured: dict[str, list[float]] = {
        figure: [value for entry in arm if (value := getattr(entry, figure)) is not None]
        for figure in ("latency_ms", "cost_usd", "prompt_tokens", "completion_tokens")
    }
    per_1000 = {
        figure: 1000 * sum(found) / len(found) if found else None
        for figure, found in measured.items()
    }
    latencies, costs = measured["latency_ms"], measured["cost_usd"]
    p50, p95 = (
        float(np.percentile(latencies, percent)) if latencies else None for percent in (50, 95)
    )
    return models.ArmFigures(
        n=len(arm),
        scores=_scores(
            values, recipe.grader.metrics, groups_of(rows), config.bootstrap_resamples, config.seed
        ),
        judge_consistency=panel_consistency(arm),
        latency_p50_ms=p50,
        latency_p95_ms=p95,
        latency_p50_ci95=percentile_ci(latencies, 50, seed=config.seed),
        latency_p95_ci95=percentile_ci(latencies, 95, seed=config.seed),
        latency_n=len(latencies),
        latency_load=load if latencies else None,
        cost_per_1000_usd=per_1000["cost_usd"],
        cost_ci95=ratio_ci(
            [(1000 * cost, 1.0) for cost in costs], config.bootstrap_resamples, config.seed
        ),
        prompt_tokens_per_1000=per_1000["prompt_tokens"],
        completion_tokens_per_1000=per_1000["completion_tokens"],
        failed=sum(not entry.measured for entry in arm),
        empty=sum(entry.measured and entry.text is None for entry in arm),
    )


def _scores(
    values: Scores, metrics: Iterable[Metric], groups: Mapping[str, str], resamples: int, seed: int
) -> dict[str, MeanCi]:
    """Of the metrics that have values."""
    means = {
        metric.name: mean_ci(values[metric.name], groups, resamples if metric.interval else 0, seed)
        for metric in metrics
    }
    return {name: found for name, found in means.items() if found.n}


def pairs_of(arms: Collection[ArmName]) -> list[tuple[ArmName, ArmName]]:
    """Those of the pairs whose arms are there, and for each further teacher what it gains and
    students gain on it."""
    others = [name for name in arms if name not in ARMS]
    pairs = (
        *_PAIRS,
        *((other, "original") for other in others),
        *((a, b) for b in others for a in ("rl", "sft")),
    )
    return [(a, b) for a, b in pairs if a in arms and b in arms]


def compare_arms(
    arms: Arms, rows: Sequence[Row], config: Evaluate, recipe: Recipe
) -> list[Comparison]:
    """All pairs on every metric that has values, with p-values corrected for all comparisons on the
    same metric."""
    groups = groups_of(rows)
    scores = {
        name: ArmScores(arm=name, scores=scores_of(arm, rows, recipe)) for name, arm in arms.items()
    }
    found = [
        compared(scores[a], scores[b], metric, groups, config)
        for a, b in pairs_of(arms)
        for metric in recipe.grader.metrics
        if metric.compared
    ]
    return holm_corrected([comparison for comparison in found if comparison.n])


def compared(
    a: ArmScores, b: ArmScores, metric: Metric, groups: Mapping[str, str], config: Evaluate
) -> Comparison:
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
    """Each arm's means per slice, and what a student, else the teacher, gains on the arms that it
    is compared with.

    Of the metrics that have intervals. Slices are many and small: an interval here is for reading
    and decides nothing.
    """
    metrics = [metric for metric in recipe.grader.metrics if metric.interval]
    scores = {name: scores_of(arm, rows, recipe) for name, arm in arms.items()}
    groups, pairs = groups_of(rows), pairs_of(arms)
    pairs = [pair for pair in pairs if pair[0] in ("rl", "sft")] or [
        pair for pair in pairs if pair[0] == "teacher"
    ]
    made = []
    for by, value, ids in _cut(rows):
        # Of a small slice the means alone, which need no resamples.
        resamples = config.bootstrap_resamples if len(ids) >= _MIN_ROWS else 0
        within = {
            name: {
                metric.name: {
                    row: score for row in ids if (score := arm[metric.name].get(row)) is not None
                }
                for metric in metrics
            }
            for name, arm in scores.items()
        }
        figures, diffs = {}, []
        for name, values in within.items():
            means = _scores(values, metrics, groups, resamples, config.seed)
            figures[name] = models.SliceArm(
                n=max((mean.n for mean in means.values()), default=0), scores=means
            )
        for a, b in pairs:
            for metric in metrics:
                left, right = within[a][metric.name], within[b][metric.name]
                paired = {row: left[row] - right[row] for row in left.keys() & right.keys()}
                found = mean_ci(paired, groups, resamples, config.seed)
                if found.n:
                    diffs.append(
                        models.SliceDiff(
                            a=a,
                            b=b,
                            metric=metric.name,
                            n=found.n,
                            diff=found.mean,
                            ci95=found.ci95,
                        )
                    )
        made.append(models.Slice(by=by, value=value, n=len(ids), arms=figures, diffs=diffs))
    return made


def _cut(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[str]]]:
    """Kind, value and row ids, the largest slices first. Rows without an intent or a pool are in no
    slice of those."""
    for by, value_of in _SLICES.items():
        ids: defaultdict[str, list[str]] = defaultdict(list)
        for row in rows:
            if value := value_of(row):
                ids[value].append(row.id)
        largest = sorted(ids, key=lambda value: -len(ids[value]))[:_MOST_VALUES]
        yield from ((by, value, ids[value]) for value in largest)


def examples(
    arms: Arms, rows: Sequence[Row], recipe: Recipe, count: int = 10
) -> list[models.ReportExample]:
    """Questions spread over groups: the first of every k-th group, in the order of row ids; then
    more, if too few."""
    ordered, groups = sorted(rows, key=lambda row: row.id), groups_of(rows)
    first_of_group = {groups[row.id]: row for row in reversed(ordered)}
    spread = sorted(first_of_group.values(), key=lambda row: row.id)
    chosen = spread[:: max(1, len(spread) // count)][:count]
    chosen = [*chosen, *islice((row for row in ordered if row not in chosen), count - len(chosen))]
    by_arm = {name: {entry.row_id: entry for entry in arm} for name, arm in arms.items()}
    return [
        models.ReportExample(
            query=row.query,
            profile=row.profile,
            history=row.history,
            inputs={
                each.column: row.inputs[each.name]
                for each in recipe.INPUTS
                if each.name in row.inputs
            },
            gold_id=row.gold_id,
            gold_title=_title_of(
                row.gold_id, (entries[row.id] for entries in by_arm.values() if row.id in entries)
            ),
            arms={
                name: models.ExampleArm(
                    text=entry.text,
                    reason=entry.reason,
                    retrieved=(found := entry.retrieved)
                    and Retrieved(
                        ids=found.ids[:3], scores=found.scores[:3], titles=found.titles[:3]
                    ),
                    values={} if recipe.grader.retrieves else values_of(entry, row, recipe),
                )
                for name, entries in by_arm.items()
                if (entry := entries.get(row.id))
            },
        )
        for row in chosen
    ]


def shared_between(
    train: Sequence[Row], test: Sequence[Row], recipe: Recipe
) -> list[models.Shared]:
    """What the test split has in common with training rows."""

    def overlap(what: models.SharedThing, keys: Callable[[Row], Sequence[str]]) -> models.Shared:
        seen, asked = ({key for row in rows for key in keys(row)} for rows in (train, test))
        return models.Shared(what=what, test=len(asked), in_train=len(asked & seen))

    def with_context(row: Row) -> list[str]:
        inputs = "".join(identifying(row.inputs, recipe.INPUTS).values())
        return [normalise(row.query + row.history + row.profile + inputs)]

    shared = [
        overlap("row_ids", lambda row: [row.id]),
        overlap("questions_with_context", with_context),
        overlap("bare_questions", lambda row: [normalise(row.query)]),
    ]
    return (
        [*shared, overlap("gold_documents", lambda row: documents_of(row.gold_id))]
        if recipe.grader.retrieves
        else shared
    )


def _title_of(document_id: str | None, entries: Iterable[ArmRow]) -> str | None:
    """A document's title, if any arm found it."""
    for entry in entries:
        if entry.retrieved and 0 < (rank := entry.retrieved.rank(document_id)) <= len(
            entry.retrieved.titles
        ):
            return entry.retrieved.titles[rank - 1]
    return None
