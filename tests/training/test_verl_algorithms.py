"""Two steps of verl on the CPU for what profiles may choose beside PPO and GRPO, and PPO with adapters throughout."""

import math
from pathlib import Path
from typing import Any

import pytest
from toy_rl import Toy, make_model

from qinglan.training.engines.progress import checkpoints, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.ray]
for module in ("torch", "verl", "transfer_queue"):
    pytest.importorskip(module)

TWO_STEPS: dict[str, Any] = {"total_steps": 2, "save_freq": 2, "test_freq": 2, "val_before_train": False}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("algorithm", "policy_loss"),
    [("rloo", "gspo"), ("reinforce_plus_plus_baseline", "clip_cov"), ("dr_grpo", "vanilla")],
)
def test_algorithm_trains_where_samples_are_missing(
    tmp_path: Path, model_folder: Path, algorithm: str, policy_loss: str
) -> None:
    groups = {"rollouts_per_prompt": 4, "train_batch_size": 4, "ppo_mini_batch_size": 2, "ppo_epochs": 2}
    settings: dict[str, Any] = {"algorithm": algorithm, "policy_loss": policy_loss, "max_invalid_share": 0.9}
    toy = Toy(tmp_path, model_folder, **settings, **groups, **TWO_STEPS)
    toy.reward_config.write_text('{"failing": [1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 41, 45, 49, 53, 57, 61]}')
    toy.run(toy.command())
    steps = read_metrics(tmp_path)
    assert set(steps) == {1, 2}
    assert all(math.isfinite(step["actor/pg_loss"]) and step["actor/grad_norm"] > 0 for step in steps.values())
    assert sum(step["reward_extra/invalid"] for step in steps.values()) > 0


LOSSES = ("vanilla", "gspo", "cispo", "clip_cov", "kl_cov", "sapo")


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
@pytest.mark.filterwarnings("ignore")
def test_rows_that_fill_up_a_batch_leave_every_gradient_finite(estimator: str, loss: str) -> None:
    import numpy as np
    import torch
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
    from verl.workers.config import FSDPActorConfig

    torch.manual_seed(0)
    mask = torch.ones(10, 6)
    mask[3, 4:] = mask[-2:] = 0.0  # the last two rows fill up, as one group
    rewards = torch.rand(10, 6) * mask
    groups = np.array([*"aaaabbbb", "pad", "pad"], dtype=object)
    algorithm = AlgoConfig(gamma=1.0)
    advantages, _ = get_adv_estimator_fn(estimator)(
        token_level_rewards=rewards, response_mask=mask, index=groups, config=algorithm
    )
    log_prob = (torch.randn(10, 6) - 2).requires_grad_()
    value, _ = get_policy_loss_fn(loss)(
        old_log_prob=log_prob.detach() + 0.05 * torch.randn(10, 6),
        log_prob=log_prob * 1.0,
        advantages=advantages,
        response_mask=mask.bool(),
        config=FSDPActorConfig(strategy="fsdp2", rollout_n=4, ppo_micro_batch_size_per_gpu=1),
    )
    value.backward()
    assert value.isfinite() and log_prob.grad is not None and log_prob.grad.isfinite().all()
    assert log_prob.grad[:8].abs().sum() > 0 and log_prob.grad[8:].abs().sum() == 0


def test_ppo_with_adapters_and_a_smaller_critic_resumes_and_exports(tmp_path: Path, model_folder: Path) -> None:
    critic = make_model(tmp_path / "critic", hidden_size=32, layers=1)
    settings = {"lora_rank": 4, "critic_model": str(critic), "kl": {"mode": "reward", "target_kl": 0.05}}
    toy = Toy(tmp_path, model_folder, **settings, **TWO_STEPS)
    toy.run(toy.command())
    first = read_metrics(tmp_path)[2]
    assert first["actor/reward_kl_penalty_coeff"] != settings["kl"].get("coefficient", 0.001)
    assert first["critic/grad_norm"] > 0
    toy.profile = toy.profile.model_copy(update={"rl": toy.profile.rl.model_copy(update={"total_steps": 3})})
    toy.run(toy.command())
    assert max(checkpoints(toy.output)) == 3
    assert read_metrics(tmp_path)[3]["critic/grad_norm"] > 0
    exported = toy.export().state_dict()
    assert exported["model.layers.0.self_attn.q_proj.weight"].isfinite().all()
