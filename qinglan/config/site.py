"""Sections about the site: tenant, services, money, folders, machines, notifications, and what is
kept for how long."""

import hashlib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from qinglan.config.base import (
    EMBEDDED,
    Count,
    LocalPath,
    Positive,
    SecretName,
    Section,
    Share,
    Url,
    uses_proxy,
)
from qinglan.config.training import AlarmName

NotifyFormat = Literal["json", "feishu", "dingtalk", "wecom", "slack"]
NotifyTopic = Literal["failed", "waiting", "running", "alarm", "approval", "refused"]
Days = Annotated[float, Field(ge=0)]


class Tenant(Section):
    """The owner of the questions."""

    id: str = "default"
    """Sent to the RAG as `tenant_id`, and part of every row id."""
    domain: str = "健康保健品"
    """Subject of the knowledge base; fills the prompt."""
    teacher_rules: str = ""
    """Further rules for the teacher, such as what a rewrite of this tenant must name;
    `qinglan prompts` shows them in place."""
    judge_rules: str = ""
    """Further rules for `judge` where it scores a rewrite or an answer.

    It scores passages without them, as a released judge (`judge.local`) does all texts; the recipe
    `answer_judge` never asks it.
    """

    @property
    def file_name(self) -> str:
        """The id as a name for files and folders.

        It never becomes a path as it is, and no two ids share a name.
        """
        if re.fullmatch(r"[a-z0-9_]{1,40}", self.id):
            return self.id
        # The digest is of the id as it is, as two ids may have the same slug.
        slug = re.sub(r"[^a-z0-9_]+", "_", self.id.lower())[:40]
        return f"{slug}-{hashlib.sha256(self.id.encode()).hexdigest()[:12]}"


class Endpoint(Section):
    """An OpenAI-compatible chat endpoint."""

    base_url: Url = EMBEDDED
    """Address up to and including `/v1`, or `embedded` for the simulator."""
    model: str
    api_key_env: SecretName | None = None
    """Name of the environment variable that holds the API key."""
    temperature: float = 0.0
    """Sampling temperature; not sent to reasoning models, which refuse it."""
    max_tokens: Count = 256
    timeout_s: Positive = 60
    max_retries: Annotated[int, Field(ge=0)] = 4
    """Retries of one call inside the client, honouring Retry-After."""
    concurrency: Count = 16
    requests_per_minute: Count | None = None
    """The account's limit for this model; nothing is sent beyond it."""
    tokens_per_minute: Count | None = None
    """The account's limit for this model, prompt and answer together."""
    max_answer_chars: Count = 20_000
    """A longer answer is a failure (`answer_too_long`)."""
    reasoning_effort: str | None = None
    """`minimal`, `low`, `medium` or `high`, for models that take it."""
    structured_output: Literal["auto", "json_schema", "json_object", "off"] = "auto"
    """Parameter that asks for an answer in JSON; `auto` decides by the model's name."""
    extra_body: dict[str, Any] = {}
    """More fields of the request, as the service names them; part of the ledger's key."""


class Embedded(Section):
    """The simulators' behaviour; used only where an address says `embedded`."""

    teacher_latency_ms: Annotated[float, Field(ge=0)] = 0.0
    rag_latency_ms: Annotated[float, Field(ge=0)] = 0.0
    fault_rate: Share = 0.0
    """Share of teacher and RAG requests answered with 429, 500 or a dropped connection."""
    pretrain_seconds_max: Positive = 900.0
    """Longest time that the pretraining of the tiny base model may take. It is a fixed number of
    steps, and fails if it would take longer."""
    pretrain_steps: Count | None = None
    """Steps of that pretraining; those of the recipe's simulated domain if not given."""
    pretrain_seed: int = 1
    """Seed of the tiny base model's first weights and texts."""
    domain: str | None = None
    """Recipe whose sample and base model `embedded` means; this profile's if not given. That way a
    recipe without a simulated domain can borrow another's base model."""
    sample_train_rows: Count = 2000
    sample_dev_rows: Count = 400
    sample_test_rows: Count = 1000
    sample_seed: int = 13


class LedgerStore(Section):
    """The store of paid answers."""

    url_env: SecretName | None = None
    """Name of the environment variable that holds the SQLAlchemy URL of a PostgreSQL database; a
    SQLite file under `paths.state` if not given. Several machines need the server."""


class Budget(Section):
    """Limits of the spending on teacher and judge together, in US dollars by `prices`."""

    per_run_usd: Positive | None = None
    per_month_usd: Positive | None = None
    """Limit for all runs on this ledger together since the first of the month, UTC."""
    when_spent: Literal["stop", "go_on"] = "stop"
    """`stop` ends the run with all answers kept; `go_on` goes on to the dataset with the rows that
    have one, the others fail as `over_budget`."""
    rl_new_share: Share = 0.2
    """Share of RL's samples that the dry run expects to be new: one that equals an earlier one is
    judged and paid once.

    It is a guess until your own first run; `make bench NAME=rehearsals` shows those of rehearsals.
    """


class Trainer(Section):
    """The machines and limits of training processes."""

    device: Literal["cpu", "cuda"] = "cpu"
    gpus_per_node: Count = 1
    step_s: dict[Literal["sft", "rl"], Positive] = {}
    """Seconds that a training step takes here, as measured, for `--dry-run` before the profile's
    first training."""
    nodes: Count = 1
    python: LocalPath | None = None
    """Interpreter of the trainer's environment; if not given, this one, or `python` on a Ray
    cluster's nodes."""
    threads: Count = 2
    """OMP threads of a training process on the CPU."""
    ray_dashboard_url: Url | None = None
    """Address of a Ray cluster's dashboard, such as http://127.0.0.1:8265: training processes run
    there as Ray jobs (docs/how-to/gpus.md). They run on this machine if not given."""
    ray_token_env: SecretName | None = None
    """Name of the environment variable that holds the token, for a cluster that asks for one
    (RAY_AUTH_MODE=token)."""
    dashboard_retry_s: Positive = 600
    """Time for which a dashboard that doesn't answer is asked again before the flow gives up; the
    job goes on."""
    max_restarts: Annotated[int, Field(ge=0)] = 2
    """Most times that SFT and RL are started again, from their newest checkpoint, where they died
    within one flow run."""
    stalled_after_s: Positive = 1800
    """SFT or RL that wrote no metric, sample or checkpoint for so long is ended, and started again
    like one that died.

    Make it longer than a step, an evaluation on the dev split, and the loading of the model may
    take. Merging, export and generation are ended where neither their files nor their logs grew for
    so long.
    """

    @property
    def is_elsewhere(self) -> bool:
        """Do training processes run on other machines?

        Several nodes are other machines, also where their dashboard is reached by a tunnel.
        """
        if self.ray_dashboard_url is None:
            return False
        return self.nodes > 1 or uses_proxy(self.ray_dashboard_url)

    @property
    def gpus_of(self) -> dict[str, int]:
        """Number of GPUs that SFT, which stays on one node, and RL take; a machine without GPUs
        counts as one."""
        # On the CPU one process trains, whatever `gpus_per_node` says.
        per_node = self.gpus_per_node if self.device == "cuda" else 1
        return {"sft": per_node, "rl": per_node * self.nodes}


class Price(Section):
    """US dollars per million tokens."""

    input_per_million_usd: Annotated[float, Field(ge=0)]
    output_per_million_usd: Annotated[float, Field(ge=0)]
    batch_factor: Share = 0.5
    """Share of these prices that the batch API takes."""


class LocalJudge(Section):
    """A released judge of passages of our own that RL asks in the judge's place
    (docs/how-to/answer-judge.md)."""

    model: str
    """Registered model whose champion is served, such as `qinglan.sample.passage_judge`."""
    price: Price = Price(input_per_million_usd=0, output_per_million_usd=0)
    """Price of its tokens on your own machine; they cost nothing if not given."""
    max_tokens: Count = 256
    concurrency: Count = 16
    timeout_s: Positive = 60
    gpu: str | None = None
    """`CUDA_VISIBLE_DEVICES` of its server, which RL must leave free; it is served on the CPU if
    not given."""
    extra: dict[str, Any] = {}
    """More arguments of ms-swift's server, such as the `template` of another family than the
    student's."""
    agreement_rows: Count = 200
    """Dev rows on which both judges are asked before RL."""
    min_agreement: Annotated[float, Field(ge=-1, le=1)] = 0.6
    """Lowest Cohen's κ with the judge, on passages that RL asks about: the lower end of its 95%
    interval must reach this."""
    min_agreement_pairs: Count = 100
    """Fewest passages that both must have judged: with fewer the interval promises too much, above
    all where few are right."""
    when_below: Literal["stop", "go_on"] = "stop"
    """Consequence of an agreement below `min_agreement`; `go_on` only warns."""


class Judge(Endpoint):
    """The judge. With `local`, RL asks that one; agreement, baseline and evaluation still ask this
    one."""

    local: LocalJudge | None = None


class Paths(Section):
    """The folders of a site."""

    runs: Annotated[Path, AfterValidator(Path.expanduser)] = Path("runs")
    state: Annotated[Path, AfterValidator(Path.expanduser)] = Path(".qinglan")
    """Ledger, embedded base models, Prefect's and MLflow's local databases."""


class Tracking(Section):
    """MLflow."""

    uri: Url | None = None
    """Tracking URI; a SQLite file under `paths.state` if not given."""
    experiment: str = "qinglan"
    rows: Literal["path", "copy"] = "path"
    """Part of a file that MLflow gets where it holds or quotes rows: `path`, its path, digest and
    number of rows; `copy`, the file itself, and with it people's questions."""
    traces_per_stage: Annotated[int, Field(ge=0)] = 50
    """Calls to teacher, answerer, judge and RAG of each stage but RL that become traces in MLflow
    with `rows: copy`, drawn by what is asked; 0 for none.

    50 cost a stage one to four seconds; all of ten thousand calls would cost minutes.
    """


class Notify(Section):
    """Notifications that Prefect sends (docs/how-to/prefect.md)."""

    webhook_url_env: SecretName | None = None
    """Name of the environment variable that holds the webhook's address, which is a secret; without
    it, no notification is sent.

    `qinglan deploy` hands the address to Prefect's server, which keeps it encrypted.
    """
    format: NotifyFormat = "json"
    """Format that the webhook understands: that of a group's robot of Feishu (Lark), DingTalk,
    WeCom or Slack, or `json`, an object with `text`, `topic`, `profile`, `name`, `reason` and
    `link`."""
    about: tuple[NotifyTopic, ...] = (
        "failed",
        "waiting",
        "running",
        "alarm",
        "approval",
        "refused",
    )
    """Events that are reported.

    `failed`: a flow run failed, crashed or timed out. `waiting`: none of the workers took it within
    `waiting_s`. `running`: it has not ended within `running_s`. `alarm`: a training run raised an
    alarm. `approval`: the gate waits for a person (`gate.approval`). `refused`: the gate did not
    release the model.
    """
    waiting_s: Annotated[int, Field(ge=10)] = 7_200
    """A run that is late by this much is reported: the workers may be down, or another run may hold
    the device."""
    running_s: Annotated[int, Field(ge=10)] = 172_800
    """A run that takes longer than this is reported."""
    ui_url: Url | None = None
    """Address at which users reach Prefect's UI, for the link; the server's own name for itself
    (its PREFECT_UI_URL) if not given."""


class Automations(Section):
    """Prefect's own answers to crashes and alarms (docs/how-to/prefect.md)."""

    crashed_after_s: Annotated[int, Field(ge=10)] = 900
    """A deployed run that sends no heartbeat for this long is marked as crashed.

    Runs send one every 30 s under `qinglan up`, compose.yaml and the charts' values, else every 180
    s (PREFECT_FLOWS_HEARTBEAT_FREQUENCY of the worker): keep it at three times that or more. There
    is one for the whole server: that of the profile deployed last holds.
    """
    crash_retries: Annotated[int, Field(ge=0, le=5)] = 2
    """Most times that a crashed run is put back into its queue, where it goes on from its finished
    stages. There is one for the whole server, as above."""
    retry_after_s: Annotated[int, Field(ge=10)] = 30
    """A crashed run goes back into its queue after this time: its worker reports a crash more than
    once."""
    pause_at: tuple[AlarmName, ...] = (
        "reward_up_gold_down",
        "reward_up_judge_down",
        "entropy_collapse",
        "reward_down",
    )
    """Alarms after which no training of this profile starts by itself until someone resumes the
    deployment; the run that raised it does what `rl.alarms` says."""


class Retention(Section):
    """The ages at which `qinglan clean-up` removes things (docs/how-to/clean-up.md); `null` keeps
    them for ever.

    A run's days count from its last work. What a registered model, a running run or a run that is
    kept needs stays, whatever is written here.
    """

    run_days: Days | None = 60
    """Finished runs that are older are removed, except the newest of each flow."""
    runs_per_flow: Count | None = None
    """Newest finished runs of each flow that stay; the others are removed whatever their age."""
    unfinished_days: Days | None = 14
    """Runs that were interrupted and not continued since."""
    checkpoint_days: Days | None = 7
    """Checkpoints of finished runs; the models and adapters that they handed on stay."""
    superseded_days: Days | None = 14
    """Files that a stage left which had to start anew, `<stage>.superseded-N`."""
    dataset_days: Days | None = 365
    """Dataset versions that no run, training or registered model uses; the newest stays."""
    mlflow_days: Days | None = 180
    """MLflow's runs with their artifacts, whose run folder was removed before."""
    flow_run_days: Days | None = 30
    """Prefect's flow runs that have ended, with their logs and artifacts."""
    log_days: Days | None = 30
    """Files of `qinglan up` and of servers in `logs/` under `paths.state` that no process has
    written to since."""
    min_free_mb: Count = 500
    """Free space at `paths.runs` and `paths.state` without which no stage starts. SFT and RL want
    more, by the model."""
