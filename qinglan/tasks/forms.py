"""Prefect's run form, as its page shows and its server checks it.

It has a flow's parameters, and the settings that a run often changes; `overrides_of` makes
overrides of the profile of them. There is one input per setting, and an empty one is left out. So
an optional setting appears in the schema as the type that it has when it is set: Prefect's page
would show `None or a number` as two buttons.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    model_serializer,
)
from pydantic_core import CoreSchema

from qinglan.config import AlarmAction, Algorithm, profile_names
from qinglan.config.base import Count, Positive

_DistillMode = Literal["live", "batch_api"]
_Promoted = Literal["champion", "challenger", "none"]
_IN_CONFIGS = {"title": "in configs/", "type": "string", "enum": profile_names()}
_BY_PATH = {"title": "by path, in quotes", "pattern": r"\.ya?ml$"}
"""Without a `type`, or Prefect's page could not tell the two apart and would go back to the
first."""
ProfileName = Annotated[str, WithJsonSchema({"anyOf": [_IN_CONFIGS, _BY_PATH]})]
"""The server refuses a name that is neither."""
Override = Annotated[str, Field(json_schema_extra={"pattern": r"^[_a-z]+(\.[^=]+)?="})]
"""`dotted.key=value`; whether there is such a key is said when the profile is read.

A refusal quotes the pattern, and Prefect's command line takes `[a…]` for markup: `[_` and `[^` it
leaves alone.
"""


@dataclass(frozen=True)
class Sets:
    """The profile's key that a form's setting stands for, and its title in the form."""

    key: str
    title: str

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return handler(schema) | {"title": self.title}


def _without_null(schema: dict[str, Any]) -> None:
    """Give each setting the type that it has when it is set, without a default."""
    schema["description"] = Changes.__doc__
    for name, setting in schema.get("properties", {}).items():
        types = setting.pop("anyOf", [])
        setting.pop("default", None)
        types_when_set = [kind for kind in types if kind != {"type": "null"}]
        if types_when_set:
            schema["properties"][name] = {**setting, **types_when_set[0]}


class Changes(BaseModel):
    """Settings of this run; an empty one stays as the profile says."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        json_schema_extra=_without_null,
    )

    @model_serializer(mode="wrap")
    def _without_empty(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if value is not None}


class DataChanges(Changes):
    max_rows: Annotated[Count | None, Sets("data.limit", "Rows to read at most")] = None
    """For a trial (`data.limit`)."""
    run_budget_usd: Annotated[
        Positive | None, Sets("budget.per_run_usd", "Budget of this run, US dollars")
    ] = None
    """For teacher and judge together (`budget.per_run_usd`)."""
    when_spent: Annotated[
        Literal["stop", "go_on"] | None, Sets("budget.when_spent", "When the budget is spent")
    ] = None
    """`stop` ends the run with all answers kept, `go_on` goes on with the rows that have one
    (`budget.when_spent`)."""
    teacher_requests_at_once: Annotated[
        Count | None, Sets("teacher.concurrency", "Requests to the teacher at once")
    ] = None
    """What the account allows (`teacher.concurrency`)."""
    sample_train_rows: Annotated[
        Count | None, Sets("embedded.sample_train_rows", "Sample: training rows")
    ] = None
    """Of the embedded workbook (`embedded.sample_train_rows`); your own workbook has no use for
    it."""
    sample_test_rows: Annotated[
        Count | None, Sets("embedded.sample_test_rows", "Sample: test rows")
    ] = None
    """Of the embedded workbook (`embedded.sample_test_rows`)."""
    sample_seed: Annotated[int | None, Sets("embedded.sample_seed", "Sample: seed")] = None
    """Of the embedded workbook (`embedded.sample_seed`); another seed, other questions."""


class DistillChanges(DataChanges):
    distill_mode: Annotated[
        _DistillMode | None, Sets("distill.mode", "How the teacher is asked")
    ] = None
    """`batch_api` is half the price and takes up to a day (`distill.mode`)."""


class RefreshChanges(DistillChanges):
    train_at_new_rows: Annotated[
        Count | None, Sets("refresh.train_at_new_rows", "New good rows that start a training")
    ] = None
    """Since the last training (`refresh.train_at_new_rows`)."""


class TrainingChanges(Changes):
    sft_epochs: Annotated[Positive | None, Sets("sft.num_train_epochs", "SFT: epochs")] = None
    """Passes over the training rows (`sft.num_train_epochs`)."""
    rl_algorithm: Annotated[Algorithm | None, Sets("rl.algorithm", "RL: algorithm")] = None
    """Those that compare a prompt's answers need `rl.rollouts_per_prompt` above 1
    (`rl.algorithm`)."""
    rl_steps: Annotated[Count | None, Sets("rl.total_steps", "RL: steps")] = None
    """Each asks `rl.train_batch_size` prompts (`rl.total_steps`)."""
    rl_seed: Annotated[int | None, Sets("rl.seed", "RL: seed")] = None
    """Another seed, other samples (`rl.seed`)."""
    at_alarm: Annotated[
        AlarmAction | None, Sets("rl.alarms.default_action", "RL: what is done at an alarm")
    ] = None
    """Where the profile names no other action for that alarm (`rl.alarms.default_action`)."""


class DecisionChanges(Changes):
    approval: Annotated[
        Literal["none", "required"] | None, Sets("gate.approval", "A person's approval")
    ] = None
    """`required`: once the gate says yes, a person decides on Prefect's page (`gate.approval`)."""
    promote: Annotated[
        _Promoted | None, Sets("release.promote", "What a model becomes that passes the gate")
    ] = None
    """`challenger` leaves the rest to a canary, `none` to you (`release.promote`)."""


class TrainChanges(DecisionChanges, TrainingChanges):
    """Settings of this run; an empty one stays as the profile says."""


class PipelineChanges(DecisionChanges, TrainingChanges, DistillChanges):
    """Settings of this run; an empty one stays as the profile says."""


def overrides_of(changes: Changes, overrides: Sequence[str]) -> tuple[str, ...]:
    """Settings as `--set` takes them, first the form's.

    Those by key come last, and so count more.
    """
    form_overrides = []
    for name, value in changes.model_dump().items():
        key = _key_of(type(changes), name)
        form_overrides.append(f"{key}={value}")
    return (*form_overrides, *overrides)


def _key_of(form: type[Changes], setting: str) -> str:
    """The profile's key that a form's setting stands for."""
    for entry in form.model_fields[setting].metadata:
        if isinstance(entry, Sets):
            return entry.key
    raise LookupError(f"{form.__name__}.{setting} has no `Sets`")
