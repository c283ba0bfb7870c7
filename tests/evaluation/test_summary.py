"""What stages found, put together: a refresh's arms, and what is shown of them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from qinglan.config import Profile
from qinglan.evaluation.models import Report, StageSummary
from qinglan.evaluation.red_team import RedTeamResult
from qinglan.evaluation.summary import build_report, evaluate_baselines, metrics_of, result_markdown
from qinglan.recipes.kinds.validation import RetrievalStatistics
from qinglan.rows import Retrieved, Row
from qinglan.runs.artifacts import Artifact, StageResult, write_jsonl
from qinglan.runs.run import open_run

HIT, MISS = Retrieved(ids=("g",), scores=(0.9,)), Retrieved(ids=("x",), scores=(0.6,))
ROWS = [
    Row(
        id=f"{n:03}", tenant="t", query=f"问题{n}", gold_id="g", source="f!A1",
        answer="改写", answer_retrieved=HIT, original_retrieved=MISS, judge_score=4.0,
    )
    for n in range(20)
]  # fmt: skip


@pytest.fixture
def profile(profile_of: Callable[..., Profile]) -> Profile:
    return profile_of(evaluate={"bootstrap_resamples": 200})


def failed(number: int, reason: str) -> Row:
    return Row(id=f"f{number}", tenant="t", query="问", source="f!A1", gold_id="g").failed(reason)


def test_a_refreshs_arms_count_failed_rows_but_no_bad_input(profile: Profile):
    rows = [*ROWS, failed(1, "teacher_refused"), failed(2, "rag_unavailable"), failed(3, "empty_query")]
    evaluation = evaluate_baselines(rows, profile)
    teacher = evaluation.arms["teacher"]
    assert (teacher.n, teacher.failed, teacher.mean("top1")) == (22, 2, 1.0)
    (top1,) = [c for c in evaluation.comparisons if c.metric == "top1"]
    assert (top1.n, top1.left_out, top1.diff) == (20, 2, 1.0)


def test_figures_and_table(profile: Profile):
    evaluation = evaluate_baselines([*ROWS, failed(1, "teacher_refused")], profile)
    assert metrics_of(evaluation)["teacher/failed"] == 1
    cases = [
        RedTeamResult(case_id=str(passed), name="例", kind="long", must_pass=True, passed=passed)
        for passed in (True, False, None)
    ]
    tried = metrics_of(evaluation.model_copy(update={"red_team": {"rl": cases}}))
    assert (tried["rl/red_team_failed"], tried["rl/red_team_unchecked"]) == (1, 1)
    known = {"metrics": evaluation.metrics, "arms": evaluation.arms, "comparisons": evaluation.comparisons}
    report = Report(run_id="r", profile="p", recipe="query_rewrite", **known)
    text = result_markdown(report)
    assert "| teacher | 21 | 1 | 1.000 | 1.000 | 0.900 | 4.00 | " in text


def test_the_table_of_a_refresh_says_what_became_of_the_rows():
    stages = [
        StageSummary(name="ingest", seconds=1, rows_in=1300, rows_out=1290, dropped={"duplicate": 10}),
        StageSummary(name="dataset", seconds=1, rows_in=1290, rows_out=1288),
    ]
    text = result_markdown(Report(run_id="r", profile="p", recipe="medical", stages=stages))
    assert text.startswith("## 1,288 of 1,300 rows are in the dataset.\n\nNothing was compared: ")
    assert "| ingest | 1,300 | 1,290 | duplicate 10 |\n" in text
    assert "| Arm |" not in text


def test_the_rows_needed_go_by_the_setting_of_the_day(
    profile: Profile, profile_of: Callable[..., Profile], tmp_path: Path
):
    rows = [
        row.model_copy(update={"gold_id": row.id, "answer_retrieved": (HIT, MISS)[n % 2]}) for n, row in enumerate(ROWS)
    ]
    path = tmp_path / "evaluation.json"
    path.write_text(evaluate_baselines(rows, profile).model_dump_json(), encoding="utf-8")
    needed = []
    for gain in (0.03, 0.06):
        with open_run(profile_of(gate={"smallest_gain": gain}), "evaluate") as run:
            stage = StageResult(
                stage="evaluate", key="k", run_id=run.id, seconds=1, artifacts={"evaluation": Artifact.of(path)}
            )
            found = {each.metric: each.rows_needed for each in build_report(run, [stage]).comparisons}
        needed.append(found["mean_top1_score"])
        assert found["mrr10"] is None
    assert needed[0] == pytest.approx(4 * needed[1], abs=4)


def test_a_report_takes_the_distributions_from_validation(profile_of: Callable[..., Profile], tmp_path: Path):
    findings = RetrievalStatistics()
    for row in ROWS:
        findings.add(row)
    details = json.loads(json.dumps({"histograms": findings.histograms()}))  # as the manifest keeps them
    with open_run(profile_of(evaluate={"bootstrap_resamples": 200}), "refresh") as run:
        stage = StageResult(
            stage="validate", key="k", run_id=run.id, seconds=1.0, details=details,
            artifacts={"rows": write_jsonl(tmp_path / "rows.jsonl", ROWS)},
        )  # fmt: skip
        report = build_report(run, [stage])
        older = build_report(run, [stage.model_copy(update={"details": {}})])
    assert [sum(part.counts) for part in report.distributions["top1_score"]] == [20, 20]
    assert older.distributions == {}
