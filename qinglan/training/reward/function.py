"""verl's custom reward function: sends a sample to the run's reward service and waits for its score."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from qinglan.recipes.scoring.service import RewardService
from qinglan.training.reward.actor import is_lost, start_reward_service

_service = lru_cache(maxsize=1)(start_reward_service)


@lru_cache(maxsize=1)
def _unscored(config_path: str) -> dict[str, float]:
    return RewardService.model_validate_json(Path(config_path).read_text(encoding="utf-8")).outcome()


async def compute_score(
    data_source: str,  # noqa: ARG001 (verl's signature)
    solution_str: str,
    ground_truth: str,  # noqa: ARG001
    extra_info: dict[str, Any],
    config_path: str,
    **_: Any,
) -> dict[str, float | str]:
    """The score, its parts and costs (`RewardService.outcome`), and the group of a dev row.

    Where this raises, verl drops all rollouts of a prompt without a message. So a sample that could not be scored is
    returned as well, with `invalid` 1: our trainer leaves it out of advantage and loss.
    """
    try:
        scores: dict[str, float] = await _service(config_path).score.remote(extra_info, solution_str)
    except Exception as error:
        if not is_lost(error):
            raise
        scores = _unscored(config_path)
    return {**scores, "group": extra_info["gold_id"] or extra_info["row_id"]}
