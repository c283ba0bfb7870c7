"""A review workbook is exported, filled in and imported as verdicts on the right rows; every bad
cell gets a line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openpyxl
import pytest
from fixture_types import ProfileOf
from run_stages import end_stage_with

from qinglan.config import Profile, Select
from qinglan.data.review import add_reviews, load_reviews
from qinglan.data.review.export import ReviewExport, VerdictCounts, count_verdicts, export_reviews
from qinglan.data.review.workbook import ControlResult, read_sheet
from qinglan.data.sources import excel
from qinglan.errors import QinglanError, WorkbookError
from qinglan.recipes.medical import RECIPE, judge_messages
from qinglan.recipes.prompting import undelimited
from qinglan.recipes.selection import select
from qinglan.rows import Retrieved, Row, row_id
from qinglan.runs.artifacts import write_jsonl
from qinglan.runs.run import open_run

FOUND = Retrieved(ids=("d", "e"), scores=(0.9, 0.8), titles=("首条", "第二条"))


def row(query: str = "怎么吃", rewrite: str | None = "服用 方法", **changes: Any) -> Row:
    question = {"tenant": "default", "query": query, "profile": "", "history": ""}
    question |= {name: value for name, value in changes.items() if name in question}
    values = {"id": row_id(**question), "source": "q.csv:2", "answer": rewrite} | question
    if rewrite:
        values |= {"judge_score": 2.0, "original_retrieved": FOUND, "answer_retrieved": FOUND}
    return Row.model_validate(values | changes)


def refresh(profile: Profile, *rows: Row) -> Path:
    """A new run with its dataset stage finished."""
    with open_run(profile, "refresh", fresh=True) as run:
        return end_stage_with(run, "dataset", rows).path("rows")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out" / "review.xlsx"


def export(profile: Profile, path: Path, *rows: Row) -> ReviewExport:
    refresh(profile, *rows)
    return export_reviews(profile, "latest", path, 50)


@contextmanager
def edited(path: Path) -> Iterator[Any]:
    book = openpyxl.load_workbook(path)
    yield book["审核"]
    book.save(path)


def columns(sheet: Any) -> dict[str, int]:
    return {cell.value: cell.column for cell in sheet[1]}


def shown(path: Path) -> dict[str, dict[str, Any]]:
    """The lines that a reviewer reads, by their questions: the cells by title."""
    titles, *rows = openpyxl.load_workbook(path)["审核"].iter_rows(values_only=True)
    lines = {}
    for cells in rows:
        line = dict(zip(titles, cells, strict=True))
        lines[line["问题"]] = line
    return lines


def line_of(sheet: Any, query: str) -> int:
    column = columns(sheet)["问题"]
    return next(n for n in range(2, sheet.max_row + 1) if sheet.cell(n, column).value == query)


def fill_in(path: Path, query: str = "怎么吃", **cells: Any) -> None:
    """Write cells of the line with this question, as a reviewer would."""
    with edited(path) as sheet:
        for title, value in cells.items():
            sheet.cell(line_of(sheet, query), columns(sheet)[title]).value = value


def problem(path: Path, profile: Profile) -> str:
    (line,) = read_sheet(path, profile).problems
    assert "\n" not in line
    return line


def test_a_reviewer_sees_the_row_a_list_of_verdicts_and_a_guide(profile_of: ProfileOf, path: Path):
    answered = row(tenant="=1+1", profile="老人", history="问过钙片", gold_id="e")
    failed = answered.failed("below_threshold")
    exported = export(profile_of(tenant={"id": "=1+1"}), path, failed, row("多少钱", tenant="=1+1"))
    assert (exported.rows, exported.stage) == (2, "dataset")
    assert exported.strata == {"裁判低检索高": 2, "随机对照": 1}
    expected = {
        "抽样原因": "裁判低检索高",
        "问题": "怎么吃",
        "历史摘要": "问过钙片",
        "改写": "服用 方法",
    }
    expected |= {
        "原因": "below_threshold",
        "裁判分": 2,
        "改写首条得分": 0.9,
        "改写召回": "1. 首条\n2. 第二条",
    }
    expected |= {"改写标准文档名次": 2, "结论": None, "行编号": failed.id}
    assert expected.items() <= shown(path)["怎么吃"].items()
    book = openpyxl.load_workbook(path)
    (choice,) = book["审核"].data_validations.dataValidation
    assert (choice.type, choice.formula1, str(choice.sqref)) == (
        "list",
        '"通过,拒绝,修改"',
        "Q2:Q3",
    )
    assert choice.errorStyle == "warning", "the English words must be possible"
    guide = book["说明"]
    (control,) = [line for line in guide.iter_rows(values_only=True) if line[0] == "随机对照"]
    assert control[2:] == (1, 1)
    assert (guide["B1"].value, guide["B1"].data_type) == ("=1+1", "s")


def test_a_row_with_an_extracted_context_can_be_reviewed(profile: Profile, path: Path):
    # The hash of its dialogue, which no sheet shows.
    extracted = row(profile="孕妇").with_id("a" * 16)
    assert export(profile, path, extracted).rows == 1
    fill_in(path, 结论="通过")
    assert [review.row for review in read_sheet(path, profile).reviews] == [extracted.id]
    fill_in(path, 用户画像="男")
    assert "is unknown" in problem(path, profile)


def test_reviewed_rows_are_left_out_until_the_teacher_says_something_new(
    profile: Profile, path: Path, tmp_path: Path
):
    export(profile, path, row(), row("多少钱"), row("在哪买"))
    fill_in(path, "怎么吃", 结论="通过")
    fill_in(path, "多少钱", 结论="修改", 修改后的改写="价格")
    add_reviews(profile, read_sheet(path, profile).reviews)

    no_cell_holds_it = row("一个", "a\x01b")
    rows = [row(), row("多少钱", "新"), row("在哪买"), no_cell_holds_it]
    second = export(profile, tmp_path / "2.xlsx", *rows)
    assert (second.rows, second.reviewed, second.unfaithful) == (1, 2, 1)
    rows = [row(answer="新"), row("多少钱"), row("在哪买")]
    assert export(profile, tmp_path / "3.xlsx", *rows).rows == 2
    assert export_reviews(profile, "latest", tmp_path / "4.xlsx", 50, again=True).rows == 3


def test_the_newest_finished_data_stage_is_taken(profile: Profile, path: Path):
    with open_run(profile, "refresh") as run:
        end_stage_with(run, "validate", [row("一")])
        end_stage_with(run, "select", [row("二")])
        # Not finished: it has no manifest.
        write_jsonl(run.stage_directory("dataset") / "rows.jsonl", [row("三")])
    assert export_reviews(profile, "latest", path, 5).stage == "select"
    assert shown(path).keys() == {"二"}
    path.unlink()
    with open_run(profile, "evaluate") as evaluation:
        assert evaluation.directory != run.directory
    assert export_reviews(profile, "latest", path, 5).run == run.directory.name


def test_what_stands_in_the_way_of_an_export_is_said(
    profile: Profile, profile_of: ProfileOf, path: Path
):
    def error(owner: Profile = profile, out: Path = path) -> str:
        with pytest.raises(QinglanError) as caught:
            export_reviews(owner, "latest", out, 5)
        return str(caught.value)

    assert "run `latest`: has no finished data stage" in error()
    refresh(profile, row(answer=None).failed("teacher_timeout"))
    assert error().endswith("its dataset stage has nothing to review")
    rows = refresh(profile, row())
    assert "let its name end in that" in error(out=path.with_suffix(".csv"))
    assert "rows of tenant `default`, but profile `test` is of tenant `b`" in error(
        profile_of(tenant={"id": "b"})
    )
    assert not path.exists()
    export_reviews(profile, "latest", path, 5)
    assert "exists already; choose another --out" in error()
    path.unlink()
    rows.write_text("")
    assert "was changed" in error()


def test_round_trip(profile: Profile, path: Path):
    rows = [
        row("怎么吃"),
        row("多少钱", profile="老人"),
        row("在哪买", history="问过"),
        row("好吗"),
    ]
    export(profile, path, *rows)
    fill_in(path, "怎么吃", 结论="通过", 审核人="王")
    fill_in(path, "多少钱", 结论=" 拒绝 ", 备注="不好")
    fill_in(path, "在哪买", 结论="Correct", 修改后的改写=" 购买\n渠道 ")
    sheet = read_sheet(path, profile)
    assert (sheet.problems, sheet.without_verdict, sheet.control) == ([], 1, ControlResult(4, 3, 2))
    add_reviews(profile, sheet.reviews)

    assert sheet.control.interval == pytest.approx((0.2077, 0.9385), abs=1e-4)
    after = list(load_reviews(profile).apply(rows))
    assert [(r.review, r.target) for r in after] == [
        ("accept", "服用 方法"),
        ("reject", "服用 方法"),
        ("correct", "购买 渠道"),
        (None, "服用 方法"),
    ]
    later = refresh(profile, row("怎么吃"), row("多少钱", "新", profile="老人")).parents[1].name
    assert count_verdicts(profile, "latest") == VerdictCounts(later, hold=1, changed=1, absent=1)


def test_a_line_may_be_moved_and_columns_may_stand_elsewhere(profile: Profile, path: Path):
    export(profile, path, row(), row("多少钱"))
    fill_in(path, "多少钱", 结论="拒绝")
    with edited(path) as sheet:
        sheet.delete_rows(line_of(sheet, "怎么吃"))
        sheet.insert_rows(2, 3)
        sheet.insert_cols(1)
    filled = read_sheet(path, profile)
    assert [review.row for review in filled.reviews] == [row("多少钱").id]
    assert filled.without_verdict == 0


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"结论": "maybe"}, 'review.xlsx!审核!Q2: "maybe" is no verdict; write 通过, 拒绝 or 修改'),
        ({"结论": "好\x9b[2J"}, '"好 [2J" is no verdict'),
        ({"结论": "修改"}, "R2: is empty, but the verdict is 修改; write your answer"),
        (
            {"结论": "修改", "修改后的改写": "长" * 121},
            "R2: has 121 characters, select.max_rewrite_chars is 120",
        ),
        (
            {"结论": "修改", "修改后的改写": "长？！"},
            'R2: "长？！" is shorter than select.min_rewrite_chars, 2',
        ),
        (
            {"结论": "通过", "修改后的改写": "别的"},
            "R2: an answer beside 通过; write 修改 into Q2, or clear it",
        ),
        (
            {"修改后的改写": "别的"},
            "Q2: has no verdict, but R2 has an answer; write 修改, or clear it",
        ),
        ({"结论": '=IF(1,"通过","")'}, "Q2: holds a formula; paste its result as a value"),
        ({"结论": "通过", "改写": "=A1"}, "E2: holds a formula"),
        ({"结论": "#N/A"}, "Q2: holds the error #N/A; write text"),
        (
            {"结论": "通过", "行编号": "0123456789abcdef"},
            'U2: "0123456789abcdef" is unknown: it is not the id of this',
        ),
        (
            {"结论": "通过", "行编号": None},
            "U2: the row id is missing; restore it from the exported workbook",
        ),
        (
            {"结论": "通过", "用户画像": "老人"},
            "what belongs to it for tenant `default`; one of them was changed",
        ),
        ({"结论": "通过", "改写": "我改的"}, "your own answer belongs into R2"),
    ],
)
def test_a_bad_cell_is_named(profile: Profile, path: Path, cells: dict[str, Any], message: str):
    export(profile, path, row())
    fill_in(path, **cells)
    line = problem(path, profile)
    assert line.startswith("review.xlsx!审核!")
    assert message in line
    assert read_sheet(path, profile).reviews == []


def test_all_bad_cells_are_in_one_list(profile: Profile, path: Path):
    export(
        profile,
        path,
        row(),
        row("多少钱"),
        row("在哪买"),
        row("好吗", None).failed("teacher_refused"),
    )
    fill_in(path, 结论="通过")
    fill_in(path, "好吗", 结论="通过")
    fill_in(path, "多少钱", 结论="好", 行编号="x")
    fill_in(path, "在哪买", 结论="通过")
    with edited(path) as cells:
        number = line_of(cells, "怎么吃")
        cells.merge_cells(f"Q{number}:R{number}")
    sheet = read_sheet(path, profile)
    problems = " ".join(sheet.problems)
    assert (len(sheet.problems), len(sheet.reviews)) == (4, 1)
    assert f"!R{number}: is merged with other cells; unmerge them" in problems
    assert "Q4: there is no answer to accept; write 拒绝, or 修改 with your own" in problems


def test_two_verdicts_for_one_row_that_differ_are_named(profile: Profile, path: Path):
    export(profile, path, row(), row("多少钱"))
    fill_in(path, 结论="通过")
    with edited(path) as sheet:
        first = line_of(sheet, "怎么吃")
        second = line_of(sheet, "多少钱")
        for column in range(1, sheet.max_column + 1):
            sheet.cell(second, column).value = sheet.cell(first, column).value
    filled = read_sheet(path, profile)
    assert (filled.problems, len(filled.reviews), filled.control) == ([], 1, ControlResult(1, 1, 0))
    with edited(path) as sheet:
        sheet["Q3"] = "拒绝"
    contradiction = (
        "Q3: 拒绝 does not agree with 通过 in Q2, which is the same row; keep one of the two"
    )
    assert contradiction in problem(path, profile)


def test_lines_without_verdict_and_of_other_tenants_are_no_reviews(
    profile: Profile, profile_of: ProfileOf, path: Path
):
    export(profile, path, row(), row("多少钱"))
    fill_in(path, 备注="不知道", 改写="改了")
    sheet = read_sheet(path, profile)
    assert (sheet.reviews, sheet.problems) == ([], [])
    assert (sheet.without_verdict, sheet.lone_comments) == (2, 1)
    fill_in(path, "多少钱", 结论="通过")
    assert "for tenant `b`" in problem(path, profile_of(tenant={"id": "b"}))


def test_a_file_that_is_no_review_workbook_is_named(profile: Profile, path: Path, tmp_path: Path):
    def error(file: Path) -> str:
        with pytest.raises(WorkbookError) as caught:
            read_sheet(file, profile)
        return str(caught.value)

    assert "no such file" in error(path)
    (tmp_path / "text.xlsx").write_text("结论")
    assert "is no readable .xlsx file (" in error(tmp_path / "text.xlsx")
    book = openpyxl.Workbook()
    book.save(tmp_path / "other.xlsx")
    assert "no sheet `审核` (sheets: Sheet)" in error(tmp_path / "other.xlsx")
    book.create_sheet("审核")
    book.save(tmp_path / "other.xlsx")
    assert "no column `抽样原因` in row 1; put it back" in error(tmp_path / "other.xlsx")
    export(profile, path, row())
    with edited(path) as sheet:
        sheet["V1"] = "结论"
    assert "column `结论` is in row 1 twice (Q and V)" in error(path)


def test_a_review_workbook_that_is_too_large_is_refused(
    profile: Profile, path: Path, monkeypatch: pytest.MonkeyPatch
):
    export(profile, path, row())
    for limit, message in (
        ("MAX_CELLS", "has more than 10 cells"),
        ("MAX_UNPACKED_BYTES", "unpacks to"),
    ):
        monkeypatch.setattr(excel, limit, 10)
        with pytest.raises(WorkbookError, match=message):
            read_sheet(path, profile)


def test_answers_go_out_with_their_inputs_and_come_back(profile_of: ProfileOf, path: Path):
    profile = profile_of(recipe=str(Path(__file__).parents[1] / "support" / "capitals_recipe.py"))
    inputs = {"hint": "塞纳河\n左岸", "capital": "巴黎"}
    answered = Row(
        id=row_id("default", "法国", inputs={"hint": inputs["hint"]}),
        tenant="default",
        query="法国",
        source="q.csv:2",
        inputs=inputs,
        answer="里昂",
        parts={"right": 0.0, "short": 1.0},
        judge_score=4.5,
        pool="red_team",
    )
    export(profile, path, answered)
    cells = shown(path)["法国"]
    assert (cells["提示"], cells["首都"]) == (inputs["hint"], "巴黎")
    assert (cells["回答"], cells["规则：right"]) == ("里昂", 0)
    fill_in(path, "法国", 结论="修改", 修改后的回答="巴黎 就是它")
    (review,) = read_sheet(path, profile).reviews
    assert (review.row, review.corrected) == (answered.id, "巴黎")
    fill_in(path, "法国", 提示="卢瓦尔河")
    assert "is not the id of this question and what belongs to it" in problem(path, profile)


def test_an_advisers_correction_teaches_and_is_what_the_judge_compares_with(
    profile_of: ProfileOf, path: Path
):
    profile = profile_of(recipe="medical", tenant={"id": "t"})
    query = "布洛芬一次吃几片"
    answer = "疼得厉害可加倍吃。"
    mended = "布洛芬用于退烧。请遵医嘱，不要自行加量。"
    inputs = {"answer": answer, "keywords": "解热镇痛药、退烧"}
    answered = Row(
        id=row_id("t", query),
        tenant="t",
        query=query,
        source="q.csv:2",
        answer=answer,
        inputs=inputs,
    )
    graded = answered.with_pool("red_team").with_parts(RECIPE.grader.parts(answered, answer))
    export(profile, path, *select([graded], RECIPE.grader, Select()))
    assert {"规则淘汰", "专门数据池"} <= {*shown(path)[query]["抽样原因"].split("；")}
    fill_in(path, query, 结论="修改", 修改后的回答="<think>该怎么说呢")
    assert "is not what the recipe can read as an answer: the answer is empty" in problem(
        path, profile
    )

    fill_in(path, query, 修改后的回答=mended)
    add_reviews(profile, read_sheet(path, profile).reviews)
    (taught,) = select(load_reviews(profile).apply([graded]), RECIPE.grader, Select())
    assert (taught.status, taught.target) == ("ok", mended)
    messages = judge_messages(taught, answer, profile.tenant)
    assert f"资料中的回答：{mended}" in undelimited(messages[1]["content"])
    assert RECIPE.grader.parts(taught, mended)["keywords"] == 1, (
        "解热镇痛药 was struck out by the adviser"
    )
