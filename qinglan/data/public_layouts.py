"""Rows in two public layouts become a recipe's workbook (`qinglan dataset import`): FlashRAG's
questions with golden answers one of `answer_judge`, r1-style medical rows one of `medical`."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from qinglan.data.sources.files import read_objects
from qinglan.data.workbook_writer import MAX_CELL_CHARS, write_questions
from qinglan.errors import WorkbookError
from qinglan.recipes import get_recipe
from qinglan.recipes.passage_judge import RIGHT, WRONG
from qinglan.rows import Row, normalise

Layout = Literal["flashrag", "medical-r1"]
_MEDICAL = (
    ("Question", {"answer": "Response", "reasoning": "Complex_CoT"}),
    ("question", {"answer": "answer", "reasoning": "think"}),
    ("question", {"answer": "response (content)", "reasoning": "reasoning (reasoning_content)"}),
    (
        "Open-ended Verifiable Question",
        {"keywords": "Ground-True Answer"},
    ),  # a few words, for an answer to hold
)
"""Fields of the four data sets that docs/how-to/medical.md names."""


def import_rows(
    layout: Layout, source: Path, workbook: Path, report: Callable[[str], None]
) -> tuple[int, int, int]:
    """Write the workbook; how many lines it has, of how many rows, and how many rows were left out.

    `report` gets one line for each row that is left out: file, number, field, and what is wrong.
    """
    recipe, inputs_of = (
        ("answer_judge", _flashrag) if layout == "flashrag" else ("medical", _medical)
    )
    lines, rows, left_out = list[Row](), 0, 0
    for number, fields in _objects(source):
        rows, place = rows + 1, f"{source.name}:{number}"
        try:
            query, found = inputs_of(fields if isinstance(fields, Mapping) else {})
        except WorkbookError as error:
            report(f"{place}: {error}")
            left_out += 1
        else:
            lines += (
                Row(id="", tenant="", query=query, inputs=inputs, source=place) for inputs in found
            )
    if not lines:
        raise WorkbookError(
            f"{source}: none of its {rows:,} rows can be used as `{layout}`; nothing was written"
        )
    write_questions(workbook, lines, get_recipe(recipe))
    return len(lines), rows, left_out


def _objects(path: Path) -> Iterator[tuple[int, Any]]:
    if path.suffix == ".jsonl":
        yield from read_objects(path)
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise WorkbookError(
            f"{path}: not valid JSON ({error}); write one list of rows, or a .jsonl file"
        ) from error
    yield from enumerate(found if isinstance(found, list) else [found], 1)


def _flashrag(fields: Mapping[str, Any]) -> tuple[str, list[dict[str, str]]]:
    """One for each answer to judge: wrong generations, beside them a golden answer, and the `pred`
    that FlashRAG saved, without a verdict. Where there is none of them one without an answer, so
    that the weak model is asked."""
    question, golden = _text(fields, "question"), _texts(fields, "golden_answers")
    wrong = _texts(fields, "wrong_generations") if "wrong_generations" in fields else []
    if both := {normalise(text) for text in golden} & {normalise(text) for text in wrong}:
        raise WorkbookError(
            f"wrong_generations: {both.pop()[:40]!r} is a golden answer too; leave it out of one"
        )
    judged = [{"candidate": text, "verdict": WRONG} for text in wrong]
    judged += [{"candidate": golden[-1], "verdict": RIGHT}] if wrong else []
    output = fields.get("output")
    judged += (
        [{"candidate": _text(output, "pred")}]
        if isinstance(output, Mapping) and "pred" in output
        else []
    )
    return question, [
        {"reference": " 或 ".join(golden)} | inputs for inputs in judged or [dict[str, str]()]
    ]


def _medical(fields: Mapping[str, Any]) -> tuple[str, list[dict[str, str]]]:
    for query, names in _MEDICAL:
        if fields.keys() >= {query, *names.values()}:
            return _text(fields, query), [
                {name: _text(fields, field) for name, field in names.items()}
            ]
    known = "; ".join(", ".join((query, *names.values())) for query, names in _MEDICAL)
    raise WorkbookError(f"has none of these sets of fields: {known}")


def _texts(fields: Mapping[str, Any], name: str) -> list[str]:
    found = fields.get(name)
    if not isinstance(found, list) or not found:
        raise WorkbookError(f"{name}: expected a list of texts; correct it")
    return [_text({name: each}, name) for each in found]


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value.strip():
        raise WorkbookError(f"{name}: expected a text; fill it in")
    if len(value) > MAX_CELL_CHARS:
        raise WorkbookError(
            f"{name}: has {len(value):,} characters, a cell holds {MAX_CELL_CHARS:,}; shorten it"
        )
    return value
