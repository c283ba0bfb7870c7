"""verl's agent loop and reward loop in the trainer's own process, which only waits while they run."""

# mypy: allow-subclassing-any, allow-untyped-calls, allow-untyped-decorators

import asyncio
import copy
import threading
from types import SimpleNamespace
from typing import Any

from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
from verl.protocol import DataProto
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.workers.rollout.llm_server import LLMServerClient

from qinglan.training.engines.verl_router import LeastRecentRouter

SINGLE_TURN = "single_turn_agent"  # verl's name for an agent loop that keeps no state between samples


class LocalClient(LLMServerClient):
    """Chooses the server itself, where verl's client calls the router's actor twice per sample."""

    def __init__(self, config: Any, load_balancer_handle: Any, servers: dict[str, Any]) -> None:
        super().__init__(config, load_balancer_handle)
        self._router = LeastRecentRouter(servers)

    async def _acquire_server(self, request_id: str, **_: Any) -> tuple[str, Any]:
        return self._router.acquire_server(request_id)

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Do nothing: there is nothing to release."""


class LocalReward:
    """Has the interface of a handle of verl's reward worker: `await compute_score.remote(data)`."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.compute_score = SimpleNamespace(remote=self._compute_score)

    async def _compute_score(self, data: Any) -> Any:
        own = copy.deepcopy(data.non_tensor_batch)  # the worker adds to it
        return await self._worker.compute_score(DataProto(data.batch, own, data.meta_info))


class LocalAgentLoopWorker(AgentLoopWorkerTQ.__ray_actor_class__):
    """Uses one agent loop for all samples: verl makes one for each by Hydra, and each tokenizes the chat template."""

    _single_turn: SingleTurnAgentLoop | None = None

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], *, agent_name: str, **kwargs: Any
    ) -> Any:
        if agent_name != SINGLE_TURN:
            return await super()._run_agent_loop(sampling_params, trajectory, agent_name=agent_name, **kwargs)
        kwargs.pop("trace", None)  # for verl's own tracing, which is off
        self._single_turn = self._single_turn or SingleTurnAgentLoop(
            trainer_config=DictConfigWrap(self.config),
            server_manager=self.llm_client,
            tokenizer=self.tokenizer,
            processor=self.processor,
            dataset_cls=self.dataset_cls,
            data_config=DictConfigWrap(self.config.data),
            hf_model_type=self.hf_model_type,
        )
        output = await self._single_turn.run(sampling_params, **kwargs)
        return await self._agent_loop_postprocess(output, trajectory["validate"], **kwargs)


class LocalAgentLoopManager(AgentLoopManagerTQ):
    """One worker, on an event loop in a thread."""

    async def _init_agent_loop_workers(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="agent loop").start()
        self._worker = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    async def _start(self) -> Any:
        reward = LocalReward(RewardLoopWorker(self.config))  # it binds to the running event loop
        return LocalAgentLoopWorker(self.config, self.llm_client, self.teacher_client, [reward])

    def generate_sequences(self, prompts: Any) -> None:
        """Start all samples; the results go to TransferQueue."""
        started = self._worker.generate_sequences(prompts.clone(recurse=False))
        asyncio.run_coroutine_threadsafe(started, self._loop).result()
