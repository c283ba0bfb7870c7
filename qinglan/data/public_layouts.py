"""Rows in two public layouts become a recipe's workbook (`qinglan dataset import`).

FlashRAG's questions with golden answers become one of `answer_judge`, r1-style medical rows one of
`medical`.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from qinglan.data.sheets import MAX_CELL_CHARS
from qinglan.data.sources.files import read_objects
from qinglan.data.workbook_writer import write_questions
from qinglan.errors import WorkbookError
from qinglan.recipes import get_recipe
from qinglan.recipes.passage_judge import RIGHT, WRONG
from qinglan.rows import Row, normalise

Layout = Literal["flashrag", "medical-r1"]
_Inputs = dict[str, str]
"""A line's inputs by their names in the recipe."""
_MEDICAL: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("Question", {"answer": "Response", "reasoning": "Complex_CoT"}),
    ("question", {"answer": "answer", "reasoning": "think"}),
    ("question", {"answer": "response (content)", "reasoning": "reasoning (reasoning_content)"}),
    # The answer is a few words, for the student's own answer to hold.
    ("Open-ended Verifiable Question", {"keywords": "Ground-True Answer"}),
)
"""Fields of the four data sets that docs/how-to/medical.md names: the question's, and by input."""


def import_rows(
    layout: Layout, source: Path, workbook: Path, report: Callable[[str], None]
) -> tuple[int, int, int]:
    """Write the workbook; how many lines it has, of how many rows, and how many rows were left out.

    `report` gets one line for each row that is left out: file, number, field, and what is wrong.
    """
    if layout == "flashrag":
        recipe = get_recipe("answer_judge")
        lines_of = _flashrag
    else:
        recipe = get_recipe("medical")
        lines_of = _medical
    lines: list[Row] = []
    rows = 0
    left_out = 0
    for number, fields in _objects(source):
        rows += 1
        place = f"{source.name}:{number}"
        try:
            query, inputs_by_line = lines_of(fields if isinstance(fields, Mapping) else {})
        except WorkbookError as error:
            report(f"{place}: {error}")
            left_out += 1
            continue
        for inputs in inputs_by_line:
            lines.append(Row(id="", tenant="", query=query, inputs=inputs, source=place))
    if not lines:
        raise WorkbookError(
            f"{source}: none of its {rows:,} rows can be used as `{layout}`; nothing was written"
        )
    write_questions(workbook, lines, recipe)
    return len(lines), rows, left_out


def _objects(path: Path) -> Iterator[tuple[int, Any]]:
    """The file's rows with their numbers: a list's items, or a line's object."""
    if path.suffix == ".jsonl":
        yield from read_objects(path)
        return
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise WorkbookError(
            f"{path}: not valid JSON ({error}); write one list of rows, or a .jsonl file"
        ) from error
    rows = content if isinstance(content, list) else [content]
    yield from enumerate(rows, start=1)


def _flashrag(fields: Mapping[str, Any]) -> tuple[str, list[_Inputs]]:
    """The question, and a line for each answer to judge.

    Those are wrong generations with one golden answer beside them, and the `pred` that FlashRAG
    saved, without a verdict. Where there is none of them there is one line without an answer, so
    that the weak model is asked.
    """
    question = _text(fields, "question")
    golden_answers = _texts(fields, "golden_answers")
    wrong_answers: list[str] = []
    if "wrong_generations" in fields:
        wrong_answers = _texts(fields, "wrong_generations")
    # A text that is right and wrong would teach the judge both.
    contradictions = set(map(normalise, golden_answers)) & set(map(normalise, wrong_answers))
    if contradictions:
        raise WorkbookError(
            f"wrong_generations: {contradictions.pop()[:40]!r} is a golden answer too; "
            "leave it out of one"
        )

    reference = {"reference": " 或 ".join(golden_answers)}
    lines = [reference | {"candidate": text, "verdict": WRONG} for text in wrong_answers]
    if wrong_answers:
        lines.append(reference | {"candidate": golden_answers[-1], "verdict": RIGHT})
    output = fields.get("output")
    if isinstance(output, Mapping) and "pred" in output:
        lines.append(reference | {"candidate": _text(output, "pred")})
    return question, lines or [reference]


def _medical(fields: Mapping[str, Any]) -> tuple[str, list[_Inputs]]:
    """The question, and the one line of its inputs."""
    for query, field_by_input in _MEDICAL:
        if fields.keys() >= {query, *field_by_input.values()}:
            question = _text(fields, query)
            inputs = {name: _text(fields, field) for name, field in field_by_input.items()}
            return question, [inputs]
    sets_of_fields: list[str] = []
    for query, field_by_input in _MEDICAL:
        sets_of_fields.append(", ".join((query, *field_by_input.values())))
    raise WorkbookError(f"has none of these sets of fields: {'; '.join(sets_of_fields)}")


def _texts(fields: Mapping[str, Any], name: str) -> list[str]:
    values = fields.get(name)
    if not isinstance(values, list) or not values:
        raise WorkbookError(f"{name}: expected a list of texts; correct it")
    return [_text({name: value}, name) for value in values]


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value.strip():
        raise WorkbookError(f"{name}: expected a text; fill it in")
    if len(value) > MAX_CELL_CHARS:
        raise WorkbookError(
            f"{name}: has {len(value):,} characters, a cell holds {MAX_CELL_CHARS:,}; shorten it"
        )
    return value
