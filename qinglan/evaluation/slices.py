"""The test questions in slices, for where an arm is good and where it is not.

Slices are many and small: an interval here is for reading, and nothing is decided by it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from qinglan.config import Evaluate
from qinglan.evaluation.comparisons import pairs_of
from qinglan.evaluation.metrics import arm_scores, groups_of, scores_of
from qinglan.evaluation.models import Slice, SliceArm, SliceDiff
from qinglan.recipes import Recipe
from qinglan.rows import ArmName, ArmRow, Row
from qinglan.statistics import Values, mean_ci

MIN_ROWS = 20
"""A smaller slice is listed without intervals."""
MOST_VALUES = 40
"""Of one kind; the rarer ones, as of intents in free text, are left out."""
_FURTHEST: tuple[ArmName, ...] = ("rl", "sft", "teacher")


BY: dict[str, Callable[[Row], str | None]] = {
    "tenant": lambda row: row.tenant,
    "intent": lambda row: row.intent,
    "length": lambda row: "≤10" if len(row.query) <= 10 else "11–20" if len(row.query) <= 20 else "21+",
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
    scores = {name: arm_scores(name, arm, rows, recipe).scores for name, arm in arms.items()}
    groups, pairs = groups_of(rows), pairs_of(arms)
    first = next((name for name in _FURTHEST if any(a == name for a, _ in pairs)), None)
    made = []
    for by, value, ids in _cut(rows):
        # Of a small slice the means alone, which need no resamples.
        resamples = config.bootstrap_resamples if len(ids) >= MIN_ROWS else 0
        within = {
            name: {metric: {row: arm[metric][row] for row in ids if row in arm[metric]} for metric in metrics}
            for name, arm in scores.items()
        }
        figures, diffs = {}, []
        for name, values in within.items():
            means = {metric: mean_ci(values[metric], groups, resamples, config.seed) for metric in metrics}
            figures[name] = SliceArm(n=max((mean.n for mean in means.values()), default=0), scores=scores_of(means))
        for a, b in (pair for pair in pairs if pair[0] == first):
            for metric in metrics:
                found = mean_ci(_paired(within[a][metric], within[b][metric]), groups, resamples, config.seed)
                if found.n:
                    diffs.append(SliceDiff(a=a, b=b, metric=metric, n=found.n, diff=found.mean, ci95=found.ci95))
        made.append(Slice(by=by, value=value, n=len(ids), arms=figures, diffs=diffs))
    return made


def _cut(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[str]]]:
    """Kind, value and row ids, the largest slices first. Rows without an intent or a pool are in no slice of those."""
    for by, value_of in BY.items():
        ids: defaultdict[str, list[str]] = defaultdict(list)
        for row in rows:
            if value := value_of(row):
                ids[value].append(row.id)
        largest = sorted(ids, key=lambda value: -len(ids[value]))[:MOST_VALUES]
        yield from ((by, value, ids[value]) for value in largest)


def _paired(a: Values, b: Values) -> dict[str, float | None]:
    """Differences by row; None where either has no value."""
    return {
        row: None if (left := a[row]) is None or (right := b[row]) is None else left - right
        for row in a.keys() & b.keys()
    }
