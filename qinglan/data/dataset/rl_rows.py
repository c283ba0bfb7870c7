"""The rows of the files that verl reads: a prompt, and the row by which its samples are graded."""

from typing import TYPE_CHECKING, Any

from qinglan.config import Tenant
from qinglan.recipes import Recipe
from qinglan.rows import Row

if TYPE_CHECKING:
    import pyarrow as pa


def rl_schema() -> "pa.Schema":
    """The schema of `rl_record`."""
    import pyarrow as pa

    message = pa.struct({"role": pa.string(), "content": pa.string()})
    return pa.schema(
        {
            "data_source": pa.string(),
            "prompt": pa.list_(message),
            "ability": pa.string(),
            "reward_model": pa.struct({"style": pa.string(), "ground_truth": pa.string()}),
            "extra_info": pa.struct(
                {
                    "index": pa.int64(),
                    "row_id": pa.string(),
                    "unit": pa.string(),
                    "row": pa.string(),
                }
            ),
        }
    )


def rl_record(row: Row, recipe: Recipe, tenant: Tenant, index: int = 0) -> dict[str, Any]:
    """A row whose question RL may ask, in `rl_schema`.

    Args:
        index: its place in the file, by which samples are seeded.
    """
    return {
        "data_source": f"qinglan/{recipe.NAME}",
        "prompt": recipe.student_messages(row, tenant),
        "ability": recipe.NAME,
        "reward_model": {"style": "rule", "ground_truth": row.gold_id or ""},
        "extra_info": {
            "index": index,
            "row_id": row.id,
            "unit": row.unit,
            "row": row.model_dump_json(exclude_none=True),
        },
    }
