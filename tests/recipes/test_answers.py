"""Answers that are graded by rules and by a judge, in every stage.

Validation, selection, evaluation, RL's prompts and rewards.
"""

import json
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import letters
import pytest
from fake_model import FakeModel
from fake_service import SIMULATED, completion
from fixture_types import ProfileOf, Serve
from letters import GRADER, JUDGED_GRADER, JudgedLetters, Letters
from reward_service import extra_info, reward_service

from qinglan.clients.roles import Addresses, Clients
from qinglan.config import Endpoint, Profile, Reward, Select, Tenant
from qinglan.data.dataset.rl_rows import rl_record, rl_schema
from qinglan.errors import ConfigError, StageError, TeacherError
from qinglan.evaluation.arms import baseline_arms
from qinglan.evaluation.measuring import measure
from qinglan.grading.grader import Grader
from qinglan.grading.validation import validate
from qinglan.recipes import Metric, Recipe, query_rewrite
from qinglan.recipes.keys import scoring_key
from qinglan.recipes.selection import select
from qinglan.rows import ArmRow, Row
from qinglan.runs.run import Run
from qinglan.tasks import rl as rl_module
from qinglan.tasks.validate import roles_of
from qinglan.training.reward_service.function import RewardActor
from qinglan.training.reward_service.scorer import Scorer
from qinglan.training.reward_service.settings import RewardService

ROW = Row(id="1", tenant="t", query="q", source="f:1", inputs={"letter": "a"}, answer="aab")
ROWS = [ROW, ROW.model_copy(update={"id": "2"})]
PLAIN = GRADER
JUDGED = JUDGED_GRADER
FOUR_OF_FIVE = (200, completion('{"score": 4}'))
COMMON = {
    "score",
    "judge",
    "invalid",
    "judge_asked",
    "judge_cached",
    "judge_cost_usd",
    "latency_ms",
}
KEYS = COMMON | {"share", "format", "pure"}
Score = Callable[..., Any]


def clients(**scores: float) -> Clients:
    """Clients with a judge that knows these texts, and fails at others."""

    def answer(question: str) -> str | Exception:
        score = scores.get(question.removeprefix("q "))
        if score is None:
            return TeacherError("no", "teacher_unavailable", transient=True)
        return f'{{"score": {score}}}'

    return Clients({"judge": FakeModel(answer)})  # type: ignore[arg-type]


def profile_with(**sections: Any) -> Profile:
    return Profile.model_validate({"name": "t"} | SIMULATED | sections)


async def validated(grader: Grader, row: Row, **scores: float) -> Row:
    return await validate(row, grader, clients(**scores), Tenant(), judge=True)


def test_who_is_asked_follows_from_the_recipe_and_the_profile():
    unjudged = profile_with(validation={"judge_baseline": False})
    assert roles_of(PLAIN, profile_with()) == ()
    assert roles_of(JUDGED, unjudged) == ()
    assert roles_of(JUDGED, profile_with()) == ("judge",)
    assert roles_of(query_rewrite.RECIPE.grader, unjudged) == ("rag",)


async def test_validation_grades_the_teachers_answer():
    judged = await validated(JUDGED, ROW, aab=4.0)
    assert judged.parts == {"format": 1.0, "share": pytest.approx(2 / 3)}
    assert judged.judge_score == 4.0
    by_rules = await validated(PLAIN, ROW)
    assert by_rules.judge_score is None
    not_to_be_asked = await validated(JUDGED, ROW.model_copy(update={"answer": "?a"}))
    assert not_to_be_asked.judge_score is None


async def test_rules_that_give_what_they_do_not_declare_are_a_mistake_of_the_recipe():
    loose = replace(PLAIN, weights={"format": 1.0})
    clashing = replace(PLAIN, metrics=(Metric("invalid", "invalid", "无效"),))
    beyond = replace(PLAIN, parts=lambda _row, _text: {"share": 1.5})
    with pytest.raises(ConfigError, match="`share`, which `weights` does not name"):
        loose.checked_parts(ROW, "a")
    with pytest.raises(ConfigError, match=r"share = 1\.5, which is not from 0 to 1"):
        beyond.checked_parts(ROW, "a")
    with pytest.raises(ConfigError, match="figures called invalid; rename"):
        clashing.check_profile(profile_with())


@pytest.mark.parametrize(
    ("grader", "reward", "message"),
    [
        (PLAIN, {"part_weights": {"chare": 1}}, "has no part `chare`; its parts: share, format"),
        (PLAIN, {"part_weights": {"share": 0, "format": 0, "judge": 1}}, "has no part `judge`"),
        (
            JUDGED,
            {"part_weights": {"share": 0}, "judge_share": 0.5},
            "must weigh more than 0, or the judge",
        ),
        (query_rewrite.RECIPE.grader, {"part_weights": {"share": 1}}, "is not graded by parts"),
    ],
)
def test_weights_that_do_not_fit_are_refused(grader: Grader, reward: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        grader.check_profile(profile_with(reward=reward))
    JUDGED.check_profile(
        profile_with(reward={"part_weights": {"share": 0, "format": 0.1}, "judge_share": 0.5})
    )


async def test_findings_are_means_of_what_is_known():
    statistics = JUDGED.validation_statistics()
    for answer, letter, score in (("aa", "a", 5.0), ("ab", "a", 2.0), ("a\nb", "", 2.0)):
        row = ROW.model_copy(update={"answer": answer, "inputs": {"letter": letter}})
        statistics.add(await validated(JUDGED, row, **{answer: score}))
    statistics.add(ROW)
    assert statistics.metrics() == {
        "share_mean": 0.75,
        "format_mean": pytest.approx(2 / 3),
        "flawed_share": pytest.approx(1 / 3),
        "judge_mean": 3.0,
    }
    assert sum(statistics.histograms()["judge_score"][0]["counts"]) == 3
    assert PLAIN.validation_statistics().metrics() == {}
    assert PLAIN.validation_statistics().histograms() == {}


def test_answers_that_all_have_a_flaw_stop_the_run():
    statistics = PLAIN.validation_statistics()
    flawed = ROW.model_copy(update={"parts": {"format": 0.0}})
    for _ in range(19):
        statistics.add(flawed)
    statistics.check()
    statistics.add(flawed)
    with pytest.raises(
        StageError, match=r"all 20 of the teacher's answers have a flaw \(bad_format 20\)"
    ):
        statistics.check()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parts": {"format": 1.0}}, None),
        ({"parts": {"format": 0.0}}, "bad_format"),
        ({"parts": {"share": 0.0}}, None),
        ({"parts": None}, "not_validated"),
        ({"parts": {"format": 0.0}, "review": "accept"}, None),
        ({"parts": {"format": 1.0}, "review": "reject"}, "rejected_by_reviewer"),
    ],
)
def test_selection(changes: dict[str, Any], reason: str | None):
    (selected,) = select([ROW.model_copy(update=changes)], PLAIN, Select())
    assert (selected.reason, selected.status) == (reason, "failed" if reason else "ok")


def test_rl_asks_what_may_teach_and_gets_the_row():
    lenient = replace(PLAIN, rl_reasons=frozenset({None, "bad_format"}))
    flawed = ROW.failed("bad_format")
    unanswered = ROW.model_copy(update={"answer": None})
    corrected = unanswered.model_copy(update={"corrected": "a", "reason": "empty_answer"})
    assert [PLAIN.may_ask_in_rl(row) for row in (ROW, flawed, unanswered, corrected)] == [
        True,
        False,
        False,
        True,
    ]
    assert lenient.may_ask_in_rl(flawed)
    row = ROW.model_copy(update={"group": "0", "parts": {"format": 1.0}})
    record = rl_record(row, Letters(), Tenant())
    assert record["prompt"] == [{"role": "user", "content": "q"}]
    assert record.keys() == set(rl_schema().names)
    assert (record["extra_info"]["row_id"], record["extra_info"]["unit"]) == ("1", "0")
    assert Row.model_validate_json(record["extra_info"]["row"]) == row


def test_the_first_metric_chooses_the_model():
    quality = Metric("quality", "judge score", "裁判评分", maximum=5.0)
    by_the_judge = replace(JUDGED, metrics=(quality, *JUDGED.metrics))
    row = ROW.model_copy(update={"group": "0", "parts": {"format": 1.0}})
    assert PLAIN.dev_metric(Reward(), [row]) == "share"
    assert PLAIN.dev_metric(Reward(), []) == "score", "no dev row can have it"
    assert by_the_judge.dev_metric(Reward(), [row]) == "judge"
    unjudged = by_the_judge.dev_metric(Reward(judge_share=0), [row])
    assert unjudged == "score", "RL does not ask the judge"


def arm(*texts: str | None, **fields: Any) -> list[ArmRow]:
    return [
        ArmRow(row_id=row.id, text=text, **fields) for row, text in zip(ROWS, texts, strict=True)
    ]


async def test_measuring_grades_every_text_and_asks_the_judge_once_for_each():
    services = clients(aa=5.0, ab=2.0, b=0.0)
    arms = {"sft": arm("aa", "ab", requests=("r",)), "rl": arm("aa", "b")}
    measured = await measure(arms, ROWS, JUDGED, services, profile_with())
    assert [(row.parts, row.judge_score) for row in measured.arms["sft"]] == [
        ({"format": 1.0, "share": 1.0}, 5.0),
        ({"format": 1.0, "share": 0.5}, 2.0),
    ]
    assert measured.arms["sft"][0].requests == ("r", 'hash of {"score": 5.0}')
    assert [row.judge_score for row in measured.arms["rl"]] == [5.0, 0.0]
    assert sorted(services.judge.questions) == ["q aa", "q ab", "q b"]  # type: ignore[attr-defined]
    assert measured.unjudged == {}


async def test_a_question_that_the_judge_fails_is_unjudged_for_all_arms():
    """An empty answer to another question scores lowest."""
    arms = {
        "teacher": arm(None, None, reason="empty_answer"),
        "sft": arm("aa", "aa"),
        "rl": arm("aa", "b"),
    }
    services = clients(aa=5.0)
    measured = await measure(arms, ROWS, JUDGED, services, profile_with())
    assert [row.judge_score for row in measured.arms["sft"]] == [5.0, None]
    assert [row.judge_score for row in measured.arms["rl"]] == [5.0, None]
    assert [row.parts is None for row in measured.arms["sft"]] == [False, False]
    assert [(entry.judge_score, entry.requests) for entry in measured.arms["teacher"]] == [
        (0.0, ()),
        (None, ()),
    ]
    assert sorted(services.judge.questions) == ["q aa", "q aa", "q b"]  # type: ignore[attr-defined]
    assert measured.unjudged == {"teacher_unavailable": 1}
    strict = profile_with(evaluate={"max_failed_share": 0})
    with pytest.raises(StageError, match="calls failed for 1 of 2 questions"):
        await measure(arms, ROWS, JUDGED, clients(aa=5.0), strict)


async def test_an_empty_answer_is_graded_and_a_missing_one_is_not():
    empty = ArmRow(row_id="1", reason="empty_answer")
    refused = ArmRow(row_id="2", reason="teacher_refused")
    arms = {"teacher": [empty, refused]}
    measured = await measure(arms, ROWS, PLAIN, clients(), profile_with())
    assert [(row.parts, row.reason) for row in measured.arms["teacher"]] == [
        ({"format": 1.0, "share": 0.0}, "empty_answer"),
        (None, "teacher_refused"),
    ]


def test_answers_that_rows_bring_are_no_teachers_arm():
    bought = ROW.model_copy(update={"answer_request": "r", "answer_cost_usd": 0.5})
    assert baseline_arms(ROWS, PLAIN, profile_with()) == {}
    assert baseline_arms([bought, *ROWS], PLAIN, profile_with()) == {}
    arms = baseline_arms([bought], PLAIN, profile_with(), retrieve_again=True)
    (entry,) = arms["teacher"]
    assert (entry.text, entry.cost_usd, entry.requests) == ("aab", 0.5, ("r",))


def service_of(folder: Path, judge_url: str = "", **settings: Any) -> RewardService:
    defaults = {
        "recipe": letters.__file__,
        "parts": PLAIN.score_parts,
        "reward": Reward(),
        "rag": None,
        "judge": Endpoint(model="j", max_retries=0) if judge_url else None,
        "judge_url": judge_url,
    }
    return reward_service(folder, **defaults | settings)


@pytest.fixture
async def score(tmp_path: Path, serve: Serve) -> AsyncIterator[Score]:
    """Score one text, by a grader, with a judge that answers so."""
    opened: list[Scorer] = []

    async def score_one(
        text: str, grader: Grader, reply: Any = None, row: Row = ROW, **settings: Any
    ) -> Any:
        url = serve(lambda _: reply).url if reply else ""
        recipe: Recipe = JudgedLetters() if grader is JUDGED else Letters()
        opened.append(Scorer(service_of(tmp_path, url, **settings), recipe))
        return await opened[-1].score(extra_info(row, recipe), text)

    yield score_one
    for scorer in opened:
        await scorer.close()


def entries(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line, parse_constant=pytest.fail)
        for line in (folder / "samples.jsonl").read_text().splitlines()
    ]


async def test_rules_alone_need_neither_judge_nor_rag(tmp_path: Path, score: Score):
    scored = await score(" ab<|im_end|>\n", PLAIN)
    assert scored.keys() == KEYS
    assert scored["score"] == pytest.approx(2 * (0.75 * 0.5 + 0.25) - 1)
    figures = {"share": 0.5, "format": 1.0, "pure": 0.0, "judge_asked": 0, "invalid": 0}
    assert {name: scored[name] for name in figures} == figures
    assert math.isnan(scored["judge"])
    (entry,) = entries(tmp_path)
    assert (entry["row_id"], entry["text"], entry["share"]) == ("1", "ab", 0.5)
    assert "judge" not in entry
    assert (await score("a\na", PLAIN))["format"] == 0.0, "its lines stay as they are"


async def test_known_parts_and_the_judge_weigh_as_the_profile_says(score: Score):
    scored = await score("ab", JUDGED, FOUR_OF_FIVE)
    assert scored["score"] == pytest.approx(2 * (0.5 * 0.5 + 0.5 * 0.8) - 1)
    assert (scored["judge"], scored["judge_asked"], scored["judge_cost_usd"]) == (4.0, 1, 110e-6)
    unlabelled = await score("ab", JUDGED, FOUR_OF_FIVE, row=ROW.model_copy(update={"inputs": {}}))
    assert unlabelled["score"] == pytest.approx(2 * 0.8 - 1), (
        "a part that is not known counts neither way"
    )
    assert unlabelled.keys() == KEYS
    assert math.isnan(unlabelled["share"])
    assert math.isnan(unlabelled["pure"])
    only_format = Reward(part_weights={"share": 0, "format": 1, "judge": 0})
    scored = await score("b", JUDGED, FOUR_OF_FIVE, reward=only_format)
    assert (scored["score"], scored["judge_asked"]) == (1.0, 0), (
        "a judge that can't matter is not asked"
    )


@pytest.mark.parametrize(
    ("text", "share", "worth", "judge"),
    [
        ("?a", 1.0, 0.0, math.nan),
        ("ab", 0.0, 0.0, math.nan),
        ("<|im_end|>", 1.0, -1.0, 0.0),  # an empty answer is known to be worth nothing
        ("<|im_end|>", 0.0, -1.0, math.nan),
    ],
)
async def test_without_the_judge_the_rules_decide(
    score: Score, text: str, share: float, worth: float, judge: float
):
    scored = await score(text, JUDGED, FOUR_OF_FIVE, reward=Reward(judge_share=share))
    assert (scored["score"], scored["judge_asked"], scored["invalid"]) == (worth, 0, 0.0)
    assert scored["judge"] == pytest.approx(judge, nan_ok=True)


@pytest.mark.parametrize("reply", [(400, {}), (200, completion("fine"))])
async def test_a_failed_judge_is_not_a_score(tmp_path: Path, score: Score, reply: Any):
    scored = await score("aa", JUDGED, reply)
    assert scored.keys() == KEYS
    assert (scored["score"], scored["invalid"], scored["judge_asked"]) == (0.0, 1.0, 1)
    known_parts = [
        part for part in ("judge", "share", "format", "pure") if not math.isnan(scored[part])
    ]
    assert known_parts == []
    (entry,) = entries(tmp_path)
    assert entry["failed_by"] == "judge"
    assert "score" not in entry


async def test_where_nothing_that_counts_is_known_there_is_no_score(tmp_path: Path, score: Score):
    row = ROW.model_copy(update={"inputs": {}})
    weights = Reward(part_weights={"share": 1, "format": 0})
    assert (await score("aa", PLAIN, row=row, reward=weights))["invalid"] == 1
    message = "no part with a weight is known for this row (known: format)"
    assert message in entries(tmp_path)[0]["invalid"]


def test_a_recipe_that_asks_nobody_depends_on_no_service(tmp_path: Path, profile_of: ProfileOf):
    profile = profile_of(recipe=letters.__file__)
    run = Run(id="r", flow="train", profile=profile, directory=tmp_path)
    service = rl_module._reward_service(
        run, partial(Addresses, "", "", ""), tmp_path / "samples.jsonl"
    )
    assert (service.rag, service.judge, service.parts) == (
        None,
        None,
        ("judge", "share", "format", "pure"),
    )
    assert set(scoring_key(profile)) == {"recipe", "tenant"}
    rewriting_run = run.model_copy(update={"profile": profile_of()})
    addresses = partial(Addresses, "", "http://j", "http://r")
    rewriting = rl_module._reward_service(rewriting_run, addresses, tmp_path / "s.jsonl")
    assert (rewriting.rag_url, rewriting.judge_url, rewriting.retrieval_scope) == (
        "http://r",
        "http://j",
        "kb:",
    )


async def test_the_actor_opens_the_recipes_scorer(tmp_path: Path):
    service = service_of(tmp_path)
    actor = RewardActor(service.model_dump_json())
    info = extra_info(ROW, Letters())
    assert (await actor.score(info, "aaa"))["score"] == 1.0
    await actor.close()
    gone = RewardActor(service.model_copy(update={"recipe": "/no/such.py"}).model_dump_json())
    lost = await gone.score(info, "aaa")
    assert (lost["invalid"], lost.keys()) == (1.0, KEYS)
