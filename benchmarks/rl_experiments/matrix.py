"""Every experiment as overrides of the embedded profile, and the tables of them side by side."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Literal

Trainer = Literal["qinglan", "trl", "swift"]
Settings = tuple[str, ...]
SEEDS = (1, 2, 3)
TWO_SEEDS = (1, 2)
"""The fewest by which a choice can be decided: for experiments that only vary another one."""

LABEL_FREE: Settings = ("reward.use_labels=false",)
UNGATED: Settings = (*LABEL_FREE, "reward.relevance_gate=false")
"""A reward without labels, whose judge does not see what is retrieved."""
# As many samples a step and an update as PPO has: 16 prompts × 4, updates of 32.
GROUPS_OF_4: Settings = (
    "rl.rollouts_per_prompt=4",
    "rl.train_batch_size=16",
    "rl.ppo_mini_batch_size=8",
)
GROUPS_OF_8: Settings = (
    "rl.rollouts_per_prompt=8",
    "rl.train_batch_size=8",
    "rl.ppo_mini_batch_size=4",
)
# The learning rates in use; the page says whether the dev split chose them. PPO has the profile's.
GRPO_RATE = "3.0e-4"
TRL_RATE = "3.0e-4"
SWIFT_RATE = "3.0e-4"
LORA_RATE = "1.0e-3"
GRPO_RATES = ("1.0e-4", "3.0e-4", "1.0e-3")
LORA_RATES = ("1.0e-3", "2.0e-3", "4.0e-3")
FORMULA_ALONE: Settings = (
    *UNGATED,
    "reward.relative_to_teacher=true",
    "reward.judge_weight=0.35",
    "reward.retrieval_weight=0.4",
    "reward.win_weight=0.25",
    "reward.tie_margin=0",
    "reward.judge_share=0.3",
    "reward.preservation_guard=false",
    "reward.gold_gate=false",
    "rl.choose=last",
)


@dataclass(frozen=True)
class Experiment:
    """One line of a table."""

    name: str
    title: str
    settings: Settings = ()
    seeds: tuple[int, ...] = SEEDS
    trainer: Trainer = "qinglan"


@dataclass(frozen=True)
class Comparison:
    """Experiments side by side, all compared with the first."""

    title: str
    experiments: tuple[str, ...]
    note: str = ""


def grpo(rate: str, groups: Settings = GROUPS_OF_4) -> Settings:
    """GRPO with as many samples as PPO."""
    return ("rl.algorithm=grpo", *groups, f"rl.actor_lr={rate}")


def lora(rate: str) -> Settings:
    """LoRA for the policy; the critic is trained as it is without."""
    return ("rl.lora_rank=16", "rl.lora_alpha=32", "rl.critic_lora_rank=0", f"rl.actor_lr={rate}")


@dataclass(frozen=True)
class Tuning:
    """Learning rates that are tried with seed 1."""

    experiment: str
    """The experiment that uses one of the rates: it is the measurement of that one."""
    used_rate: str
    rates: tuple[str, ...]
    settings: Callable[[str], Settings]
    trainer: Trainer = "qinglan"

    def candidate(self, rate: str) -> str:
        """The experiment that measures a rate."""
        return self.experiment if rate == self.used_rate else f"{self.experiment}_lr_{rate}"

    def unused_candidates(self) -> list[Experiment]:
        """Experiments with the rates that are not in use."""
        unused_rates = [rate for rate in self.rates if rate != self.used_rate]
        return [
            Experiment(
                self.candidate(rate),
                f"{self.experiment}, rate {rate}",
                self.settings(rate),
                (1,),
                self.trainer,
            )
            for rate in unused_rates
        ]


TUNED = (
    Tuning("grpo", GRPO_RATE, GRPO_RATES, grpo),
    Tuning("trl", TRL_RATE, GRPO_RATES, grpo, "trl"),
    Tuning("swift", SWIFT_RATE, GRPO_RATES, grpo, "swift"),
    Tuning("lora", LORA_RATE, LORA_RATES, lora),
)

_ALL = (
    Experiment("default", "PPO with labels: the profile as it ships"),
    Experiment("label_free", "PPO, no labels in the reward", LABEL_FREE),
    Experiment(
        "formula_alone", "the formula alone: judge on 30%, no guard, no gate", FORMULA_ALONE
    ),
    *chain.from_iterable(tuning.unused_candidates() for tuning in TUNED),
    Experiment("grpo", "GRPO with labels, 16 prompts × 4", grpo(GRPO_RATE)),
    Experiment("grpo_8", "GRPO with labels, 8 prompts × 8", grpo(GRPO_RATE, GROUPS_OF_8), (1,)),
    Experiment(
        "grpo_label_free",
        "GRPO, no labels in the reward",
        (*grpo(GRPO_RATE), *LABEL_FREE),
        TWO_SEEDS,
    ),
    Experiment(
        "rloo",
        "RLOO with labels, 16 prompts × 4",
        (*grpo(GRPO_RATE)[1:], "rl.algorithm=rloo"),
        (1,),
    ),
    Experiment(
        "kl_adaptive",
        "KL to SFT in the reward, kept at 0.1",
        ("rl.kl.mode=reward", "rl.kl.target_kl=0.1"),
        (1,),
    ),
    Experiment(
        "no_judge",
        "judge has no weight, only guards",
        (*LABEL_FREE, "reward.judge_weight=0"),
        TWO_SEEDS,
    ),
    Experiment("no_win", "no win term", (*LABEL_FREE, "reward.win_weight=0"), TWO_SEEDS),
    Experiment(
        "absolute",
        "absolute, not relative to the teacher",
        (*LABEL_FREE, "reward.relative_to_teacher=false"),
        TWO_SEEDS,
    ),
    Experiment("no_gate", "no relevance gate, judge on every sample", UNGATED, TWO_SEEDS),
    Experiment(
        "no_guards",
        "neither guard nor gate, judge on every sample",
        (*UNGATED, "reward.preservation_guard=false", "reward.guard_min_judge=0"),
        TWO_SEEDS,
    ),
    Experiment(
        "judge_30",
        "no relevance gate, judge on 30% of the samples",
        (*UNGATED, "reward.judge_share=0.3"),
        TWO_SEEDS,
    ),
    Experiment(
        "judge_0",
        "no relevance gate, judge never asked",
        (*UNGATED, "reward.judge_share=0"),
        TWO_SEEDS,
    ),
    Experiment("lora", "LoRA, rank 16", lora(LORA_RATE), TWO_SEEDS),
    Experiment("rl_only", "RL from the base model, no SFT", ("rl.start_from=base",), TWO_SEEDS),
    Experiment("cool", "sampling at temperature 0.7", ("rl.temperature=0.7",), TWO_SEEDS),
    Experiment("hot", "sampling at temperature 1.3", ("rl.temperature=1.3",), TWO_SEEDS),
    Experiment("faults", "10% of the calls fail", ("embedded.fault_rate=0.1",), TWO_SEEDS),
    Experiment("trl", "TRL's GRPOTrainer", grpo(TRL_RATE), trainer="trl"),
    Experiment("swift", "ms-swift's GRPO", grpo(SWIFT_RATE), trainer="swift"),
)
EXPERIMENTS = {experiment.name: experiment for experiment in _ALL}

COMPARISONS = (
    Comparison(
        "PPO, GRPO and RLOO, with labels and without",
        ("default", "label_free", "grpo", "grpo_8", "grpo_label_free", "rloo"),
    ),
    Comparison(
        "What the reward is made of",
        ("label_free", "no_judge", "no_win", "absolute", "no_gate", "no_guards"),
        "Without labels, as with labels the gold gate would hide what a part is for. Each line "
        "leaves a part out.",
    ),
    Comparison(
        "The formula without guards",
        ("label_free", "formula_alone"),
        "The reward as a weighted sum of judge, retrieval and win alone, and the last checkpoint: "
        "the judge on 30% of the samples, no guard, no gate, no labels. Read the reward beside "
        "top-1 and the judge: a reward that rises while they fall is being hacked.",
    ),
    Comparison(
        "How many samples the judge sees",
        ("no_gate", "judge_30", "judge_0"),
        "With the preservation guard on, without labels and the relevance gate, which asks the "
        "judge of every sample.",
    ),
    Comparison("LoRA or all parameters", ("default", "lora")),
    Comparison(
        "SFT, RL, or both",
        ("default", "rl_only"),
        "SFT alone is the column SFT of the first line; the second starts RL from the pretrained "
        "base model.",
    ),
    Comparison("Sampling temperature", ("default", "cool", "hot")),
    Comparison("KL to the SFT model", ("default", "kl_adaptive"), "The profile has none."),
    Comparison(
        "Transient faults",
        ("default", "faults"),
        "A tenth of the calls to judge and RAG end in a 429, a 500 or a dropped connection, and "
        "are made again.",
    ),
)
RIVALS = ("grpo", "trl", "swift")
