"""The adviser's workbook for medical answers: out, filled in, back, and what the data are afterwards."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import openpyxl
import pytest

from qinglan.config import Profile, Select
from qinglan.data.review import add_reviews, load_reviews
from qinglan.data.review.export import export_reviews
from qinglan.data.review.workbook import read_sheet
from qinglan.recipes.medical import RECIPE
from qinglan.rows import Row, row_id
from qinglan.runs.artifacts import StageResult, write_jsonl
from qinglan.runs.run import open_run, save_stage

SAFE = "布洛芬属解热镇痛药。请遵医嘱，不要自行加量。"
MENDED = "布洛芬用于退烧。请遵医嘱，不要自行加量。"
ROWS = {
    "布洛芬一次吃几片": "疼得厉害可加倍吃。",
    "华法林一次吃几片": "华法林属抗凝药。请遵医嘱，不要自行加量。",
    "孕妇能吃布洛芬吗": "布洛芬属解热镇痛药。",
    "感冒吃什么好": "感冒可吃小米粥、雪梨。",
}


def graded(query: str, answer: str) -> Row:
    inputs = {"answer": answer, "keywords": "解热镇痛药、退烧"}
    row = Row(id=row_id("t", query), tenant="t", query=query, source="q.csv:2", answer=answer, inputs=inputs)
    pooled = row.model_copy(update={"pool": RECIPE.pool_of(row), "judge_score": 2.0})
    return pooled.model_copy(update={"parts": RECIPE.parts(pooled, answer)})


def selected(rows: Iterable[Row]) -> dict[str, Row]:
    return {row.query: row for row in RECIPE.select(rows, Select())}


@pytest.fixture
def profile(profile_of: Callable[..., Profile]) -> Profile:
    return profile_of(recipe="medical", tenant={"id": "t"})


@pytest.fixture
def workbook(profile: Profile, tmp_path: Path) -> Path:
    with open_run(profile, "refresh", fresh=True) as run:
        rows = selected(graded(*each) for each in ROWS.items()).values()
        artifact = write_jsonl(run.stage_directory("select") / "rows.jsonl", rows)
        save_stage(run, StageResult(stage="select", key="k", run_id=run.id, seconds=1, artifacts={"rows": artifact}))
    path = tmp_path / "adviser.xlsx"
    export_reviews(profile, "latest", path, 50)
    return path


def lines(path: Path) -> dict[str, dict[str, Any]]:
    titles, *rows = openpyxl.load_workbook(path)["审核"].iter_rows(values_only=True)
    return {line["问题"]: line for line in (dict(zip(titles, row, strict=True)) for row in rows)}


def fill_in(path: Path, verdicts: dict[str, tuple[str, str | None]]) -> None:
    book = openpyxl.load_workbook(path)
    sheet = book["审核"]
    place = {cell.value: cell.column for cell in sheet[1]}
    for number in range(2, sheet.max_row + 1):
        verdict, text = verdicts.get(sheet.cell(number, place["问题"]).value, (None, None))
        sheet.cell(number, place["结论"]).value = verdict
        sheet.cell(number, place["修改后的回答"]).value = text
    book.save(path)


def feed_back(profile: Profile, path: Path, verdicts: dict[str, tuple[str, str | None]]) -> dict[str, Row]:
    """The data of the next refresh."""
    fill_in(path, verdicts)
    sheet = read_sheet(path, profile)
    assert sheet.problems == []
    add_reviews(profile, sheet.reviews)
    return selected(load_reviews(profile).apply(graded(*each) for each in ROWS.items()))


def test_verdicts_and_a_correction_change_what_teaches(profile: Profile, workbook: Path) -> None:
    verdicts = {
        "布洛芬一次吃几片": ("修改", MENDED), "华法林一次吃几片": ("通过", None), "孕妇能吃布洛芬吗": ("拒绝", None),
    }  # fmt: skip
    found = lines(workbook)
    assert set(found) == set(ROWS)
    assert {"规则淘汰", "专门数据池"} <= set(found["布洛芬一次吃几片"]["抽样原因"].split("；"))
    rows = feed_back(profile, workbook, verdicts)
    taught = {query: row.target for query, row in rows.items() if row.status == "ok"}
    assert taught == {query: ROWS[query] for query in ("华法林一次吃几片", "感冒吃什么好")} | {
        "布洛芬一次吃几片": MENDED
    }
    assert rows["孕妇能吃布洛芬吗"].reason == "rejected_by_reviewer"
    row = rows["布洛芬一次吃几片"]
    assert f"资料中的回答：{MENDED}" in RECIPE.judge_messages(row, SAFE, profile.tenant)[1]["content"]
    assert RECIPE.parts(row, MENDED)["keywords"] == 1, "解热镇痛药 was struck out by the adviser"


def test_a_correction_without_an_answer_is_named(profile: Profile, workbook: Path) -> None:
    fill_in(workbook, {"感冒吃什么好": ("修改", "<think>该怎么说呢")})
    (problem,) = read_sheet(workbook, profile).problems
    assert "is not what the recipe can read as an answer: the answer is empty" in problem
