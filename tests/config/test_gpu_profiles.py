"""The memory that the GPU profiles need, computed from the models' shapes."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from qinglan.config import Profile, load_profile

MEDICAL = Path(__file__).parents[2] / "qinglan" / "configs" / "medical_gpu.yaml"
VOCABULARY = 151_936
HEAD = 128
KV_HEADS = 8
GPU_GB = 80
# Weights and gradients in fp32, Adam's two states.
BYTES_TRAINED = 4 + 4 + 8
VLLM_SHARE = "actor_rollout_ref.rollout.gpu_memory_utilization"


@dataclass(frozen=True)
class Shape:
    """The shape of a Qwen3, from its config.json."""

    hidden: int
    inner: int
    layers: int
    heads: int
    tied: bool

    @property
    def linear(self) -> list[tuple[int, int]]:
        """Inputs and outputs of a layer's matrices."""
        query = self.heads * HEAD
        value = KV_HEADS * HEAD
        attention = [
            (self.hidden, query),
            (self.hidden, value),
            (self.hidden, value),
            (query, self.hidden),
        ]
        return attention + [(self.hidden, self.inner)] * 2 + [(self.inner, self.hidden)]

    @property
    def parameters(self) -> int:
        norms = 2 * self.hidden + 2 * HEAD
        layers = self.layers * (sum(rows * columns for rows, columns in self.linear) + norms)
        return layers + self.hidden + VOCABULARY * self.hidden * (1 if self.tied else 2)

    def adapter(self, rank: int) -> int:
        return self.layers * rank * sum(rows + columns for rows, columns in self.linear)

    def trained_gb(self, rank: int) -> float:
        """Memory of a model that learns: all of it, or frozen fp32 weights and an adapter."""
        if rank:
            return (4 * self.parameters + BYTES_TRAINED * self.adapter(rank)) / 1e9
        return BYTES_TRAINED * self.parameters / 1e9

    def waiting_gb(self, rank: int) -> float:
        """The same without gradients, while vLLM generates."""
        trained = self.adapter(rank) if rank else self.parameters
        return self.trained_gb(rank) - 4 * trained / 1e9

    @property
    def cache_bytes(self) -> int:
        """Size of one token in the cache, in bf16."""
        return 2 * 2 * self.layers * KV_HEADS * HEAD


SHAPES = {
    "Qwen/Qwen3-32B": Shape(5120, 25600, 64, 64, tied=False),
    "Qwen/Qwen3-8B": Shape(4096, 12288, 36, 32, tied=False),
    "Qwen/Qwen3-4B": Shape(2560, 9728, 36, 32, tied=True),
    "Qwen/Qwen3-1.7B": Shape(2048, 6144, 28, 16, tied=True),
    "Qwen/Qwen3-0.6B": Shape(1024, 3072, 28, 16, tied=True),
}


def policy_and_critic(profile: Profile) -> list[tuple[Shape, int]]:
    """Each with the rank of its adapter; 0 where all of it learns. GRPO has no critic."""
    rl = profile.rl
    base = profile.student.base_model
    policy = (SHAPES[base], rl.lora_rank)
    if rl.algorithm != "ppo":
        return [policy]
    critic_rank = rl.lora_rank if rl.critic_lora_rank is None else rl.critic_lora_rank
    return [policy, (SHAPES[rl.critic_model or base], critic_rank)]


def waiting_gb_of(profile: Profile, models: list[tuple[Shape, int]]) -> float:
    """Memory of all GPUs that the models take while vLLM generates."""
    if profile.rl.param_offload:
        return 0.0
    return sum(shape.waiting_gb(rank) for shape, rank in models)


@pytest.mark.parametrize(
    "name",
    ["fivedoctors", "fivedoctors_4gpus", "fivedoctors_full", "fivedoctors_2nodes", "chengla"],
)
def test_models_vllm_and_10_gb_to_work_in_fit_a_gpu(name: str) -> None:
    profile = load_profile(name)
    rl = profile.rl
    gpus = profile.trainer.nodes * profile.trainer.gpus_per_node
    models = policy_and_critic(profile)
    policy, _ = models[0]
    vllm_gb = rl.extra.get(VLLM_SHARE, 0.5) * GPU_GB
    assert 2 * policy.parameters / rl.tensor_model_parallel_size / 1e9 + 10 < vllm_gb
    if "actor_rollout_ref.actor.fsdp_config.offload_policy" in rl.extra:
        models = models[1:]
    learning_gb = sum(shape.trained_gb(rank) for shape, rank in models) / gpus
    waiting_gb = waiting_gb_of(profile, models) / gpus
    assert waiting_gb + vllm_gb < 0.9 * GPU_GB
    assert learning_gb * 1.25 + 10 < 0.9 * GPU_GB, (
        "with Adam's temporaries, of the size of the weights"
    )


@pytest.mark.parametrize(
    ("name", "gpu_gb"),
    [
        ("medical_gpu", 24),
        ("medical_gpu", 16),
        ("medical_published", 24),
        ("answer_judge_gpu", 40),
        ("answer_judge_published", 80),
    ],
)
def test_the_profiles_for_one_gpu_fit_it(name: str, gpu_gb: int) -> None:
    overrides: list[str] = []
    if gpu_gb == 16:
        # The profile's comment says what a smaller GPU needs.
        settings = re.findall(r"--set (?:'([^']+)'|(\S+))", MEDICAL.read_text("utf-8"))
        overrides = [quoted or plain for quoted, plain in settings]
    profile = load_profile(name, overrides)
    rl = profile.rl
    models = policy_and_critic(profile)
    trained_gb = [shape.trained_gb(rank) for shape, rank in models]
    waiting_gb = waiting_gb_of(profile, models)
    vllm_gb = rl.extra[VLLM_SHARE] * gpu_gb
    tokens = rl.ppo_micro_batch_size_per_gpu * (rl.max_prompt_length + rl.max_response_length)
    logits_gb = tokens * VOCABULARY * 4 / 1e9
    assert waiting_gb + vllm_gb < 0.9 * gpu_gb
    learning_gb = max(trained_gb) if rl.param_offload else sum(trained_gb)
    assert learning_gb + 3 * logits_gb + 2 < 0.9 * gpu_gb, (
        "logits, their softmax and gradient; layers that compute"
    )
    student = SHAPES[profile.student.base_model]
    cache_gb = vllm_gb - 2 * student.parameters / 1e9 - 1.0
    assert cache_gb * 1e9 / student.cache_bytes > 30 * 1024, "some 30 answers at once"
