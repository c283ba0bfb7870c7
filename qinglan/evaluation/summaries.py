"""One arm's figures: means with intervals over groups, money and time with intervals over questions."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from qinglan.config import Endpoint, Evaluate
from qinglan.evaluation.metrics import arm_scores, groups_of
from qinglan.evaluation.models import ArmFigures, Score
from qinglan.evaluation.reasons import Reason, reason
from qinglan.recipes import Recipe
from qinglan.recipes.measuring.panel import consistency
from qinglan.rows import ArmRow, Row
from qinglan.statistics import Interval, MeanCi, mean_ci, percentile_ci, ratio_ci


def summarise(
    arm: Sequence[ArmRow], rows: Sequence[Row], config: Evaluate, recipe: Recipe, load: Reason | None = None
) -> ArmFigures:
    """The figures of one arm.

    Args:
        load: what else the model had to do while its latency was measured.
    """
    groups, values = groups_of(rows), arm_scores("arm", arm, rows, recipe)
    found = {
        metric.name: mean_ci(
            values.scores[metric.name], groups, config.bootstrap_resamples if metric.interval else 0, config.seed
        )
        for metric in recipe.METRICS
    }
    latencies = [entry.latency_ms for entry in arm if entry.latency_ms is not None]
    return ArmFigures(
        n=len(arm),
        scores=scores_of(found),
        judge_consistency=consistency(arm),
        latency_p50_ms=_percentile(latencies, 50),
        latency_p95_ms=_percentile(latencies, 95),
        latency_p50_ci95=percentile_ci(latencies, 50, seed=config.seed),
        latency_p95_ci95=percentile_ci(latencies, 95, seed=config.seed),
        latency_n=len(latencies),
        latency_load=load if latencies else None,
        cost_per_1000_usd=_per_1000(arm, lambda entry: entry.cost_usd),
        cost_ci95=_cost_ci(arm, config),
        prompt_tokens_per_1000=_per_1000(arm, lambda entry: entry.prompt_tokens),
        completion_tokens_per_1000=_per_1000(arm, lambda entry: entry.completion_tokens),
        failed=sum(not entry.measured for entry in arm),
    )


def scores_of(found: Mapping[str, MeanCi]) -> dict[str, Score]:
    """Of the metrics that have values."""
    return {metric: Score(mean=mean.mean, n=mean.n, ci95=mean.ci95) for metric, mean in found.items() if mean.n}


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None


def _per_1000(arm: Sequence[ArmRow], value: Callable[[ArmRow], float | None]) -> float | None:
    present = [number for entry in arm if (number := value(entry)) is not None]
    return 1000 * sum(present) / len(present) if present else None


def _cost_ci(arm: Sequence[ArmRow], config: Evaluate) -> Interval | None:
    pairs = [(1000 * entry.cost_usd, 1.0) for entry in arm if entry.cost_usd is not None]
    return ratio_ci(pairs, config.bootstrap_resamples, config.seed)


def live_load(endpoint: Endpoint) -> Reason:
    """Under what load a teacher's latency was measured: its service's own, and as many of our questions."""
    return reason("live_at_once", questions=endpoint.concurrency)


def student_load(device: str) -> Reason:
    """Under what load a student's latency was measured."""
    return reason("one_at_a_time", device=device)
