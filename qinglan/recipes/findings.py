"""Tables that a recipe adds to the report."""

from pydantic import BaseModel

from qinglan.text import Both


class FindingRow(BaseModel):
    """A line of a finding."""

    label: Both
    values: tuple[bool | float | None, ...]
    """As many as the finding has columns; None where there is no value."""


class Finding(BaseModel):
    """A table that a recipe adds to the report."""

    title: Both
    columns: tuple[Both, ...]
    """Heads of the numbers; the labels' column has none."""
    rows: tuple[FindingRow, ...]
    digits: int = 3
