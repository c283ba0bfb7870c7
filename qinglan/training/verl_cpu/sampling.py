"""Sampling from a transformers model on the CPU, in batches that rows leave as soon as they have
ended.

Log-probabilities are those of the tempered distribution before top-p and top-k cut it, as in the
trainer. Each row has a stream of random numbers of its own, so its tokens depend neither on the
other rows nor on the order of calls.
"""

# mypy: allow-subclassing-any, allow-untyped-calls, allow-untyped-decorators

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicLayer

SPARE_TOKENS = 32  # the keys' and values' memory grows by so many at a time
ENDED_SHARE = 0.1
"""Rows that have ended leave the batch once they are this share of it: each time, the others' keys
and values are copied."""


@dataclass(frozen=True)
class Sampling:
    """How to sample one row. Temperature 0 is greedy; `top_k` −1 and `top_p` 1 are off; `seed`
    names the stream of random numbers, of which token n takes the n-th."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int = 0


Sampled = tuple[list[int], list[float]]
"""New token ids, the end-of-sequence token included, and their log-probabilities under the
temperature."""


@dataclass
class RolloutRow:
    """A prompt being continued; `answer` is called once, as soon as it has ended."""

    prompt: list[int]
    sampling: Sampling
    answer: Callable[[Sampled], object]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    ended: bool = False

    def __post_init__(self) -> None:
        stream = np.random.Generator(np.random.Philox(key=self.sampling.seed))
        self._points: list[float] = stream.random(self.sampling.max_tokens).tolist()

    @property
    def point(self) -> float:
        """Where in [0, 1) the next token is drawn."""
        return self._points[len(self.tokens) - self.ended]

    def take(self, token: int, log_prob: float, eos_ids: set[int]) -> None:
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        if token in eos_ids or len(self.tokens) == self.sampling.max_tokens:
            self.ended = True
            self.answer((self.tokens, self.log_probs))


class KeyValueLayer(DynamicLayer):
    """One layer's keys and values, in memory that is not reallocated for each token."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._keys, self._values = key_states[:, :, :0], value_states[:, :, :0]
        self.keys, self.values = self._keys, self._values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = self.keys.shape[2]
        end = length + key_states.shape[2]
        if end > self._keys.shape[2]:
            spare = (0, 0, 0, end + SPARE_TOKENS - length)
            self._keys, self._values = pad(self.keys, spare), pad(self.values, spare)
        self._keys[:, :, length:end], self._values[:, :, length:end] = key_states, value_states
        self.keys, self.values = self._keys[:, :, :end], self._values[:, :, :end]
        return self.keys, self.values

    def keep(self, rows: torch.Tensor) -> None:
        self._keys, self._values = self._keys[rows], self._values[rows]
        length = self.keys.shape[2]
        self.keys, self.values = self._keys[:, :, :length], self._values[:, :, :length]


class RolloutBatch:
    """Rows that get a token each at every `step`, padded on the left to one width."""

    _token: torch.Tensor
    """What each row ends with, (rows, 1): the next input."""

    def __init__(self, model: Any, rows: list[RolloutRow], eos_ids: set[int], pad_id: int) -> None:
        self.rows = rows
        self._model, self._eos_ids = model, eos_ids
        self._cache = Cache(layer_class_to_replicate=KeyValueLayer)
        ids, self._mask = _pad_prompts([row.prompt for row in rows], pad_id)
        position = (self._mask.cumsum(-1) - 1).clamp(min=0)
        self._position = position[:, -1:]
        self._rules = SamplingRules([row.sampling for row in rows])
        self._advance(ids, position)

    def step(self) -> None:
        self._mask = pad(self._mask, (0, 1), value=1)
        self._position = self._position + 1
        self._advance(self._token, self._position)

    @torch.inference_mode()
    def _advance(self, ids: torch.Tensor, position: torch.Tensor) -> None:
        logits = self._model(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=position,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        points = torch.tensor([[row.point] for row in self.rows], dtype=torch.float64)
        token, log_prob = self._rules.pick(logits[:, -1].float(), points)
        self._token = token.unsqueeze(1)
        for row, one, value in zip(self.rows, token.tolist(), log_prob.tolist(), strict=True):
            if not row.ended:
                row.take(one, value, self._eos_ids)
        running = [place for place, row in enumerate(self.rows) if not row.ended]
        if not running or len(self.rows) - len(running) > ENDED_SHARE * len(self.rows):
            self._keep(running)

    def _keep(self, places: list[int]) -> None:
        self.rows = [self.rows[place] for place in places]
        if not self.rows:
            return
        index = torch.tensor(places)
        for layer in self._cache.layers:
            layer.keep(index)
        self._mask, self._position, self._token = (
            self._mask[index],
            self._position[index],
            self._token[index],
        )
        self._rules = SamplingRules([row.sampling for row in self.rows])


class SamplingRules:
    def __init__(self, rows: Sequence[Sampling]) -> None:
        self._greedy = torch.tensor([row.temperature == 0 for row in rows])
        self._all_greedy, self._all_drawn = bool(self._greedy.all()), not self._greedy.any()
        self._temperature = torch.tensor([row.temperature or 1.0 for row in rows]).unsqueeze(1)
        self._is_cut = any(row.top_k > 0 or row.top_p < 1 for row in rows)
        self._top_k = torch.tensor(
            [row.top_k if row.top_k > 0 else torch.iinfo(torch.int64).max for row in rows]
        )
        self._top_p = torch.tensor([row.top_p for row in rows]).unsqueeze(1)

    def pick(self, logits: torch.Tensor, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The next token of each row and its log-probability; `points` are uniform in [0, 1), of
        shape (rows, 1)."""
        log_probs = torch.log_softmax(logits / self._temperature, -1)
        if self._all_greedy:
            token = log_probs.argmax(-1)
        else:
            # `torch.multinomial` would draw a random number for every token of the vocabulary.
            mass = self.cut(log_probs).double().exp().cumsum(-1)
            token = (
                torch.searchsorted(mass, points * mass[:, -1:], right=True)
                .squeeze(1)
                .clamp(max=mass.shape[-1] - 1)
            )
            if not self._all_drawn:
                token = torch.where(self._greedy, log_probs.argmax(-1), token)
        return token, log_probs.gather(1, token.unsqueeze(1)).squeeze(1)

    def cut(self, log_probs: torch.Tensor) -> torch.Tensor:
        """Log-probabilities with everything outside each row's top-k and top-p at −inf."""
        if not self._is_cut:
            return log_probs
        ordered, index = log_probs.sort(-1, descending=True)
        mass_before = ordered.exp().cumsum(-1) - ordered.exp()
        rank = torch.arange(log_probs.shape[-1]).unsqueeze(0)
        drop = (rank >= self._top_k.unsqueeze(1)) | (
            (mass_before >= self._top_p) & (self._top_p < 1)
        )
        drop[:, 0] = False
        return log_probs.masked_fill(torch.zeros_like(drop).scatter(1, index, drop), float("-inf"))


def _pad_prompts(prompts: list[list[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (width - len(prompt)) + prompt for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts]).unsqueeze(1)
    return ids, (torch.arange(width).unsqueeze(0) >= width - lengths).long()
