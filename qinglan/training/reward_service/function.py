"""verl's reward function, and the run's reward service that answers it.

The service is one Ray actor for all nodes. One process holds the clients, the ledger's queue and
the caches, so limits are those of the run, and no question is asked twice at the same time. After a
crash Ray restarts it and repeats the calls that it had not answered; what the ledger holds is not
asked again. This module imports neither Ray nor the scorer, so reward workers start fast.
"""

import logging
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qinglan.errors import QinglanError
from qinglan.training.reward_service.settings import RewardService

if TYPE_CHECKING:
    from qinglan.training.reward_service.scorer import Scorer

_log = logging.getLogger(__name__)
# At the same time, of all workers: during an outage all samples wait in the service.
_MAX_SAMPLES = 100_000
# After so many crashes while it was being scored, a sample may be the cause of the crashes.
_MAX_CRASHES = 5
# A little longer than the ledger's queue tries to write.
_CLOSE_TIMEOUT_S = 75.0
# Opening fails only after seconds where the database is unreachable, and blocks all samples: it is
# not tried for each of them.
_REOPEN_AFTER_S = 30.0


class RewardActor:
    """Scores samples for a `RewardService`; reads API keys from its own process's environment."""

    def __init__(self, service: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Open the scorer.

        Args:
            service: a `RewardService` as JSON.
        """
        self._service = RewardService.model_validate_json(service)
        self._clock = clock
        self._scorer: Scorer | QinglanError = self._open()

    def _open(self) -> "Scorer | QinglanError":
        from qinglan.recipes import get_recipe
        from qinglan.training.reward_service.scorer import Scorer

        try:
            return Scorer(self._service, get_recipe(self._service.recipe))
        except QinglanError as error:
            self._reopen_at = self._clock() + _REOPEN_AFTER_S
            return error

    async def score(self, extra_info: dict[str, Any], text: str) -> dict[str, float]:
        """The sample's outcome, as `Scorer.score` gives it.

        Without a scorer, such as for a missing key, no sample has a score.
        """
        if isinstance(self._scorer, QinglanError) and self._clock() >= self._reopen_at:
            self._scorer = self._open()
        if not isinstance(self._scorer, QinglanError):
            return await self._scorer.score(extra_info, text)
        from qinglan.training.reward_service.samples import write_sample

        with self._service.samples_log.open("ab", buffering=0) as log:
            write_sample(log, {"row_id": extra_info.get("row_id")}, self._scorer)
        return self._service.outcome()

    async def close(self) -> None:
        """Write what is not written yet, and close connections and files."""
        if not isinstance(self._scorer, QinglanError):
            await self._scorer.close()


def start_reward_service(config_path: str) -> Any:
    """The handle of the run's service, which is started unless it was before.

    The call does not wait for the start. The service runs on this node if possible, and ends with
    the process that called this first.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    service = Path(config_path).read_text(encoding="utf-8")
    this_node = ray.get_runtime_context().get_node_id()
    options = {
        "name": RewardService.model_validate_json(service).actor_name,
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": _MAX_CRASHES,
        "max_concurrency": _MAX_SAMPLES,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(this_node, soft=True),
    }
    actor: Any = ray.remote(RewardActor)
    return actor.options(**options).remote(service)


def close_reward_service(service: Any) -> None:
    """Let the service write what it still holds, as Ray ends actors without notice.

    A failure is logged, not raised.
    """
    import ray
    from ray.exceptions import RayError

    try:
        ray.get(service.close.remote(), timeout=_CLOSE_TIMEOUT_S)
    except RayError as error:
        _log.warning("the reward service could not write the last samples: %s", error)


_service = lru_cache(maxsize=1)(start_reward_service)


@lru_cache(maxsize=1)
def _outcome_without_score(config_path: str) -> dict[str, float]:
    settings = Path(config_path).read_text(encoding="utf-8")
    return RewardService.model_validate_json(settings).outcome()


async def compute_score(
    data_source: str,  # noqa: ARG001 (verl's signature)
    solution_str: str,
    ground_truth: str,  # noqa: ARG001
    extra_info: dict[str, Any],
    config_path: str,
    **_: Any,
) -> dict[str, float | str]:
    """The score, its parts and costs (`RewardService.outcome`), the row, and its `Row.unit`.

    Where this raises, verl drops all rollouts of a prompt without a message. So a sample that could
    not be scored is returned as well, with `invalid` 1: our trainer leaves it out of advantage and
    loss.
    """
    try:
        score = _service(config_path).score.remote
        outcome: dict[str, float] = await score(extra_info, solution_str)
    except Exception as error:  # noqa: BLE001 (a service that crashed too often, for one)
        # The error's text may quote a user.
        _log.error("a sample has no score: %s", type(error).__name__)
        outcome = _outcome_without_score(config_path)
    return {**outcome, "row_id": extra_info["row_id"], "target": extra_info["unit"]}
