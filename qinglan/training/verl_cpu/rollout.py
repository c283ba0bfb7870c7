"""verl's server-mode rollout (`RolloutReplica`, `BaseRollout`) with transformers on the CPU.

The rollout runs in the worker of the trainer, with its own fp32 copy of the policy. verl's agent
loop sends one request per sample. A request says how many others belong to its batch, and which
place it has there: sampling starts when all have come, in the order of their places, whatever the
order in which they came. Each is answered as soon as it has ended, so that its reward is computed
meanwhile.

Log-probabilities come from the same weights, precision and temperature as the trainer's own, so the
trainer may use them as the old policy's (`algorithm.rollout_correction.bypass_mode`) unless top-p,
top-k or LoRA is on.
"""

# mypy: allow-subclassing-any, allow-untyped-decorators

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from qinglan.training.engines.verl_router import NamedServer
from qinglan.training.verl_cpu.sampling import RolloutBatch, RolloutRow, Sampled, Sampling


class _Request(NamedTuple):
    """A sample that is asked for."""

    place: int
    """Place in the batch."""
    row: RolloutRow
    answer: asyncio.Future[Sampled]
    """Set when the row has ended or its batch has failed."""


class RolloutServer:
    """Answers requests for samples, one batch after the other, in a thread of its own."""

    def __init__(self, model: Any, eos_ids: set[int], pad_id: int, max_rows: int) -> None:
        """Serve `model`, with at most `max_rows` rows in its memory at a time."""
        self._model = model
        self._eos_ids = eos_ids
        self._pad_id = pad_id
        self._max_rows = max_rows
        self._waiting: list[_Request] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout")

    async def generate(
        self, prompt: list[int], sampling: Sampling, place: int = 0, batch_rows: int = 1
    ) -> Sampled:
        """Continue a prompt; `batch_rows` requests make a batch, each with a `place` of its own."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Sampled] = loop.create_future()

        def answer_from_thread(sampled: Sampled) -> None:
            loop.call_soon_threadsafe(answer.set_result, sampled)

        row = RolloutRow(prompt, sampling, answer_from_thread)
        self._waiting.append(_Request(place, row, answer))
        if len(self._waiting) < batch_rows:
            return await answer
        # The last request to come starts the batch, in an order that does not depend on it.
        batch = sorted(self._waiting, key=lambda request: request.place)
        self._waiting = []
        rows = [request.row for request in batch]
        try:
            await loop.run_in_executor(self._thread, self._sample, rows)
        except Exception as error:  # noqa: BLE001 (each caller gets it)
            for request in batch:
                if not request.answer.done():
                    request.answer.set_exception(error)
        return await answer

    async def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Load weights, all of them or none, after the batch that is being sampled."""
        own_names = self._model.state_dict().keys()
        missing_names = own_names - weights.keys()
        if self._model.config.tie_word_embeddings:
            # The output layer's weight is the embedding's, and is sent once.
            missing_names -= {"lm_head.weight"}
        unexpected_names = weights.keys() - own_names
        if missing_names or unexpected_names:
            raise ValueError(
                f"weights don't fit the rollout's model: missing {sorted(missing_names)[:3]}, "
                f"unexpected {sorted(unexpected_names)[:3]}"
            )
        load = partial(self._model.load_state_dict, weights, strict=False)
        await asyncio.get_running_loop().run_in_executor(self._thread, load)

    def _sample(self, rows: list[RolloutRow]) -> None:
        for start in range(0, len(rows), self._max_rows):
            batch_rows = rows[start : start + self._max_rows]
            batch = RolloutBatch(self._model, batch_rows, self._eos_ids, self._pad_id)
            while batch.rows:
                batch.step()


class CpuRollout(BaseRollout):
    """verl's trainer side of the rollout: runs beside the actor, in the same worker."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, model_config, device_mesh, *args, **kwargs)
        path = self.model_config.local_path
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        tokenizer = self.model_config.tokenizer
        self._server = RolloutServer(
            model, _eos_ids(model, tokenizer), tokenizer.pad_token_id, self.config.max_num_seqs
        )
        self._global_steps: int | None = None

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any]) -> TokenOutput:
        """Answer one sample's request; `LocalClient` has added `place` and `batch_rows` to it."""
        token_ids, log_probs = await self._server.generate(
            prompt_ids,
            self._sampling(prompt_ids, sampling_params),
            sampling_params["place"],
            sampling_params["batch_rows"],
        )
        return TokenOutput(
            token_ids=token_ids,
            log_probs=log_probs if sampling_params.get("logprobs") else None,
            stop_reason="completed",
            extra_fields={"global_steps": self._global_steps},
        )

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """Nothing to release."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        peft_config: dict[str, Any] | None = None,
        base_sync_done: bool = True,
        global_steps: int | None = None,
        **_: Any,
    ) -> None:
        """Copy the actor's full weights. An adapter apart from its base is refused."""
        is_adapter_alone = peft_config is not None and base_sync_done
        if wire_format != "named_tensors" or is_adapter_alone:
            raise ValueError(
                "the CPU rollout takes merged weights: set actor_rollout_ref.model.lora.merge=True"
            )
        await self._server.load({name: value.detach() for name, value in weights})
        self._global_steps = global_steps

    def _sampling(self, prompt_ids: list[int], params: dict[str, Any]) -> Sampling:
        # Prompt and answer share the room of both limits, as in verl's servers.
        free_tokens = self.config.prompt_length + self.config.response_length - len(prompt_ids)
        max_tokens = (
            params.get("max_tokens") or params.get("max_new_tokens") or self.config.response_length
        )
        return Sampling(
            max_tokens=max(1, min(max_tokens, free_tokens)),
            temperature=params.get("temperature", 1.0),
            top_p=params.get("top_p", 1.0),
            top_k=params.get("top_k", -1),
            seed=params["seed"],
        )


def _eos_ids(model: Any, tokenizer: Any) -> set[int]:
    """Tokens that end an answer: the model's, of which there may be several, or its tokenizer's."""
    eos = model.generation_config.eos_token_id
    if eos is None:
        eos = tokenizer.eos_token_id
    return set(eos) if isinstance(eos, list) else {eos}


class CpuReplica(RolloutReplica):
    """verl's controller side of the rollout (`RolloutReplicaRegistry`).

    There is no server process: the worker itself answers.
    """

    async def init_hybrid(self, worker_group: Any) -> None:
        """Give verl a handle with `generate`; verl never calls the address."""
        self._server_address = worker_group.worker_names[self.replica_rank]
        self._server_handle = NamedServer(self._server_address)
        await super().init_hybrid(worker_group)

    async def launch_servers(self) -> None:
        """Nothing is left to start."""

    async def _idle(self, *_: Any, **__: Any) -> None:
        """Calls that only move memory on an accelerator."""

    wake_up = sleep = abort_all_requests = resume_generation = clear_kv_cache = _idle
    release_kv_cache = resume_kv_cache = start_profile = stop_profile = _idle
