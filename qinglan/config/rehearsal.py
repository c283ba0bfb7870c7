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
"""Sections that are the profile's own."""
_LEFT_OUT = {
    "dataset": ("decontaminate_against",),
    "evaluate": ("red_team",),
    "gate": ("approval",),
    "release": ("name",),
}
"""Keys of these sections that stay the demo's: files with the profile's own columns, a person, and
the model that production serves."""
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
"""Keys that do not depend on the model's size, of sections that otherwise are the demo's."""
_FOLLOWS = {"sft": ("eval_steps", "save_steps"), "rl": ("total_steps", "save_freq", "test_freq")}
"""Schedules that follow from the rows; a `total_steps` of the profile's own is converted."""
_ROWS = {"sample_train_rows": 640, "sample_dev_rows": 80, "sample_test_rows": 80}
_LATENCY_MS = 300
"""Latency of the simulated teacher: one that answers within a millisecond would make every student
slow."""
_UNREAD = {"gold": "", "split": "", "intent": ""}


def rehearsal(real: Raw, demo: Raw, name: str) -> Raw:
    """The rehearsal's keys, from those of a profile of this name and of its recipe's demo."""
    profile = _without(demo, _SECTIONS)
    for section in _SECTIONS:
        if section in real:
            profile[section] = _without(real[section], _LEFT_OUT.get(section, ()))
    tenant = {"id": f"rehearsal_{name}", "domain": demo["tenant"]["domain"]}
    profile["tenant"] = real.get("tenant", {}) | tenant
    for section, keys in _KEYS.items():
        profile[section] = _mixed_section(real, demo, section, keys)
    _fit_to_tiny_student(profile, real, demo)
    # It is the tiny student that repeats itself.
    new_share = demo.get("budget", {}).get("rl_new_share", Budget().rl_new_share)
    profile["budget"] = profile.get("budget", {}) | {"rl_new_share": new_share}
    profile["data"]["columns"] = demo.get("data", {}).get("columns", {}) | _UNREAD
    profile["embedded"] = demo.get("embedded", {}) | _ROWS | {"teacher_latency_ms": _LATENCY_MS}
    rivals = real.get("compare", {}).get("teachers", {})
    profile["compare"] = {"teachers": dict.fromkeys(rivals, demo["teacher"])}
    profile["prices"] = _prices(real, demo)
    return profile


def _mixed_section(real: Raw, demo: Raw, section: str, keys: Collection[str]) -> Raw:
    """The demo's section with these keys of the profile, and without its schedules."""
    own = {key: real[section][key] for key in keys if key in real.get(section, {})}
    followed = _FOLLOWS.get(section, ())
    return _without(demo.get(section, {}), (*keys, *followed)) | own


def _fit_to_tiny_student(profile: Raw, real: Raw, demo: Raw) -> None:
    """Adapt learning rates and steps to what the profile's own decisions make of them."""
    rl = profile["rl"]
    # More passes over the same rollouts learn as much at a lower rate.
    passes = rl.get("ppo_epochs", Rl().ppo_epochs) / demo["rl"]["ppo_epochs"]
    for rate in ("actor_lr", "critic_lr"):
        if rate in demo["rl"]:
            rl[rate] = demo["rl"][rate] / passes
    if profile["sft"].get("tuner_type") == "full":
        # The demo's rate is an adapter's.
        profile["sft"]["learning_rate"] = demo["sft"]["learning_rate"] / 5
    steps = real.get("rl", {}).get("total_steps")
    if isinstance(steps, int):
        # As many prompts in all.
        prompts = steps * real["rl"].get("train_batch_size", Rl().train_batch_size)
        rl["total_steps"] = round(prompts / demo["rl"]["train_batch_size"])


def _prices(real: Raw, demo: Raw) -> Raw:
    """The profile's prices under the names of the models that play its own."""
    played: dict[str, str] = {}
    # The teacher comes last: a simulator may play two of them, and then has the teacher's price.
    for role in ("judge", "answerer", "teacher"):
        if role in demo and role in real:
            played[demo[role]["model"]] = real[role]["model"]
    played[demo["student"]["name"]] = real.get("student", {}).get("name", Student().name)
    prices: Raw = {}
    for simulator, model in played.items():
        if model in real["prices"]:
            prices[simulator] = real["prices"][model]
    return prices


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
