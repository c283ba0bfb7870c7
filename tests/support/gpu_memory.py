"""Models' shapes, and the GPU memory and disk space that follow from them."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
VOCABULARY, HEAD, GPU_GB = 151_936, 128, 80
BYTES_TRAINED = 4 + 4 + 8  # weights and gradients in fp32, Adam's two states
BYTES_SAVED = 4 + 8  # gradients are not


@dataclass(frozen=True)
class Shape:
    """Of a Qwen3, from its config.json."""

    hidden: int
    inner: int
    layers: int
    heads: int
    tied: bool
    kv_heads: int = 8

    @property
    def linear(self) -> list[tuple[int, int]]:
        """Inputs and outputs of a layer's matrices."""
        query, value = self.heads * HEAD, self.kv_heads * HEAD
        attention = [(self.hidden, query), (self.hidden, value), (self.hidden, value), (query, self.hidden)]
        return attention + [(self.hidden, self.inner)] * 2 + [(self.inner, self.hidden)]

    @property
    def parameters(self) -> int:
        norms = 2 * self.hidden + 2 * HEAD
        layers = self.layers * (sum(rows * columns for rows, columns in self.linear) + norms)
        return layers + self.hidden + VOCABULARY * self.hidden * (1 if self.tied else 2)

    def adapter(self, rank: int) -> int:
        return self.layers * rank * sum(rows + columns for rows, columns in self.linear)

    @property
    def cache_bytes(self) -> int:
        """Of one token, in bf16."""
        return 2 * 2 * self.layers * self.kv_heads * HEAD


SHAPES = {
    "Qwen/Qwen3-32B": Shape(5120, 25600, 64, 64, tied=False),
    "Qwen/Qwen3-8B": Shape(4096, 12288, 36, 32, tied=False),
    "Qwen/Qwen3-4B": Shape(2560, 9728, 36, 32, tied=True),
    "Qwen/Qwen3-1.7B": Shape(2048, 6144, 28, 16, tied=True),
    "Qwen/Qwen3-0.6B": Shape(1024, 3072, 28, 16, tied=True),
}


def held(shape: Shape, rank: int) -> float:
    """GB of a model that learns: all of it, or frozen fp32 weights and an adapter."""
    if rank:
        return (4 * shape.parameters + BYTES_TRAINED * shape.adapter(rank)) / 1e9
    return BYTES_TRAINED * shape.parameters / 1e9


def saved(shape: Shape, rank: int, *, base: bool) -> float:
    """GB of its checkpoint; verl saves a policy's adapter without the frozen weights."""
    if rank:
        return (4 * shape.parameters * base + BYTES_SAVED * shape.adapter(rank)) / 1e9
    return BYTES_SAVED * shape.parameters / 1e9
