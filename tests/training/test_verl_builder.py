"""The builder's overrides, composed against verl's own configuration schema."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from fixture_types import ProfileOf
from pydantic import ValidationError
from verl_config import command_of, compose

from qinglan.config import Profile
from qinglan.cpu import cpu_env
from qinglan.runs.launcher import Command
from qinglan.training.engines.generate import generate_commands
from qinglan.training.engines.swift import merge_command, sft_command
from qinglan.training.engines.verl import hydra_value, left_out

FOLDER = Path("/data/青蓝 runs/it's")
MEAN_OF_LOSS = dict.fromkeys(("vanilla", "cispo", "clip_cov", "kl_cov"), "token-mean")
MEAN_OF_LOSS |= dict.fromkeys(("gspo", "sapo"), "seq-mean-token-mean")
CASES = yaml.safe_load(Path(__file__).with_name("verl_settings.yaml").read_text(encoding="utf-8"))


@pytest.fixture
def profile(profile_of: ProfileOf) -> ProfileOf:
    def make(device: str, trainer: dict[str, Any] | None = None, **rl: Any) -> Profile:
        gpus = {"gpus_per_node": 8 if device == "cuda" else 1}
        return profile_of(rl=rl, trainer={"device": device, "threads": 2} | gpus | (trainer or {}))

    return make


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_settings_reach_verl(profile: ProfileOf, case: dict[str, Any]) -> None:
    config = compose(command_of(profile(case["device"], **case["rl"]), FOLDER))
    from omegaconf import OmegaConf

    expected = {
        key: str(FOLDER / "model") if value == "FOLDER/model" else value
        for key, value in case["verl"].items()
    }
    assert {key: OmegaConf.select(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    "rl", [{}, {"lora_rank": 8}, {"algorithm": "grpo", "rollouts_per_prompt": 4}]
)
def test_the_cpu_trains_as_gpus_do_but_for_processes_memory_and_types_of_numbers(
    profile: ProfileOf, rl: dict[str, Any]
) -> None:
    def overrides(device: str) -> set[str]:
        command = command_of(profile(device, rollout_engine="vllm", **rl), FOLDER)
        return {word.lstrip("+") for word in command.argv[3:]}

    processes = (
        r"trainer\.(device|n_gpus_per_node|v1\.trainer_mode)|"
        r"ray_kwargs\.|\S+num_workers|transfer_queue"
    )
    engines = (
        r"\S+(fsdp|fsdp_config|checkpoint)\.|"
        r"\S+(attn_implementation|use_remove_padding|gradient_checkpointing)"
    )
    rollout = (
        r"actor_rollout_ref\.rollout\."
        r"(enable|engine_kwargs|checkpoint_engine|dtype|enforce_eager|free|gpu_memory)"
    )
    may_differ = re.compile(f"{processes}|{engines}|{rollout}")
    different = overrides("cpu") ^ overrides("cuda")
    assert [override for override in different if not may_differ.match(override)] == []


@pytest.mark.parametrize(("loss", "mean"), MEAN_OF_LOSS.items())
def test_each_policy_loss_reaches_verl_with_its_mean(
    profile: ProfileOf, loss: str, mean: str
) -> None:
    actor = compose(command_of(profile("cuda", policy_loss=loss), FOLDER)).actor_rollout_ref.actor
    assert (actor.policy_loss.loss_mode, actor.loss_agg_mode) == (loss, mean)


def test_the_environment_names_the_platform_and_a_ray_job_joins_its_cluster(
    profile: ProfileOf,
) -> None:
    assert command_of(profile("cuda"), FOLDER).env["VERL_PLATFORM"] == "nvidia"
    cpu = command_of(profile("cpu"), FOLDER).env
    assert cpu["VERL_PLATFORM"] == "cpu"
    assert cpu_env(2, profile("cpu").sft.torch_dtype).items() <= cpu.items()
    assert "CUDA_VISIBLE_DEVICES" not in cpu
    assert cpu["VERL_FILE_LOGGER_PATH"].endswith("metrics.1.jsonl")
    config = compose(command_of(profile("cuda", {"ray_dashboard_url": "http://ray:8265"}), FOLDER))
    assert "address" not in config.ray_kwargs.ray_init


def test_engines_get_only_the_keys_they_need(
    profile_of: ProfileOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    profile = profile_of(trainer={"ray_token_env": "RAY_TOKEN"})
    for name in ("teacher", "judge", "rag"):
        service = getattr(profile, name).model_copy(
            update={"api_key_env": f"KEY_OF_{name.upper()}"}
        )
        profile = profile.model_copy(update={name: service})
    everything = {
        "KEY_OF_TEACHER",
        "KEY_OF_JUDGE",
        "KEY_OF_RAG",
        "MLFLOW_TRACKING_TOKEN",
        "PREFECT_API_KEY",
        "RAY_TOKEN",
        "RAY_AUTH_TOKEN",
        "OTHER_TENANT_API_KEY",
        "db_password",
        "SECRET",
        "HF_TOKEN",
    }
    for name in everything:
        monkeypatch.setenv(name, "is set")

    def keys_of(command: Command) -> set[str]:
        """The keys that the started process sees."""
        return {name for name in everything if command.env.get(name, "is set")}

    folders = {"train_file": tmp_path, "dev_file": tmp_path, "output_dir": tmp_path}
    sft = sft_command(profile, model=str(tmp_path), resume_from=None, **folders)
    merge = merge_command(profile, model=str(tmp_path), adapter=tmp_path, output_dir=tmp_path)
    (generate,) = generate_commands(profile, {"sft": str(tmp_path)}, tmp_path, tmp_path, {})
    assert keys_of(sft) == set()
    assert keys_of(merge) == set()
    assert keys_of(generate) == set()
    sft_from_hub = sft_command(profile, model="Qwen/Qwen3-4B", resume_from=None, **folders)
    assert keys_of(sft_from_hub) == {"HF_TOKEN"}
    assert keys_of(command_of(profile, FOLDER)) == {"KEY_OF_JUDGE", "KEY_OF_RAG", "RAY_AUTH_TOKEN"}


@pytest.mark.parametrize(
    ("rl", "message"),
    [
        ({"algorithm": "grpo"}, "set rollouts_per_prompt above 1"),
        ({"algorithm": "rloo"}, "set rollouts_per_prompt above 1"),
        ({"algorithm": "opo"}, "Input should be 'ppo', 'grpo'"),
        (
            {"algorithm": "dr_grpo", "rollouts_per_prompt": 4, "policy_loss": "gspo"},
            "leave out policy_loss: gspo",
        ),
        ({"algorithm": "reinforce_plus_plus", "critic_model": "Qwen/Qwen3-4B"}, "has no critic"),
        ({"critic_revision": "abc123"}, "critic_revision needs critic_model"),
        ({"kl": {"mode": "loss", "target_kl": 0.1}}, "target_kl needs mode: reward, not loss"),
        ({"kl": {"mode": "loss", "estimator": "kl"}}, "no gradient in the loss"),
        ({"rollout_engine": "cpu"}, "rl.rollout_engine: cpu needs trainer.device: cpu"),
    ],
)
def test_senseless_combinations_are_refused(
    profile: ProfileOf, rl: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        profile("cuda", **rl)


def test_hydra_values() -> None:
    values = [None, True, 1e-05, "gae", "true", "a b"]
    assert hydra_value(values) == '[null,true,1e-05,gae,"true","a b"]'
    assert hydra_value({"param_dtype": 'say "hi"'}) == '{param_dtype:"say \\"hi\\""}'


def test_prompts_that_verl_left_out():
    assert left_out("") == 0
    assert left_out("dataset len: 100\n") == 0
    whole = "dataset len: 100\nUsing dataset class\n(TaskRunner pid=7) filter dataset len: 93\n"
    assert left_out(whole + "dataset len: 20\nfilter dataset len: 1\n") == 7, (
        "the training file comes first"
    )
    part = "dataset len: 100\nselected 50 random samples out of 100\nfilter dataset len: 49\n"
    assert left_out(part) == 1
