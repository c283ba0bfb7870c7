"""The reward service of a run: one Ray actor, which all reward workers on all nodes ask.

One process holds the clients, the ledger's queue and the caches, so limits are those of the run, and nothing is asked
twice at once. It comes back by itself after a crash, on what the ledger holds, and Ray hands it again what it had not
answered. This module imports neither Ray nor what scoring takes: reward workers need none of it to start.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qinglan.errors import QinglanError
from qinglan.recipes.scoring.service import RewardService

if TYPE_CHECKING:
    from qinglan.recipes.scoring.scorer import Scorer

_log = logging.getLogger(__name__)
_MOST_SAMPLES = 100_000
"""At once, of all workers: during an outage they all wait in here."""
_MOST_DEATHS = 5
"""After so many while it was being scored, a sample may be what kills the service."""


_CLOSE_TIMEOUT_S = 75.0
"""A little longer than the ledger's queue tries to write."""
_TRY_AGAIN_S = 30.0
"""An unreachable database takes seconds to show it, in which nothing else is done: not for every sample anew."""


class RewardActor:
    """Scores samples. Reads API keys from its own process's environment."""

    def __init__(self, service: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`service` is a `RewardService` as JSON."""
        self._service, self._clock = RewardService.model_validate_json(service), clock
        self._opened = self._open()

    def _open(self) -> "Scorer[Any] | tuple[QinglanError, float]":
        """A scorer, or why there is none, and when to try again."""
        from qinglan.recipes import get_recipe

        try:
            return get_recipe(self._service.recipe).scorer(self._service)
        except QinglanError as error:
            return error, self._clock() + _TRY_AGAIN_S

    async def score(self, extra_info: dict[str, Any], text: str) -> dict[str, float]:
        """As `Scorer.score`; where there can't be a scorer, as for want of a key, no sample has a score."""
        if isinstance(self._opened, tuple) and self._clock() >= self._opened[1]:
            self._opened = self._open()
        if not isinstance(self._opened, tuple):
            return await self._opened.score(extra_info, text)
        from qinglan.recipes.scoring.samples import invalid, open_log, write_sample

        with open_log(self._service.samples_log) as log:
            write_sample(log, {"row_id": extra_info.get("row_id")} | invalid(self._opened[0]))
        return self._service.outcome()

    async def close(self) -> None:
        """Write what is not written yet, and close connections and files."""
        if not isinstance(self._opened, tuple):
            await self._opened.close()


def start_reward_service(config_path: str) -> Any:
    """The handle of the run's service, which is started unless it was before; the call does not wait for it.

    It runs on this node where there is room, and as long as the process lives that was the first to call this.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    text = Path(config_path).read_text(encoding="utf-8")
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    options = {
        "name": RewardService.model_validate_json(text).actor_name,
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": _MOST_DEATHS,
        "max_concurrency": _MOST_SAMPLES,
        "scheduling_strategy": here,
    }
    actor: Any = ray.remote(RewardActor)
    return actor.options(**options).remote(text)


def close_reward_service(service: Any) -> None:
    """Let it write what it holds still: Ray ends it without a word. Failing in this is said, not raised."""
    import ray
    from ray.exceptions import RayError

    try:
        ray.get(service.close.remote(), timeout=_CLOSE_TIMEOUT_S)
    except RayError as error:
        _log.warning("the reward service could not write the last of what it holds: %s", error)


def is_lost(error: Exception) -> bool:
    """Did the service die too often while it scored a sample?"""
    from ray.exceptions import RayActorError

    return isinstance(error, RayActorError)
