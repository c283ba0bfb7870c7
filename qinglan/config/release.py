"""Sections about a trained model: the gate, the registry, serving and the canary."""

import ipaddress
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from qinglan.config.base import Count, LocalPath, Positive, SecretName, Section, Share
from qinglan.config.training import AlarmName

NotNegative = Annotated[float, Field(ge=0)]
Consent = Literal["none", "header", "all"]
_DEFAULT_CLIENT = "default"
"""The client whose key `serve.api_key_env` names."""


class Gate(Section):
    """May the challenger replace the champion? Every rule must hold (docs/reference/gate.md)."""

    challenger: Literal["sft", "rl"] = "rl"
    """The arm that is to be released."""
    fallback: Literal["sft", "rl"] | None = None
    """The arm that the same rules are asked about where the challenger is not released; null for no
    other. A second try can double the rate at which a model is released that is no better."""
    rivals: Annotated[tuple[str, ...], Field(min_length=1)] = ("teacher",)
    """Arms that it must beat, beside the champion where there is one: `teacher`, `base`, `sft`,
    `rl`, one of `evaluate.teachers`, or `original` where the recipe retrieves.

    The report's verdict is about the first.
    """
    max_quality_loss: NotNegative = 0.2
    """Non-inferiority margin on the judge's scale of 0–5: the 95% interval of the difference must
    lie above −margin. It counts for recipes that have the judge's score as a metric."""
    min_gain: NotNegative = 0.0
    """Smallest gain over each rival, above which the 95% interval of the difference must lie, on
    the first of the recipe's metrics that has values."""
    smallest_gain: Positive = 0.03
    """The gain worth finding: an interval that ends below it fails, and a test set that can't
    detect it makes the gate say how many rows would."""
    max_cost_ratio: Positive | None = 0.5
    """Highest cost per 1,000 questions, as a share of the teacher's, where a teacher was evaluated;
    null for no limit."""
    max_latency_p95_ms: Positive | None = None
    max_latency_ratio: Positive | None = 1.0
    """Highest median latency, as a share of the teacher's where both were measured; null for no
    limit."""
    accepted_alarms: tuple[AlarmName, ...] = ()
    """Alarms of RL up to the chosen step that don't block a release; all others do."""
    approval: Literal["none", "required"] = "none"
    """`required`: a person decides in Prefect's UI once the gate says yes."""
    approval_timeout_s: Positive = 86_400

    @model_validator(mode="after")
    def _can_find_a_gain(self) -> Self:
        # An interval would have to end above the one and below the other.
        if self.smallest_gain <= self.min_gain:
            raise ValueError(
                f"smallest_gain {self.smallest_gain:g} is not above min_gain {self.min_gain:g}, "
                "so that no test set could tell it from the limit; raise smallest_gain or lower "
                "min_gain"
            )
        return self

    def about(self, arm: str) -> "Gate":
        """The same rules about another arm.

        It is no rival of itself; one without another rival must beat the base.
        """
        # Without any rival nothing would be compared, and every arm would pass.
        rivals = tuple(rival for rival in self.rivals if rival != arm) or ("base",)
        return self.model_copy(update={"challenger": arm, "rivals": rivals})


Band = tuple[Share, Share]


class Targets(Section):
    """The site's goals: the report shows them beside what was found, and a stage whose rows leave
    their band warns as it ends. The gate does not ask them."""

    gain: Positive | None = None
    """Gain of the challenger over the first of `gate.rivals`, on the recipe's first metric."""
    quality_loss: NotNegative | None = None
    """Largest loss of the challenger in the judge's score."""
    cost_saving: Share | None = None
    """Share of the teacher's cost per 1,000 questions that is saved."""
    latency_saving: Share | None = None
    """Share of the teacher's median latency that is saved."""
    rows: dict[Literal["distill", "validate", "select", "dataset"], Band] = {}
    """Shares of the questions that are left after a stage, lowest and highest:
    `{select: [0.5, 0.8]}`."""
    run_usd: Positive | None = None
    """Highest cost of a run's paid calls."""
    days: Positive | None = None
    """Longest time that the stages work together, in days, pauses left out."""


class Release(Section):
    """The registry of released models."""

    name: str | None = None
    """Name of the registered model; `qinglan.<tenant>.<recipe>` if not given."""
    promote: Literal["champion", "challenger", "none"] = "champion"
    """Role of a model that passed the gate: `challenger` leaves the rest to a canary."""
    max_artifact_mb: Positive = 200
    """Weights up to this size go into MLflow themselves, larger ones by path and digest."""


class RequestLog(Section):
    """The questions of live requests that the router keeps; refresh can read the folder as a
    workbook."""

    folder: LocalPath | None = None
    """Folder of the log, one file a day with the workbook's column names; null keeps no text at
    all."""
    consent: Consent = "none"
    """Consent that a question needs to be kept: `none` keeps nobody's, `header` those of requests
    with `x-log-consent: yes`, `all` everybody's."""
    redact: bool = True
    """Phone, identity-card and bank-card numbers and e-mail addresses become placeholders."""
    keep_days: Count = 30
    """Days for which files are kept; those of earlier days are removed."""


class ApiKey(Section):
    """A client of the router, which its key names."""

    key_env: SecretName
    consent: Consent | None = None
    """Consent that its questions need to be kept in the request log; `request_log.consent` if not
    given."""
    logged_per_day: Count | None = None
    """Most of its questions that are kept a day; any number if not given."""


class Canary(Section):
    """A share of live traffic for the challenger, and when it ends."""

    share: Share = 0.1
    min_requests: Count = 200
    """Requests to the challenger before its latency counts, and before it is called better."""
    max_error_gain: Share = 0.02
    """Largest share of the challenger's requests answered by the fallback, above the champion's, at
    95% confidence."""
    max_latency_ratio: Positive = 1.5
    """Highest p95 latency of the challenger, over that of the champion."""
    max_retrieval_loss: NotNegative = 0.02
    """Largest loss in the RAG's score of the best passage, paired on the same questions: the
    challenger is rolled back where the interval lies below −loss."""
    compare_share: Share = 0.2
    """Share of the requests that are put to both models and the RAG in the background."""
    check_every_s: Positive = 5
    keep_for_s: Positive = 86_400
    """Seconds after which a canary that was neither rolled back nor promoted ends as `undecided`:
    the champion stays."""


class Serve(Section):
    """The endpoint of the champion: OpenAI-compatible, with an answer or a reason before the
    deadline."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key_env: SecretName | None = None
    """Name of the environment variable that holds the key of a client called `default`. A key, here
    or in `api_keys`, is required where `host` is not loopback."""
    api_keys: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,40}$")], ApiKey] = {}
    """Further clients by their names, which the request log gives as the origins of their
    questions.

    Each has the variable that holds its key, and, if given, the consent that holds for it instead
    of `request_log.consent`, and how many of its questions the log takes a day.
    """
    deadline_ms: Positive = 800
    """Time from the request's arrival to the answer: by then it is the model's, or what the recipe
    gives in its place, the original question or HTTP 503."""
    max_in_flight: Count = 256
    """Requests that wait for a model at the same time; any more are answered without one,
    immediately."""
    max_connections: Count = 512
    """Open connections; of any more, those are closed that have waited longest for their client."""
    max_body_bytes: Count = 65_536
    max_query_chars: Count = 512
    max_context_chars: Count = 2_000
    max_answer_chars: Count | None = None
    """A longer answer of the model is not used. The limit is 200 for a rewrite of the question if
    not given, and none for other answers."""
    backend: Literal["transformers", "vllm"] | None = None
    """Engine that answers, in evaluation too; null chooses by `trainer.device`."""
    extra: dict[str, Any] = {}
    """More arguments of `swift deploy`, passed through as they are; evaluation takes those for
    vLLM, such as `vllm_max_model_len`."""
    models_per_gpu: Count = 1
    """Models that share a GPU, or a group of `rl.tensor_model_parallel_size` GPUs; vLLM's part of
    the memory is divided by it.

    A swap, a canary and a warm previous model each need memory for one more model than the
    champion.
    """
    keep_previous_warm: bool = True
    """The model before the champion stays loaded, so that a rollback takes seconds."""
    poll_every_s: Positive = 1.0
    """Seconds between two looks for changes in the registry."""
    try_page: Literal["none", "models", "with_teacher"] = "none"
    """A page at the router's address on which one question is put to the models in service, and
    with `with_teacher` to the teacher as well, which costs money.

    It shows questions of the test split to everybody who has a key.
    """
    request_log: RequestLog = RequestLog()
    canary: Canary = Canary()

    @property
    def vllm_arguments(self) -> dict[str, Any]:
        """The arguments of `extra` that are for vLLM, under its own names."""
        arguments = {}
        for name, value in self.extra.items():
            if name.startswith("vllm_"):
                arguments[name.removeprefix("vllm_")] = value
        return arguments

    @property
    def clients(self) -> dict[str, ApiKey]:
        """All clients that have a key, by name."""
        clients: dict[str, ApiKey] = {}
        if self.api_key_env:
            clients[_DEFAULT_CLIENT] = ApiKey(key_env=self.api_key_env)
        return clients | self.api_keys

    def consent_of(self, client: str) -> Consent:
        key = self.clients.get(client)
        if key and key.consent:
            return key.consent
        return self.request_log.consent

    @model_validator(mode="after")
    def _open_to_others_only_with_a_key(self) -> Self:
        if self.api_key_env and _DEFAULT_CLIENT in self.api_keys:
            raise ValueError(
                f"api_keys: {_DEFAULT_CLIENT} is the client of api_key_env; choose another name"
            )
        try:
            is_loopback = ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            # It is a name, and others than this one may lead to any machine.
            is_loopback = self.host == "localhost"
        if not self.clients and not is_loopback:
            raise ValueError(
                f"host {self.host} can be reached from other machines; set api_key_env to the name "
                "of an environment variable with a key, or host to 127.0.0.1"
            )
        return self
