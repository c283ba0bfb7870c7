"""Engines, workers and trainer for the CPU, as subclasses that verl's registries and hooks accept.

Engines are verl's FSDP2 engines. A single worker has nothing to shard, so its modules are not wrapped, which verl's
engine and checkpoints support; FSDP2 costs time in each layer. Workers are verl's own, with the process group on gloo
alone, because verl would ask for "cpu:gloo,cpu:gloo".
"""

# mypy: allow-subclassing-any, allow-untyped-decorators, allow-untyped-calls

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import open_dict
from torch.nn.functional import cross_entropy
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.utils import tensordict_utils as tu
from verl.utils.torch_functional import entropy_from_logits
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import FSDPEngineWithLMHead
from verl.workers.rollout.replica import TokenOutput

from qinglan.training.engines.ppo_critic import ValueEngine
from qinglan.training.engines.ppo_trainer import RewardedTrainer, ScalableLrActorWorker, ScalableLrWorker
from qinglan.training.verl_cpu import AGENT_LOOP, TRAINER
from qinglan.training.verl_cpu.agent_loop import LocalClient

# Flags of a batch that ask for more of the logits.
_OF_DISTILLATION = ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only")


class Unsharded:
    """Keeps an `FSDPEngine` from wrapping its module where there is nothing to shard."""

    engine_config: Any
    model_config: Any

    def _build_fsdp_module(self, module: Any) -> Any:
        # verl offloads the reference policy with pinned memory, which needs an accelerator; here it stays as it is.
        # To hand an adapter's merged weights to the rollout, verl wants the module wrapped.
        sharded = torch.distributed.get_world_size() > 1 or self.model_config.lora_rank > 0
        if sharded and not self.engine_config.forward_only:
            return super()._build_fsdp_module(module)  # type: ignore[misc]
        self._is_offload_param = self._is_offload_optimizer = False
        self._autocast_dtype, self.scaler = torch.float32, None
        return module


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")
class CpuActorEngine(Unsharded, FSDPEngineWithLMHead):
    """Actor and reference policy.

    Without a flash-attention kernel verl 0.9.1 takes the log-probabilities in a Python loop over the tokens, whose
    backward pass costs as much as the model's. Here all tokens go at once.
    """

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, Any]:
        """The tokens' log-probabilities, and entropies if asked for, without padding."""
        wanted = {name: tu.get_non_tensor_data(micro_batch, name, default=False) for name in _OF_DISTILLATION}
        if any(wanted.values()) or self.use_remove_padding:
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)  # type: ignore[no-any-return]
        offsets = micro_batch["input_ids"].offsets()
        is_token = torch.arange(output.logits.shape[1]) < offsets.diff().unsqueeze(1)
        logits = (output.logits / output_args["temperature"].view(-1, 1, 1))[is_token]
        labels = output_args["input_ids_rmpad_rolled"]
        found = {"log_probs": -cross_entropy(logits, labels, reduction="none")}
        if tu.get_non_tensor_data(micro_batch, "calculate_entropy", default=False):
            found["entropy"] = entropy_from_logits(logits)
        return {name: torch.nested.nested_tensor_from_jagged(value, offsets) for name, value in found.items()}


@EngineRegistry.register(model_type="value_model", backend="fsdp2", device="cpu")
class CpuValueEngine(Unsharded, ValueEngine):
    """Critic."""


class CpuTrainingWorker(ScalableLrWorker):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group(backend="gloo")  # Ray's worker has set RANK, MASTER_ADDR, …
        super().__init__(*args, **kwargs)


class CpuActorRolloutRefWorker(ScalableLrActorWorker):
    actor_worker_cls = CpuTrainingWorker
    ref_worker_cls = CpuTrainingWorker

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> TokenOutput:
        return await self.rollout.generate(prompt_ids, sampling_params)


@register_trainer(TRAINER)
class CpuTrainer(RewardedTrainer):
    WORKERS: Mapping[str, type] = {
        "ActorRolloutRefWorker": CpuActorRolloutRefWorker,
        "TrainingWorker": CpuTrainingWorker,
    }

    def __init__(self, config: Any) -> None:
        rollout = config.actor_rollout_ref.rollout
        with open_dict(rollout):
            rollout.agent.agent_loop_manager_class = AGENT_LOOP
        rollout.router_config_path = str(Path(__file__).with_name("router.yaml"))
        config.reward.num_workers = 0  # the agent loop scores in its own process
        if config.trainer.nnodes * config.trainer.n_gpus_per_node == 1:
            for owner in (config.actor_rollout_ref.actor, config.critic):
                owner.optim.override_optimizer_config = {"fused": True} | (owner.optim.override_optimizer_config or {})
        super().__init__(config)

    def get_llm_client(self) -> LocalClient:
        manager = self.llm_server_manager
        servers = dict(zip(manager.server_addresses, manager.server_handles, strict=True))
        return manager.get_client(LocalClient, servers=servers)  # type: ignore[no-any-return]
