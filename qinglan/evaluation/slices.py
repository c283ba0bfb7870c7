"""The test questions in slices, for where an arm is good and where it is not.

Slices are many and small: an interval here is for reading, and nothing is decided by it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from qinglan.config import Evaluate
from qinglan.evaluation.arms import ArmRow
from qinglan.evaluation.metrics import arm_scores, groups_of
from qinglan.report import ArmName, Slice, SliceArm, SliceDiff
from qinglan.rows import Row
from qinglan.statistics import ArmScores, MeanCi, Values, mean_ci

MIN_ROWS = 20
"""A smaller slice is listed without intervals."""
MOST_VALUES = 40
"""Of one kind; the rarer ones, as of intents in free text, are left out."""
METRICS = ("top1", "mean_top1_score", "quality")
_HEADLINES: tuple[tuple[ArmName, ArmName], ...] = (("rl", "teacher"), ("sft", "teacher"), ("teacher", "original"))


def _length(row: Row) -> str:
    characters = len(row.query)
    return "≤10" if characters <= 10 else "11–20" if characters <= 20 else "21+"


BY: dict[str, Callable[[Row], str | None]] = {
    "tenant": lambda row: row.tenant,
    "intent": lambda row: row.intent,
    "length": _length,
    "history": lambda row: "with" if row.history else "without",
}


def slices_of(arms: Mapping[ArmName, Sequence[ArmRow]], rows: Sequence[Row], config: Evaluate) -> list[Slice]:
    """Each arm's means per slice, and the difference between the furthest student and its rival."""
    scores, groups = {name: arm_scores(name, arm, rows) for name, arm in arms.items()}, groups_of(rows)
    pair = next(((a, b) for a, b in _HEADLINES if a in arms and b in arms), None)
    return [_slice(by, value, ids, scores, groups, pair, config) for by, value, ids in _cut(rows)]


def _cut(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[str]]]:
    """Kind, value and row ids, the largest slices first; rows without an intent are in no slice of intents."""
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
    pair: tuple[ArmName, ArmName] | None,
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
        diff=_differences(within[pair[0]], within[pair[1]], groups, resamples, config.seed) if pair else {},
    )


def _within(arm: ArmScores, ids: Sequence[str]) -> ArmScores:
    return ArmScores(
        arm=arm.arm, scores={m: {row: arm.scores[m][row] for row in ids if row in arm.scores[m]} for m in METRICS}
    )


def _arm(arm: ArmScores, groups: Mapping[str, str], resamples: int, seed: int) -> SliceArm:
    found: dict[str, MeanCi] = {m: mean_ci(arm.scores[m], groups, resamples, seed) for m in METRICS}
    return SliceArm(
        n=max(mean.n for mean in found.values()),
        **{metric: mean.mean for metric, mean in found.items()},
        top1_ci95=found["top1"].ci95,
        top1_score_ci95=found["mean_top1_score"].ci95,
        quality_ci95=found["quality"].ci95,
    )


def _differences(
    a: ArmScores, b: ArmScores, groups: Mapping[str, str], resamples: int, seed: int
) -> dict[str, SliceDiff]:
    found = {m: mean_ci(_paired(a.scores[m], b.scores[m]), groups, resamples, seed) for m in METRICS}
    return {m: SliceDiff(a=a.arm, b=b.arm, n=d.n, diff=d.mean, ci95=d.ci95) for m, d in found.items() if d.n}


def _paired(a: Values, b: Values) -> dict[str, float | None]:
    """Differences by row; None where either has no value."""
    return {
        row: None if (left := a[row]) is None or (right := b[row]) is None else left - right
        for row in a.keys() & b.keys()
    }
