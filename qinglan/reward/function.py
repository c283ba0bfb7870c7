"""verl's custom reward function."""

from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from qinglan.reward.samples import invalid, open_log, write_sample
from qinglan.reward.service import RewardService, Scorer


@lru_cache(maxsize=1)
def _scorer(config_path: str) -> Scorer:
    service = RewardService.model_validate_json(Path(config_path).read_text(encoding="utf-8"))
    try:
        return Scorer(service)
    except Exception as error:  # such as a key that this machine lacks: the flow has to hear of it
        with open_log(service.samples_log) as log:
            write_sample(log, invalid(error))
        raise


async def compute_score(
    data_source: str,  # noqa: ARG001 (verl's signature)
    solution_str: str,
    ground_truth: str,  # noqa: ARG001
    extra_info: dict[str, Any],
    config_path: str,
    **_: Any,
) -> dict[str, float]:
    """verl's custom reward function: the score, and its parts as extra metrics.

    verl wants the same keys from every sample, so a part that is unknown for this one is NaN, and means skip it.
    """
    scored = await _scorer(config_path).score(extra_info, solution_str)
    return asdict(scored)
