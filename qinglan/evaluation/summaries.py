"""One arm's figures: means with intervals over groups, money and time with intervals over questions."""

from collections.abc import Callable, Sequence

import numpy as np

from qinglan.config import Evaluate
from qinglan.evaluation.arms import ArmRow
from qinglan.evaluation.metrics import arm_scores, groups_of
from qinglan.evaluation.panel import consistency
from qinglan.report import Arm
from qinglan.rows import Row
from qinglan.statistics import Interval, mean_ci, percentile_ci, ratio_ci

_WITH_INTERVAL = ("top1", "mean_top1_score", "quality")


def summarise(arm: Sequence[ArmRow], rows: Sequence[Row], config: Evaluate, load: str | None = None) -> Arm:
    """The figures of one arm.

    Args:
        load: what else the model had to do while its latency was measured.
    """
    groups = groups_of(rows)
    found = {
        metric: mean_ci(values, groups, config.bootstrap_resamples if metric in _WITH_INTERVAL else 0, config.seed)
        for metric, values in arm_scores("arm", arm, rows).scores.items()
    }
    latencies = [entry.latency_ms for entry in arm if entry.latency_ms is not None]
    return Arm(
        n=len(arm),
        **{metric: mean.mean for metric, mean in found.items()},
        top1_ci95=found["top1"].ci95,
        top1_score_ci95=found["mean_top1_score"].ci95,
        quality_ci95=found["quality"].ci95,
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
        failed=sum(entry.retrieved is None for entry in arm),
    )


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None


def _per_1000(arm: Sequence[ArmRow], value: Callable[[ArmRow], float | None]) -> float | None:
    present = [number for entry in arm if (number := value(entry)) is not None]
    return 1000 * sum(present) / len(present) if present else None


def _cost_ci(arm: Sequence[ArmRow], config: Evaluate) -> Interval | None:
    pairs = [(1000 * entry.cost_usd, 1.0) for entry in arm if entry.cost_usd is not None]
    return ratio_ci(pairs, config.bootstrap_resamples, config.seed)
