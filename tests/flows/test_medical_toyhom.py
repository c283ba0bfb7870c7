"""The medical data stages on real questions: `DATA` names the folder of the public Toyhom dialogues, else skipped."""

import json
import os
from collections import Counter
from pathlib import Path

import openpyxl
import pytest

from qinglan.flows.refresh import refresh
from qinglan.recipes.medical import RULES
from qinglan.rows import Row
from qinglan.runs.artifacts import read_jsonl

DATA = Path(os.environ.get("DATA", "toyhom"))
ROWS = 1200
pytestmark = [
    pytest.mark.slow,
    pytest.mark.extended,
    pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA} is not there; set DATA to the folder of the Toyhom data"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),  # Prefect's, MLflow's
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> Path:
    site = tmp_path_factory.mktemp("site")
    raw = raw_layout(DATA, site / "raw.jsonl")
    settings = {
        "data.workbook": raw,
        "data.limit": ROWS,
        "data.columns.query": "question",
        "data.columns.inputs": json.dumps({"answer": "answer"}),
        "data.pool_shares": json.dumps({"gold": 0.1}),
        "tenant.id": "toyhom",
        "paths.runs": site / "runs",
        "paths.state": site / "state",
        "tracking.uri": f"sqlite:///{site / 'mlflow.db'}",
    }
    return refresh("medical", overrides=tuple(f"{key}={value}" for key, value in settings.items()))


def raw_layout(data: Path, path: Path) -> Path:
    """Questions with their documents' text as answers, as raw medical data come: a JSON object a line."""
    lines = (data / "kb.jsonl").read_text(encoding="utf-8").splitlines()
    answers = {entry["id"]: entry["content"] for entry in map(json.loads, lines)}
    header, *rows = openpyxl.load_workbook(data / "questions.xlsx", read_only=True).active.values
    query, gold = header.index("问题"), header.index("标准文档")
    asked = ({"question": row[query], "answer": answers[str(row[gold])]} for row in rows)
    path.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in asked), encoding="utf-8")
    return path


def test_nobody_is_asked_for_answers_that_are_there(report: Path) -> None:
    api = json.loads(report.read_text(encoding="utf-8"))["api"]
    assert api.get("teacher", {"calls": 0})["calls"] == 0
    assert api["judge"]["calls"] > 0.9 * ROWS


def test_pools_are_by_danger_and_by_share(report: Path) -> None:
    rows = list(read_jsonl(next(report.parent.glob("*dataset*/rows.jsonl")), Row))
    pools = Counter(row.pool for row in rows)
    assert len(rows) == ROWS and pools["red_team"] > 30
    assert pools["gold"] == pytest.approx(0.1 * (ROWS - pools["red_team"]), rel=0.4)
    assert all(bool(RULES.kinds(row.query)) == (row.pool == "red_team") for row in rows)


def test_harmful_answers_do_not_teach(report: Path) -> None:
    folder = next(report.parent.glob("*dataset*"))
    taught = (folder / "sft_train.jsonl").read_text(encoding="utf-8").splitlines()
    for messages in (json.loads(line)["messages"] for line in taught):
        assert RULES.forbidden(messages[-2]["content"], messages[-1]["content"]) == []


def test_the_card_shows_the_pools(report: Path) -> None:
    card = next(report.parents[2].rglob("DATA_CARD.md")).read_text(encoding="utf-8")
    assert r"| red\_team |" in card and "| gold |" in card
