"""verl's synchronous PPO trainer, with what an external reward needs around it, on verl's own
hooks; and its critic.

A sample without a reward (the reward function returned `invalid`) is left out of advantage and
loss; verl fills the batch up with rows that have no loss. With too many of them training saves its
state and stops. The reward's parts are logged at every step, alarms are checked, and each
validation gives one value, by which the model is chosen.

The critic is verl's without two assumptions that verl 0.9.1 makes about its model. verl's loader
asks for flash attention whatever the configuration says. Its adapter is meant for a model that
generates, and peft refuses it for a token classifier, whose head predicts the value; here the head
is trained in full. A worker that receives a `CriticModelConfig` imports this module, and thereby
registers the engine with verl.
"""

# mypy: allow-subclassing-any, allow-untyped-decorators, allow-untyped-calls

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue
from huggingface_hub import snapshot_download
from omegaconf import open_dict
from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoModelForTokenClassification, AutoTokenizer
from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.fsdp_utils import get_init_weight_context_manager
from verl.utils.py_functional import convert_to_regular_types
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.rollout import base, replica

from qinglan.errors import EngineError
from qinglan.training.alarms import DISTINCT, ENTROPY, REWARD_KL, ZERO_VARIANCE, part_mean
from qinglan.training.engines.agent_loop import AGENTS_FILE
from qinglan.training.engines.progress import TrainerSettings, TrainingProgress, repair_checkpoints
from qinglan.training.engines.verl import TRAINER

VLLM = "qinglan.training.engines.vllm_rollout"
replica.RolloutReplicaRegistry.register("vllm", lambda: import_module(VLLM).EndingReplica)
# verl offers no function to replace this class. Workers import this module, so they have it too.
base._ROLLOUT_REGISTRY[("vllm", "async")] = f"{VLLM}.TimedServerAdapter"

BEST_SCORE = 1.0
WORST_SCORE = -1.0
"""Ends of all recipes' rewards."""
POLL_S = 0.05
"""Pause between looks whether a batch is complete; verl's is 2 s, and not a setting."""
SUMMED = ("rag_calls", "judge_cost_usd")
"""Parts that are logged as a step's sum as well."""
_SAME_SCORE = 1e-6
"""Scores that differ by less are the same."""
_UNGROUPED = (AdvantageEstimator.GAE.value, AdvantageEstimator.REINFORCE_PLUS_PLUS.value)
"""Estimators that do not compare a sample with others of its prompt."""
KL_COEFFICIENT = "actor/next_kl_coefficient"
"""Metric of ours: the adaptive coefficient for the next step, which verl's checkpoint does not
hold."""

WORKER_FIELDS = (
    "prompts",
    "responses",
    "input_ids",
    "position_ids",
    "attention_mask",
    "response_mask",
    "loss_mask",
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_prob",
    "values",
    "advantages",
    "returns",
    "rollout_is_weights",
)
"""Fields of a sample that workers read. verl would send all, with question, baseline and scores."""


@dataclass
class CriticModelConfig(HFModelConfig):
    """verl's configuration for a critic that may start from another model than the policy.

    `tokenizer_path` is the policy's. verl knows no revision of a hub's model: it is handed that
    revision's folder in the hub's cache.
    """

    _mutable_fields = HFModelConfig._mutable_fields | {"path"}
    revision: str | None = None

    def __post_init__(self) -> None:
        if self.revision:
            self.path: str = snapshot_download(
                self.path, revision=self.revision, local_files_only=True
            )
        super().__post_init__()
        if self.tokenizer_path == self.path:
            return
        # The critic reads the policy's token ids, so both must mean the same by them.
        own_tokens = AutoTokenizer.from_pretrained(self.local_path).get_vocab()
        if own_tokens != self.tokenizer.get_vocab():
            raise EngineError(
                f"critic {self.path} has another tokenizer than the policy, "
                f"of {len(own_tokens)} tokens and not {len(self.tokenizer)}; "
                "take rl.critic_model from the same family"
            )


@EngineRegistry.register(model_type="value_model", backend="fsdp2", device="cuda", vendor="nvidia")
class ValueEngine(FSDPEngineWithValueHead):
    """verl's engine of the critic: a token classifier whose one label is the value."""

    def _build_module(self) -> Any:
        model_config = self.model_config
        config = model_config.hf_config
        config.num_labels = 1
        config.classifier_dropout = 0.0
        dtype = PrecisionType.to_dtype(self.engine_config.model_dtype)
        on_first_rank = get_init_weight_context_manager(
            use_meta_tensor=not config.tie_word_embeddings, mesh=self.device_mesh
        )
        with on_first_rank():
            module = AutoModelForTokenClassification.from_pretrained(
                model_config.local_path,
                dtype=dtype,
                config=config,
                attn_implementation=model_config.override_config.get("attn_implementation", "sdpa"),
            )
            apply_monkey_patch(
                model=module, use_remove_padding=self.use_remove_padding, use_fused_kernels=False
            )
            module.to(dtype)
        if model_config.enable_gradient_checkpointing:
            module.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        return module

    def _build_lora_module(self, module: Any) -> Any:
        module.enable_input_require_grads()
        model_config = self.model_config
        adapter = LoraConfig(
            task_type=TaskType.TOKEN_CLS,
            r=model_config.lora_rank,
            lora_alpha=model_config.lora_alpha,
            target_modules=convert_to_regular_types(model_config.target_modules),
            # The head, which peft trains in full for this task.
            exclude_modules=["score"],
            bias="none",
        )
        return get_peft_model(module, adapter)


class ScalableLrWorker(TrainingWorker):
    """verl's worker of critic and actor, with a learning rate that can be lowered during
    training."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reset(self) -> None:
        """Build the model, seeded also where training is not deterministic: adapters and the
        critic's head begin at random."""
        torch.manual_seed(self.engine_config.seed)
        super().reset()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def scale_lr(self, factor: float) -> None:
        """Multiply this and all later learning rates of the schedule; checkpoints contain the
        change."""
        schedule = self.engine.lr_scheduler
        schedule.base_lrs = [lr * factor for lr in schedule.base_lrs]
        for group in self.engine.optimizer.param_groups:
            group["lr"] *= factor


class ScalableLrActorWorker(ActorRolloutRefWorker):
    """verl's worker that is actor, rollout and reference policy, with the same."""

    actor_worker_cls = ScalableLrWorker

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def scale_lr(self, factor: float) -> None:
        self.actor.scale_lr(factor)


@register_trainer(TRAINER)
class RewardedTrainer(PPOTrainerSync):
    """verl's synchronous trainer for any of its algorithms: generation and training alternate on
    the same devices."""

    WORKERS: Mapping[str, type] = {
        "ActorRolloutRefWorker": ScalableLrActorWorker,
        "TrainingWorker": ScalableLrWorker,
    }
    """Replacements for verl's workers, by their class names."""
    global_steps: int
    total_training_steps: int
    kl_ctrl_in_reward: Any

    def __init__(self, config: Any) -> None:
        # verl compares this name to choose the on-policy replay buffer.
        config.trainer.v1.trainer_mode = "sync"
        with open_dict(config.actor_rollout_ref.rollout) as rollout:
            rollout.agent.agent_loop_config_path = str(AGENTS_FILE)
        super().__init__(config)
        path = Path(config.qinglan.trainer_settings)
        self._settings = TrainerSettings.model_validate_json(path.read_text(encoding="utf-8"))
        self._checkpoints = Path(config.trainer.default_local_dir)
        self._rollouts = int(config.actor_rollout_ref.rollout.n)
        self._extras: dict[str, Mapping[str, Any]] = {}
        self._numbers = count()

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role, worker in self.role_worker_mapping.items():
            replacement = self.WORKERS[worker.__ray_metadata__.class_name]
            self.role_worker_mapping[role] = ray.remote(replacement)

    def _build_replay_buffer(self) -> Any:
        buffer = super()._build_replay_buffer()
        buffer.poll_interval = POLL_S
        return buffer

    def _load_checkpoint(self) -> None:
        repair_checkpoints(self._checkpoints)
        super()._load_checkpoint()
        self._progress = TrainingProgress(self._settings, resumed_at=self.global_steps)
        coefficient = self._progress.last_known(KL_COEFFICIENT)
        if self.config.algorithm.use_kl_in_reward and coefficient is not None:
            self.kl_ctrl_in_reward.value = coefficient

    # ---- order ----

    def _next_train_batch(self, num_prompts: int | None = None) -> Any:
        """Name prompts by their order, by which samples are sorted later: they come in the order in
        which they end."""
        self._data_before = self.train_dataloader.state_dict()
        batch = super()._next_train_batch(num_prompts)
        # All of the same width, so that they sort as numbers do.
        uids = [f"{next(self._numbers):010}" for _ in range(len(batch))]
        tu.assign_non_tensor_stack(batch, "uid", uids)
        return batch

    # ---- samples without a reward ----

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Leave out samples without a reward, or give up; verl's first call with a complete
        batch."""
        scored, counts = self._keep_scored(batch)
        invalid_share = counts["invalid"] / counts["wanted"]
        if invalid_share > self._settings.max_invalid_share or not counts["samples"]:
            # First, as saving may fail as well.
            error = self._give_up_unscored(
                counts["invalid"], counts["lost"], counts["wanted"], f"step {self.global_steps}"
            )
            # This step has changed no weight yet, and its prompts are to come again.
            self.train_dataloader.load_state_dict(self._data_before)
            self._save_if_new(self.global_steps - 1)
            raise error
        self._lower_rates()
        for name in ("samples", "invalid", "alone"):
            metrics[f"reward_extra/{name}"] = float(counts[name])
        batch = super()._balance_batch(scored, metrics, *args, **kwargs)
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        is_padding = [bool(tag.get("is_padding")) for tag in batch.tags]
        batch.reorder(spread(is_padding, ranks))
        return batch

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if not self.config.algorithm.use_kl_in_reward:
            return super()._compute_advantage(batch, metrics)
        sample_share = len(self._extras) / len(batch.keys)
        controller = self.kl_ctrl_in_reward
        self.kl_ctrl_in_reward = ScaledKl(controller, sample_share)
        try:
            batch = super()._compute_advantage(batch, metrics)
        finally:
            self.kl_ctrl_in_reward = controller
        metrics[REWARD_KL] /= sample_share
        return batch

    def _keep_scored(self, batch: Any) -> tuple[Any, Counter[str]]:
        """The samples that have a reward and, in a group algorithm, another sample to compare with;
        in their order.

        The counts are of the samples that were `wanted`, that are left (`samples`), that have no
        reward (`invalid`, those that were `lost` with a process among them), and that have nothing
        to be compared with (`alone`).
        """
        batch = batch.select_keys(sorted(batch.keys, key=_place_of))
        extras = self._reward_extras(batch)
        valid_keys = [key for key, extra in extras.items() if not extra.get("invalid")]
        compares = self.config.algorithm.adv_estimator not in _UNGROUPED and self._rollouts > 1
        kept_keys = _with_company(valid_keys) if compares else valid_keys
        self._extras = {key: extras[key] for key in kept_keys}
        wanted_count = self.config.data.train_batch_size * self._rollouts
        counts = Counter(
            wanted=wanted_count,
            samples=len(kept_keys),
            invalid=wanted_count - len(valid_keys),
            alone=len(valid_keys) - len(kept_keys),
            lost=wanted_count - len(batch.keys),
        )
        dropped_keys = [key for key in batch.keys if key not in self._extras]
        if not dropped_keys:
            return batch, counts
        transfer_queue.kv_clear(keys=dropped_keys, partition_id=batch.partition_id)
        return batch.select_keys(kept_keys), counts

    def _reward_extras(self, batch: Any) -> dict[str, Mapping[str, Any]]:
        """Parts of the reward that each sample of a batch got, by the sample's key."""
        rows = transfer_queue.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"]
        ).pop("extra_fields")
        extras = {}
        for key, row in zip(batch.keys, rows.tolist(), strict=True):
            extras[key] = row.get("reward_extra_info", {})
        return extras

    def _give_up_unscored(self, unscored: int, lost: int, wanted: int, where: str) -> EngineError:
        """Note that training gave up, unless samples were lost with a process; returns the error to
        raise."""
        reason = f"{unscored} of {wanted} samples of {where} could not be scored, "
        max_share = self._settings.max_invalid_share
        if unscored / wanted > max_share:
            reason += f"more than reward.max_invalid_share = {max_share:.0%} allows"
        else:
            reason += "and none of the others has another of its prompt to be compared with"
        if lost:
            # Another attempt may have them: training is not given up.
            return EngineError(f"{reason}; {lost} were lost with a process of the engine")
        self._progress.stop(reason, failed=True)
        return EngineError(reason)

    # ---- the fields that are sent to workers ----

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return super()._compute_old_log_prob(_for_workers(batch), metrics)

    def _compute_ref_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return super()._compute_ref_log_prob(_for_workers(batch), metrics)

    def _compute_values(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return super()._compute_values(_for_workers(batch), metrics)

    def _update_critic(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return super()._update_critic(_for_workers(batch), metrics)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return super()._update_actor(_for_workers(batch), metrics)

    # ---- metrics of a step ----

    def _compute_metrics(
        self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        super()._compute_metrics(batch, metrics, *args, **kwargs)
        metrics |= extra_metrics(self._extras.values())
        self._add_answer_metrics(batch, metrics)
        if self.config.algorithm.use_kl_in_reward:
            metrics[KL_COEFFICIENT] = self.kl_ctrl_in_reward.value
        numbers = {name: float(value) for name, value in metrics.items() if _is_number(value)}
        self._progress.stepped(self.global_steps, numbers)
        self._stop_if_alarmed(self.global_steps)
        stopping_reason = self._progress.early_stopping_reason()
        if stopping_reason:
            self._end_after(self.global_steps, stopping_reason)
        self._progress.prune(self._checkpoints)

    def _add_answer_metrics(self, batch: Any, metrics: dict[str, Any]) -> None:
        """Add how much the samples' answers and scores differ from each other."""
        rows = transfer_queue.kv_batch_get(
            keys=list(self._extras),
            partition_id=batch.partition_id,
            select_fields=["rm_scores", "rollout_log_probs", "responses"],
        )
        answers = {tuple(row.tolist()) for row in rows["responses"].unbind()}
        targets = {extra["target"] for extra in self._extras.values()}
        metrics[DISTINCT] = len(answers) / len(targets)
        # The mean negative log-probability of the sampled tokens estimates the entropy without
        # bias, at no cost.
        metrics.setdefault(ENTROPY, -float(rows["rollout_log_probs"].values().mean()))
        if self._rollouts > 1:
            scores = rows["rm_scores"].to_padded_tensor(0.0).sum(-1)
            share = zero_variance_share(list(self._extras), scores)
            if share is not None:
                metrics[ZERO_VARIANCE] = share

    def on_train_begin(self) -> None:
        super().on_train_begin()
        self._stop_if_alarmed(self.global_steps - 1)

    def _lower_rates(self) -> None:
        """Lower the learning rates as the alarms of the step before ask.

        As late as this, so that no checkpoint of that step has it: a run that goes on from it
        lowers the rates itself.
        """
        for alarm in self._progress.not_in_checkpoint:
            if alarm.action == "lower_lr":
                self.actor_rollout_wg.scale_lr(self._settings.alarms.lr_factor)
                if self.use_critic:
                    self.critic_wg.scale_lr(self._settings.alarms.lr_factor)

    def _stop_if_alarmed(self, step: int) -> None:
        for alarm in self._progress.not_in_checkpoint:
            if alarm.action == "stop":
                self._end_after(step, f"alarm {alarm.name}")

    def _end_after(self, step: int, reason: str) -> None:
        if step >= self.total_training_steps:
            return
        self._save_if_new(step)
        self._progress.stop(f"after step {step}: {reason}", failed=False)
        self.total_training_steps = step

    def _save_if_new(self, step: int) -> None:
        if step > 0 and not (self._checkpoints / f"global_step_{step}").exists():
            self.global_steps = step
            self._save_checkpoint()

    # ---- validation ----

    def _val_metrics_update(
        self,
        data_sources: Any,
        sample_uids: Any,
        reward_extra_infos_dict: Mapping[str, list[Any]],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Give up where too many dev rows are unscored; else add the dev split's value."""
        all_valid = [False] * len(sample_uids)
        is_invalid = [bool(value) for value in reward_extra_infos_dict.get("invalid", all_valid)]
        wanted_count = len(self.val_dataset)
        # A sample that was lost with a process of the engine has no values at all.
        lost_count = wanted_count - len(is_invalid)
        unscored_count = lost_count + sum(is_invalid)
        if unscored_count > self._settings.max_invalid_share * wanted_count:
            where = f"the validation at step {self.global_steps}"
            error = self._give_up_unscored(unscored_count, lost_count, wanted_count, where)
            self._save_if_new(self.global_steps)
            raise error
        known_values = {
            name: _with_gaps(values, is_invalid) for name, values in reward_extra_infos_dict.items()
        }
        metrics = super()._val_metrics_update(
            data_sources, sample_uids, known_values, *args, **kwargs
        )
        part = self._settings.dev_metric
        scored_rows = zip(
            reward_extra_infos_dict["row_id"], known_values[part], is_invalid, strict=True
        )
        scored = {row_id: (value, failed) for row_id, value, failed in scored_rows}
        infos = self.val_dataset.dataframe["extra_info"]
        values, groups = dev_values(infos, scored, part, self._settings.dev_rows)
        return metrics | self._progress.validated(self.global_steps, values, groups)


class ScaledKl:
    """verl's controller of the KL coefficient, told of the samples alone: rows that fill up a batch
    have a KL of 0."""

    def __init__(self, controller: Any, sample_share: float) -> None:
        """`sample_share`: the samples' share of the batch's rows."""
        self._controller = controller
        self._sample_share = sample_share
        self.value = controller.value

    def update(self, current_kl: float, n_steps: int) -> None:
        samples_kl = current_kl / self._sample_share
        self._controller.update(samples_kl, round(n_steps * self._sample_share))


def spread(is_padding: Sequence[bool], ranks: int) -> list[int]:
    """An order of a batch's rows in which those that fill it up lie evenly among the others, within
    each rank's part.

    A mini-batch or micro-batch of such rows alone would have no tokens to take a mean of.
    """
    size = len(is_padding) // ranks
    order: list[int] = []
    for start in range(0, len(is_padding), size):
        rows_of_rank = range(start, start + size)
        samples = [row for row in rows_of_rank if not is_padding[row]]
        padding = [row for row in rows_of_rank if is_padding[row]]
        # Each kind lies evenly between 0 and 1, and together they are sorted.
        places = _even_places(samples) | _even_places(padding)
        order += sorted(places, key=lambda row: (places[row], row))
    return order


def _even_places(rows: Sequence[int]) -> dict[int, float]:
    return {row: (number + 0.5) / len(rows) for number, row in enumerate(rows)}


def dev_values(
    infos: Iterable[Mapping[str, Any]],
    scored: Mapping[str, tuple[float | None, bool]],
    part: str,
    rows_with_part: Collection[str],
) -> tuple[dict[str, float], dict[str, str]]:
    """The dev rows' values and groups, by row id. A row without a score counts as wrong, or silence
    would pay.

    Args:
        infos: `extra_info` of the dev file.
        scored: by row id, the value, None where the part is not known of the row, and whether
            scoring failed.
        part: of the reward.
    """
    # Every part that a recipe chooses its model by is at least 0; the whole score is not.
    worst = WORST_SCORE if part == "score" else 0.0
    values: dict[str, float] = {}
    groups: dict[str, str] = {}
    for info in infos:
        row_id = info["row_id"]
        # A row that is not there was dropped by verl, and so failed.
        value, failed = scored.get(row_id, (None, True))
        if failed and row_id in rows_with_part:
            value = worst
        if value is not None:
            values[row_id] = value
            groups[row_id] = info["unit"]
    return values, groups


def _for_workers(batch: Any) -> Any:
    """The batch itself, with what workers are sent of it."""
    batch.fields = list(WORKER_FIELDS)
    if batch.extra_info:
        # verl leaves it in the batch after the reference's turn, and the critic would answer
        # without its adapter and head.
        batch.extra_info.pop("no_lora_adapter", None)
    return batch


def extra_metrics(extras: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Mean of each numeric part over the samples that have it, and the sums of `SUMMED`; NaN means
    not known."""
    values: dict[str, list[float]] = defaultdict(list)
    for extra in extras:
        for name, value in extra.items():
            if _is_number(value) and not math.isnan(value):
                values[name].append(float(value))
    metrics = {
        part_mean(name): sum(part_values) / len(part_values) for name, part_values in values.items()
    }
    for name in SUMMED:
        if name in values:
            metrics[f"reward_extra/{name}/sum"] = sum(values[name])
    return metrics


def zero_variance_share(keys: Sequence[str], scores: torch.Tensor) -> float | None:
    """Share of the prompts with several rollouts whose rollouts all have the same score: they teach
    nothing.

    Prompts whose rollouts all earn the most there is are solved and left out; None where no others
    are there.
    """
    scores_by_prompt: dict[str, list[float]] = defaultdict(list)
    for key, score in zip(keys, scores.tolist(), strict=True):
        scores_by_prompt[_place_of(key)[0]].append(score)
    unsolved = [
        prompt_scores
        for prompt_scores in scores_by_prompt.values()
        if len(prompt_scores) > 1 and min(prompt_scores) < BEST_SCORE - _SAME_SCORE
    ]
    if not unsolved:
        return None
    flat_count = sum(
        max(prompt_scores) - min(prompt_scores) < _SAME_SCORE for prompt_scores in unsolved
    )
    return flat_count / len(unsolved)


def _with_gaps(values: Sequence[Any], is_invalid: Sequence[bool]) -> list[Any]:
    """The values of a part, with None, by which verl's validation leaves a value out, where the
    sample is invalid or the value is NaN."""
    known_values = []
    for value, invalid in zip(values, is_invalid, strict=True):
        is_nan = value != value
        known_values.append(None if invalid or is_nan else value)
    return known_values


def _with_company(keys: Sequence[str]) -> list[str]:
    """Keys of samples that are not the only one of their prompt."""
    per_prompt = Counter(_place_of(key)[0] for key in keys)
    return [key for key in keys if per_prompt[_place_of(key)[0]] > 1]


def _place_of(key: str) -> tuple[str, int, int]:
    # verl's keys are {prompt}_{rollout}_{output}.
    prompt, rollout, output = key.rsplit("_", 2)
    return prompt, int(rollout), int(output)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
