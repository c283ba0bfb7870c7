"""Arms: a failure is no score, one text is retrieved with once, figures come with intervals,
comparisons are paired.

What the stages found is put together: a refresh's arms, and what is shown of them.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from fake_model import FakeModel, FakeRag
from fake_service import SIMULATED
from fixture_types import ProfileOf
from ledger_calls import call
from run_stages import stage_result

from qinglan.clients.roles import Clients
from qinglan.config import Evaluate, Profile, Tenant
from qinglan.errors import RetrievalError, StageError, TeacherError
from qinglan.evaluation import figures
from qinglan.evaluation.arms import original_rows, student_rows, teacher_rows, with_tokens
from qinglan.evaluation.evaluating import evaluate_baselines, metrics_of
from qinglan.evaluation.figures import (
    compare_arms,
    examples,
    pairs_of,
    scores_of,
    slices_of,
    summarise,
)
from qinglan.evaluation.measuring import grade_arms
from qinglan.evaluation.models import Decision, Report, StageSummary
from qinglan.evaluation.reasons import reason
from qinglan.evaluation.red_team import RedTeamResult
from qinglan.evaluation.report.summary import build_report, result_markdown
from qinglan.evaluation.teacher_comparison import ask_teacher
from qinglan.grading.validation_statistics import RetrievalStatistics
from qinglan.recipes.query_rewrite import RECIPE
from qinglan.rows import ArmRow, Retrieved, Row, groups_of
from qinglan.runs.artifacts import Artifact, write_jsonl
from qinglan.runs.run import open_run
from qinglan.statistics import MeanCi

FEW = {"bootstrap_resamples": 200}
CONFIG = Evaluate(**FEW)
LOAD = reason("one_at_a_time", device="cpu")
HIT = Retrieved(ids=("g", "x"), scores=(0.9, 0.5))
MISS = Retrieved(ids=("x", "g"), scores=(0.6, 0.5))


def row(number: int, gold: str | None = "g", **update: Any) -> Row:
    question = Row(
        id=f"{number:03}",
        tenant="t",
        query=f"问题{number}",
        gold_id=gold,
        source="f!A1",
        split="test",
    )
    return question.model_copy(update=update)


ROWS = [row(n) for n in range(40)]
TAUGHT = [
    row(n, answer="改写", answer_retrieved=HIT, original_retrieved=MISS, judge_score=4.0)
    for n in range(20)
]


def arm(*found: Retrieved | None, **update: Any) -> list[ArmRow]:
    return [
        ArmRow(row_id=f"{n:03}", text="改写", retrieved=r, **update) for n, r in enumerate(found)
    ]


def library(failing: int = 0) -> FakeRag:
    """Is down for the first questions."""
    down = iter([RetrievalError("down", "rag_unavailable", transient=True)] * failing)
    return FakeRag(lambda *_: next(down, HIT))


def teacher(down: int) -> FakeModel:
    """Refuses the first question; its service is down for the next ones."""
    outage = [TeacherError("down", "teacher_unavailable", transient=True)] * down
    errors = iter([TeacherError("no", "teacher_refused"), *outage])
    return FakeModel(lambda _: next(errors, "新"))


PROFILE = Profile.model_validate({"name": "t"} | SIMULATED)


async def retrieved(rag: FakeRag, **arms: list[ArmRow]) -> dict[str, list[ArmRow]]:
    clients = Clients(rag=rag)  # type: ignore[arg-type]
    graded = await grade_arms(arms, ROWS, RECIPE.grader, clients, PROFILE)
    return graded.arms


def test_teacher_and_original_from_the_data_stages():
    rows = [
        row(
            0,
            answer="改写",
            answer_retrieved=HIT,
            original_retrieved=MISS,
            judge_score=4.5,
            answer_cost_usd=0.1,
        ),
        row(1, status="failed", reason="teacher_refused"),
    ]
    taught = teacher_rows(rows)
    typed = original_rows(rows)
    assert (taught[0].text, taught[0].reason, taught[0].judge_score, taught[0].cost_usd) == (
        "改写",
        None,
        4.5,
        0.1,
    )
    assert (taught[1].text, taught[1].reason, taught[1].retrieved) == (
        None,
        "teacher_refused",
        None,
    )
    assert (typed[0].text, typed[0].retrieved, typed[0].cost_usd) == ("问题0", MISS, 0.0)
    counted, unknown = with_tokens(
        [ArmRow(row_id="0", requests=("key",)), ArmRow(row_id="1")], {"key": call()}
    )
    assert (counted.prompt_tokens, counted.completion_tokens, unknown.prompt_tokens) == (
        100,
        10,
        None,
    )


async def test_only_what_is_missing_is_asked_for_and_arms_that_agree_share_it():
    rag = library()
    nothing = ArmRow(row_id="002", reason="teacher_refused")
    filled = await retrieved(
        rag,
        original=[ArmRow(row_id="000", text="问题0")],
        teacher=[ArmRow(row_id="000", text="新", retrieved=MISS)],
        sft=[ArmRow(row_id="000", text="新"), ArmRow(row_id="001", text="问题1"), nothing],
        rl=[ArmRow(row_id="000", text="b")],
    )
    retrieved_by_arm = {name: [entry.retrieved for entry in arm] for name, arm in filled.items()}
    assert retrieved_by_arm == {
        "original": [HIT],
        "teacher": [MISS],
        "sft": [MISS, HIT, None],
        "rl": [HIT],
    }
    assert filled["sft"][2] == nothing
    assert sorted(rag.asked, key=str) == [("问题0", "b"), ("问题0", None), ("问题1", "问题1")]


async def test_an_empty_rewrite_is_wrong_and_one_that_no_call_gave_is_missing():
    line = '{"id": "000", "text": " \\n", "prompt_tokens": 9, "completion_tokens": 2}'
    refused = ArmRow(row_id="001", reason="teacher_refused")
    rag = library()
    arms = {
        "rl": [*student_rows([line], None, RECIPE.grader), *arm(*[HIT] * 40)[1:]],
        "teacher": arm(*[HIT] * 40),
    }
    arms["teacher"][:2] = [ArmRow(row_id="000", reason="empty_answer"), refused]
    filled = await retrieved(rag, **arms)
    top1 = {name: scores_of(entries, ROWS, RECIPE)["top1"] for name, entries in filled.items()}
    values = {name: list(by_row.values()) for name, by_row in top1.items()}
    assert values == {"rl": [0.0, *[1.0] * 39], "teacher": [0.0, None, *[1.0] * 38]}
    assert rag.asked == []
    summary = summarise(filled["teacher"], ROWS, CONFIG, RECIPE)
    assert (summary.failed, summary.empty, summary.score("top1").n) == (1, 1, 39)


async def test_a_failed_retrieval_is_no_score():
    (entries,) = (await retrieved(library(failing=2), rl=arm(*[None] * 40))).values()
    summary = summarise(entries, ROWS, CONFIG, RECIPE)
    assert (summary.n, summary.failed, summary.mean("top1")) == (40, 2, 1.0)
    assert entries[0].reason == "rag_unavailable"
    with pytest.raises(StageError, match="calls failed for 3 of 40 questions"):
        await retrieved(library(failing=3), rl=arm(*[None] * 40))


async def test_a_further_teachers_refusal_is_a_finding_and_its_outage_is_none():
    rows = [row(n, answer="das andere", answer_retrieved=HIT, judge_score=5.0) for n in range(40)]
    clients = Clients({"teacher": teacher(down=2)})  # type: ignore[arg-type]
    refused, down, _, answered, *_ = await ask_teacher(
        rows, RECIPE, clients, Tenant(), max_failed_share=0.05
    )
    assert (refused.text, refused.reason, down.reason) == (
        None,
        "teacher_refused",
        "teacher_unavailable",
    )
    assert (answered.text, answered.requests, answered.retrieved) == ("新", ("hash of 新",), None)
    assert (answered.latency_ms, answered.judge_score) == (12.0, None)
    clients = Clients({"teacher": teacher(down=3)})  # type: ignore[arg-type]
    with pytest.raises(StageError, match="teacher_unavailable 3"):
        await ask_teacher(ROWS, RECIPE, clients, Tenant(), max_failed_share=0.05)


def test_scores_of_one_arm():
    scores = scores_of(arm(HIT, MISS, None, Retrieved()), ROWS, RECIPE)
    assert list(scores["top1"].values()) == [1.0, 0.0, None, 0.0]
    assert list(scores["mrr10"].values()) == [1.0, 0.5, None, 0.0]
    assert list(scores["mean_top1_score"].values()) == [0.9, 0.6, None, 0.0]
    unlabelled = summarise(arm(HIT), [row(0, gold=None)], CONFIG, RECIPE)
    assert tuple(map(unlabelled.mean, ("top1", "mrr10", "mean_top1_score"))) == (None, None, 0.9)


@pytest.mark.parametrize(
    ("rank", "recall3", "recall10", "mrr10", "ndcg10"),
    [
        (1, 1, 1, 1, 1),
        (3, 1, 1, 1 / 3, 0.5),
        (10, 0, 1, 0.1, 1 / math.log2(11)),
        (11, 0, 0, 0, 0),
        (0, 0, 0, 0, 0),
    ],
)
def test_metrics_by_rank(rank: int, recall3: float, recall10: float, mrr10: float, ndcg10: float):
    passages = Retrieved(ids=tuple("g" if place == rank else f"x{place}" for place in range(1, 13)))
    scores = scores_of(arm(passages), ROWS, RECIPE)
    values = {name: scores[name]["000"] for name in ("recall3", "recall10", "mrr10", "ndcg10")}
    assert values == pytest.approx(
        {"recall3": recall3, "recall10": recall10, "mrr10": mrr10, "ndcg10": ndcg10}
    )


def test_means_money_and_time_come_with_intervals():
    entries = [
        entry.model_copy(
            update={"latency_ms": float(n), "cost_usd": 0.001 * (n % 2), "prompt_tokens": n}
        )
        for n, entry in enumerate(arm(*[HIT] * 40))
    ]
    summary = summarise(entries, ROWS, CONFIG, RECIPE, LOAD)
    assert (summary.latency_n, summary.latency_load) == (40, LOAD)
    for value, interval in (
        (summary.latency_p50_ms, summary.latency_p50_ci95),
        (summary.latency_p95_ms, summary.latency_p95_ci95),
        (summary.cost_per_1000_usd, summary.cost_ci95),
    ):
        assert interval is not None
        assert interval[0] < value < interval[1]
    assert (summary.prompt_tokens_per_1000, summary.completion_tokens_per_1000) == (19_500, None)
    assert summarise(arm(HIT), ROWS, CONFIG, RECIPE).cost_per_1000_usd is None
    rows = [row(n, gold=f"g{n // 2}") for n in range(20)]
    summary = summarise(arm(*[HIT, MISS] * 10, judge_score=4.0), rows, CONFIG, RECIPE)
    assert summary.score("mean_top1_score").ci95 == pytest.approx((0.75, 0.75)), (
        "each group holds one of both"
    )
    assert summary.score("quality") == MeanCi(mean=4.0, n=20, ci95=(4.0, 4.0))


def test_every_comparison_on_a_metric_counts_for_holm():
    arms = {
        "rl": arm(*[HIT] * 40),
        "sft": arm(*[HIT, MISS] * 10, *[None] * 20),
        "teacher": arm(*[MISS] * 40),
    }
    rows = [row(n, gold=f"g{n}") for n in range(40)]
    comparisons = [
        c for c in compare_arms(arms, rows, CONFIG, RECIPE) if c.metric == "mean_top1_score"
    ]
    assert [(c.a, c.b) for c in comparisons] == [
        ("rl", "teacher"),
        ("sft", "teacher"),
        ("rl", "sft"),
    ]
    assert [c.n for c in comparisons] == [40, 20, 20], "only what both have is compared"
    assert comparisons[0].p_holm == pytest.approx(3 * (comparisons[0].p_value or 0))
    assert (comparisons[0].detectable_diff, comparisons[0].p_mcnemar) == (None, None), (
        "no spread, no top-1"
    )
    assert {c.rows_needed for c in comparisons} == {None}, (
        "a setting that may change later; the report fills it in"
    )


def test_pairs_of_champion_and_further_teachers():
    pairs = pairs_of(["original", "teacher", "cheap", "rl", "champion"])
    assert pairs == [
        ("rl", "teacher"),
        ("teacher", "original"),
        ("rl", "champion"),
        ("champion", "teacher"),
        ("rl", "original"),
        ("cheap", "original"),
        ("rl", "cheap"),
    ]


def sliced(rows: list[Row]) -> dict[tuple[str, str], Any]:
    arms = {"teacher": arm(*[MISS] * len(rows)), "rl": arm(*[HIT] * len(rows))}
    return {(s.by, s.value): s for s in slices_of(arms, rows, CONFIG, RECIPE)}


def test_slices_and_small_ones_without_an_interval():
    rows = [
        row(n, gold=f"g{n}", intent="功效" if n < 30 else None, history="前" * (n % 2))
        for n in range(40)
    ]
    slices = sliced(
        [r.model_copy(update={"query": "问" * (8 + n % 3)}) for n, r in enumerate(rows)]
    )
    assert {key: s.n for key, s in slices.items()} == {
        ("tenant", "t"): 40,
        ("intent", "功效"): 30,
        ("length", "≤10"): 40,
        ("history", "without"): 20,
        ("history", "with"): 20,
    }
    difference = slices["intent", "功效"].diff("rl", "teacher", "mean_top1_score")
    assert (difference.a, difference.b, difference.n, difference.diff) == (
        "rl",
        "teacher",
        30,
        pytest.approx(0.3),
    )
    assert difference.ci95 == pytest.approx((0.3, 0.3))
    slices = sliced([row(n, intent="少见" if n < 19 else "常见") for n in range(40)])
    small = slices["intent", "少见"]
    assert (small.n, small.arms["rl"].n, small.arms["rl"].mean("mean_top1_score")) == (
        19,
        19,
        pytest.approx(0.9),
    )
    assert small.arms["rl"].score("mean_top1_score").ci95 is None
    assert small.diff("rl", "teacher", "mean_top1_score").ci95 is None
    for characters, value in ((1, "≤10"), (10, "≤10"), (11, "11–20"), (20, "11–20"), (21, "21+")):
        assert ("length", value) in sliced([row(0, query="问" * characters)])


def test_groups_of_questions_and_what_train_and_test_share():
    rows = [row(0), row(1), row(2, gold=None), row(3, gold=None, group="002")]
    assert groups_of(rows) == {"000": "g", "001": "g", "002": "002", "003": "002"}
    several = [
        row(0, gold="d1; d2"),
        row(1, gold="d4；d3"),
        row(2, gold="d2; d3"),
        row(3, gold="d3"),
        row(4),
    ]
    assert set(groups_of(several).values()) == {"d1", "g"}, (
        "questions that share a document, if through others"
    )
    overlaps = figures.shared_between(
        [row(0), row(1)], [row(1), row(2, gold="h; g"), row(3, gold=None)], RECIPE
    )
    shared = {s.what: (s.in_train, s.test) for s in overlaps}
    assert (shared["row_ids"], shared["gold_documents"]) == ((1, 3), (1, 2))


def test_examples_spread_over_groups_and_name_the_gold_document_where_an_arm_found_it():
    rows = [row(n, gold=f"g{n % 5}; x{n}") for n in range(20)]
    chosen = examples({"rl": arm(*[HIT] * 20)}, rows, RECIPE, count=3)  # type: ignore[arg-type]
    assert [example.gold_id for example in chosen] == ["g0; x0", "g1; x1", "g2; x2"]
    assert chosen[0].arms["rl"].retrieved.ids == ("g", "x")
    filled = [example.query for example in examples({}, rows, RECIPE)]
    assert len(filled) == len(set(filled)) == 10
    assert filled[:5] == [question.query for question in rows[:5]]
    titled = HIT.model_copy(update={"ids": ("x", "g"), "titles": ("别的", "标准")})
    rows = [row(0), row(0, gold="h")]
    assert [
        examples({"rl": arm(titled)}, [question], RECIPE)[0].gold_title for question in rows
    ] == [
        "标准",
        None,
    ]


def test_a_refreshs_arms_count_failed_rows_but_no_bad_input(profile_of: ProfileOf):
    reasons = ("teacher_refused", "rag_unavailable", "empty_query")
    failed = [row(n, status="failed", reason=why) for n, why in enumerate(reasons, 50)]
    evaluation = evaluate_baselines([*TAUGHT, *failed], profile_of(evaluate=FEW))
    teacher = evaluation.arms["teacher"]
    assert (teacher.n, teacher.failed, teacher.mean("top1")) == (22, 2, 1.0)
    (top1,) = [c for c in evaluation.comparisons if c.metric == "top1"]
    assert (top1.n, top1.left_out, top1.diff) == (20, 2, 1.0)
    alike = [
        r.model_copy(update={"gold_id": None, "query": f"鱼油怎么吃{'？' * n}"})
        for n, r in enumerate(TAUGHT)
    ]
    assert {c.groups for c in evaluate_baselines(alike, profile_of(evaluate=FEW)).comparisons} == {
        1
    }
    cases = [
        RedTeamResult(case_id=str(passed), name="例", kind="long", must_pass=True, passed=passed)
        for passed in (True, False, None)
    ]
    metrics = metrics_of(evaluation.model_copy(update={"red_team": {"rl": cases}}))
    assert [metrics[f"rl/red_team_{name}"] for name in ("failed", "unchecked")] == [1, 1]
    assert metrics["teacher/failed"] == 2
    parts = {
        "metrics": evaluation.metrics,
        "arms": evaluation.arms,
        "comparisons": evaluation.comparisons,
    }
    text = result_markdown(Report(run_id="r", profile="p", recipe="query_rewrite", **parts))
    assert "| teacher | 22 | 2 | 1.000 | 1.000 | 0.900 | 4.00 | " in text


def test_the_table_of_a_refresh_says_what_became_of_the_rows():
    stages = [
        StageSummary(
            name="ingest", seconds=1, rows_in=1300, rows_out=1290, dropped={"duplicate": 10}
        ),
        StageSummary(name="dataset", seconds=1, rows_in=1290, rows_out=1288),
    ]
    text = result_markdown(Report(run_id="r", profile="p", recipe="medical", stages=stages))
    assert text.startswith("## 1,288 of 1,300 rows are in the dataset.\n\nNothing was compared: ")
    assert "| ingest | 1,300 | 1,290 | duplicate 10 |\n" in text
    assert "| Arm |" not in text


def test_a_report_goes_by_the_setting_of_the_day_and_the_model_decided_on(
    profile_of: ProfileOf, tmp_path: Path
):
    path = tmp_path / "evaluation.json"
    rows_by_gain = []
    rows = [row.model_copy(update={"gold_id": row.id}) for row in TAUGHT]
    rows[::2] = [row.model_copy(update={"answer_retrieved": MISS}) for row in rows[::2]]
    path.write_text(
        evaluate_baselines(rows, profile_of(evaluate=FEW)).model_dump_json(), encoding="utf-8"
    )
    evaluated = stage_result("evaluate", artifacts={"evaluation": Artifact.of(path)})
    for gain in (0.03, 0.06):
        with open_run(profile_of(gate={"smallest_gain": gain}), "evaluate") as run:
            rows_needed = {
                comparison.metric: comparison.rows_needed
                for comparison in build_report(run, [evaluated]).comparisons
            }
        rows_by_gain.append(rows_needed["mean_top1_score"])
        assert rows_needed["mrr10"] is None
    assert rows_by_gain[0] == pytest.approx(4 * rows_by_gain[1], abs=4)
    decision = Decision(verdict="promote", challenger="sft", rules=[], is_fallback=True).model_dump(
        mode="json"
    )
    stages = [evaluated, stage_result("gate", details={"decision": decision})]
    with open_run(profile_of(gate={"rivals": ["sft"], "fallback": "sft"}), "evaluate") as run:
        assert build_report(run, stages).rivals == ["base"]


def test_a_report_takes_the_distributions_from_validation(profile_of: ProfileOf, tmp_path: Path):
    findings = RetrievalStatistics()
    for row in TAUGHT:
        findings.add(row)
    details = json.loads(
        json.dumps({"histograms": findings.histograms()})
    )  # as the manifest keeps them
    validated = stage_result(
        "validate",
        details=details,
        artifacts={"rows": write_jsonl(tmp_path / "rows.jsonl", TAUGHT)},
    )
    with open_run(profile_of(evaluate=FEW), "refresh") as run:
        report, older = (
            build_report(run, [result])
            for result in (validated, validated.model_copy(update={"details": {}}))
        )
    assert [sum(part.counts) for part in report.distributions["top1_score"]] == [20, 20]
    assert older.distributions == {}
