"""The CPU's engines, workers and trainer, as subclasses that verl's registries and hooks take.

Engines: verl's FSDP2 engines, registered for device `cpu`, less the two places where they ask for an accelerator.
Workers: verl's own, with the process group on gloo alone, because verl would ask for "cpu:gloo,cpu:gloo".
Trainer: `ReportingTrainer` that hands these workers to verl.
"""

# mypy: allow-subclassing-any, allow-untyped-decorators, allow-untyped-calls

from typing import Any

import ray
import torch
from transformers import AutoModelForTokenClassification
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import FSDPEngineWithLMHead
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from qinglan.engines.ppo_trainer import ReportingTrainer
from qinglan.verl_cpu import TRAINER


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")
class CpuActorEngine(FSDPEngineWithLMHead):
    """Actor and reference policy."""

    def _build_fsdp_module(self, module: Any) -> Any:
        if not self.engine_config.forward_only:
            return super()._build_fsdp_module(module)
        # verl offloads the reference policy with pinned memory, which needs an accelerator; here it stays as it is.
        self._is_offload_param = self._is_offload_optimizer = False
        self._autocast_dtype = torch.float32
        return module


@EngineRegistry.register(model_type="value_model", backend="fsdp2", device="cpu")
class CpuValueEngine(FSDPEngineWithValueHead):
    """Critic: verl's loader of value models asks for flash attention whatever the configuration says."""

    def _build_module(self) -> Any:
        config = self.model_config.hf_config
        config.num_labels, config.classifier_dropout = 1, 0.0
        return AutoModelForTokenClassification.from_pretrained(
            self.model_config.local_path,
            dtype=PrecisionType.to_dtype(self.engine_config.model_dtype),
            config=config,
            attn_implementation=self.model_config.override_config.get("attn_implementation", "sdpa"),
        )


class CpuTrainingWorker(TrainingWorker):
    """Critic, and the actor's and reference's inner worker."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group(backend="gloo")  # Ray's worker has set RANK, MASTER_ADDR, …
        super().__init__(*args, **kwargs)


class CpuActorRolloutRefWorker(ActorRolloutRefWorker):
    """verl's hybrid worker over `CpuTrainingWorker`."""

    actor_worker_cls = CpuTrainingWorker
    ref_worker_cls = CpuTrainingWorker


_CPU_WORKERS = {"ActorRolloutRefWorker": CpuActorRolloutRefWorker, "TrainingWorker": CpuTrainingWorker}


@register_trainer(TRAINER)
class CpuTrainer(ReportingTrainer):
    """verl's synchronous PPO on CPU workers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._rollout_has_weights = False

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role, worker in self.role_worker_mapping.items():
            self.role_worker_mapping[role] = ray.remote(_CPU_WORKERS[worker.__ray_metadata__.class_name])

    def on_init_end(self) -> None:
        """Leave the first weights for later, so that the agent loop's process starts meanwhile."""

    def on_validate_begin(self) -> None:
        """Hand the rollout its first weights, if validation comes first."""
        self._hand_over_first_weights()

    def on_train_begin(self) -> None:
        """Hand the rollout its first weights, if training comes first."""
        self._hand_over_first_weights()

    def _hand_over_first_weights(self) -> None:
        if not self._rollout_has_weights:
            self.checkpoint_manager.update_weights(self.global_steps)
            self._rollout_has_weights = True
