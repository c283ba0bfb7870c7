"""What both kinds of grading share."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from qinglan.clients.row_batches import OVER_BUDGET
from qinglan.errors import TeacherError
from qinglan.recipes.kinds.recipe import Message, Recipe

if TYPE_CHECKING:
    from qinglan.clients.roles import Clients
    from qinglan.rows import ArmRow

_TEXT = pa.string()


class PrimaryMetric(NamedTuple):
    """The part of the reward that tells how good the policy is, such as `gold_top1`, and its name in a sentence."""

    part: str
    words: str


class Measured(NamedTuple):
    """Arms with what their texts are worth."""

    arms: "dict[str, list[ArmRow]]"
    unjudged: dict[str, int]
    """Questions without a judge's score in any arm, by the reason why the call failed."""


async def judged(clients: "Clients", messages: list[Message], recipe: Recipe) -> float | None:
    """The score; None where a run that goes on without money could not pay for it: the answer is good all the same."""
    try:
        return (await clients.judge.ask(messages, recipe.parse_judge, recipe.JUDGE_SCHEMA)).value
    except TeacherError as error:
        if error.reason != OVER_BUDGET:
            raise
        return None


def rl_schema(extra_info: Mapping[str, pa.DataType]) -> pa.Schema:
    """Of a file that verl reads; `extra_info` is what our reward is told."""
    return pa.schema(
        {
            "data_source": _TEXT,
            "prompt": pa.list_(pa.struct({"role": _TEXT, "content": _TEXT})),
            "ability": _TEXT,
            "reward_model": pa.struct({"style": _TEXT, "ground_truth": _TEXT}),
            "extra_info": pa.struct(dict(extra_info)),
        }
    )


def rl_record(
    recipe: Recipe, prompt: Sequence[Message], ground_truth: str, extra_info: Mapping[str, Any]
) -> dict[str, Any]:
    """A line of such a file."""
    return {
        "data_source": f"qinglan/{recipe.NAME}",
        "prompt": list(prompt),
        "ability": recipe.NAME,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": dict(extra_info),
    }


def outline(label: str, low: float, high: float, counts: Sequence[int]) -> dict[str, Any]:
    """A distribution as the report draws it."""
    return {"label": label, "low": low, "high": high, "counts": list(counts)}
