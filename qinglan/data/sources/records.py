"""An input row as its file has it, and the columns that are read."""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from datetime import date, time
from typing import Any, NamedTuple

from openpyxl.utils import get_column_letter

from qinglan.config import Columns, Data
from qinglan.errors import WorkbookError
from qinglan.recipes import Input

FIELDS = tuple(field for field in Columns.model_fields if field != "inputs")
"""Columns that every recipe knows; a recipe's own are `input_field(name)`."""

# Not allowed in XML 1.0, or not encodable at all (lone surrogates out of JSON escapes).
_ILLEGAL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]|_x000D_")
_SHOWN_NAMES = 12


class MissingColumnError(WorkbookError):
    """A required column is not there; `found` is the header."""

    def __init__(self, message: str, found: Sequence[str]) -> None:
        super().__init__(message)
        self.found = list(found)


class Record(NamedTuple):
    """An input row as its file has it, not yet checked."""

    prefix: str
    """The part of its source before the number: `q.xlsx!Sheet1!A` or `q.jsonl:`."""
    number: int
    """Of the row or line."""
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
        default = {field: Columns.model_fields[field].default for field in FIELDS}
        default |= {input_field(each.name): each.column for each in inputs}
        named = {field: getattr(data.columns, field) for field in FIELDS}
        named |= {input_field(name): column for name, column in data.columns.inputs.items()}
        names = {field: column for field in default if (column := named.get(field, default[field]))}
        required = {"query", *(input_field(each.name) for each in inputs if each.required)}
        required |= {field for field, column in names.items() if column != default[field]}
        return cls(names, frozenset(required), data.sheet)


def input_field(name: str) -> str:
    return f"inputs.{name}"


def column_places(found: Sequence[str], columns: InputColumns, where: str) -> dict[str, int]:
    """Position of each used column that is there; WorkbookError where a required one is not, or a
    used one is twice."""
    places = {}
    for field, name in columns.names.items():
        if found.count(name) > 1:
            letters = " and ".join(
                get_column_letter(i + 1) for i, other in enumerate(found) if other == name
            )
            raise WorkbookError(
                f"{where}: column `{name}` is in the header twice ({letters}); rename one"
            )
        if name in found:
            places[field] = found.index(name)
        elif field in columns.required:
            names = [other for other in found if other]
            if len(names) == 1 and re.search(r"[;\t|]", names[0]):
                problem = f"cells are not separated by commas (header: {names[0]!r})"
                raise WorkbookError(f"{where}: {problem}; save it as comma-separated CSV")
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.3)
            known = f"found: {listed(names) or 'none'}{f'; nearest: {near[0]}' if near else ''}"
            hint = f"rename it or run with --set data.columns.{field}={near[0] if near else 'NAME'}"
            raise MissingColumnError(f"{where}: no column `{name}` ({known}); {hint}", names)
    return places


def listed(names: Sequence[str]) -> str:
    """The first of a header's names; an empty text where it has none."""
    return ", ".join(names[:_SHOWN_NAMES]) + (", …" if len(names) > _SHOWN_NAMES else "")


def cell_text(value: Any) -> str:
    """A cell's text for a prompt: no illegal characters, 12.0 as 12, dates in ISO form."""
    if value is None or (
        isinstance(value, float) and math.isnan(value)
    ):  # pandas writes NaN for an empty cell
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, date | time):
        value = value.isoformat()
    return without_illegal(str(value)).strip()


def without_illegal(text: str) -> str:
    """The text without the characters that XML can't hold."""
    return _ILLEGAL.sub("", text)
