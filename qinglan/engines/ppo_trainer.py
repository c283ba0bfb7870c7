"""verl's synchronous PPO trainer, which also reports the reward's parts at every step.

verl logs what a reward function returns beside the score in validation only. Registered by name with verl's
`register_trainer`, this one adds `reward_extra/<name>/mean`, `reward_extra/samples` and `reward_extra/invalid` to
the metrics of each training step. A sample whose reward function raised is invalid: verl leaves it out of the batch
and fills up with rows that have no loss.
"""

# mypy: allow-subclassing-any, allow-untyped-decorators, allow-untyped-calls

import math
from collections.abc import Iterable, Mapping
from typing import Any

import transfer_queue
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from qinglan.engines.verl import TRAINER

POLL_S = 0.05
"""verl looks every 2 s whether a batch is complete, and has no setting for it."""


@register_trainer(TRAINER)
class ReportingTrainer(PPOTrainerSync):
    """PPO or GRPO with generation and training taking turns on the same devices."""

    def __init__(self, config: Any) -> None:
        config.trainer.v1.trainer_mode = "sync"  # verl compares this name to choose the on-policy replay buffer
        super().__init__(config)

    def _build_replay_buffer(self) -> Any:
        buffer = super()._build_replay_buffer()
        buffer.poll_interval = POLL_S
        return buffer

    def _compute_metrics(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        super()._compute_metrics(batch, metrics, *args, **kwargs)
        keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
        fields = ["extra_fields", "rollout_log_probs"]
        rows = transfer_queue.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=fields)
        extras = [row.get("reward_extra_info", {}) for row in rows.pop("extra_fields").tolist()]
        wanted = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
        metrics["reward_extra/samples"] = float(len(keys))
        metrics["reward_extra/invalid"] = float(wanted - len(keys))
        metrics |= {f"reward_extra/{name}/mean": value for name, value in extra_means(extras).items()}
        # The sampled tokens' mean surprise estimates the entropy without bias, and costs nothing.
        metrics.setdefault("actor/entropy", -float(rows["rollout_log_probs"].values().mean()))

    def _val_metrics_update(
        self,
        data_sources: Any,
        sample_uids: Any,
        reward_extra_infos_dict: Mapping[str, list[Any]],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        known = {name: [_or_none(value) for value in values] for name, values in reward_extra_infos_dict.items()}
        return super()._val_metrics_update(data_sources, sample_uids, known, *args, **kwargs)


def extra_means(extras: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Mean of each numeric value over the samples that have it; NaN means that a sample does not."""
    values: dict[str, list[float]] = {}
    for extra in extras:
        for name, value in extra.items():
            if isinstance(value, int | float) and not math.isnan(value):
                values.setdefault(name, []).append(float(value))
    return {name: sum(known) / len(known) for name, known in values.items()}


def _or_none(value: Any) -> Any:
    """None is how verl's validation leaves a value out."""
    return None if isinstance(value, float) and math.isnan(value) else value
