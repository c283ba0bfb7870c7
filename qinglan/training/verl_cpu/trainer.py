"""Engines, workers, agent loop and trainer for the CPU, as subclasses that verl's registries and
hooks accept.

Engines are verl's FSDP2 engines. A single worker has nothing to shard, so its modules are not
wrapped, which verl's engine and checkpoints support; FSDP2 costs time in each layer. Workers are
verl's own, with the process group on gloo alone, because verl would ask for "cpu:gloo,cpu:gloo".
verl's agent loop and reward loop run in the trainer's own process, which only waits meanwhile.
"""

# mypy: allow-subclassing-any, allow-untyped-decorators, allow-untyped-calls

import asyncio
import copy
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from omegaconf import open_dict
from torch.nn.functional import cross_entropy
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.utils import tensordict_utils as tu
from verl.utils.torch_functional import entropy_from_logits
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import FSDPEngineWithLMHead
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from qinglan.training.engines.agent_loop import sample_seed
from qinglan.training.engines.ppo_trainer import (
    RewardedTrainer,
    ScalableLrActorWorker,
    ScalableLrWorker,
    ValueEngine,
)
from qinglan.training.engines.verl import AGENT

_LOGITS_FLAGS = ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only")
"""verl's flags of a batch that ask for more of the logits than log-probabilities and entropy."""


class Unsharded:
    """Keeps an `FSDPEngine` from wrapping its module where there is nothing to shard."""

    engine_config: Any
    model_config: Any

    def _build_fsdp_module(self, module: Any) -> Any:
        # verl offloads the reference policy with pinned memory, which needs an accelerator; here it
        # stays as it is. To hand an adapter's merged weights to the rollout, verl wants the module
        # wrapped.
        sharded = torch.distributed.get_world_size() > 1 or self.model_config.lora_rank > 0
        if sharded and not self.engine_config.forward_only:
            return super()._build_fsdp_module(module)  # type: ignore[misc]
        self._is_offload_param = False
        self._is_offload_optimizer = False
        self._autocast_dtype = torch.float32
        self.scaler = None
        return module


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")
class CpuActorEngine(Unsharded, FSDPEngineWithLMHead):
    """Actor and reference policy.

    Without a flash-attention kernel verl 0.9.1 takes the log-probabilities in a Python loop over
    the tokens, whose backward pass costs as much as the model's. Here all tokens go at once.
    """

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, Any]:
        """The tokens' log-probabilities, and entropies if asked for, without padding.

        Each is a jagged tensor: a row for each sequence, a number for each of its tokens.
        """
        asks_for_more = any(
            tu.get_non_tensor_data(micro_batch, flag, default=False) for flag in _LOGITS_FLAGS
        )
        if asks_for_more or self.use_remove_padding:
            return super().prepare_model_outputs(  # type: ignore[no-any-return]
                output, output_args, micro_batch, logits_processor_func
            )
        offsets = micro_batch["input_ids"].offsets()
        is_token = torch.arange(output.logits.shape[1]) < offsets.diff().unsqueeze(1)
        logits = (output.logits / output_args["temperature"].view(-1, 1, 1))[is_token]
        labels = output_args["input_ids_rmpad_rolled"]
        figures = {"log_probs": -cross_entropy(logits, labels, reduction="none")}
        if tu.get_non_tensor_data(micro_batch, "calculate_entropy", default=False):
            figures["entropy"] = entropy_from_logits(logits)
        return {
            name: torch.nested.nested_tensor_from_jagged(values, offsets)
            for name, values in figures.items()
        }


@EngineRegistry.register(model_type="value_model", backend="fsdp2", device="cpu")
class CpuValueEngine(Unsharded, ValueEngine):
    """Critic."""


class CpuTrainingWorker(ScalableLrWorker):
    """Worker of actor, reference policy or critic, with a process group on gloo alone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not torch.distributed.is_initialized():
            # Ray's worker has set RANK, MASTER_ADDR and the like.
            torch.distributed.init_process_group(backend="gloo")
        super().__init__(*args, **kwargs)


class CpuActorRolloutRefWorker(ScalableLrActorWorker):
    """Worker of the policy, which also answers the agent loop's requests for samples."""

    actor_worker_cls = CpuTrainingWorker
    ref_worker_cls = CpuTrainingWorker

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        return await self.rollout.generate(prompt_ids, sampling_params)


class _HeldRequest(NamedTuple):
    """A sample's request that waits for the others of its batch."""

    sampling_params: dict[str, Any]
    """Parameters of the sample, to which the number of rows in its batch is added."""
    server: asyncio.Future[tuple[str, Any]]
    """Address and handle of the server, set when the batch is complete."""


class LocalClient(LLMServerClient):
    """Holds a batch's requests back until all have come, then spreads them over the servers in the
    samples' order.

    verl's client would ask the router's actor for a server as each request comes, and so in an
    order that varies.
    """

    def __init__(self, config: Any, load_balancer_handle: Any, servers: dict[str, Any]) -> None:
        """`servers`: the servers' handles by address."""
        super().__init__(config, load_balancer_handle)
        self._servers = list(servers.items())
        self._awaited_rows = 0
        self._held_requests: list[_HeldRequest] = []

    def expect(self, rows: int) -> None:
        """Take `rows` more requests for one batch; a negative number says that so many will not
        come."""
        self._awaited_rows += rows
        self._send_if_complete()

    async def _acquire_server(
        self,
        request_id: str,  # noqa: ARG002 (verl's signature)
        *,
        sampling_params: dict[str, Any],
        **_: Any,
    ) -> tuple[str, Any]:
        # Marks the request as one that has come; the number is known when the batch is complete.
        sampling_params["batch_rows"] = 0
        server: asyncio.Future[tuple[str, Any]] = asyncio.get_running_loop().create_future()
        self._held_requests.append(_HeldRequest(sampling_params, server))
        self.expect(-1)
        return await server

    def _send_if_complete(self) -> None:
        if self._awaited_rows:
            return
        requests = sorted(self._held_requests, key=lambda request: request.sampling_params["place"])
        self._held_requests = []
        for number, server in enumerate(self._servers):
            share = requests[number :: len(self._servers)]
            for request in share:
                request.sampling_params["batch_rows"] = len(share)
                request.server.set_result(server)

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Do nothing: there is nothing to release."""


class LocalAgentLoopWorker(AgentLoopWorkerTQ.__ray_actor_class__):
    """Uses one agent loop for all samples: verl makes one for each by Hydra, and each tokenizes the
    chat template."""

    _agent_loop: SingleTurnAgentLoop | None = None

    async def generate_sequences(self, batch: Any) -> None:
        rollout = self.config.actor_rollout_ref.rollout
        is_validation = tu.get_non_tensor_data(batch, "validate", default=False)
        self._rollouts = rollout.val_kwargs.n if is_validation else rollout.n
        self.llm_client.expect(len(batch) * self._rollouts)
        await super().generate_sequences(batch)

    async def _run_agent_loop(
        self,
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        *,
        agent_name: str,
        **kwargs: Any,
    ) -> Any:
        if agent_name != AGENT:
            raise ValueError(f"the CPU rollout has no agent loop {agent_name}, only {AGENT}")
        # An argument of verl's own tracing, which is off.
        kwargs.pop("trace", None)
        if self._agent_loop is None:
            self._agent_loop = self._make_agent_loop()
        rollout = self.config.actor_rollout_ref.rollout
        # A copy for this sample: `LocalClient` writes into it.
        sampling_params = sampling_params | {
            "seed": sample_seed(rollout.seed, kwargs),
            "place": int(kwargs["index"]) * self._rollouts + kwargs["session_id"],
        }
        try:
            output = await self._agent_loop.run(sampling_params, **kwargs)
        except Exception:
            has_asked_for_server = "batch_rows" in sampling_params
            if not has_asked_for_server:
                # The rest of the batch must not wait for this sample.
                self.llm_client.expect(-1)
            raise
        return await self._agent_loop_postprocess(output, trajectory["validate"], **kwargs)

    def _make_agent_loop(self) -> SingleTurnAgentLoop:
        return SingleTurnAgentLoop(
            trainer_config=DictConfigWrap(self.config),
            server_manager=self.llm_client,
            tokenizer=self.tokenizer,
            processor=self.processor,
            dataset_cls=self.dataset_cls,
            data_config=DictConfigWrap(self.config.data),
            hf_model_type=self.hf_model_type,
        )


class LocalAgentLoopManager(AgentLoopManagerTQ):
    """One worker, on an event loop in a thread."""

    async def _init_agent_loop_workers(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="agent loop").start()
        self._worker = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    async def _start(self) -> Any:
        # The reward worker binds to the running event loop, so it is made here.
        reward_worker = RewardLoopWorker(self.config)

        async def compute_score(data: Any) -> Any:
            # The worker adds to what it is given, and the agent loop goes on to use the original.
            own_fields = copy.deepcopy(data.non_tensor_batch)
            return await reward_worker.compute_score(
                DataProto(data.batch, own_fields, data.meta_info)
            )

        # Looks like a handle of verl's reward worker: `await compute_score.remote(data)`.
        reward_handle = SimpleNamespace(compute_score=SimpleNamespace(remote=compute_score))
        return LocalAgentLoopWorker(
            self.config, self.llm_client, self.teacher_client, [reward_handle]
        )

    def generate_sequences(self, prompts: Any) -> None:
        """Start all samples; the results go to TransferQueue."""
        started = self._worker.generate_sequences(prompts.clone(recurse=False))
        asyncio.run_coroutine_threadsafe(started, self._loop).result()


@register_trainer("cpu_vllm_sync")
class CpuVllmTrainer(RewardedTrainer):
    """The trainer of GPUs, with vLLM and verl's agent loop and router, whose models learn on the
    CPU."""

    WORKERS: Mapping[str, type] = {
        "ActorRolloutRefWorker": CpuActorRolloutRefWorker,
        "TrainingWorker": CpuTrainingWorker,
    }


@register_trainer("cpu_sync")
class CpuTrainer(CpuVllmTrainer):
    """The same with our own rollout, agent loop and reward loop in fewer processes."""

    def __init__(self, config: Any) -> None:
        rollout = config.actor_rollout_ref.rollout
        with open_dict(rollout):
            rollout.agent.agent_loop_manager_class = f"{__name__}.LocalAgentLoopManager"
        rollout.router_config_path = str(Path(__file__).with_name("router.yaml"))
        # The agent loop scores in its own process.
        config.reward.num_workers = 0
        if config.trainer.nnodes * config.trainer.n_gpus_per_node == 1:
            # Otherwise MKL takes AdamW's square roots, and they differ between processors. The
            # parameters of several workers are sharded, and keep verl's choice.
            for model in (config.actor_rollout_ref.actor, config.critic):
                own_settings = model.optim.override_optimizer_config or {}
                model.optim.override_optimizer_config = {"fused": True, **own_settings}
        super().__init__(config)

    def get_llm_client(self) -> LocalClient:
        manager = self.llm_server_manager
        servers = dict(zip(manager.server_addresses, manager.server_handles, strict=True))
        return manager.get_client(LocalClient, servers=servers)  # type: ignore[no-any-return]
