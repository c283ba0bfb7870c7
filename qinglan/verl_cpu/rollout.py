"""verl's server-mode rollout (`RolloutReplica`, `BaseRollout`) with transformers on the CPU.

A Ray actor holds a copy of the policy in fp32 and answers token-in, token-out requests. verl's agent loop sends one
request per sample; the server gathers those that arrive together and samples them as one batch. After each update
the trainer's half of the rollout hands over the new weights.

Log-probabilities come from the same weights, precision and temperature as the trainer's own, so the trainer may use
them as the old policy's (`algorithm.rollout_correction.bypass_mode`) unless top-p, top-k or LoRA is on.
"""

# mypy: allow-subclassing-any, allow-untyped-decorators

import asyncio
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import CONTROL_METHOD_CONCURRENCY, RolloutReplica, TokenOutput

GATHER_S = 0.02
"""A batch starts once no request has come in for this long."""


@dataclass(frozen=True)
class Sampling:
    """How to sample one row. Temperature 0 is greedy; `top_k` −1 and `top_p` 1 are off."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1


Sampled = tuple[list[int], list[float]]
"""New token ids, the end-of-sequence token included, and their log-probabilities under the temperature."""


@torch.inference_mode()
def sample(model: Any, prompts: list[list[int]], rows: list[Sampling], eos_ids: set[int], pad_id: int) -> list[Sampled]:
    """Sample one batch; each row has its own temperature, top-p, top-k and limit.

    Log-probabilities are those of the tempered distribution before top-p and top-k cut it, as in the trainer.
    """
    ids, mask = _left_padded(prompts, pad_id)
    limit = torch.tensor([row.max_tokens for row in rows])
    eos = torch.tensor(sorted(eos_ids))
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    done = torch.zeros(len(rows), dtype=torch.bool)
    tokens: list[torch.Tensor] = []
    log_probs: list[torch.Tensor] = []
    past = None
    while not bool(done.all()):
        output = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position,
            past_key_values=past,
            use_cache=True,
            logits_to_keep=1,
        )
        past = output.past_key_values
        token, log_prob = _pick(output.logits[:, -1].float(), rows)
        tokens.append(token.masked_fill(done, -1))
        log_probs.append(log_prob)
        done = done | torch.isin(token, eos) | (limit <= len(tokens))
        ids, position = token.unsqueeze(1), position[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
    return _trimmed(torch.stack(tokens, 1).tolist(), torch.stack(log_probs, 1).tolist())


def _left_padded(prompts: list[list[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad_id)
    mask = torch.zeros((len(prompts), width), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids, mask


def _pick(logits: torch.Tensor, rows: list[Sampling]) -> tuple[torch.Tensor, torch.Tensor]:
    """Next token of each row and its log-probability."""
    greedy = torch.tensor([row.temperature == 0 for row in rows])
    temperature = torch.tensor([row.temperature or 1.0 for row in rows]).unsqueeze(1)
    log_probs = torch.log_softmax(logits / temperature, -1)
    drawn = torch.multinomial(_cut(log_probs, rows).softmax(-1), 1).squeeze(1)
    token = torch.where(greedy, log_probs.argmax(-1), drawn)
    return token, log_probs.gather(1, token.unsqueeze(1)).squeeze(1)


def _cut(log_probs: torch.Tensor, rows: list[Sampling]) -> torch.Tensor:
    """Log-probabilities with everything outside each row's top-k and top-p at −inf."""
    if all(row.top_k <= 0 and row.top_p >= 1 for row in rows):
        return log_probs
    vocabulary = log_probs.shape[-1]
    top_k = torch.tensor([row.top_k if row.top_k > 0 else vocabulary for row in rows]).unsqueeze(1)
    top_p = torch.tensor([row.top_p for row in rows]).unsqueeze(1)
    ordered, index = log_probs.sort(-1, descending=True)
    mass_before = ordered.exp().cumsum(-1) - ordered.exp()
    drop = (torch.arange(vocabulary).unsqueeze(0) >= top_k) | ((mass_before >= top_p) & (top_p < 1))
    drop[:, 0] = False
    return log_probs.masked_fill(torch.zeros_like(drop).scatter(1, index, drop), float("-inf"))


def _trimmed(tokens: list[list[int]], log_probs: list[list[float]]) -> list[Sampled]:
    ends = [row.index(-1) if -1 in row else len(row) for row in tokens]
    return [(ids[:end], values[:end]) for ids, values, end in zip(tokens, log_probs, ends, strict=True)]


Request = tuple[list[int], Sampling, "asyncio.Future[Sampled]"]


@ray.remote
class CpuServer:
    """The rollout's policy. One per worker; named, so that its worker finds it."""

    def __init__(self, config: Any, model_path: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.manual_seed(config.seed)
        self._config = config
        self._model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        eos = self._model.generation_config.eos_token_id
        eos = tokenizer.eos_token_id if eos is None else eos
        self._eos_ids = set(eos if isinstance(eos, list) else [eos])
        self._pad_id = tokenizer.pad_token_id
        self._queue: asyncio.Queue[Request] = asyncio.Queue()
        self._worker: asyncio.Task[None] | None = None
        self._global_steps: int | None = None

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **_: Any
    ) -> TokenOutput:
        """Answer one request of verl's agent loop."""
        del request_id
        if self._worker is None:
            self._worker = asyncio.create_task(self._serve())
        answer: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        await self._queue.put((list(prompt_ids), self._sampling(prompt_ids, sampling_params), answer))
        token_ids, log_probs = await answer
        return TokenOutput(
            token_ids=token_ids,
            log_probs=log_probs if sampling_params.get("logprobs") else None,
            stop_reason="completed",
            extra_fields={"global_steps": self._global_steps},
        )

    async def update_weights(self, weights: dict[str, torch.Tensor], global_steps: int | None) -> None:
        """Take over the trainer's weights, all of them or none."""
        missing, unexpected = self._model.load_state_dict(weights, strict=False)
        tied = {"lm_head.weight"} if self._model.config.tie_word_embeddings else set()
        if unexpected or set(missing) - tied:
            raise ValueError(
                f"weights don't fit the rollout's model: missing {missing[:3]}, unexpected {unexpected[:3]}"
            )
        self._global_steps = global_steps

    async def idle(self, *_: Any, **__: Any) -> None:
        """Calls that only move memory on an accelerator."""

    wake_up = sleep = abort_all_requests = resume_generation = clear_kv_cache = idle
    release_kv_cache = resume_kv_cache = start_profile = stop_profile = idle

    def _sampling(self, prompt_ids: list[int], params: dict[str, Any]) -> Sampling:
        room = self._config.prompt_length + self._config.response_length - len(prompt_ids)
        wanted = params.get("max_tokens") or params.get("max_new_tokens") or self._config.response_length
        return Sampling(
            max_tokens=max(1, min(wanted, room)),
            temperature=params.get("temperature", 1.0),
            top_p=params.get("top_p", 1.0),
            top_k=params.get("top_k", -1),
        )

    async def _serve(self) -> None:
        while True:
            batch = await self._gather()
            prompts, rows, answers = zip(*batch, strict=True)
            try:
                sampled = await asyncio.to_thread(
                    sample, self._model, list(prompts), list(rows), self._eos_ids, self._pad_id
                )
            except Exception as error:  # noqa: BLE001 (each caller gets it; the loop must go on)
                for answer in answers:
                    answer.set_exception(error)
            else:
                for answer, result in zip(answers, sampled, strict=True):
                    answer.set_result(result)

    async def _gather(self) -> list[Request]:
        batch = [await self._queue.get()]
        while len(batch) < self._config.max_num_seqs:
            try:
                batch.append(await asyncio.wait_for(self._queue.get(), GATHER_S))
            except TimeoutError:
                break
        return batch


def _server_name(rank: int) -> str:
    return f"hf_cpu_server_{rank}"


def start_server(config: Any, model_path: str, rank: int = 0) -> Any:
    """The server's handle; it is started unless it was before. The call returns before the server is ready."""
    options = {"name": _server_name(rank), "get_if_exists": True, "num_cpus": 0}
    concurrency = max(1000, config.max_num_seqs + CONTROL_METHOD_CONCURRENCY)
    actor: Any = CpuServer
    return actor.options(max_concurrency=concurrency, **options).remote(config, model_path)


class CpuReplica(RolloutReplica):
    """The controller's half: starts the server (verl's `RolloutReplicaRegistry`)."""

    async def launch_servers(self) -> None:
        """Start one server; verl asks for its handle and never calls its address."""
        self._server_handle = start_server(self.config, self.model_config.path, self.replica_rank)
        self.servers, self._server_address = [self._server_handle], _server_name(self.replica_rank)


class CpuRolloutAdapter(BaseRollout):
    """The worker's half: lives beside the actor and pushes its weights to the server."""

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
        """Copy full weights to the server. An adapter apart from its base is refused."""
        if wire_format != "named_tensors" or (peft_config is not None and base_sync_done):
            raise ValueError("the CPU rollout takes merged weights: set actor_rollout_ref.model.lora.merge=True")
        state = {name: value.detach().to("cpu", torch.float32).clone() for name, value in weights}
        server = ray.get_actor(_server_name(int(os.environ["RANK"])))
        await server.update_weights.remote(state, global_steps)
