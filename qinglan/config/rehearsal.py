"""A rehearsal: a profile's own decisions on simulators, with the tiny student, on this machine's CPU.

What decides (filters, dataset, reward, schedules, evaluation, gate, targets, budget) is the profile's own. Services,
model, device, and what depends on the model's size are the demo's of the same recipe; where a batch is learnt from more
often than in the demo (`rl.ppo_epochs`), the learning rates are so many times lower. The questions are 800 of the
simulated domain without labels; the split is the profile's.
"""

from typing import Any

from qinglan.config.training import Rl
from qinglan.errors import ConfigError

Raw = dict[str, Any]
DEMOS = {"query_rewrite": "embedded", "answer_judge": "answer_judge", "medical": "medical"}
"""The demo's profile by recipe."""
_SECTIONS = (
    "dataset",
    "distill",
    "evaluate",
    "gate",
    "release",
    "reward",
    "select",
    "serve",
    "targets",
    "validation",
    "budget",
)
_KEYS = {
    "student": ("gpu_hour_usd",),
    "sft": ("num_train_epochs",),
    "rl": ("algorithm", "epochs", "ppo_epochs", "clip_ratio", "kl", "patience", "rollouts_per_prompt"),
}
"""What does not depend on the model's size, of sections that otherwise are the demo's."""
_FOLLOWS = {"sft": ("eval_steps", "save_steps"), "rl": ("total_steps", "save_freq", "test_freq")}
"""Schedules that follow from the rows, unless the profile sets them."""
_ROWS = {"sample_train_rows": 640, "sample_dev_rows": 80, "sample_test_rows": 80}
_LATENCY_MS = 300
"""Of the simulated teacher: one that answers within a millisecond would make every student slow."""
_UNREAD = {"gold": "", "split": "", "intent": ""}


def rehearsal(real: Raw, demo: Raw) -> Raw:
    """The rehearsal's keys, from those of a profile and of its recipe's demo."""
    made = {name: section for name, section in demo.items() if name not in _SECTIONS}
    made |= {name: real[name] for name in _SECTIONS if name in real}
    for name, keys in _KEYS.items():
        kept = {key: value for key, value in demo.get(name, {}).items() if key not in (*keys, *_FOLLOWS.get(name, ()))}
        made[name] = kept | {key: real[name][key] for key in keys if key in real.get(name, {})}
    passes = made["rl"].get("ppo_epochs", Rl().ppo_epochs) / demo["rl"]["ppo_epochs"]
    made["rl"] |= {rate: demo["rl"][rate] / passes for rate in ("actor_lr", "critic_lr") if rate in demo["rl"]}
    if isinstance(steps := real.get("rl", {}).get("total_steps"), int):  # as many prompts in all
        prompts = steps * real["rl"].get("train_batch_size", Rl().train_batch_size)
        made["rl"]["total_steps"] = round(prompts / demo["rl"]["train_batch_size"])
    made["data"] = {**demo.get("data", {}), "columns": demo.get("data", {}).get("columns", {}) | _UNREAD}
    made["embedded"] = demo.get("embedded", {}) | _ROWS | {"teacher_latency_ms": _LATENCY_MS}
    made["compare"] = {"teachers": dict.fromkeys(real.get("compare", {}).get("teachers", {}), demo["teacher"])}
    roles = [role for role in ("teacher", "answerer", "judge") if role in demo and role in real]
    made["prices"] = {demo[role]["model"]: real["prices"][real[role]["model"]] for role in roles}
    return made


def demo_of(real: Raw) -> str:
    """Name of the demo's profile for a profile's keys."""
    recipe = real.get("recipe", "query_rewrite")
    if recipe not in DEMOS:
        raise ConfigError(f"rehearses: recipe {recipe} has no simulated domain; these have: {', '.join(DEMOS)}")
    return DEMOS[recipe]
