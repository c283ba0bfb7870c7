"""Each alarm in a verl run that really has what it warns of, and what alarms do to the run."""

from pathlib import Path
from typing import Any

import pytest
from toy_rl import Toy, make_model

from qinglan.training.alarms import Alarm, read_alarms
from qinglan.training.engines.progress import ALARMS_FILE, read_metrics, read_stop

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.ray]
for module in ("torch", "verl", "transfer_queue"):
    pytest.importorskip(module)

REWARD = """
said = set()


async def compute_score(data_source, solution_str, ground_truth, extra_info, **_):
    variety = len(set(solution_str)) / max(len(solution_str), 1)
    pieces = {{solution_str[at : at + 4] for at in range(max(len(solution_str) - 3, 1))}}
    novelty = len(pieces - said) / len(pieces)
    said.update(pieces)
    row_id = extra_info["row_id"]
    return {{"invalid": 0.0, "row_id": row_id, "target": row_id, {parts}}}
"""
HACKABLE = {
    "score": "solution_str.count('a') / max(len(solution_str), 1)",
    "gold_top1": "float(variety > 0.5)",
    "judge": "5 * variety",
}
"""Pays for one letter, while what is wanted is many."""
HONEST = {"score": "variety"}
LOST_IN_A_COLLAPSE = {"score": "novelty"}
"""Nearly 1 for a policy that speaks at random, and 0 for one that repeats itself, whatever it repeats."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def train(folder: Path, model: Path, reward: dict[str, str], **rl: Any) -> dict[str, Alarm]:
    """A run to its end; the first alarm of each name."""
    toy = Toy(folder, model, save_freq=100, test_freq=100, val_before_train=False, **rl)
    parts = ", ".join(f"'{name}': {value}" for name, value in reward.items())
    (folder / "toy_reward.py").write_text(REWARD.format(parts=parts))
    toy.run(toy.command())
    return {alarm.name: alarm for alarm in reversed(read_alarms(folder / ALARMS_FILE))}


def test_a_hacked_reward_is_seen_and_so_is_the_collapse(tmp_path: Path, model_folder: Path) -> None:
    alarms = train(
        tmp_path,
        model_folder,
        HACKABLE,
        algorithm="grpo",
        rollouts_per_prompt=4,
        total_steps=40,
        actor_lr=1e-2,
        lr_scheduler_type="constant",
        alarms={"window_steps": 4},
    )
    assert {"reward_up_gold_down", "reward_up_judge_down", "entropy_collapse", "zero_variance"} <= set(alarms)
    assert not {"reward_down", "value_loss_flat"} & set(alarms)


def test_updates_that_grow_too_large_are_seen_and_made_smaller(tmp_path: Path, model_folder: Path) -> None:
    alarms = train(
        tmp_path,
        model_folder,
        LOST_IN_A_COLLAPSE,
        total_steps=30,
        actor_lr=1.0,
        lr_warmup_steps_ratio=0.8,
        ppo_epochs=8,
        kl={"mode": "loss", "coefficient": 1e-6},
        alarms={"window_steps": 4, "actions": {"reward_down": "lower_lr"}},
    )
    assert {"clip_fraction", "kl_runaway", "reward_down"} <= set(alarms)
    rates = {step: metrics["actor/lr"] for step, metrics in read_metrics(tmp_path).items()}
    at = alarms["reward_down"].step
    assert at < max(rates), alarms
    assert rates[at] >= rates[at - 1]
    assert rates[at + 1] < 0.7 * rates[at]


def test_a_critic_that_does_not_learn_ends_the_run(tmp_path: Path, model_folder: Path) -> None:
    alarms = train(
        tmp_path,
        model_folder,
        HONEST,
        total_steps=40,
        critic_lr=1e-12,
        actor_lr=1e-5,
        alarms={"window_steps": 3, "actions": {"value_loss_flat": "stop"}},
    )
    step = alarms["value_loss_flat"].step
    stopped = read_stop(tmp_path)
    assert stopped is not None
    assert "value_loss_flat" in stopped[0] and not stopped[1]
    assert max(read_metrics(tmp_path)) == step < 40
