"""A batch's input file: one request per line, and the reasons for which OpenAI refuses the whole of it."""

from collections.abc import Collection
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

MAX_REQUESTS = 50_000
"""Of one batch, as at OpenAI."""


class Line(NamedTuple):
    """One request of an input file."""

    custom_id: str
    body: object


class _InputLine(BaseModel):
    model_config = ConfigDict(strict=True)

    custom_id: str
    method: Literal["POST"]
    url: Literal["/v1/chat/completions"]
    body: dict[str, Any]


def read_input(content: bytes, models: Collection[str]) -> tuple[list[Line], list[dict[str, Any]]]:
    """An input file's lines, and what is wrong with them."""
    lines: dict[str, Line] = {}
    errors: list[dict[str, Any]] = []
    texts = content.splitlines()
    for number, text in enumerate(texts, 1):
        try:
            line = _InputLine.model_validate_json(text)
        except ValidationError as error:
            problem = error.errors()[0]["msg"]
            errors.append(_error("invalid_json_line", f"This line is no batch request: {problem}", number))
            continue
        if line.custom_id in lines:
            errors.append(_error("duplicate_custom_id", f"The custom_id '{line.custom_id}' is not unique.", number))
        if (model := line.body.get("model")) not in models:
            errors.append(_error("model_not_found", f"The model '{model}' does not exist.", number))
        lines[line.custom_id] = Line(line.custom_id, line.body)
    if not 1 <= len(texts) <= MAX_REQUESTS:
        errors.append(_error("invalid_file", f"A batch has 1 to {MAX_REQUESTS} requests; this has {len(texts)}."))
    return list(lines.values()), errors


def _error(code: str, message: str, line: int | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": None, "line": line}
