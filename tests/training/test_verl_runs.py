"""verl on the CPU for real, on a random tiny Qwen3: choices that profiles have, and the effect of
an alarm on a run that really has what it warns of."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from toy_rl import Toy

from qinglan.training.alarms import Alarm, read_alarms
from qinglan.training.engines import progress
from qinglan.training.engines.progress import read_metrics, read_stop

pytestmark = [pytest.mark.slow, pytest.mark.extended]
pytest.importorskip("verl")

TWO_STEPS: dict[str, Any] = {
    "total_steps": 2,
    "save_freq": 2,
    "test_freq": 2,
    "val_before_train": False,
}
STEPS = 24
"""Enough steps to make the reward more than twice what it was."""


def test_ppo_learns_and_exports(tmp_path: Path, model_folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    toy = Toy(tmp_path, model_folder, total_steps=STEPS, save_freq=8, test_freq=8)
    toy.reward_config.write_text(json.dumps({"failing": [3, 4]}))
    toy.run(toy.command())
    steps = read_metrics(tmp_path)
    assert set(steps) == set(range(STEPS + 1))
    trained = [steps[step] for step in range(1, STEPS + 1)]
    counted = [step["reward_extra/samples"] + step["reward_extra/invalid"] for step in trained]
    assert counted == [16] * STEPS
    assert sum(step["reward_extra/invalid"] for step in trained) > 0
    losses = {"critic/vf_loss", "actor/entropy", "actor/ppo_kl", "actor/pg_clipfrac"}
    assert losses | {"reward_extra/half_known/mean", "dev/value", "dev/ci_low"} <= set(steps[STEPS])
    rewards = [step["critic/score/mean"] for step in trained]
    # Of a random model's letters one in twenty is the right one.
    assert sum(rewards[-4:]) > 1.5 * sum(rewards[:4])
    assert progress.best_checkpoint(toy.output, tmp_path)[0] % 8 == 0

    exported = toy.export()
    before = AutoModelForCausalLM.from_pretrained(model_folder)
    assert exported.dtype == torch.float32
    assert not torch.equal(exported.model.embed_tokens.weight, before.model.embed_tokens.weight)
    assert AutoTokenizer.from_pretrained(tmp_path / "exported").chat_template


def test_rloo_and_gspo_train_where_samples_are_missing(tmp_path: Path, model_folder: Path) -> None:
    groups = {
        "rollouts_per_prompt": 4,
        "train_batch_size": 4,
        "ppo_mini_batch_size": 2,
        "ppo_epochs": 2,
    }
    settings: dict[str, Any] = {
        "algorithm": "rloo",
        "policy_loss": "gspo",
        "max_invalid_share": 0.9,
        "kl": {"mode": "loss", "coefficient": 0.01},
        "entropy_coefficient": 0.01,
    }
    toy = Toy(tmp_path, model_folder, **settings, **groups, **TWO_STEPS)
    toy.reward_config.write_text(json.dumps({"failing": list(range(1, 64, 4))}))
    toy.run(toy.command())
    steps = read_metrics(tmp_path)
    assert set(steps) == {1, 2}
    losses = [step["actor/pg_loss"] for step in steps.values()]
    assert [loss for loss in losses if not math.isfinite(loss)] == []
    assert min(step["actor/grad_norm"] for step in steps.values()) > 0
    assert "actor/kl_loss" in steps[2]
    assert sum(step["reward_extra/invalid"] for step in steps.values()) > 0


REWARD = """
said = set()


async def compute_score(data_source, solution_str, ground_truth, extra_info, **_):
    pieces = {{solution_str[at : at + 4] for at in range(max(len(solution_str) - 3, 1))}}
    novelty = len(pieces - said) / len(pieces)
    said.update(pieces)
    row_id = extra_info["row_id"]
    return {{"invalid": 0.0, "row_id": row_id, "target": row_id, {parts}}}
"""
LOST_IN_A_COLLAPSE = {"score": "novelty"}
"""Nearly 1 for a policy that speaks at random, and 0 for one that repeats itself, whatever it
repeats."""


def train(folder: Path, model: Path, reward: dict[str, str], **rl: Any) -> dict[str, Alarm]:
    """A run to its end; the first alarm of each name."""
    toy = Toy(folder, model, save_freq=100, test_freq=100, val_before_train=False, **rl)
    parts = ", ".join(f"'{name}': {value}" for name, value in reward.items())
    (folder / "toy_reward.py").write_text(REWARD.format(parts=parts))
    toy.run(toy.command())
    return {alarm.name: alarm for alarm in reversed(read_alarms(folder / progress.ALARMS_FILE))}


TOO_LARGE: dict[str, Any] = {
    "actor_lr": 1.0,
    "lr_warmup_steps_ratio": 0.8,
    "ppo_epochs": 8,
    "kl": {"mode": "loss", "coefficient": 1e-6},
}


def test_updates_that_grow_too_large_are_seen_and_made_smaller(
    tmp_path: Path, model_folder: Path
) -> None:
    actions = {"window_steps": 4, "actions": {"reward_down": "lower_lr"}}
    alarms = train(
        tmp_path, model_folder, LOST_IN_A_COLLAPSE, total_steps=14, alarms=actions, **TOO_LARGE
    )
    assert {"clip_fraction", "kl_runaway", "reward_down", "entropy_collapse"} <= set(alarms)
    rates = {step: metrics["actor/lr"] for step, metrics in read_metrics(tmp_path).items()}
    at = alarms["reward_down"].step
    assert at < max(rates) == 14, alarms
    assert rates[at] >= rates[at - 1]
    assert rates[at + 1] < 0.7 * rates[at]


def test_a_policy_that_collapses_is_stopped(tmp_path: Path, model_folder: Path) -> None:
    """A run of its own: on some processors the collapse comes with the fall of the reward, and
    nothing after it."""
    actions = {"window_steps": 4, "actions": {"entropy_collapse": "stop"}}
    alarms = train(
        tmp_path, model_folder, LOST_IN_A_COLLAPSE, total_steps=30, alarms=actions, **TOO_LARGE
    )
    stopped = read_stop(tmp_path)
    assert stopped is not None
    reason, failed = stopped
    assert "entropy_collapse" in reason
    assert not failed
    last_step = max(read_metrics(tmp_path))
    assert last_step == alarms["entropy_collapse"].step
    assert last_step < 30
