"""`qinglan review` as a person uses it: out, filled in, back in, counted."""

import json
from functools import partial
from pathlib import Path

import openpyxl
import pytest
import yaml
from fixture_types import ProfileOf, Qinglan
from ledger_calls import call
from run_stages import end_stage_with

from qinglan.clients.roles import site_ledger
from qinglan.config import Profile
from qinglan.data.review import load_reviews, store_path
from qinglan.evaluation.red_team import cases_of
from qinglan.recipes.requests import judge_requests
from qinglan.rows import Retrieved, Row, row_id
from qinglan.runs.run import open_run

FOUND = Retrieved(ids=("d",), scores=(0.9,), titles=("首条",))


@pytest.fixture
def profile(profile_of: ProfileOf) -> Profile:
    return profile_of(tenant={"id": "t[/b]"})


@pytest.fixture
def review(
    qinglan: Qinglan, profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Qinglan:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return partial(qinglan, "review", profile=profile)


def finish_run(
    profile: Profile, count: int, score: float | None = None, flow: str = "refresh"
) -> list[Row]:
    def row(query: str) -> Row:
        return Row(
            id=row_id(profile.tenant.id, query),
            tenant=profile.tenant.id,
            query=query,
            source="q.csv:2",
            answer="改写",
            judge_score=score,
            original_retrieved=FOUND,
            answer_retrieved=FOUND,
        )

    rows = [row(f"问题{n}") for n in range(count)]
    with open_run(profile, flow) as run:
        end_stage_with(run, "select", rows)
    return rows


def fill_in(path: Path, *verdicts: str | None, reviewer: str = "") -> None:
    book = openpyxl.load_workbook(path)
    for number, verdict in enumerate(verdicts, 2):
        book["审核"][f"Q{number}"] = verdict
        book["审核"][f"T{number}"] = reviewer
    book.save(path)


def test_export_import_list(profile: Profile, review: Qinglan):
    assert review("list")[1].startswith("no reviews under ")
    # A run of one teacher among others.
    finish_run(profile, 2, flow="compare")
    problem = "run `latest`: has no finished data stage (dataset, select, validate); name"
    assert problem in review("export")[2]
    finish_run(profile, 5)
    finish_run(profile, 3, flow="compare")
    status, out, err = review("export", "--rows", "4")
    assert (status, err) == (0, "")
    assert out.startswith("review.xlsx: 4 rows of run ")
    assert "  随机对照 4\n" in out

    fill_in(Path("review.xlsx"), "通过", "拒绝", "accept", None, reviewer="[/王]")
    status, out, err = review("import", "review.xlsx")
    assert (status, err) == (0, "")
    assert "review.xlsx: 2 accepted, 1 rejected, 0 corrected; 1 rows without a verdict" in out
    assert f"{store_path(profile)}: 3 new, 0 of them against an earlier verdict; 0 unchanged" in out
    share = "1 of 3 control rows rejected or corrected = 33.3% [6.1%, 79.2%] (Wilson, 95%)"
    assert f"{share}; 1 control rows have no" in out
    assert (
        "0 new, 0 of them against an earlier verdict; 3 unchanged"
        in review("import", "review.xlsx")[1]
    )

    status, out, _ = review("list", "--run", "latest")
    (line,) = (line for line in out.splitlines() if "[/王]" in line)
    assert [cell.strip() for cell in line.strip("│").split("│")][:5] == [
        "t[/b]",
        "[/王]",
        "2",
        "1",
        "0",
    ]
    assert "3 verdicts hold, 0 no longer" in out

    assert review("export")[0] == 2, "review.xlsx is there"
    assert "left out: 3 rows that are reviewed" in review("export", "--out", "2.xlsx")[1]


def test_bad_cells_are_listed_and_nothing_is_imported(profile: Profile, review: Qinglan):
    finish_run(profile, 25)
    review("export")
    fill_in(Path("review.xlsx"), *["maybe"] * 24, "通过")
    status, out, err = review("import", "review.xlsx")
    assert (status, out) == (2, "")
    *lines, last = err.splitlines()
    assert lines == [
        f'review.xlsx!审核!Q{n}: "maybe" is no verdict; write 通过, 拒绝 or 修改'
        for n in range(2, 22)
    ]
    assert (
        last == "error: review.xlsx: 24 cells to correct, 4 of them not shown; nothing was imported"
    )
    assert load_reviews(profile).by_row == {}


def test_what_the_judge_said_becomes_rules_and_cases_to_choose_from(
    profile: Profile, review: Qinglan
):
    rows = finish_run(profile, 4, score=2.0)
    request = judge_requests(profile)
    reasons = ("改写漏掉了产品名称", "改写漏掉了产品的名称", "添加了\n问题里没有的内容")
    with site_ledger(profile) as ledger:
        # The ledger has lost the last row's.
        for row, reason in zip(rows, reasons, strict=False):
            answer = json.dumps({"score": 2, "reason": reason}, ensure_ascii=False)
            ledger.record([call(request(row, "改写").request_hash, text=answer)])

    status, out, err = review("reasons", "--cases", "cases.jsonl")
    assert (status, err) == (0, "")
    counts = [
        line.strip("│").split("│")[0].strip()
        for line in out.splitlines()
        if "问题" in line and "│" in line
    ]
    assert counts == ["2", "1"]
    (_, block) = out.split("tenant:\n")
    proposed = yaml.safe_load("tenant:\n" + block.partition("\n\n")[0])["tenant"]["teacher_rules"]
    assert proposed.splitlines()[1][2:] in reasons
    assert proposed.splitlines()[2] == "- 添加了 问题里没有的内容"
    own = profile.model_copy(
        update={"evaluate": profile.evaluate.model_copy(update={"red_team": Path("cases.jsonl")})}
    )
    assert {row.query for row in rows[:3]} == {
        case.query for case in cases_of(own) if case.id.startswith("judge-")
    }

    assert "File exists" in review("reasons", "--cases", "cases.jsonl")[2]
    assert review("reasons", "--below", "1")[1].endswith("an answer that scored below 1\n")
    review("export")
    sheet = openpyxl.load_workbook("review.xlsx")["审核"]
    place = [cell.value for cell in sheet[1]].index("裁判理由")
    reasons_in_sheet = {row[place] for row in sheet.iter_rows(min_row=2, values_only=True)}
    assert reasons_in_sheet == {*reasons[:2], "添加了 问题里没有的内容", None}
