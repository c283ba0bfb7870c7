"""The builder's overrides, composed against verl's own configuration schema."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from qinglan.config import Algorithm, Profile
from qinglan.errors import ArtifactError
from qinglan.runs.command import Command
from qinglan.training.engines.verl import (
    best_checkpoint,
    checkpoints,
    hydra_value,
    last_checkpoint,
    left_out,
    next_metrics_path,
    ppo_command,
    read_metrics,
    repair_checkpoints,
)


def profile(device: str, **rl: Any) -> Profile:
    return Profile.model_validate(
        {
            "name": "test",
            "teacher": {"model": "m"},
            "judge": {"model": "m"},
            "prices": {"m": {"input_per_million_usd": 1, "output_per_million_usd": 1}},
            "rl": rl,
            "trainer": {"device": device, "gpus_per_node": 8 if device == "cuda" else 1, "threads": 2},
        }
    )


def command(given: Profile, folder: Path = Path("/data/青蓝 runs/it's")) -> Command:
    return ppo_command(
        given,
        model=folder / "model",
        train_file=folder / "train.parquet",
        dev_file=folder / "dev.parquet",
        output_dir=folder / "rl",
        reward_config=folder / "reward.json",
        trainer_settings=folder / "trainer.json",
        metrics_path=folder / "metrics.1.jsonl",
        run_name="run-1",
    )


@pytest.fixture(scope="module")
def schema() -> Iterator[None]:
    hydra = pytest.importorskip("hydra")
    verl = importlib.util.find_spec("verl")
    if verl is None:
        pytest.skip("verl is not installed")
    folder = str(Path(verl.origin).parent / "trainer" / "config")
    with hydra.initialize_config_dir(config_dir=folder, version_base=None):
        yield


def composed(given: Command) -> Any:
    """What verl's entry point would get; an override of a key that verl doesn't have is an error."""
    from hydra import compose
    from omegaconf import OmegaConf

    assert given.argv[1:3] == ["-m", "qinglan.training.engines.ppo"]
    overrides = [argument for argument in given.argv[3:] if not argument.startswith("hydra.")]
    config = compose(config_name="ppo_trainer", overrides=overrides)
    OmegaConf.to_container(config, resolve=True)
    return config


def test_cpu_profile_composes(schema: None) -> None:
    config = composed(command(profile("cpu", rollout_engine="cpu", test_freq=10)))
    assert config.actor_rollout_ref.rollout.name == "hf_cpu"
    assert config.trainer.v1.trainer_mode == "cpu_sync"
    assert config.actor_rollout_ref.model.path == "/data/青蓝 runs/it's/model"
    assert config.critic.fsdp.mixed_precision.param_dtype == "fp32"
    assert config.algorithm.rollout_correction.bypass_mode


def test_cuda_profile_composes(schema: None) -> None:
    settings = {"kl": {"mode": "loss"}, "param_offload": True, "tensor_model_parallel_size": 4}
    config = composed(command(profile("cuda", **settings)))
    assert config.actor_rollout_ref.rollout.name == "vllm"
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == 4
    assert config.actor_rollout_ref.actor.strategy == config.critic.strategy == "fsdp2"
    assert config.actor_rollout_ref.actor.use_kl_loss
    assert config.critic.fsdp.param_offload and config.actor_rollout_ref.actor.fsdp_config.param_offload
    assert not config.algorithm.rollout_correction.bypass_mode
    assert config.trainer.n_gpus_per_node == 8


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("algorithm", get_args(Algorithm))
@pytest.mark.parametrize("lora_rank", [0, 16])
def test_every_variant_composes(schema: None, device: str, algorithm: str, lora_rank: int) -> None:
    config = composed(command(profile(device, algorithm=algorithm, lora_rank=lora_rank, rollouts_per_prompt=4)))
    assert config.actor_rollout_ref.model.lora_rank == lora_rank
    assert config.algorithm.adv_estimator == {"ppo": "gae", "dr_grpo": "grpo"}.get(algorithm, algorithm)


def test_only_a_ray_job_joins_a_cluster(schema: None) -> None:
    assert composed(command(profile("cuda"))).ray_kwargs.ray_init.address == "local"
    of_cluster = profile("cuda")
    trainer = of_cluster.trainer.model_copy(update={"ray_dashboard_url": "http://ray:8265"})
    assert "address" not in composed(command(of_cluster.model_copy(update={"trainer": trainer}))).ray_kwargs.ray_init


def test_dr_grpo_neither_divides_by_the_spread_nor_by_the_length(schema: None) -> None:
    config = composed(command(profile("cuda", algorithm="dr_grpo", rollouts_per_prompt=4, max_response_length=48)))
    assert not config.algorithm.norm_adv_by_std_in_grpo
    assert config.actor_rollout_ref.actor.loss_agg_mode == "seq-mean-token-sum-norm"
    assert config.actor_rollout_ref.actor.loss_scale_factor == 48


@pytest.mark.parametrize("loss", ["vanilla", "gspo", "cispo", "clip_cov", "kl_cov", "sapo"])
def test_every_policy_loss_composes(schema: None, loss: str) -> None:
    actor = composed(command(profile("cuda", policy_loss=loss))).actor_rollout_ref.actor
    assert actor.policy_loss.loss_mode == loss
    assert actor.loss_agg_mode == ("seq-mean-token-mean" if loss in ("gspo", "sapo") else "token-mean")


@pytest.mark.parametrize(
    ("rl", "message"),
    [
        ({"algorithm": "grpo"}, "set rollouts_per_prompt above 1"),
        ({"algorithm": "rloo"}, "set rollouts_per_prompt above 1"),
        ({"algorithm": "opo"}, "Input should be 'ppo', 'grpo'"),
        ({"algorithm": "dr_grpo", "rollouts_per_prompt": 4, "policy_loss": "gspo"}, "leave out policy_loss: gspo"),
        ({"algorithm": "reinforce_plus_plus", "critic_model": "Qwen/Qwen3-4B"}, "has no critic"),
        ({"kl": {"mode": "loss", "target_kl": 0.1}}, "target_kl needs mode: reward, not loss"),
        ({"kl": {"mode": "loss", "estimator": "kl"}}, "no gradient in the loss"),
    ],
)
def test_senseless_combinations_are_refused(rl: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        profile("cuda", **rl)


def test_kl_is_off_in_the_loss_or_in_the_reward(schema: None) -> None:
    off = composed(command(profile("cuda", kl={"coefficient": 0.5})))
    assert not off.actor_rollout_ref.actor.use_kl_loss and not off.algorithm.use_kl_in_reward
    actor = composed(command(profile("cuda", kl={"mode": "loss", "coefficient": 0.02}))).actor_rollout_ref.actor
    assert (actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type) == (True, 0.02, "low_var_kl")
    algorithm = composed(command(profile("cuda", kl={"mode": "reward", "coefficient": 0.02}))).algorithm
    assert algorithm.use_kl_in_reward and algorithm.kl_penalty == "kl"
    assert (algorithm.kl_ctrl.type, algorithm.kl_ctrl.kl_coef) == ("fixed", 0.02)


def test_horizon_is_counted_in_samples(schema: None) -> None:
    kl = {"mode": "reward", "target_kl": 0.05, "horizon_steps": 10}
    given = profile("cuda", kl=kl, train_batch_size=64, rollouts_per_prompt=2)
    control = composed(command(given)).algorithm.kl_ctrl
    assert (control.type, control.target_kl, control.horizon) == ("adaptive", 0.05, 10 * 64 * 2)


def test_reference_is_what_training_starts_from(schema: None) -> None:
    model = composed(command(profile("cuda", kl={"mode": "reward"}, lora_rank=8), Path("/d"))).actor_rollout_ref.model
    assert (model.path, model.lora_adapter_path) == ("/d/model", None)


def test_critic_may_be_smaller_and_trained_whole(schema: None) -> None:
    critic = composed(
        command(profile("cuda", lora_rank=16, critic_model="Qwen/Qwen3-4B", critic_lora_rank=0), Path("/d"))
    ).critic
    assert (critic.model.path, critic.model.tokenizer_path, critic.model.lora_rank) == ("Qwen/Qwen3-4B", "/d/model", 0)


def test_adapters_travel_to_vllm_and_to_checkpoints_without_the_base(schema: None) -> None:
    config = composed(command(profile("cuda", lora_rank=16)))
    assert config.actor_rollout_ref.actor.checkpoint.save_lora_only
    assert config.actor_rollout_ref.rollout.load_format == "safetensors"
    assert config.critic.model.lora_rank == 16 and "save_lora_only" not in config.critic.checkpoint


def test_only_flash_attention_packs_sequences(schema: None) -> None:
    for kind, packed in (("sdpa", False), ("flash_attention_2", True)):
        config = composed(command(profile("cuda", attention=kind)))
        for model in (config.actor_rollout_ref.model, config.critic.model):
            assert (model.override_config.attn_implementation, model.use_remove_padding) == (kind, packed)


def test_plan_hyperparameters_have_their_place(schema: None) -> None:
    config = composed(command(profile("cuda")))
    actor = config.actor_rollout_ref.actor
    assert (actor.clip_ratio, actor.ppo_epochs, actor.entropy_coeff) == (0.2, 4, 0.01)
    assert (config.algorithm.gamma, config.algorithm.lam) == (0.99, 0.95)
    assert actor.optim.clip_grad == config.critic.optim.clip_grad == 0.5
    assert config.critic.ppo_epochs == 4
    half = composed(command(profile("cuda", value_coefficient=0.25, grad_clip=0.5)))
    assert half.critic.optim.clip_grad == 1.0, "verl's weight of the value loss is fixed at 0.5"


def test_extra_comes_last_and_unknown_keys_are_refused(schema: None) -> None:
    from hydra.errors import ConfigCompositionException

    config = composed(command(profile("cuda", extra={"actor_rollout_ref.rollout.gpu_memory_utilization": 0.7})))
    assert config.actor_rollout_ref.rollout.gpu_memory_utilization == 0.7
    with pytest.raises(ConfigCompositionException):
        composed(command(profile("cuda", extra={"actor_rollout_ref.rollout.gpu_memory": 0.7})))


def test_environment_names_the_platform() -> None:
    assert command(profile("cuda")).env["VERL_PLATFORM"] == "nvidia"
    cpu = command(profile("cpu")).env
    assert (cpu["VERL_PLATFORM"], cpu["OMP_NUM_THREADS"]) == ("cpu", "2")
    assert "CUDA_VISIBLE_DEVICES" not in cpu
    assert cpu["VERL_FILE_LOGGER_PATH"].endswith("metrics.1.jsonl")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (1e-05, "1e-05"),
        ("gae", "gae"),
        ("true", '"true"'),
        ("a b", '"a b"'),
        ('say "hi"', '"say \\"hi\\""'),
        (["console", "file"], "[console,file]"),
        ({"param_dtype": "fp32"}, "{param_dtype:fp32}"),
    ],
)
def test_hydra_value(value: Any, text: str) -> None:
    assert hydra_value(value) == text


def write_attempt(folder: Path, *steps: tuple[int, float]) -> None:
    lines = [json.dumps({"step": step, "data": {"dev/value": value, "unknown": None}}) for step, value in steps]
    next_metrics_path(folder).write_text("\n".join(lines) + "\n")


def test_metrics_of_a_resumed_run_are_joined(tmp_path: Path) -> None:
    write_attempt(tmp_path, (0, 0.1), (10, 0.2), (20, 0.3))
    write_attempt(tmp_path, (10, 0.25), (30, 0.4))
    assert next_metrics_path(tmp_path).name == "metrics.3.jsonl"
    measured = {step: values["dev/value"] for step, values in read_metrics(tmp_path).items()}
    assert measured == {0: 0.1, 10: 0.25, 20: 0.3, 30: 0.4}


def test_an_incomplete_checkpoint_is_ignored_and_deleted(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        (tmp_path / f"global_step_{step}").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    write_attempt(tmp_path, (10, 0.5), (20, 0.4), (30, 0.9))
    assert list(checkpoints(tmp_path)) == [10, 20]
    assert best_checkpoint(tmp_path, tmp_path) == (10, tmp_path / "global_step_10")
    assert last_checkpoint(tmp_path) == (20, tmp_path / "global_step_20")
    repair_checkpoints(tmp_path)
    assert not (tmp_path / "global_step_30").exists(), "it would look complete once a later one is saved"


def test_the_model_before_training_may_be_the_best(tmp_path: Path) -> None:
    (tmp_path / "global_step_10").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    write_attempt(tmp_path, (0, 0.5), (10, 0.4))
    assert best_checkpoint(tmp_path, tmp_path) == (0, None)
    write_attempt(tmp_path, (10, 0.5))
    assert best_checkpoint(tmp_path, tmp_path) == (0, None), "a tie is no reason to change the model"


def test_an_empty_tracker_is_repaired(tmp_path: Path) -> None:
    for step in (10, 20):
        (tmp_path / f"global_step_{step}").mkdir()
    (tmp_path / "global_step_10" / "data.pt").touch()
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("")
    assert list(checkpoints(tmp_path)) == [10]
    repair_checkpoints(tmp_path)
    assert tracker.read_text() == "10"
    assert list(tmp_path.glob("global_step_*")) == [tmp_path / "global_step_10"]


def test_best_checkpoint_needs_the_metric(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="nothing was validated"):
        best_checkpoint(tmp_path, tmp_path)


def test_prompts_that_verl_left_out():
    assert left_out("") == left_out("dataset len: 100\n") == 0
    whole = "dataset len: 100\nUsing dataset class\n(TaskRunner pid=7) filter dataset len: 93\n"
    assert left_out(whole + "dataset len: 20\nfilter dataset len: 1\n") == 7, "the training file comes first"
    assert left_out("dataset len: 100\nselected 50 random samples out of 100\nfilter dataset len: 49\n") == 1
