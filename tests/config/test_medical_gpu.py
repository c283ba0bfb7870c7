"""What the medical GPU profile needs of memory, for 24 and 16 GB."""

import re

import pytest
from gpu_memory import ROOT, SHAPES, held, saved

from qinglan.config import Profile, load_profile

PATH = ROOT / "configs" / "medical_gpu.yaml"
SHARE = "actor_rollout_ref.rollout.gpu_memory_utilization"


def small_settings() -> list[str]:
    """Those for 16 GB, as the profile's comment gives them."""
    return [quoted or plain for quoted, plain in re.findall(r"--set (?:'([^']+)'|(\S+))", PATH.read_text("utf-8"))]


SMALL = load_profile(str(PATH), small_settings())
LARGE = load_profile(str(PATH))
both = pytest.mark.parametrize(("profile", "gpu_gb"), [(LARGE, 24), (SMALL, 16)], ids=["24 GB", "16 GB"])


def sums(profile: Profile, gpu_gb: int) -> list[float]:
    """GB: policy, critic, what is held of both while vLLM generates, vLLM's share, logits of a micro-batch in fp32."""
    rl = profile.rl
    policy, critic = SHAPES[profile.student.base_model], SHAPES[str(rl.critic_model)]
    waiting = saved(policy, rl.lora_rank, base=True) + saved(critic, rl.lora_rank, base=True)
    tokens = rl.ppo_micro_batch_size_per_gpu * (rl.max_prompt_length + rl.max_response_length)
    return [
        held(policy, rl.lora_rank),
        held(critic, rl.lora_rank),
        0.0 if rl.param_offload else waiting,
        rl.extra[SHARE] * gpu_gb,
        tokens * 151_936 * 4 / 1e9,
    ]


@both
def test_it_fits_the_gpu(profile: Profile, gpu_gb: int) -> None:
    policy, critic, waiting, vllm, logits = sums(profile, gpu_gb)
    learning = max(policy, critic) if profile.rl.param_offload else policy + critic
    cache_tokens = (vllm - 2 * SHAPES[profile.student.base_model].parameters / 1e9 - 1.0) * 1e9 / 114_688
    assert SHAPES[profile.student.base_model].cache_bytes == 114_688
    assert waiting + vllm < 0.9 * gpu_gb
    assert learning + 3 * logits + 2 < 0.9 * gpu_gb  # logits, their softmax and gradient; layers at work
    assert cache_tokens > 30 * 1024, "some 30 answers at once"
