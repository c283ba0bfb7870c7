"""The test questions in slices, for where an arm is good and where it is not.

Slices are many and small: an interval here is for reading, and nothing is decided by it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from qinglan.config import Evaluate
from qinglan.evaluation.comparisons import pairs_of
from qinglan.evaluation.metrics import arm_scores, groups_of
from qinglan.evaluation.models import Slice, SliceArm, SliceDiff
from qinglan.evaluation.summaries import scores_of
from qinglan.recipes import Recipe
from qinglan.rows import ArmName, ArmRow, Row
from qinglan.statistics import ArmScores, Values, mean_ci

MIN_ROWS = 20
"""A smaller slice is listed without intervals."""
MOST_VALUES = 40
"""Of one kind; the rarer ones, as of intents in free text, are left out."""
_FURTHEST: tuple[ArmName, ...] = ("rl", "sft", "teacher")


def _length(row: Row) -> str:
    characters = len(row.query)
    return "≤10" if characters <= 10 else "11–20" if characters <= 20 else "21+"


BY: dict[str, Callable[[Row], str | None]] = {
    "tenant": lambda row: row.tenant,
    "intent": lambda row: row.intent,
    "length": _length,
    "history": lambda row: "with" if row.history else "without",
    "pool": lambda row: row.pool,
}


def slices_of(
    arms: Mapping[ArmName, Sequence[ArmRow]], rows: Sequence[Row], config: Evaluate, recipe: Recipe
) -> list[Slice]:
    """Each arm's means per slice, and what the furthest arm gains on those that it is compared with.

    Of the metrics that have intervals.
    """
    metrics = [metric.name for metric in recipe.METRICS if metric.interval]
    scores = {name: arm_scores(name, arm, rows, recipe) for name, arm in arms.items()}
    scores = {
        name: ArmScores(arm=name, scores={metric: arm.scores[metric] for metric in metrics})
        for name, arm in scores.items()
    }
    groups, pairs = groups_of(rows), pairs_of(arms)
    first = next((name for name in _FURTHEST if any(a == name for a, _ in pairs)), None)
    drawn = [(a, b) for a, b in pairs if a == first]
    return [_slice(by, value, ids, scores, groups, drawn, config) for by, value, ids in _cut(rows)]


def _cut(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[str]]]:
    """Kind, value and row ids, the largest slices first; rows without an intent are in no slice of intents, and so with
    pools."""
    for by, value_of in BY.items():
        ids: defaultdict[str, list[str]] = defaultdict(list)
        for row in rows:
            if value := value_of(row):
                ids[value].append(row.id)
        sizes = Counter({value: len(found) for value, found in ids.items()})
        yield from ((by, value, ids[value]) for value, _ in sizes.most_common(MOST_VALUES))


def _slice(
    by: str,
    value: str,
    ids: Sequence[str],
    scores: Mapping[ArmName, ArmScores],
    groups: Mapping[str, str],
    pairs: Sequence[tuple[ArmName, ArmName]],
    config: Evaluate,
) -> Slice:
    within = {name: _within(arm, ids) for name, arm in scores.items()}
    # Of a small slice the means alone, which need no resamples.
    resamples = config.bootstrap_resamples if len(ids) >= MIN_ROWS else 0
    return Slice(
        by=by,
        value=value,
        n=len(ids),
        arms={name: _arm(arm, groups, resamples, config.seed) for name, arm in within.items()},
        diffs=[found for a, b in pairs for found in _differences(within[a], within[b], groups, resamples, config.seed)],
    )


def _within(arm: ArmScores, ids: Sequence[str]) -> ArmScores:
    found = {metric: {row: values[row] for row in ids if row in values} for metric, values in arm.scores.items()}
    return ArmScores(arm=arm.arm, scores=found)


def _arm(arm: ArmScores, groups: Mapping[str, str], resamples: int, seed: int) -> SliceArm:
    found = {metric: mean_ci(values, groups, resamples, seed) for metric, values in arm.scores.items()}
    return SliceArm(n=max((mean.n for mean in found.values()), default=0), scores=scores_of(found))


def _differences(
    a: ArmScores, b: ArmScores, groups: Mapping[str, str], resamples: int, seed: int
) -> Iterator[SliceDiff]:
    for metric, values in a.scores.items():
        found = mean_ci(_paired(values, b.scores[metric]), groups, resamples, seed)
        if found.n:
            yield SliceDiff(a=a.arm, b=b.arm, metric=metric, n=found.n, diff=found.mean, ci95=found.ci95)


def _paired(a: Values, b: Values) -> dict[str, float | None]:
    """Differences by row; None where either has no value."""
    return {
        row: None if (left := a[row]) is None or (right := b[row]) is None else left - right
        for row in a.keys() & b.keys()
    }
