"""The format number in every file that a later Qinglan reads.

A file with a higher number is refused in one line. The number of a manifest covers the data files
that it describes as well. Raise it together with a change that other code would misread.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from qinglan.errors import ArtifactError

SCHEMA_VERSION = 1
KEY = "schema_version"
Model = TypeVar("Model", bound=BaseModel)


def with_version(values: dict[str, Any]) -> dict[str, Any]:
    return {KEY: SCHEMA_VERSION} | values


def dump_record(record: BaseModel) -> dict[str, Any]:
    return with_version(record.model_dump(mode="json"))


def record_line(record: BaseModel) -> str:
    """The record as a line of JSON, with the line's end."""
    return json.dumps(dump_record(record), ensure_ascii=False) + "\n"


def check_version(values: dict[str, Any], where: object) -> dict[str, Any]:
    """The values without their format number.

    Raises `ArtifactError` where a later version wrote them, or the number is none. `where` begins
    the message.
    """
    # Files of before the first number are of the first format.
    number = values.get(KEY, SCHEMA_VERSION)
    # To Python, True is an integer.
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ArtifactError(
            f"{where}: {KEY} is {number!r}, which is no version; restore it from a backup"
        )
    if number > SCHEMA_VERSION:
        formats = f"format {number}, this one reads up to {SCHEMA_VERSION}"
        hint = "upgrade this one (docs/how-to/backup.md)"
        raise ArtifactError(f"{where}: written by a newer Qinglan ({formats}); {hint}")
    return {name: value for name, value in values.items() if name != KEY}


def parse_record(model: type[Model], content: str | bytes, where: object) -> Model:
    """A record from a line or a file's content; raises the errors of `read_record`."""
    try:
        values = json.loads(content)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        # The model says what is wrong with the content.
        return model.model_validate_json(content)
    return model.model_validate(check_version(values, where))


def read_record(model: type[Model], path: Path) -> Model:
    """A record from a file.

    Raises `OSError`, `ValidationError`, or `ArtifactError` where a later version wrote it.
    """
    return parse_record(model, path.read_bytes(), path)


def find_record(model: type[Model], path: Path) -> Model | None:
    """A record from a file, and None where there is no file that can be read."""
    with suppress(OSError, ValueError):
        return read_record(model, path)
    return None


def read_lines(model: type[Model], path: Path, what: str, hint: str) -> list[Model]:
    """A record a line, none where there is no file.

    Raises ArtifactError where a line is damaged, as none may be skipped. The message calls a line
    `what`, and ends with the hint.
    """
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            records.append(parse_record(model, line, place))
        except ValidationError as error:
            raise ArtifactError(f"{place}: is no {what} ({first_flaw(error)}); {hint}") from error
    return records


def first_flaw(error: ValidationError) -> str:
    """The place where a record is wrong first, and the problem there."""
    problem = error.errors()[0]
    place = ".".join(map(str, problem["loc"])) or "content"
    return f"`{place}`: {problem['msg']}"
