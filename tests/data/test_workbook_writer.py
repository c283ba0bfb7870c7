"""The workbook out: text that stays text, and can be read again."""

from pathlib import Path
from typing import Any

import openpyxl
import pytest

from qinglan.config import Data, Tenant
from qinglan.data import sheets
from qinglan.data.workbook import read_rows
from qinglan.data.workbook_writer import write_rows
from qinglan.recipes import get_recipe
from qinglan.recipes.query_rewrite import RECIPE
from qinglan.rows import Retrieved, Row, row_id


def written(path: Path, *rows: Row) -> list[dict[str, Any]]:
    artifact = write_rows(path, rows, RECIPE)
    assert artifact.rows == len(rows)
    header, *lines = openpyxl.load_workbook(path).active.iter_rows()
    titles = [cell.value for cell in header]
    return [dict(zip(titles, line, strict=True)) for line in lines]


def test_written_rows_keep_verdict_and_scores(tmp_path: Path) -> None:
    row = Row(
        id="1",
        tenant="t",
        query="头\x00疼\ud800",
        source="q.csv:2",
        gold_id="b",
        answer="头疼 缓解",
        answer_retrieved=Retrieved(ids=("a", "b"), scores=(0.9, 0.6), titles=("钙片", "鱼油")),
    )
    (cells,) = written(tmp_path / "new" / "out.xlsx", row.failed("below_threshold"))
    expected = {
        "问题": "头疼",
        "状态": "failed",
        "原因": "below_threshold",
        "改写首条得分": 0.9,
        "改写检索质量": 0.74,
    }
    expected |= {"改写标准文档名次": 2, "改写首条内容": "钙片"}
    assert {name: cells[name].value for name in expected} == expected


@pytest.mark.parametrize("text", ["=1+1", "+1", "@SUM(A1)", "\n=1", "#N/A"])
def test_written_text_never_becomes_a_formula(tmp_path: Path, text: str) -> None:
    row = Row(id="1", tenant="t", query=text, answer=text, source=text)
    (cells,) = written(tmp_path / "out.xlsx", row)
    for name in ("问题", "改写", "来源"):
        assert (cells[name].data_type, cells[name].value) == ("s", text)
        assert bool(cells[name].quotePrefix) == (text != "#N/A")


def test_more_rows_than_a_sheet_holds_stand_on_further_sheets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sheets, "ROWS_A_SHEET", 2)
    write_rows(
        tmp_path / "out.xlsx",
        (Row(id=str(n), tenant="t", query=f"问{n}", source="s") for n in range(5)),
        RECIPE,
    )
    book = openpyxl.load_workbook(tmp_path / "out.xlsx")
    sizes = [(sheet.title, sheet.max_row, sheet.auto_filter.ref[-2:]) for sheet in book]
    assert sizes == [("数据", 3, "V3"), ("数据2", 3, "V3"), ("数据3", 2, "V2")]
    assert [sheet["A2"].value for sheet in book] == ["问0", "问2", "问4"]


def test_answers_are_shown_with_inputs_and_parts_and_can_be_read_again(tmp_path: Path) -> None:
    recipe = get_recipe(str(Path(__file__).parents[1] / "support" / "capitals_recipe.py"))
    row = Row(
        id=row_id("t", "=法国", "老人", inputs={"hint": "塞纳河"}),
        tenant="t",
        query="=法国",
        profile="老人",
        source="s",
        answer="巴黎",
        split="dev",
        pool="gold",
        inputs={"hint": "塞纳河", "capital": "巴黎"},
        parts={"right": 1.0},
    )
    write_rows(tmp_path / "out.xlsx", [row], recipe)
    header, line = openpyxl.load_workbook(tmp_path / "out.xlsx").active.iter_rows(values_only=True)
    cells = dict(zip(header, line, strict=True))
    assert (cells["提示"], cells["回答"]) == ("塞纳河", "巴黎")
    assert (cells["规则：right"], cells["规则：short"]) == (1.0, None)
    (again,) = read_rows(tmp_path / "out.xlsx", Data(), Tenant(id="t"), inputs=recipe.INPUTS)
    assert again == row.model_copy(
        update={"source": "out.xlsx!数据!A2", "answer": None, "parts": None}
    )
