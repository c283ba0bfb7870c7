"""What the GPU profiles need of memory, computed from the models' shapes."""

import pytest
from gpu_memory import GPU_GB, ROOT, SHAPES, held, saved

from qinglan.config import Profile, load_profile
from qinglan.errors import ConfigError

NAMES = ("fivedoctors", "fivedoctors_full", "fivedoctors_2nodes", "chengla")
PROFILES = {name: load_profile(str(ROOT / "configs" / f"{name}.yaml")) for name in NAMES}
each = pytest.mark.parametrize("name", NAMES)


def sums(profile: Profile) -> dict[str, float]:
    """GB: of each model in all, of a GPU while they learn and while they wait (no gradients), and of a checkpoint."""
    rl, gpus = profile.rl, profile.trainer.nodes * profile.trainer.gpus_per_node
    policy, critic = SHAPES[profile.student.base_model], SHAPES[rl.critic_model or profile.student.base_model]
    critic_rank = rl.lora_rank if rl.critic_lora_rank is None else rl.critic_lora_rank
    both = held(policy, rl.lora_rank) + held(critic, critic_rank)
    waiting = saved(policy, rl.lora_rank, base=True) + saved(critic, critic_rank, base=True)
    on_host = "actor_rollout_ref.actor.fsdp_config.offload_policy" in rl.extra
    return {
        "policy": held(policy, rl.lora_rank),
        "critic": held(critic, critic_rank),
        "a GPU": (held(critic, critic_rank) if on_host else both) / gpus,
        "a GPU, waiting": (saved(critic, critic_rank, base=True) if on_host else waiting) / gpus,
        "vLLM's weights": 2 * policy.parameters / rl.tensor_model_parallel_size / 1e9,
        "a checkpoint": saved(policy, rl.lora_rank, base=False) + saved(critic, critic_rank, base=True),
    }


def test_parameters_are_those_of_the_model_cards() -> None:
    counted = {name: shape.parameters / 1e9 for name, shape in SHAPES.items()}
    cards = dict(zip(SHAPES, (32.8, 8.2, 4.0, 1.7, 0.6), strict=True))
    assert counted == pytest.approx(cards, abs=0.05)
    assert SHAPES["Qwen/Qwen3-32B"].adapter(16) == pytest.approx(134e6, rel=0.01)


@each
def test_models_vllm_and_10_gb_to_work_in_fit_a_gpu(name: str) -> None:
    profile, needed = PROFILES[name], sums(PROFILES[name])
    vllm = profile.rl.extra.get("actor_rollout_ref.rollout.gpu_memory_utilization", 0.5) * GPU_GB
    waiting = 0.0 if profile.rl.param_offload else needed["a GPU, waiting"]
    assert needed["vLLM's weights"] + 10 < vllm
    assert waiting + vllm < 0.9 * GPU_GB
    temporaries = needed["a GPU"] / 4  # Adam's, of the size of the weights
    assert needed["a GPU"] + temporaries + 10 < 0.9 * GPU_GB


def test_all_parameters_do_not_fit_one_node_unless_they_live_on_the_host() -> None:
    everything = held(SHAPES["Qwen/Qwen3-32B"], 0) / 8
    assert everything == pytest.approx(65.5, abs=0.1)
    assert everything * 1.25 > GPU_GB, "with Adam's temporaries"
    assert PROFILES["fivedoctors_full"].rl.extra == {"actor_rollout_ref.actor.fsdp_config.offload_policy": True}


@each
def test_batches_divide(name: str) -> None:
    rl, trainer = PROFILES[name].rl, PROFILES[name].trainer
    gpus = trainer.nodes * trainer.gpus_per_node
    assert rl.train_batch_size % rl.ppo_mini_batch_size == 0
    assert rl.ppo_mini_batch_size * rl.rollouts_per_prompt % (gpus * rl.ppo_micro_batch_size_per_gpu) == 0
    assert trainer.gpus_per_node % rl.tensor_model_parallel_size == 0  # verl puts no vLLM across nodes
    assert rl.total_steps % rl.save_freq == 0


@pytest.mark.parametrize(
    ("change", "message"), [("gpus_per_node=6", "must be a multiple of"), ("nodes=3", "GPUs × rl")]
)
def test_sizes_that_do_not_divide_are_refused(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_profile(str(ROOT / "configs" / "fivedoctors.yaml"), [f"trainer.{change}"])


def test_a_token_of_qwen3_32b_takes_262_kb_of_cache() -> None:
    assert SHAPES["Qwen/Qwen3-32B"].cache_bytes == 262_144
    assert SHAPES["Qwen/Qwen3-8B"].cache_bytes == 147_456
