"""A rehearsal: a profile's own decisions on simulators, with the tiny student, on this machine's
CPU.

What decides is the profile's own. Services, model, device, what depends on the model's size, and
the engines' `extra` are the demo's of the same recipe. The questions are 800 of the simulated
domain without labels. The tenant's rules are sent, but no simulator follows them; domain, columns
and pools are the sample's, as the tiny student knows no others.
"""

from collections.abc import Collection
from typing import Any

from qinglan.config.site import Budget
from qinglan.config.training import Rl, Student
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
_LEFT_OUT = {
    "dataset": ("decontaminate_against",),
    "evaluate": ("red_team",),
    "gate": ("approval",),
    "release": ("name",),
}
"""Of these: files with the profile's own columns, a person, and the model that production
serves."""
_KEYS = {
    "data": ("max_query_chars", "max_context_chars"),
    "student": ("gpu_hour_usd",),
    "sft": ("num_train_epochs", "tuner_type"),
    "rl": (
        "algorithm",
        "epochs",
        "ppo_epochs",
        "clip_ratio",
        "kl",
        "patience",
        "rollouts_per_prompt",
    ),
}
"""What does not depend on the model's size, of sections that otherwise are the demo's."""
_FOLLOWS = {"sft": ("eval_steps", "save_steps"), "rl": ("total_steps", "save_freq", "test_freq")}
"""Schedules that follow from the rows, unless the profile sets them."""
_ROWS = {"sample_train_rows": 640, "sample_dev_rows": 80, "sample_test_rows": 80}
_LATENCY_MS = 300
"""Of the simulated teacher: one that answers within a millisecond would make every student slow."""
_UNREAD = {"gold": "", "split": "", "intent": ""}


def rehearsal(real: Raw, demo: Raw, name: str) -> Raw:
    """The rehearsal's keys, from those of a profile of this name and of its recipe's demo."""
    made = _without(demo, _SECTIONS)
    made |= {
        each: _without(real[each], _LEFT_OUT.get(each, ())) for each in _SECTIONS if each in real
    }
    made["tenant"] = real.get("tenant", {}) | {
        "id": f"rehearsal_{name}",
        "domain": demo["tenant"]["domain"],
    }
    for section, keys in _KEYS.items():
        kept = _without(demo.get(section, {}), (*keys, *_FOLLOWS.get(section, ())))
        made[section] = kept | {
            key: real[section][key] for key in keys if key in real.get(section, {})
        }
    passes = made["rl"].get("ppo_epochs", Rl().ppo_epochs) / demo["rl"]["ppo_epochs"]
    made["rl"] |= {
        rate: demo["rl"][rate] / passes for rate in ("actor_lr", "critic_lr") if rate in demo["rl"]
    }
    if made["sft"].get("tuner_type") == "full":  # the demo's rate is an adapter's
        made["sft"]["learning_rate"] = demo["sft"]["learning_rate"] / 5
    if isinstance(steps := real.get("rl", {}).get("total_steps"), int):  # as many prompts in all
        prompts = steps * real["rl"].get("train_batch_size", Rl().train_batch_size)
        made["rl"]["total_steps"] = round(prompts / demo["rl"]["train_batch_size"])
    # It is the tiny student that repeats itself.
    new_share = demo.get("budget", {}).get("rl_new_share", Budget().rl_new_share)
    made["budget"] = made.get("budget", {}) | {"rl_new_share": new_share}
    made["data"]["columns"] = demo.get("data", {}).get("columns", {}) | _UNREAD
    made["embedded"] = demo.get("embedded", {}) | _ROWS | {"teacher_latency_ms": _LATENCY_MS}
    made["compare"] = {
        "teachers": dict.fromkeys(real.get("compare", {}).get("teachers", {}), demo["teacher"])
    }
    roles = [
        role for role in ("judge", "answerer", "teacher") if role in demo and role in real
    ]  # the teacher's last
    played = {
        demo[role]["model"]: real[role]["model"] for role in roles
    }  # a simulator may play two of them
    played[demo["student"]["name"]] = real.get("student", {}).get("name", Student().name)
    made["prices"] = {
        ours: real["prices"][theirs] for ours, theirs in played.items() if theirs in real["prices"]
    }
    return made


def _without(section: Raw, keys: Collection[str]) -> Raw:
    return {key: value for key, value in section.items() if key not in keys}


def demo_of(real: Raw) -> str:
    """Name of the demo's profile for a profile's keys."""
    recipe = real.get("recipe", "query_rewrite")
    if recipe not in DEMOS:
        raise ConfigError(
            f"rehearses: recipe {recipe} has no demo profile; these have one: {', '.join(DEMOS)}"
        )
    return DEMOS[recipe]
