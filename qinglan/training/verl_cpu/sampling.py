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

SPARE_TOKENS = 32
"""The keys' and values' memory grows by this many tokens at a time."""
ENDED_SHARE = 0.1
"""Rows that have ended leave the batch once they are more than this share of it.

Each time, the keys and values of all other rows are copied.
"""


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of one row.

    Temperature 0 is greedy; `top_k` −1 and `top_p` 1 are off. `seed` names the row's stream of
    random numbers, of which token n takes the n-th.
    """

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
        # Philox is counter-based: streams of neighbouring seeds are independent of each other.
        stream = np.random.Generator(np.random.Philox(key=self.sampling.seed))
        self._points: list[float] = stream.random(self.sampling.max_tokens).tolist()

    @property
    def point(self) -> float:
        """Place in [0, 1) at which the next token is drawn."""
        if self.ended:
            # The row stays in its batch for a while, and what is drawn for it is thrown away.
            return self._points[len(self.tokens) - 1]
        return self._points[len(self.tokens)]

    def take(self, token: int, log_prob: float, eos_ids: set[int]) -> None:
        """Append a token, and answer if it is the last one."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        if token in eos_ids or len(self.tokens) == self.sampling.max_tokens:
            self.ended = True
            self.answer((self.tokens, self.log_probs))


class KeyValueLayer(DynamicLayer):
    """One layer's keys and values, in memory that is not reallocated for each token.

    `_keys` and `_values` are that memory, of shape (rows, heads, tokens with spare ones, size).
    `keys` and `values` are views of the tokens that are there, under the names that transformers
    reads.
    """

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._keys = key_states[:, :, :0]
        self._values = value_states[:, :, :0]
        self._show(0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the states of new tokens; return those of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = self.keys.shape[2]
        end = length + key_states.shape[2]
        if end > self._keys.shape[2]:
            growth = (0, 0, 0, end + SPARE_TOKENS - length)
            self._keys = pad(self.keys, growth)
            self._values = pad(self.values, growth)
        self._keys[:, :, length:end] = key_states
        self._values[:, :, length:end] = value_states
        self._show(end)
        return self.keys, self.values

    def keep(self, rows: torch.Tensor) -> None:
        """Keep the rows of these indices, in this order."""
        length = self.keys.shape[2]
        self._keys = self._keys[rows]
        self._values = self._values[rows]
        self._show(length)

    def _show(self, length: int) -> None:
        self.keys = self._keys[:, :, :length]
        self.values = self._values[:, :, :length]


class RolloutBatch:
    """Rows that get a token each at every `step`, padded on the left to one width."""

    _last_tokens: torch.Tensor
    """Token that each row ends with, of shape (rows, 1): the next input."""

    def __init__(self, model: Any, rows: list[RolloutRow], eos_ids: set[int], pad_id: int) -> None:
        """Read the prompts and draw each row's first token."""
        self.rows = rows
        self._model = model
        self._eos_ids = eos_ids
        self._cache = Cache(layer_class_to_replicate=KeyValueLayer)
        ids, self._mask = _pad_prompts([row.prompt for row in rows], pad_id)
        positions = (self._mask.cumsum(-1) - 1).clamp(min=0)
        self._last_positions = positions[:, -1:]
        self._rules = SamplingRules([row.sampling for row in rows])
        self._advance(ids, positions)

    def step(self) -> None:
        self._mask = pad(self._mask, (0, 1), value=1)
        self._last_positions = self._last_positions + 1
        self._advance(self._last_tokens, self._last_positions)

    @torch.inference_mode()
    def _advance(self, ids: torch.Tensor, positions: torch.Tensor) -> None:
        logits = self._model(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        points = torch.tensor([[row.point] for row in self.rows], dtype=torch.float64)
        tokens, log_probs = self._rules.pick(logits[:, -1].float(), points)
        self._last_tokens = tokens.unsqueeze(1)
        for row, token, log_prob in zip(
            self.rows, tokens.tolist(), log_probs.tolist(), strict=True
        ):
            if not row.ended:
                row.take(token, log_prob, self._eos_ids)
        running = [place for place, row in enumerate(self.rows) if not row.ended]
        ended_count = len(self.rows) - len(running)
        if not running or ended_count > ENDED_SHARE * len(self.rows):
            self._keep(running)

    def _keep(self, places: list[int]) -> None:
        self.rows = [self.rows[place] for place in places]
        if not self.rows:
            return
        index = torch.tensor(places)
        for layer in self._cache.layers:
            layer.keep(index)
        self._mask = self._mask[index]
        self._last_positions = self._last_positions[index]
        self._last_tokens = self._last_tokens[index]
        self._rules = SamplingRules([row.sampling for row in self.rows])


class SamplingRules:
    """Settings of a batch's rows as tensors, and how tokens are picked by them."""

    def __init__(self, rows: Sequence[Sampling]) -> None:
        self._is_greedy = torch.tensor([row.temperature == 0 for row in rows])
        self._all_greedy = bool(self._is_greedy.all())
        self._all_drawn = not self._is_greedy.any()
        # A greedy row's log-probabilities are stated at temperature 1.
        self._temperature = torch.tensor([row.temperature or 1.0 for row in rows]).unsqueeze(1)
        self._is_cut = any(row.top_k > 0 or row.top_p < 1 for row in rows)
        top_k = torch.tensor([row.top_k for row in rows])
        self._top_k = top_k.masked_fill(top_k <= 0, torch.iinfo(torch.int64).max).unsqueeze(1)
        self._top_p = torch.tensor([row.top_p for row in rows]).unsqueeze(1)

    def pick(self, logits: torch.Tensor, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The next token of each row and its log-probability, each of shape (rows,).

        Args:
            logits: shape (rows, vocabulary).
            points: uniform in [0, 1), shape (rows, 1), in double precision.
        """
        log_probs = torch.log_softmax(logits / self._temperature, -1)
        if self._all_greedy:
            tokens = log_probs.argmax(-1)
        elif self._all_drawn:
            tokens = self._draw(log_probs, points)
        else:
            drawn_tokens = self._draw(log_probs, points)
            tokens = torch.where(self._is_greedy, log_probs.argmax(-1), drawn_tokens)
        return tokens, log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1)

    def _draw(self, log_probs: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        """A token of each row by its probability: the inverse of the cumulated probabilities.

        `torch.multinomial` would draw a random number for every token of the vocabulary.
        """
        # In double precision, as a vocabulary's many small probabilities are summed up.
        mass = self.cut(log_probs).double().exp().cumsum(-1)
        tokens = torch.searchsorted(mass, points * mass[:, -1:], right=True).squeeze(1)
        # Rounding may put a point at the end of all mass, which is one past the last token.
        return tokens.clamp(max=mass.shape[-1] - 1)

    def cut(self, log_probs: torch.Tensor) -> torch.Tensor:
        """Log-probabilities with everything outside each row's top-k and top-p at −inf."""
        if not self._is_cut:
            return log_probs
        ordered, index = log_probs.sort(-1, descending=True)
        mass_before = ordered.exp().cumsum(-1) - ordered.exp()
        rank = torch.arange(log_probs.shape[-1]).unsqueeze(0)
        outside_top_k = rank >= self._top_k
        outside_top_p = (mass_before >= self._top_p) & (self._top_p < 1)
        is_dropped = outside_top_k | outside_top_p
        # The likeliest token stays, however small top-p is.
        is_dropped[:, 0] = False
        is_dropped_by_token = torch.zeros_like(is_dropped).scatter(1, index, is_dropped)
        return log_probs.masked_fill(is_dropped_by_token, float("-inf"))


def _pad_prompts(prompts: list[list[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids of the prompts, padded on the left to the longest one, and their attention mask."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (width - len(prompt)) + prompt for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts]).unsqueeze(1)
    mask = (torch.arange(width).unsqueeze(0) >= width - lengths).long()
    return ids, mask
