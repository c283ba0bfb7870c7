"""A profile: everything that a run depends on, as one YAML file read into frozen models.

Unknown keys are refused with the nearest right name. Secrets appear only as the *name* of an environment
variable. Engine settings keep the engines' own names where they are handed through unchanged.
"""

import difflib
import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from qinglan.errors import ConfigError

EMBEDDED = "embedded"
"""In place of an address or a path: use the stand-in that ships with Qinglan."""

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


def _expand_home(value: str) -> str:
    return str(Path(value).expanduser()) if value.startswith("~") else value


def _refuse_secret_in_url(value: str) -> str:
    if urlsplit(value).password:
        raise ValueError("holds a password, which would be logged; give the address without it")
    return value


def _refuse_secret_as_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise ValueError("write the name of an environment variable here, never the key itself")
    return value


LocalPath = Annotated[str, AfterValidator(_expand_home)]
Url = Annotated[str, AfterValidator(_refuse_secret_in_url)]
SecretName = Annotated[str, AfterValidator(_refuse_secret_as_name)]
"""Name of an environment variable that holds a secret."""


class Section(BaseModel):
    """One section of a profile."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class Tenant(Section):
    """Whose questions these are."""

    id: str = "default"
    """Sent to the RAG as `tenant_id`, and part of every row id."""
    domain: str = "健康保健品"
    """What the knowledge base is about; fills the prompt."""

    @property
    def file_name(self) -> str:
        """The id as a name for files and folders: it never becomes a path as it is, and no two ids share a name."""
        if re.fullmatch(r"[a-z0-9_]{1,40}", self.id):
            return self.id
        slug = re.sub(r"[^a-z0-9_]+", "_", self.id.lower())[:40]
        return f"{slug}-{hashlib.sha256(self.id.encode()).hexdigest()[:12]}"


class Columns(Section):
    """Column names in the workbook's header row."""

    query: str = "问题"
    profile: str = "用户画像"
    history: str = "历史摘要"
    gold: str = "标准文档"
    """Id of the document that answers the question (optional column)."""
    split: str = "划分"
    """train, dev or test (optional column); rows without it are split by `dataset`."""


class Sql(Section):
    """A query that selects the questions, its columns named as `data.columns` says."""

    url_env: SecretName
    """Name of the environment variable that holds the database's SQLAlchemy URL."""
    query: str
    """One SELECT statement. Order its rows by something that stays, so that a duplicate's first row stays the first."""


class Data(Section):
    """Where the questions come from."""

    workbook: LocalPath = EMBEDDED
    """Path of an .xlsx, .csv, .jsonl or .parquet file, of a folder of them (a drop folder, read in the order of the
    names), or `embedded` for the shipped sample."""
    sql: Sql | None = None
    """Read the questions from a database instead."""
    sheet: str | None = None
    """Sheet name; the first sheet if not given."""
    columns: Columns = Columns()
    max_query_chars: Count = 500
    """A longer query is kept as a failed row (`query_too_long`)."""
    max_context_chars: Count = 2000
    """A row whose profile and history together are longer is kept as a failed row (`context_too_long`)."""
    limit: Count | None = None
    """Use only the first rows; for trials."""


class Endpoint(Section):
    """An OpenAI-compatible chat endpoint."""

    base_url: Url = EMBEDDED
    """Up to and including `/v1`, or `embedded` for the stand-in."""
    model: str
    api_key_env: SecretName | None = None
    """Name of the environment variable that holds the API key."""
    temperature: float = 0.0
    """Not sent to reasoning models, which refuse it."""
    max_tokens: Count = 256
    timeout_s: Positive = 60
    max_retries: Annotated[int, Field(ge=0)] = 4
    """Retries of one call inside the client, honouring Retry-After."""
    concurrency: Count = 16
    requests_per_minute: Count | None = None
    """The account's limit for this model; nothing is sent beyond it."""
    tokens_per_minute: Count | None = None
    """The account's limit for this model, prompt and answer together."""
    max_answer_chars: Count | None = None
    """A longer answer is a failure (`answer_too_long`)."""
    reasoning_effort: str | None = None
    """`minimal`, `low`, `medium` or `high`, for models that take it."""
    structured_output: Literal["auto", "json_schema", "json_object", "off"] = "auto"
    """How an answer in JSON is asked for; `auto` goes by the model's name."""
    extra_body: dict[str, Any] = {}
    """More fields of the request, as the service names them; part of the ledger's key."""


class Rag(Section):
    """The retrieval service (see docs/rag-service.md)."""

    url: Url = EMBEDDED
    """Address that takes the POST, or `embedded` for the BM25 stand-in."""
    knowledge_base: LocalPath = EMBEDDED
    """JSONL (id, title, content) that the embedded RAG serves; `embedded` is the shipped sample. Unused otherwise."""
    kb_name: str = "default"
    top_k: Count = 10
    score_threshold: Share = 0.0
    timeout_s: Positive = 20
    max_retries: Annotated[int, Field(ge=0)] = 4
    concurrency: Count = 16
    api_key_env: SecretName | None = None
    """Name of the environment variable that holds a bearer token, where the service wants one."""


class Embedded(Section):
    """How the stand-ins behave; used only where an address says `embedded`."""

    teacher_latency_ms: Annotated[float, Field(ge=0)] = 0.0
    rag_latency_ms: Annotated[float, Field(ge=0)] = 0.0
    fault_rate: Share = 0.0
    """Share of teacher and RAG requests answered with 429, 500 or a dropped connection."""
    pretrain_seconds_max: Positive = 900.0
    """The tiny base model's pretraining is a fixed number of steps; it fails if it would take longer than this."""
    pretrain_steps: Count = 600
    sample_train_rows: Count = 2000
    sample_dev_rows: Count = 200
    sample_test_rows: Count = 1000
    sample_seed: int = 11


class BatchApi(Section):
    """The teacher's batch API: half the price, an answer within a day."""

    max_requests: Count = 10_000
    """Requests per batch; OpenAI takes 50,000 and 200 MB."""
    poll_every_s: Positive = 60
    give_up_after_h: Positive = 26
    """Then what is missing is asked row by row, at full price."""


class OnRay(Section):
    """Distillation as Ray tasks, where one machine is outgrown."""

    address: str | None = None
    """Of the cluster, as `ray.init` takes it; a local Ray if not given. On several machines the ledger must be a
    database server (`ledger.url_env`)."""
    tasks: Count = 4
    """Tasks at once. They share the teacher's concurrency and rate limits equally."""


class Distill(Section):
    """Asking the teacher."""

    mode: Literal["live", "batch_api"] = "live"
    """`batch_api` sends what the ledger lacks through `/v1/batches`, and row by row what comes back without an
    answer."""
    batch_api: BatchApi = BatchApi()
    engine: Literal["process", "ray"] = "process"
    """Where the rows are worked on: in the flow's own process, or as tasks on a Ray cluster."""
    ray: OnRay = OnRay()
    batch_rows: Count = 500
    """Rows per Prefect task."""
    retries: Annotated[int, Field(ge=0)] = 2
    """Prefect retries of a batch; only its missing rows are asked again."""
    max_failed_share: Share = 0.1
    """More failed rows than this, of all that the stage was given, stop the run at once; above 0, one alone never does.
    """


class Validate(Section):
    """Asking the RAG, and the judge where RL needs a baseline."""

    batch_rows: Count = 500
    retries: Annotated[int, Field(ge=0)] = 2
    max_failed_share: Share = 0.05
    """As for `distill`."""
    judge_baseline: bool = True
    """Score the teacher's rewrites once, so that RL never has to."""


class Select(Section):
    """Which rewrites may teach."""

    min_top1_score: Share = 0.6
    min_rewrite_chars: Count = 2
    max_rewrite_chars: Count = 120
    boilerplate: tuple[str, ...] = ()
    """More regular expressions for rewrites that are no rewrites (`boilerplate`), beside the built-in ones."""
    not_worse_than_original: bool = True
    """A rewrite that retrieves worse than the user's own words must not teach (`worse_than_original`)."""

    @model_validator(mode="after")
    def _compile_boilerplate(self) -> Self:
        for pattern in self.boilerplate:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"boilerplate {pattern!r} is no regular expression: {error}") from error
        return self


class Dataset(Section):
    """Splits and training files."""

    seed: int = 1
    """Of the hash that puts unsplit rows into splits."""
    train_share: Share = 0.8
    dev_share: Share = 0.1
    near_duplicate_jaccard: Annotated[float, Field(ge=0.5, le=1)] = 0.85
    """Character-trigram similarity from which two questions count as the same; such groups never straddle splits."""
    decontaminate_against: tuple[LocalPath, ...] = ()
    """Workbooks of questions that are kept for evaluation elsewhere: a row that nearly repeats one of them reaches
    neither training nor development (`near_duplicate_of_evaluation`)."""

    @model_validator(mode="after")
    def _leave_a_test_split(self) -> Self:
        if self.train_share + self.dev_share >= 1:
            raise ValueError("train_share + dev_share must leave a share for the test split")
        return self


class Refresh(Section):
    """What a nightly refresh does beyond making a dataset."""

    train_at_new_rows: Count | None = None
    """Start the `train` deployment as soon as this many good training rows came in since the last training; never if
    not given."""
    drift_warning: Positive = 0.2
    """Jensen–Shannon distance (0 to 1) of vocabulary, length or score from which a drift is called out."""


_OWN_ARMS = ("original", "teacher", "base", "sft", "rl")


def _refuse_no_file_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}", value):
        raise ValueError("a teacher's name is 1 to 40 letters, digits, dots, dashes and underscores, as files carry it")
    if value.lower() in _OWN_ARMS:
        raise ValueError(f"{value} has a meaning in every report ({', '.join(_OWN_ARMS)}); choose another name")
    return value


class Compare(Section):
    """Teachers side by side: which one to buy (docs/teachers.md)."""

    teachers: dict[Annotated[str, AfterValidator(_refuse_no_file_name)], Endpoint] = {}
    """By a name for the report, those to compare with `teacher`. All are asked live, whatever `distill.mode` says."""
    rows: Count = 500
    """Questions that each of them is asked, drawn by a hash of the row's id."""
    tolerable_loss: Share = 0.03
    """What a cheaper teacher may lose in top-1, in the top-1 score or in the share of questions it answers, and five
    times as much in the judge's score: one that is shown to lose no more counts as good enough."""


class LedgerStore(Section):
    """Where paid answers are kept."""

    url_env: SecretName | None = None
    """Name of the environment variable that holds the SQLAlchemy URL of a PostgreSQL database; a SQLite file under
    `paths.state` if not given. Several machines need the server."""


class Budget(Section):
    """What may be spent on teacher and judge together, in US dollars by `prices`."""

    per_run_usd: Positive | None = None
    per_month_usd: Positive | None = None
    """Of all runs on this ledger since the first of the month, UTC."""
    when_spent: Literal["stop", "go_on"] = "stop"
    """`stop` ends the run with all answers kept; `go_on` goes on to the dataset with the rows that have one, the
    others fail as `over_budget`."""


class Student(Section):
    """The model that learns."""

    base_model: LocalPath = EMBEDDED
    """Local folder or hub id, or `embedded` for a tiny Qwen3 that is pretrained on this machine."""
    model_type: str = "qwen3"
    """ms-swift's model type."""
    template: str = "qwen3_nothinking"
    """ms-swift's template; rewriting needs no thinking."""
    name: str = "student"
    """Key into `prices`."""
    max_new_tokens: Count = 64


class Sft(Section):
    """LoRA supervised fine-tuning; the names are ms-swift's."""

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
    eval_steps: Count = 100
    save_steps: Count = 100
    save_total_limit: Count = 3
    logging_steps: Count = 10
    seed: int = 1
    deepspeed: str | None = None
    """ms-swift's deepspeed preset, such as `zero3`."""
    extra: dict[str, Any] = {}
    """More ms-swift arguments, passed through as they are."""


class Reward(Section):
    """The reward against the teacher's baseline (docs/reward.md)."""

    judge_weight: Share = 0.35
    retrieval_weight: Share = 0.40
    win_weight: Share = 0.25
    win: float = 0.5
    loss: float = -0.3
    tie_margin: Annotated[float, Field(ge=0)] = 0.02
    """|rq_s − rq_t| up to this is a tie."""
    judge_share: Share = 1.0
    """Share of samples that the judge scores, chosen by a hash of query and rewrite."""
    preservation_guard: bool = True
    """Entities and intent of the question must survive, else the reward is capped at `guard_cap`."""
    guard_min_judge: float = 3.0
    """A judged sample below this score has lost the question's meaning."""
    guard_cap: float = -0.5
    gold_gate: bool = True
    """Rows that name a gold document earn at most `gold_gate_cap` unless it is retrieved first."""
    gold_gate_cap: float = -0.3
    relevance_gate: bool = True
    """Where no label is used, the judge is also asked whether the best passage answers the question; a rewrite that
    brings up another one earns at most `gold_gate_cap`."""
    min_relevance: float = 3.0
    """A passage that the judge scores below this, 0–5, does not answer the question."""
    max_chars: Count = 120
    use_labels: bool = True
    """False: no gold label is used in training, neither in the reward nor to choose the model (label-free); test rows
    are still evaluated with theirs."""
    relative_to_teacher: bool = True
    """False: the reward is what the rewrite earns by itself, the weighted mean of retrieval quality and judge score, both
    from 0 to 1; the teacher's side and `win_weight` don't count."""
    max_invalid_share: Share = 0.05
    """More samples without a score than this, of a step's or of a validation's, stop the run."""
    max_outage_s: Positive = 600
    """A RAG or judge that is down is waited for so long, then the samples that need it have no score."""

    @model_validator(mode="after")
    def _weigh_something_always(self) -> Self:
        if self.relative_to_teacher and self.retrieval_weight + self.win_weight == 0:
            raise ValueError("retrieval_weight + win_weight must be above 0: the judge is not asked for every sample")
        if not self.relative_to_teacher and self.retrieval_weight == 0:
            raise ValueError("retrieval_weight must be above 0: the judge is not asked for every sample")
        return self

    @property
    def judged_share(self) -> float:
        """Share of samples that the judge is asked for; none where its score could not matter."""
        return self.judge_share if self.judge_weight > 0 or self.guard_min_judge > 0 else 0.0


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
]


class Alarms(Section):
    """What of a training run is watched at every step (docs/alarms.md)."""

    default_action: AlarmAction = "warn"
    """`lower_lr` multiplies the learning rates by `lr_factor`; `stop` ends training, and the best checkpoint so far is
    used."""
    actions: dict[AlarmName, AlarmAction] = {}
    """Other actions, by alarm."""
    lr_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    window_steps: Annotated[int, Field(ge=3)] = 10
    """Steps of which means are taken. Two windows must have passed before a change is seen, so make it less than half
    of a short run."""
    significance: Positive = 5.0
    """A mean has changed when it moved by this many standard errors, as estimated from how much neighbouring steps
    differ."""
    min_reward_change: Positive = 0.02
    """The reward has risen or fallen only if by at least this much; rewards lie within −1 and 1."""
    min_gold_drop: Share = 0.05
    """Top-1 has fallen only if by at least this share of the labelled samples."""
    min_judge_drop: Positive = 0.2
    """The judge's score, 0–5, has fallen only if by at least this much."""
    min_entropy_share: Share = 0.1
    """Entropy has collapsed below this share of the first window's; a healthy run that learns kept 0.25."""
    max_clip_fraction: Share = 0.5
    """Share of the tokens whose part in an update was cut off at `clip_ratio`."""
    min_value_loss_fall: Share = 0.05
    """The value loss has fallen if it is below the first window's by at least this share of it."""
    min_explained_variance: float = 0.05
    """A value loss that has not fallen is alarming only if the values explain less of the returns than this."""
    max_update_kl: Positive = 0.1
    """Nats per token between the policies before and after a step's updates."""
    max_reference_kl: Positive = 0.5
    """Nats per token to the model that RL started from, known where a reference model is loaded; healthy runs ended near 0.1."""
    max_zero_variance: Share = 0.8
    """Share of prompts whose rollouts all earned the same, so that GRPO learns nothing from them."""

    def action(self, name: AlarmName) -> AlarmAction:
        """What is done at an alarm."""
        return self.actions.get(name, self.default_action)


class Kl(Section):
    """What holds training near the model that it starts from, which is always the reference."""

    mode: Annotated[Literal["off", "loss", "reward"], BeforeValidator(_yaml_off)] = "off"
    """`loss` adds the KL to the actor's loss, `reward` takes it off each token's reward. `off` loads no reference."""
    coefficient: Positive = 0.001
    """Weight of the KL per token; with `target_kl` only where it begins."""
    target_kl: Positive | None = None
    """Nats per token, for `reward`: the coefficient rises while the KL is above it and falls while below."""
    horizon_steps: Count = 20
    """Training steps in which the coefficient may change by a fifth."""
    estimator: Literal["kl", "abs", "mse", "low_var_kl"] | None = None
    """verl's; if not given, `low_var_kl` in the loss and `kl` in the reward."""

    @model_validator(mode="after")
    def _know_what_verl_can_do(self) -> Self:
        if self.target_kl is not None and self.mode != "reward":
            raise ValueError(f"target_kl needs mode: reward, not {self.mode}; verl adapts no other coefficient")
        if self.mode == "loss" and self.estimator == "kl":
            raise ValueError("estimator: kl has no gradient in the loss; use low_var_kl or mse, or mode: reward")
        return self


Algorithm = Literal["ppo", "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
_WITHIN_GROUPS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")
"""Algorithms that compare the answers to one prompt with each other."""


class Rl(Section):
    """Reinforcement learning on verl; the embedded profile has its own values, because a tiny model needs others."""

    algorithm: Algorithm = "ppo"
    """`ppo` learns a critic (GAE); the others compare samples instead and need none (docs/gpu.md)."""
    policy_loss: Literal["vanilla", "gspo", "cispo", "clip_cov", "kl_cov", "sapo"] = "vanilla"
    """verl's; `vanilla` is PPO's clipped ratio. GSPO wants a much smaller `clip_ratio`, about 0.0004."""
    start_from: Literal["sft", "base"] = "sft"
    """The merged SFT model, which is also the reference of any KL, or the base model as it is."""
    rollouts_per_prompt: Count = 1
    total_steps: Count = 200
    train_batch_size: Count = 64
    """Prompts a step, a multiple of `ppo_mini_batch_size`: verl fills up to one with rows that have no loss."""
    ppo_mini_batch_size: Count = 32
    """Prompts an update; its rollouts are spread over the GPUs in whole micro-batches."""
    ppo_micro_batch_size_per_gpu: Count = 4
    ppo_epochs: Count = 4
    clip_ratio: Positive = 0.2
    value_coefficient: Positive = 0.5
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.01
    grad_clip: Positive = 0.5
    gamma: Share = 0.99
    lam: Share = 0.95
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
    """0 trains all parameters of the merged SFT model."""
    lora_alpha: Count = 32
    critic_model: LocalPath | None = None
    """Local folder or hub id of a model with the same tokenizer, such as a smaller one; the policy's if not given."""
    critic_lora_rank: Annotated[int, Field(ge=0)] | None = None
    """As the policy's if not given; 0 trains all of the critic."""
    save_freq: Count = 20
    """Steps between checkpoints, a multiple of `test_freq`: the best is chosen by its validation. The last is saved."""
    test_freq: Count = 20
    """Steps between validations on the dev split."""
    val_before_train: bool = True
    """Validate the SFT model first, as the curve's step 0."""
    keep_checkpoints: Count | None = None
    """The newest so many are kept, and the best on the dev split; all if not given."""
    patience: Count | None = None
    """Validations without a better dev value after which training ends; never if not given."""
    choose: Literal["best", "last"] = "best"
    """Which checkpoint goes on: the best on the dev split, the SFT model itself among them where it was validated, or
    the last."""
    alarms: Alarms = Alarms()
    seed: int = 1
    rollout_engine: Literal["cpu", "vllm"] = "vllm"
    tensor_model_parallel_size: Count = 1
    """GPUs that share one copy of vLLM's weights."""
    attention: Literal["sdpa", "flash_attention_2"] = "sdpa"
    """`flash_attention_2` also packs sequences instead of padding them, and needs flash-attn installed."""
    param_offload: bool = False
    """Weights wait in the host's memory while another model has the GPUs."""
    optimizer_offload: bool = False
    extra: dict[str, Any] = {}
    """More verl (Hydra) overrides by dotted key, passed through as they are."""

    @model_validator(mode="after")
    def _validate_every_checkpoint(self) -> Self:
        if self.save_freq % self.test_freq:
            raise ValueError(
                f"save_freq ({self.save_freq}) must be a multiple of test_freq ({self.test_freq}); "
                "a checkpoint without a validation can't be compared"
            )
        return self

    @model_validator(mode="after")
    def _fill_mini_batches(self) -> Self:
        if self.train_batch_size % self.ppo_mini_batch_size:
            raise ValueError(
                f"train_batch_size ({self.train_batch_size}) must be a multiple of "
                f"ppo_mini_batch_size ({self.ppo_mini_batch_size})"
            )
        return self

    @model_validator(mode="after")
    def _combine_what_belongs_together(self) -> Self:
        if self.algorithm in _WITHIN_GROUPS and self.rollouts_per_prompt == 1:
            raise ValueError(
                f"algorithm: {self.algorithm} compares the answers to one prompt; set rollouts_per_prompt above 1, "
                "such as 4"
            )
        if self.algorithm == "dr_grpo" and self.policy_loss != "vanilla":
            raise ValueError(f"algorithm: dr_grpo has its own loss; leave out policy_loss: {self.policy_loss}")
        if self.algorithm != "ppo" and (self.critic_model or self.critic_lora_rank is not None):
            raise ValueError(f"algorithm: {self.algorithm} has no critic; leave out critic_model and critic_lora_rank")
        return self


class Evaluate(Section):
    """Arms compared on the test split."""

    max_failed_share: Share = 0.05
    """Of an arm's questions without an answer from RAG or judge; more would compare the weather."""
    batch_size: Count = 64
    latency_queries: Count = 40
    """Queries timed one at a time, for p50 and p95."""
    bootstrap_resamples: Count = 10_000
    seed: int = 0


class Trainer(Section):
    """Where training processes run."""

    device: Literal["cpu", "cuda"] = "cpu"
    gpus_per_node: Count = 1
    nodes: Count = 1
    python: LocalPath | None = None
    """Interpreter of the trainer's environment; if not given, this one, or `python` on a Ray cluster's nodes."""
    threads: Count = 2
    """OMP threads of a training process on the CPU."""
    ray_dashboard_url: Url | None = None
    """Of a Ray cluster, such as http://127.0.0.1:8265: training processes run there as Ray jobs (docs/cluster.md). On
    this machine if not given."""
    ray_token_env: SecretName | None = None
    """For a cluster that asks for a token (RAY_AUTH_MODE=token)."""
    dashboard_patience_s: Positive = 600
    """For how long a dashboard that doesn't answer is asked again before the flow gives up; the job goes on."""
    max_restarts: Annotated[int, Field(ge=0)] = 2
    """How often SFT and RL are started again, from their newest checkpoint, where they died within one flow run."""


class Price(Section):
    """US dollars per million tokens."""

    input_per_million_usd: Annotated[float, Field(ge=0)]
    output_per_million_usd: Annotated[float, Field(ge=0)]
    batch_factor: Share = 0.5
    """What the batch API takes of these prices."""


class Paths(Section):
    """Where a site keeps things."""

    runs: Annotated[Path, AfterValidator(Path.expanduser)] = Path("runs")
    state: Annotated[Path, AfterValidator(Path.expanduser)] = Path(".qinglan")
    """Ledger, embedded base models, Prefect's and MLflow's local databases."""


class Tracking(Section):
    """MLflow."""

    uri: Url | None = None
    """Tracking URI; a SQLite file under `paths.state` if not given."""
    experiment: str = "qinglan"


class Profile(Section):
    """One profile: see configs/."""

    name: str
    recipe: str = "query_rewrite"
    tenant: Tenant = Tenant()
    data: Data = Data()
    teacher: Endpoint
    judge: Endpoint
    rag: Rag = Rag()
    embedded: Embedded = Embedded()
    distill: Distill = Distill()
    validation: Validate = Validate()
    select: Select = Select()
    dataset: Dataset = Dataset()
    refresh: Refresh = Refresh()
    compare: Compare = Compare()
    ledger: LedgerStore = LedgerStore()
    budget: Budget = Budget()
    student: Student = Student()
    sft: Sft = Sft()
    reward: Reward = Reward()
    rl: Rl = Rl()
    evaluate: Evaluate = Evaluate()
    trainer: Trainer = Trainer()
    prices: dict[str, Price] = {}
    paths: Paths = Paths()
    tracking: Tracking = Tracking()

    @model_validator(mode="after")
    def _price_every_paid_model(self) -> Self:
        rivals = ((f"compare.teachers.{name}", endpoint) for name, endpoint in self.compare.teachers.items())
        for role, endpoint in (("teacher", self.teacher), ("judge", self.judge), *rivals):
            if endpoint.model not in self.prices:
                raise ValueError(f"prices has no entry for {role}.model {endpoint.model!r}")
        return self

    @model_validator(mode="after")
    def _fill_micro_batches(self) -> Self:
        rl, gpus = self.rl, self.trainer.nodes * self.trainer.gpus_per_node
        rollouts = rl.ppo_mini_batch_size * rl.rollouts_per_prompt
        if rollouts % (gpus * rl.ppo_micro_batch_size_per_gpu) and not any("dynamic_bsz" in key for key in rl.extra):
            raise ValueError(
                f"rl.ppo_mini_batch_size × rollouts_per_prompt ({rollouts}) must be a multiple of "
                f"GPUs × rl.ppo_micro_batch_size_per_gpu ({gpus} × {rl.ppo_micro_batch_size_per_gpu})"
            )
        return self

    @model_validator(mode="after")
    def _keep_vllm_within_a_node(self) -> Self:
        trainer, shared = self.trainer, self.rl.tensor_model_parallel_size
        if trainer.device == "cuda" and trainer.gpus_per_node % shared:
            raise ValueError(
                f"trainer.gpus_per_node ({trainer.gpus_per_node}) must be a multiple of "
                f"rl.tensor_model_parallel_size ({shared})"
            )
        return self

    @property
    def tracking_uri(self) -> str:
        """MLflow's tracking URI, local by default."""
        return self.tracking.uri or f"sqlite:///{(self.paths.state / 'mlflow.db').resolve()}"


def load_profile(name_or_path: str, overrides: Iterable[str] = ()) -> Profile:
    """Read a profile by name (``configs/NAME.yaml``) or path, apply ``dotted.key=value`` overrides, validate.

    Raises:
        ConfigError: one line naming the file, the key and the remedy.
    """
    path = _find(name_or_path)
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"profile {path}: can't be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"profile {path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"profile {path}: expected sections such as `teacher:`, found {type(raw).__name__}")
    for override in overrides:
        _apply(raw, override)
    try:
        return Profile.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"profile {path}: {explain(error)}") from error


def explain(error: ValidationError, root: str = "profile") -> str:
    """The first problem of a pydantic error in words, with the nearest right key for an unknown one."""
    problems = error.errors()
    first = problems[0]
    where = ".".join(str(part) for part in first["loc"]) or root
    if first["type"] == "extra_forbidden":
        known = _keys_beside(first["loc"])
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0.4)
        hint = f"did you mean `{near[0]}`?" if near else f"known keys: {', '.join(sorted(known)) or 'none'}"
        text = f"unknown key `{where}`; {hint}"
    elif first["type"] == "missing":
        text = f"`{where}` is missing; add it"
    elif first["type"] == "value_error":
        text = f"`{where}`: {first['msg'].removeprefix('Value error, ')}"
    else:
        text = f"`{where}`: {first['msg']}, got {_short(first['input'])}"
    return text + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")


def require_secret(env_name: str | None, used_by: str) -> str:
    """The value of a secret's environment variable; a placeholder where the service needs none.

    Raises:
        ConfigError: the variable is not set, or can't be an HTTP header (httpx's error would show the secret).
    """
    if env_name is None:
        return "no-key"
    value = os.environ.get(env_name, "").strip()
    if not value:
        raise ConfigError(f"{used_by} needs the environment variable {env_name}; set it and run again")
    if not (value.isascii() and value.isprintable()):
        raise ConfigError(f"{used_by}: the value of {env_name} has characters that no key has; set it again")
    return value


def uses_proxy(url: str) -> bool:
    """Should the proxy settings of the environment apply? Not to this machine itself, where the stand-ins are."""
    return urlsplit(url).hostname not in ("127.0.0.1", "::1", "localhost")


def _find(name_or_path: str) -> Path:
    path = Path(name_or_path)
    if path.suffix in {".yaml", ".yml"}:
        if not path.is_file():
            raise ConfigError(f"profile {path}: no such file")
        return path
    folders = (Path.cwd() / "configs", Path(__file__).parent.parent / "configs")
    for folder in folders:
        if (candidate := folder / f"{name_or_path}.yaml").is_file():
            return candidate
    known = sorted({p.stem for folder in folders for p in folder.glob("*.yaml")})
    near = difflib.get_close_matches(name_or_path, known, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"known profiles: {', '.join(known) or 'none'}"
    raise ConfigError(f"profile `{name_or_path}`: there is no configs/{name_or_path}.yaml; {hint}")


def _apply(raw: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {override!r}: write it as dotted.key=value")
    try:
        value = yaml.safe_load(text) if text else text
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override!r}: the value is not valid YAML") from error
    *parents, leaf = key.split(".")
    node = raw
    for parent in parents:
        child = node.get(parent)
        if child is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override!r}: `{parent}` is a value, not a section")
        node = child
    node[leaf] = value


def _short(value: object, chars: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= chars else text[: chars - 3] + "..."


def _keys_beside(location: tuple[int | str, ...]) -> list[str]:
    model: Any = Profile
    for part in location[:-1]:
        if get_origin(model) is dict:  # `part` is a key that the user chose, such as a model's name in `prices`
            model = get_args(model)[1]
        else:
            field = getattr(model, "model_fields", {}).get(str(part))
            model = field.annotation if field else None
    return list(getattr(model, "model_fields", ()))
