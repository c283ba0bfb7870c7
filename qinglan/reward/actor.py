"""The reward service of a run: one Ray actor, which all reward workers on all nodes ask.

One process holds the clients, the ledger's queue and the caches, so limits are those of the run, and nothing is asked
twice at once. It comes back by itself after a crash, on what the ledger holds, and Ray hands it again what it had not
answered. This module imports neither Ray nor what scoring takes: reward workers need none of it to start.
"""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qinglan.errors import QinglanError
from qinglan.reward.service import RewardService, outcome

if TYPE_CHECKING:
    from qinglan.reward.scorer import Scorer

_MOST_SAMPLES = 100_000
"""At once, of all workers: during an outage they all wait in here."""
_MOST_DEATHS = 5
"""After so many while it was being scored, a sample may be what kills the service."""


class RewardActor:
    """Scores samples. Reads API keys from its own process's environment."""

    def __init__(self, service: str) -> None:
        """`service` is a `RewardService` as JSON."""
        self._service = RewardService.model_validate_json(service)
        self._scorer: Scorer | None = None
        with suppress(QinglanError):  # told with the first sample
            self._scorer = self._open()

    def _open(self) -> "Scorer":
        from qinglan.reward.scorer import Scorer

        return Scorer(self._service)

    async def score(self, extra_info: dict[str, Any], text: str) -> dict[str, float]:
        """As `Scorer.score`; where there can't be a scorer, as for want of a key, no sample has a score."""
        try:
            self._scorer = self._scorer or self._open()
        except QinglanError as error:
            from qinglan.reward.samples import invalid, open_log, write_sample

            with open_log(self._service.samples_log) as log:
                write_sample(log, {"row_id": extra_info.get("row_id")} | invalid(error))
            return outcome(None)
        return await self._scorer.score(extra_info, text)

    async def close(self) -> None:
        """Write what is not written yet, and close connections and files."""
        if self._scorer:
            await self._scorer.close()


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


def is_lost(error: Exception) -> bool:
    """Did the service die too often while it scored a sample?"""
    from ray.exceptions import RayActorError

    return isinstance(error, RayActorError)
