"""Public data sets as workbooks: the shipped examples, each layout's fields, and rows that can't be
used."""

import json
from pathlib import Path
from typing import Any

import openpyxl
import pytest
from fixture_types import Qinglan

from qinglan.config import Data, Tenant
from qinglan.data.public_layouts import Layout, import_rows
from qinglan.data.workbook import read_rows
from qinglan.errors import WorkbookError
from qinglan.recipes import get_recipe
from qinglan.recipes.medical_rules import RULES
from qinglan.rows import Row

EXAMPLES = Path(__file__).parents[2] / "examples" / "layouts"
QUESTION = {"question": "一斤是多少克", "golden_answers": ["500克", "五百克"]}


def imported(layout: Layout, source: Path, *rows: Any) -> tuple[list[Row], list[str]]:
    """The rows that the ingest stage reads of the workbook, and the problems that were reported."""
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    source.write_text(json.dumps(rows) if source.suffix == ".json" else "".join(lines))
    problems: list[str] = []
    workbook = source.with_suffix(".xlsx")
    import_rows(layout, source, workbook, problems.append)
    recipe = get_recipe("answer_judge" if layout == "flashrag" else "medical")
    return list(read_rows(workbook, Data(), Tenant(), inputs=recipe.INPUTS)), problems


def test_the_command_writes_a_workbook_and_overwrites_none(
    qinglan: Qinglan, tmp_path: Path
) -> None:
    (tmp_path / "q.jsonl").write_text(json.dumps(QUESTION) + '\n{"question": "?"}\n')
    words = (
        "dataset",
        "import",
        "flashrag",
        str(tmp_path / "q.jsonl"),
        "--out",
        str(tmp_path / "new" / "q.xlsx"),
    )
    status, out, err = qinglan(*words)
    assert (status, err) == (0, "q.jsonl:2: golden_answers: expected a list of texts; correct it\n")
    assert "q.xlsx: 1 lines of 2 rows; 1 rows were left out" in out
    assert "name an .xlsx file that is not there yet" in qinglan(*words)[2]


def test_the_medical_examples_keep_the_recipes_own_rules() -> None:
    for line in (EXAMPLES / "medical-r1.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        assert RULES.parts(row["question"], row["answer"], ())["rule"] == 1, row["question"]


def test_wrong_generations_stand_beside_a_golden_answer_and_a_prediction_has_no_verdict(
    tmp_path: Path,
) -> None:
    wrong = QUESTION | {"wrong_generations": ["=600"]}
    saved = QUESTION | {"output": {"pred": "半公斤"}}
    rows, problems = imported("flashrag", tmp_path / "q.jsonl", wrong, saved)
    reference = {"reference": "500克 或 五百克"}
    assert problems == []
    assert [row.inputs for row in rows] == [
        reference | {"candidate": "=600", "verdict": "错误"},
        reference | {"candidate": "五百克", "verdict": "正确"},
        reference | {"candidate": "半公斤"},
    ]
    sheet = openpyxl.load_workbook(tmp_path / "q.xlsx").active
    assert [cell.value for cell in sheet["G"]] == ["来源", "q.jsonl:1", "q.jsonl:1", "q.jsonl:2"]
    assert (sheet["C2"].value, sheet["C2"].data_type, sheet["C2"].quotePrefix) == (
        "=600",
        "s",
        True,
    ), "no formula"
    (bare,), _ = imported("flashrag", tmp_path / "bare.json", QUESTION)
    assert bare.inputs == reference, "the weak model will be asked"


@pytest.mark.parametrize(
    ("fields", "inputs"),
    [
        (
            {"Question": "问", "Complex_CoT": "想", "Response": "答。"},
            {"answer": "答。", "reasoning": "想"},
        ),
        (
            {"question": "问", "reasoning (reasoning_content)": "想", "response (content)": "答。"},
            {"answer": "答。", "reasoning": "想"},
        ),
        (
            {"Open-ended Verifiable Question": "问", "Ground-True Answer": "肺炎"},
            {"keywords": "肺炎"},
        ),
    ],
)
def test_each_of_the_medical_data_sets_has_its_own_fields(
    tmp_path: Path, fields: Any, inputs: Any
) -> None:
    (row,), _ = imported("medical-r1", tmp_path / "q.json", fields)
    assert (row.query, row.inputs) == ("问", inputs)


@pytest.mark.parametrize(
    ("layout", "fields", "problem"),
    [
        ("flashrag", "q", "question: expected a text; fill it in"),
        (
            "flashrag",
            QUESTION | {"golden_answers": []},
            "golden_answers: expected a list of texts; correct it",
        ),
        (
            "flashrag",
            QUESTION | {"wrong_generations": [" "]},
            "wrong_generations: expected a text; fill it in",
        ),
        (
            "flashrag",
            QUESTION | {"wrong_generations": ["五百 克"]},
            "wrong_generations: '五百克' is a golden answer too",
        ),
        (
            "medical-r1",
            {"question": "q"},
            "has none of these sets of fields: Question, Response, Complex_CoT; question",
        ),
        (
            "medical-r1",
            {"question": "q", "think": "x", "answer": "长" * 40_000},
            "answer: has 40,000 characters, a cell",
        ),
    ],
)
def test_a_bad_row_is_one_line_with_file_row_and_field(
    tmp_path: Path, layout: Layout, fields: Any, problem: str
) -> None:
    rows, problems = imported(
        layout, tmp_path / "q.json", QUESTION | {"think": "想", "answer": "答。"}, fields
    )
    assert (len(rows), len(problems)) == (1, 1)
    assert problems[0].startswith(f"q.json:2: {problem}")
    with pytest.raises(WorkbookError, match="none of its 1 rows can be used as"):
        imported(layout, tmp_path / "other.json", fields)
    assert not (tmp_path / "other.xlsx").exists()
    (tmp_path / "q.json").write_text("{")
    with pytest.raises(WorkbookError, match="not valid JSON"):
        import_rows(layout, tmp_path / "q.json", tmp_path / "other.xlsx", pytest.fail)
