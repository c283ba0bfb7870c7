"""Sections about the student: its SFT, its reinforcement learning (reward, alarms, KL, algorithm),
its evaluation."""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from qinglan.config.base import EMBEDDED, AutoCount, Count, LocalPath, Positive, Section, Share

AUTO_INTERVALS = 10
"""Number of intervals that a training has where an interval is `auto`."""


class Student(Section):
    """The model that learns."""

    base_model: LocalPath = EMBEDDED
    """Local folder or hub id, or `embedded` for a tiny Qwen3 that is pretrained on this machine."""
    revision: str | None = None
    """Commit, tag or branch to load of a `base_model` on a hub; its newest files if not given."""
    model_type: str = "qwen3"
    """ms-swift's model type."""
    template: str = "qwen3_nothinking"
    """ms-swift's template; rewriting needs no thinking."""
    name: str = "student"
    """Key into `prices`."""
    gpu_hour_usd: Positive | None = None
    """Cost of an hour of one GPU, of which `rl.tensor_model_parallel_size` answer; on the CPU, of
    the machine.

    Where `prices` does not have the student, an answer costs its part of the time that evaluation
    took for all of them.
    """
    max_new_tokens: Count = 64

    @model_validator(mode="after")
    def _take_revisions_of_a_hub_alone(self) -> Self:
        if self.revision and self.base_model == EMBEDDED:
            raise ValueError(
                f"base_model: {EMBEDDED} is made on this machine and has no revision; "
                "leave out revision"
            )
        return self


class Sft(Section):
    """Supervised fine-tuning; the names are ms-swift's."""

    tuner_type: Literal["lora", "full"] = "lora"
    """`lora` trains an adapter, which is merged; `full` all parameters, and needs no `lora_…` and
    `target_modules`."""
    lora_rank: Count = 16
    lora_alpha: Count = 32
    lora_dropout: Share = 0.0
    target_modules: str = "all-linear"
    learning_rate: Positive = 5e-5
    num_train_epochs: Positive = 3
    per_device_train_batch_size: Count = 2
    gradient_accumulation_steps: Count = 8
    max_length: Count = 2048
    warmup_ratio: Share = 0.05
    lr_scheduler_type: str = "cosine"
    torch_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    gradient_checkpointing: bool = True
    eval_steps: AutoCount = 0
    """Steps between evaluations on the dev split; `auto`, kept as 0, is a tenth of the training."""
    save_steps: AutoCount = 0
    """Steps between checkpoints, a multiple of `eval_steps`: the one with the lowest loss on the
    dev split goes on."""
    save_total_limit: Count = 3
    logging_steps: Count = 10
    seed: int = 1
    deepspeed: str | None = None
    """ms-swift's deepspeed preset, such as `zero3`."""
    extra: dict[str, Any] = {}
    """More ms-swift arguments, passed through as they are."""

    @model_validator(mode="after")
    def _evaluate_every_checkpoint(self) -> Self:
        # `extra` is handed through unread: what Qinglan itself needs to know can't stand in it.
        if "tuner_type" in self.extra:
            raise ValueError("extra: tuner_type is a setting of `sft` itself")
        if self.save_steps and self.eval_steps and self.save_steps % self.eval_steps:
            raise ValueError(
                f"save_steps ({self.save_steps}) must be a multiple of "
                f"eval_steps ({self.eval_steps})"
            )
        return self

    def steps(self, rows: int, gpus: int) -> int:
        """Optimiser steps that so many training rows make on so many GPUs."""
        # ms-swift gives each GPU as many rows.
        batches = _ceil_div(rows // gpus, self.per_device_train_batch_size)
        steps_per_epoch = max(1, _ceil_div(batches, self.gradient_accumulation_steps))
        steps = math.ceil(self.num_train_epochs * steps_per_epoch)
        # ms-swift's own limit goes before the epochs.
        return int(self.extra.get("max_steps", steps))

    def scheduled(self, rows: int, gpus: int) -> "Sft":
        """The section with numbers in place of `auto`."""
        eval_steps = (
            self.eval_steps or self.save_steps or max(1, self.steps(rows, gpus) // AUTO_INTERVALS)
        )
        save_steps = self.save_steps or eval_steps
        return self.model_copy(update={"eval_steps": eval_steps, "save_steps": save_steps})


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


class Reward(Section):
    """The reward of a sample (docs/reference/reward.md). Where answers are graded by parts, only
    `part_weights`, `judge_share`, `use_labels`, `max_invalid_share` and `max_outage_s` count."""

    judge_weight: Share = 0.35
    retrieval_weight: Share = 0.40
    win_weight: Share = 0.25
    win: float = 0.5
    loss: float = -0.3
    tie_margin: Annotated[float, Field(ge=0)] = 0.02
    """Difference |rq_s − rq_t| up to which a sample is a tie."""
    judge_share: Share = 1.0
    """Share of samples that the judge scores, chosen by a hash of question and text."""
    preservation_guard: bool = True
    """Entities and intent of the question must survive, else the reward is capped at
    `guard_cap`."""
    guard_min_judge: float = 3.0
    """A judged sample below this score has lost the question's meaning."""
    guard_cap: float = -0.5
    gold_gate: bool = True
    """Rows that name a gold document earn at most `gold_gate_cap` unless it is retrieved first."""
    gold_gate_cap: float = -0.3
    relevance_gate: bool = True
    """Ask the judge, where no label is used, whether the best passage answers the question; a
    rewrite whose passage does not earns at most `gold_gate_cap`."""
    min_relevance: float = 3.0
    """A passage that the judge scores below this, 0–5, does not answer the question."""
    max_chars: Count = 120
    use_labels: bool = True
    """Use gold labels in training. False is label-free: no gold label is used, neither in the
    reward nor to choose the model; test rows are still evaluated with theirs."""
    relative_to_teacher: bool = True
    """Reward what a rewrite earns beyond the teacher's.

    False rewards what it earns by itself, the weighted mean of retrieval quality and judge score,
    both from 0 to 1; the teacher's side and `win_weight` don't count.
    """
    part_weights: dict[str, Annotated[float, Field(ge=0)]] = {}
    """Other weights than the recipe's own, by part, where answers are graded by parts; 0 leaves a
    part out."""
    max_invalid_share: Share = 0.05
    """Share of samples without a score, of a step's or of a validation's, above which the run
    stops."""
    max_outage_s: Positive = 600
    """Time for which a RAG or judge that is down is waited for; then the samples that need it have
    no score."""

    @model_validator(mode="after")
    def _weigh_something_always(self) -> Self:
        # A sample that the judge is not asked for must still earn something by retrieval or win.
        if self.relative_to_teacher and self.retrieval_weight + self.win_weight == 0:
            raise ValueError(
                "retrieval_weight + win_weight must be above 0: "
                "the judge is not asked for every sample"
            )
        if not self.relative_to_teacher and self.retrieval_weight == 0:
            raise ValueError(
                "retrieval_weight must be above 0: the judge is not asked for every sample"
            )
        return self

    @property
    def judged_share(self) -> float:
        """Share of rewrites that the judge is asked for; none where its score could not matter."""
        is_score_used = self.judge_weight > 0 or self.guard_min_judge > 0
        return self.judge_share if is_score_used else 0.0


def _yaml_off(value: object) -> object:
    """A bare `off` is YAML's false."""
    return "off" if value is False else value


AlarmAction = Annotated[Literal["off", "warn", "lower_lr", "stop"], BeforeValidator(_yaml_off)]
AlarmName = Literal[
    "reward_up_gold_down",
    "reward_up_judge_down",
    "entropy_collapse",
    "clip_fraction",
    "value_loss_flat",
    "kl_runaway",
    "reward_down",
    "zero_variance",
    "sampler_mismatch",
]


class Alarms(Section):
    """The alarms that watch every step of a training run (docs/reference/reward.md)."""

    default_action: AlarmAction = "warn"
    """Action of an alarm that `actions` does not name. `lower_lr` multiplies the learning rates by
    `lr_factor`; `stop` ends training, and the best checkpoint so far is used."""
    actions: dict[AlarmName, AlarmAction] = {}
    """Other actions, by alarm."""
    lr_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    window_steps: Annotated[int, Field(ge=3)] = 10
    """Steps over which means are taken. Two windows must have passed before a change is seen, so
    make it less than half of a short run."""
    significance: Positive = 5.0
    """A mean has changed when it moved by this many standard errors, as estimated from how much
    neighbouring steps differ."""
    min_reward_change: Positive = 0.02
    """The reward has risen or fallen only if by at least this much; rewards lie within −1 and 1."""
    min_gold_drop: Share = 0.05
    """Top-1 has fallen only if by at least this share of the labelled samples; the same for the
    first metric of a recipe whose answers are graded by parts."""
    min_judge_drop: Positive = 0.2
    """The judge's score, 0–5, has fallen only if by at least this much."""
    min_entropy_share: Share = 0.1
    """Entropy is low below this share of the first window's.

    It has collapsed if, besides, the answers no longer follow the questions (see
    `min_distinct_share`), or the first metric or the judge's score has fallen.
    """
    min_distinct_share: Share = 0.5
    """Answers no longer follow the questions where the different ones per target are below this
    share of the first window's."""
    max_clip_fraction: Share = 0.3
    """Highest share of the tokens whose part in an update was cut off at `clip_ratio`. It is half
    in a policy that is lost: the tokens whose advantage is negative."""
    min_value_loss_fall: Share = 0.05
    """The value loss has fallen if it is below the first window's by at least this share of it."""
    min_explained_variance: float = 0.05
    """A value loss that has not fallen is alarming only if the values explain less of the returns
    than this."""
    max_update_kl: Positive = 0.1
    """Highest KL between the policies before and after a step's updates, in nats per token."""
    max_reference_kl: Positive = 0.5
    """Highest KL to the model that RL started from, in nats per token, known where a reference
    model is loaded; healthy runs ended at 0.06 to 0.08."""
    max_zero_variance: Share = 0.8
    """Highest share of prompts whose rollouts all earned the same, so that GRPO learns nothing from
    them; those whose rollouts all earned the most there is don't count."""
    max_sampler_difference: Share = 0.05
    """Highest mean difference between the probabilities that sampler and trainer give to a sampled
    token, known where the trainer computes its own. Rounding to bfloat16 makes a tenth of it."""


class Kl(Section):
    """The KL term that holds training near the model that it starts from, which is always the
    reference."""

    mode: Annotated[Literal["off", "loss", "reward"], BeforeValidator(_yaml_off)] = "off"
    """`loss` adds the KL to the actor's loss, `reward` takes it off each token's reward. `off`
    loads no reference."""
    coefficient: Positive = 0.001
    """Weight of the KL per token; with `target_kl`, its first value."""
    target_kl: Positive | None = None
    """Target of the KL in nats per token, for `reward`: the coefficient rises while the KL is above
    it and falls while below."""
    horizon_steps: Count = 20
    """Training steps in which the coefficient may change by a fifth."""
    estimator: Literal["kl", "abs", "mse", "low_var_kl"] | None = None
    """Estimator of the KL, by verl's name; `low_var_kl` in the loss and `kl` in the reward if not
    given."""

    @model_validator(mode="after")
    def _know_what_verl_can_do(self) -> Self:
        if self.target_kl is not None and self.mode != "reward":
            raise ValueError(
                f"target_kl needs mode: reward, not {self.mode}; verl adapts no other coefficient"
            )
        if self.mode == "loss" and self.estimator == "kl":
            raise ValueError(
                "estimator: kl has no gradient in the loss; use low_var_kl or mse, or mode: reward"
            )
        return self


Algorithm = Literal[
    "ppo", "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
]
_WITHIN_GROUPS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")
"""Algorithms that compare the answers to one prompt with each other."""


class Rl(Section):
    """Reinforcement learning on verl; the embedded profile has its own values, because a tiny model
    needs others."""

    algorithm: Algorithm = "ppo"
    """Algorithm: `ppo` learns a critic (GAE); the others compare samples instead and need none
    (docs/how-to/gpus.md)."""
    policy_loss: Literal["vanilla", "gspo", "cispo", "clip_cov", "kl_cov", "sapo"] = "vanilla"
    """Loss of the policy, by verl's name; `vanilla` is PPO's clipped ratio. GSPO wants a much
    smaller `clip_ratio`, about 0.0004."""
    start_from: Literal["sft", "base"] = "sft"
    """Model that RL starts from: the merged SFT model, or the base model as it is, a local folder.
    It is also the reference of any KL."""
    rollouts_per_prompt: Count = 1
    epochs: Positive = 10
    """Passes over the prompts, where `total_steps` is `auto`."""
    total_steps: AutoCount = 0
    """Steps, each of `train_batch_size` prompts; `auto`, kept as 0, follows from `epochs`."""
    train_batch_size: Count = 64
    """Prompts in a step, a multiple of `ppo_mini_batch_size`: verl fills up to one with rows that
    have no loss."""
    ppo_mini_batch_size: Count = 32
    """Prompts in an update; their rollouts are spread over the GPUs in whole micro-batches."""
    ppo_micro_batch_size_per_gpu: Count = 4
    ppo_epochs: Count = 4
    clip_ratio: Positive = 0.2
    value_coefficient: Positive = 0.5
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.01
    grad_clip: Positive = 0.5
    gamma: Share = 1.0
    """Discount per token. An answer earns once, at its end, of which 0.99 would leave half to the
    first of 64 tokens; 1 here and in `lam` treats the answer as one action."""
    lam: Share = 1.0
    actor_lr: Positive = 1e-5
    critic_lr: Positive = 1e-4
    lr_scheduler_type: Literal["constant", "cosine"] = "cosine"
    min_lr_ratio: Share = 0.1
    lr_warmup_steps_ratio: Share = 0.0
    kl: Kl = Kl()
    temperature: Positive = 1.0
    max_prompt_length: Count = 1024
    max_response_length: Count = 64
    lora_rank: Annotated[int, Field(ge=0)] = 0
    """Rank of the policy's adapter; 0 trains all parameters of the merged SFT model."""
    lora_alpha: Count = 32
    critic_model: LocalPath | None = None
    """Local folder or hub id of a model with the same tokenizer, such as a smaller one; the
    policy's if not given."""
    critic_revision: str | None = None
    """Commit, tag or branch to load of a `critic_model` on a hub; its newest files if not given."""
    critic_lora_rank: Annotated[int, Field(ge=0)] | None = None
    """Rank of the critic's adapter; the policy's if not given, and 0 trains all of the critic."""
    save_freq: AutoCount = 0
    """Steps between checkpoints, a multiple of `test_freq`: the best is chosen by its validation.
    The last is saved."""
    test_freq: AutoCount = 0
    """Steps between validations on the dev split; `auto`, kept as 0, is a tenth of the training."""
    val_before_train: bool = True
    """Validate the SFT model first, as the curve's step 0."""
    keep_checkpoints: Count | None = None
    """Newest checkpoints that are kept, beside the best on the dev split; all if not given."""
    patience: Count | None = None
    """Validations without a better dev value after which training ends; never if not given."""
    choose: Literal["best", "last"] = "best"
    """Checkpoint that goes on.

    `best` is the most trained one that is not worse than the best on the dev split (by the 95%
    interval of the difference, row by row), or the SFT model itself where it was validated and none
    was better; `last` is the last.
    """
    alarms: Alarms = Alarms()
    seed: int = 1
    """Seed that fixes the order of prompts, the critic's head, and every sample's random
    numbers."""
    deterministic: bool = False
    """Use kernels on GPUs that give the same bits each time, and vLLM's batch-invariant mode; both
    are slower."""
    rollout_engine: Literal["cpu", "vllm"] | None = None
    """Engine that samples: `vllm` by default on GPUs, Qinglan's own (`cpu`) on the CPU. vLLM on the
    CPU is there to try what GPUs run (`make setup-vllm`)."""
    tensor_model_parallel_size: Count = 1
    """GPUs that share one copy of vLLM's weights."""
    attention: Literal["sdpa", "flash_attention_2"] = "sdpa"
    """`flash_attention_2` also packs sequences instead of padding them, and needs flash-attn
    installed."""
    param_offload: bool = False
    """Weights wait in the host's memory while another model has the GPUs."""
    optimizer_offload: bool = False
    extra: dict[str, Any] = {}
    """More verl (Hydra) overrides by dotted key, passed through as they are."""

    @model_validator(mode="after")
    def _combine_what_belongs_together(self) -> Self:
        if self.save_freq and self.test_freq and self.save_freq % self.test_freq:
            raise ValueError(
                f"save_freq ({self.save_freq}) must be a multiple of test_freq ({self.test_freq}); "
                "a checkpoint without a validation can't be compared"
            )
        if self.train_batch_size % self.ppo_mini_batch_size:
            raise ValueError(
                f"train_batch_size ({self.train_batch_size}) must be a multiple of "
                f"ppo_mini_batch_size ({self.ppo_mini_batch_size})"
            )
        # A group of one has nothing to be compared with, so that nothing would be learnt.
        if self.algorithm in _WITHIN_GROUPS and self.rollouts_per_prompt == 1:
            raise ValueError(
                f"algorithm: {self.algorithm} compares the answers to one prompt; "
                "set rollouts_per_prompt above 1, such as 4"
            )
        if self.algorithm == "dr_grpo" and self.policy_loss != "vanilla":
            raise ValueError(
                f"algorithm: dr_grpo has its own loss; leave out policy_loss: {self.policy_loss}"
            )
        if self.critic_revision and not self.critic_model:
            raise ValueError(
                "critic_revision needs critic_model: the policy's model has a revision of its own"
            )
        if self.algorithm != "ppo" and (self.critic_model or self.critic_lora_rank is not None):
            raise ValueError(
                f"algorithm: {self.algorithm} has no critic; "
                "leave out critic_model and critic_lora_rank"
            )
        return self

    @property
    def lora_rank_of_critic(self) -> int:
        """Rank of the critic's adapter, be it given or the policy's."""
        return self.lora_rank if self.critic_lora_rank is None else self.critic_lora_rank

    def scheduled(self, prompts: int) -> "Rl":
        """The section with numbers in place of `auto`, for so many prompts."""
        total_steps = self.total_steps or max(
            1, round(self.epochs * prompts / self.train_batch_size)
        )
        test_freq = self.test_freq or self.save_freq or max(1, total_steps // AUTO_INTERVALS)
        save_freq = self.save_freq or test_freq
        return self.model_copy(
            update={"total_steps": total_steps, "test_freq": test_freq, "save_freq": save_freq}
        )


class Evaluate(Section):
    """Arms compared on the test split."""

    max_failed_share: Share = 0.05
    """Largest share of the questions without an answer from RAG, judge or a further teacher's
    service; with more failures the comparison would not be fair.

    Above 0, one failure alone never stops the run.
    """
    retries: Annotated[int, Field(ge=0)] = 2
    """Repetitions of the stage where calls failed that may succeed later; what was answered is not
    asked again."""
    batch_size: Count = 64
    latency_queries: Count = 40
    """Queries timed one at a time, for p50 and p95."""
    parity_prompts: Count = 64
    """Prompts on which a model's first 16 tokens must be those of the trainer's own code.

    That code answers with the base model and the adapter, or with the same files where there is no
    adapter and vLLM answers.
    """
    parity_min_equal: Share = 0.8
    """Smallest share of these beginnings that must be equal: in 16 bits merging and vLLM round, and
    a text may turn where two tokens are as likely."""
    parity_max_difference: Positive = 0.5
    """Largest difference of a token's log-probability, in the texts that are equal."""
    teachers: tuple[str, ...] = ()
    """Names in `compare.teachers` of teachers that are asked the test questions and compared too,
    at the cost of their calls."""
    bootstrap_resamples: Annotated[int, Field(ge=100)] = 10_000
    seed: int = 0
    red_team: LocalPath | None = None
    """More cases for the red team: .jsonl in its schema, or a workbook whose rows' gold documents
    must come first (docs/reference/gate.md)."""
