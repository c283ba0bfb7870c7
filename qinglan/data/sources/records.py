"""An input row as its file has it, and the columns that are read."""

import math
import re
from collections.abc import Mapping, Sequence
from datetime import date, time
from typing import Any, NamedTuple

from openpyxl.utils import get_column_letter

from qinglan.config import Columns, Data
from qinglan.errors import WorkbookError
from qinglan.recipes import Input
from qinglan.text import nearest_names

FIELDS = tuple(field for field in Columns.model_fields if field != "inputs")
"""Columns that every recipe knows; a recipe's own are `input_field(name)`."""

# Not allowed in XML 1.0, or not encodable at all (lone surrogates out of JSON escapes).
_ILLEGAL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]|_x000D_")
_SHOWN_NAMES = 12


class MissingColumnError(WorkbookError):
    """A required column is not there; `header` has the names that are, without empty ones."""

    def __init__(self, message: str, header: Sequence[str]) -> None:
        super().__init__(message)
        self.header = list(header)


class Record(NamedTuple):
    """An input row as its file has it, not yet checked."""

    prefix: str
    """The part of its source before the number: `q.xlsx!Sheet1!A` or `q.jsonl:`."""
    number: int
    """Number of the row or line."""
    cells: Mapping[str, Any]
    """Value by field name (`query`, `profile`, …, `inputs.NAME`); absent columns are absent."""
    flaw: str | None = None
    """A reason that only the file format shows, such as a merged cell."""
    blank: bool = False


class InputColumns(NamedTuple):
    """The columns to read from an input, and the sheet."""

    names: Mapping[str, str]
    """The column's name by field."""
    required: frozenset[str]
    """Fields whose columns must be there: the query's, a required input's, and each that the
    profile names."""
    sheet: str | None = None

    @classmethod
    def of(cls, data: Data, inputs: Sequence[Input] = ()) -> "InputColumns":
        """The profile's columns; it may give the recipe's inputs other names than the recipe."""
        default_names = {field: Columns.model_fields[field].default for field in FIELDS}
        profile_names = {field: getattr(data.columns, field) for field in FIELDS}
        required = {"query"}
        for recipe_input in inputs:
            field = input_field(recipe_input.name)
            default_names[field] = recipe_input.column
            if recipe_input.required:
                required.add(field)
        for input_name, column in data.columns.inputs.items():
            profile_names[input_field(input_name)] = column

        names: dict[str, str] = {}
        for field, default_name in default_names.items():
            name = profile_names.get(field, default_name)
            is_switched_off = not name
            if is_switched_off:
                continue
            names[field] = name
            if name != default_name:
                # Who names a column expects it to be read: a misspelt one must not pass silently.
                required.add(field)
        return cls(names, frozenset(required), data.sheet)

    def cells(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values by field, out of values by column name; columns that are absent stay absent."""
        cells = {}
        for field, name in self.names.items():
            if name in values:
                cells[field] = values[name]
        return cells


def input_field(name: str) -> str:
    """The field name of a recipe's own input."""
    return f"inputs.{name}"


def column_places(header: Sequence[str], columns: InputColumns, where: str) -> dict[str, int]:
    """Position of each used column that is there, by field.

    WorkbookError where a required column is not there, or a used one is twice.
    """
    places: dict[str, int] = {}
    for field, name in columns.names.items():
        if header.count(name) > 1:
            letters = column_letters(header, name)
            raise WorkbookError(
                f"{where}: column `{name}` is in the header twice ({letters}); rename one"
            )
        if name in header:
            places[field] = header.index(name)
        elif field in columns.required:
            raise _missing_column(header, field, name, where)
    return places


def column_letters(header: Sequence[str], title: str) -> str:
    """Letters of all the columns with this title, such as `B and D`."""
    letters = []
    for number, name in enumerate(header, start=1):
        if name == title:
            letters.append(get_column_letter(number))
    return " and ".join(letters)


def _missing_column(header: Sequence[str], field: str, name: str, where: str) -> WorkbookError:
    """The error for a required column: how the file differs from what was expected."""
    names = [title for title in header if title]
    # One name with another separator in it: the whole header was read as one column.
    if len(names) == 1 and re.search(r"[;\t|]", names[0]):
        problem = f"cells are not separated by commas (header: {names[0]!r})"
        return WorkbookError(f"{where}: {problem}; save it as comma-separated CSV")

    shown_names = f"found: {listed(names) or 'none'}"
    suggestion = "NAME"
    nearest = nearest_names(name, names, cutoff=0.3)
    if nearest:
        suggestion = nearest[0]
        shown_names += f"; nearest: {suggestion}"
    hint = f"rename it or run with --set data.columns.{field}={suggestion}"
    return MissingColumnError(f"{where}: no column `{name}` ({shown_names}); {hint}", names)


def listed(names: Sequence[str]) -> str:
    """The first of a header's names; an empty text where it has none."""
    first_names = ", ".join(names[:_SHOWN_NAMES])
    return f"{first_names}, …" if len(names) > _SHOWN_NAMES else first_names


def cell_text(value: Any) -> str:
    """A cell's text for a prompt: no illegal characters, 12.0 as 12, dates in ISO form."""
    if value is None:
        return ""
    if isinstance(value, float):
        # pandas writes NaN for an empty cell.
        if math.isnan(value):
            return ""
        if value.is_integer():
            value = int(value)
    if isinstance(value, date | time):
        value = value.isoformat()
    return without_illegal(str(value)).strip()


def without_illegal(text: str) -> str:
    """The text without the characters that XML can't hold."""
    return _ILLEGAL.sub("", text)
