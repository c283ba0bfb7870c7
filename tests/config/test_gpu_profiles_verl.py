"""The GPU profiles in verl's own validation, with tiny models in place of theirs; needs no GPU."""

import importlib.util
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from toy_rl import make_model
from verl_config import command_of, compose

from qinglan.config import load_profile, profile_names

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
for module in ("torch", "verl", "hydra"):
    pytest.importorskip(module)

NAMES = [name.removesuffix("_rehearsal") for name in profile_names() if name.endswith("_rehearsal")]
VARIED = ("fivedoctors", "fivedoctors_full", "answer_judge_gpu", "answer_judge_published")
"""PPO and GRPO with and without adapters: with every KL, the others with their own alone."""
CASES = [
    *product(VARIED, ("off", "loss", "reward")),
    *((name, None) for name in NAMES if name not in VARIED),
]


def composed(name: str, model: Path, *changes: str) -> Any:
    overrides = [*changes]
    if load_profile(name).rl.algorithm == "ppo":
        overrides.insert(0, f"rl.critic_model={model}")
    profile = load_profile(name, overrides)
    config = compose(command_of(profile, model, model))
    if importlib.util.find_spec("vllm") is None:
        # verl asks vLLM how large an adapter may be.
        config.actor_rollout_ref.rollout.name = "hf_cpu"
    return config


@pytest.mark.parametrize(("name", "kl"), CASES)
def test_verl_validates_the_profile(name: str, kl: str | None, model_folder: Path) -> None:
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    changes = [f"rl.kl.mode={kl}"] if kl else []
    config = composed(name, model_folder, *changes)
    assert need_reference_policy(config) == ((kl or load_profile(name).rl.kl.mode) != "off")
    validate_config(
        config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config)
    )
    for part in (
        config.actor_rollout_ref.model,
        config.actor_rollout_ref.rollout,
        config.algorithm,
    ):
        assert omega_conf_to_dataclass(part)


def test_a_critic_with_another_tokenizer_is_refused(model_folder: Path, tmp_path: Path) -> None:
    from hydra.errors import InstantiationException
    from transformers import AutoTokenizer
    from verl.utils.config import omega_conf_to_dataclass

    critic = make_model(tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(critic)
    tokenizer.add_tokens(["unheard-of"])
    tokenizer.save_pretrained(critic)
    config = composed("fivedoctors", model_folder, f"rl.critic_model={critic}")
    with pytest.raises(
        InstantiationException, match="another tokenizer than the policy, of 339 tokens and not 338"
    ):
        omega_conf_to_dataclass(config.critic)


def test_a_critic_of_a_hub_is_loaded_at_its_revision(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants
    from verl.utils.config import omega_conf_to_dataclass

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--org--small" / "snapshots").mkdir(parents=True)
    for revision in ("a" * 40, "b" * 40):
        (tmp_path / "models--org--small" / "snapshots" / revision).symlink_to(model_folder)
    config = composed(
        "fivedoctors", model_folder, "rl.critic_model=org/small", f"rl.critic_revision={'b' * 40}"
    )
    assert omega_conf_to_dataclass(config.critic.model).local_path.endswith("b" * 40)


def test_the_critics_engine_takes_the_place_of_verls_on_nvidia(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from verl.workers.engine import EngineRegistry

    from qinglan.training.engines.ppo_trainer import ValueEngine

    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "nvidia")
    assert EngineRegistry.get_engine_cls("value_model", "fsdp2") is ValueEngine
