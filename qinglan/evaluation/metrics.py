"""Values of one row by metric, and one arm's figures: means with intervals over groups, money and time over questions.

A recipe declares its metrics (`Recipe.METRICS`) and computes them (`Recipe.measured_values`), all but `quality`, which
is the judge's score. A row has no value where nothing was retrieved or graded, where it has no label, or no judgement.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from qinglan.config import Evaluate
from qinglan.evaluation.models import ArmFigures, Score
from qinglan.evaluation.reasons import Reason
from qinglan.recipes import QUALITY, Recipe
from qinglan.recipes.measuring.panel import consistency
from qinglan.rows import ArmRow, Row
from qinglan.statistics import ArmScores, MeanCi, mean_ci, percentile_ci, ratio_ci


def arm_scores(name: str, arm: Sequence[ArmRow], rows: Iterable[Row], recipe: Recipe) -> ArmScores:
    """Each of the recipe's metrics by row id."""
    by_id = {row.id: row for row in rows}
    found = {entry.row_id: values_of(entry, by_id[entry.row_id], recipe) for entry in arm}
    return ArmScores(
        arm=name,
        scores={metric.name: {row: found[row].get(metric.name) for row in found} for metric in recipe.METRICS},
    )


def values_of(entry: ArmRow, row: Row, recipe: Recipe) -> dict[str, float]:
    """One text's values by metric."""
    if not entry.measured:
        return {}
    judged = {} if entry.judge_score is None else {QUALITY: entry.judge_score}
    return recipe.measured_values(entry, row) | judged


def groups_of(rows: Iterable[Row]) -> dict[str, str]:
    """The units that the bootstrap resamples, by row id."""
    return {row.id: row.unit for row in rows}


def summarise(
    arm: Sequence[ArmRow], rows: Sequence[Row], config: Evaluate, recipe: Recipe, load: Reason | None = None
) -> ArmFigures:
    """The figures of one arm.

    Args:
        load: what else the model had to do while its latency was measured.
    """
    groups, values = groups_of(rows), arm_scores("arm", arm, rows, recipe)
    means = {
        metric.name: mean_ci(
            values.scores[metric.name], groups, config.bootstrap_resamples if metric.interval else 0, config.seed
        )
        for metric in recipe.METRICS
    }

    def measured(figure: str) -> list[float]:
        return [value for entry in arm if (value := getattr(entry, figure)) is not None]

    def per_1000(figure: str) -> float | None:
        values = measured(figure)
        return 1000 * sum(values) / len(values) if values else None

    latencies, costs = measured("latency_ms"), measured("cost_usd")
    p50, p95 = (float(np.percentile(latencies, percent)) if latencies else None for percent in (50, 95))
    return ArmFigures(
        n=len(arm),
        scores=scores_of(means),
        judge_consistency=consistency(arm),
        latency_p50_ms=p50,
        latency_p95_ms=p95,
        latency_p50_ci95=percentile_ci(latencies, 50, seed=config.seed),
        latency_p95_ci95=percentile_ci(latencies, 95, seed=config.seed),
        latency_n=len(latencies),
        latency_load=load if latencies else None,
        cost_per_1000_usd=per_1000("cost_usd"),
        cost_ci95=ratio_ci([(1000 * cost, 1.0) for cost in costs], config.bootstrap_resamples, config.seed),
        prompt_tokens_per_1000=per_1000("prompt_tokens"),
        completion_tokens_per_1000=per_1000("completion_tokens"),
        failed=sum(not entry.measured for entry in arm),
    )


def scores_of(means: Mapping[str, MeanCi]) -> dict[str, Score]:
    """Of the metrics that have values."""
    return {metric: Score(mean=found.mean, n=found.n, ci95=found.ci95) for metric, found in means.items() if found.n}
