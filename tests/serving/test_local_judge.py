"""The judge of our own: who it may be, what it is asked, and that it must agree with the judge."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_service import PRICE
from registered import Models

from qinglan.clients.chat import Answer
from qinglan.clients.roles import Addresses, site_ledger
from qinglan.config import LocalJudge, Profile
from qinglan.errors import ConfigError, RetrievalError, StageError, TeacherError
from qinglan.evaluation.summary import build_report
from qinglan.ops.estimate import estimate
from qinglan.ops.preflight import inspect_profile
from qinglan.recipes._verdicts import BEST, RIGHT_FROM, reference_of, verdict_recipe
from qinglan.recipes.query_rewrite import RECIPE
from qinglan.rows import Retrieved, Row
from qinglan.runs.artifacts import StageResult, write_jsonl
from qinglan.runs.run import open_run
from qinglan.serving.local_judge import JudgeServer, ReleasedJudge, released_judge
from qinglan.serving.registry import prompt_digest
from qinglan.tasks import rl as rl_module
from qinglan.training.judge_agreement import (
    JudgeAgreement,
    JudgeComparison,
    JudgedPassage,
    agreement_finding,
    choose_rows,
    count_retryable,
    describe_agreement,
    measure_agreement,
    require_agreement,
    require_answers,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's own use of SQLAlchemy

ProfileOf = Callable[..., Profile]
MODEL = "qinglan.t.answer_judge"
JUDGE = verdict_recipe("answer_judge")


def judged(profile_of: ProfileOf, models: Models | None = None, **sections: Any) -> Profile:
    tracking = {"tracking": {"uri": models.uri}} if models else {}
    local = {"model": models.name if models else MODEL, "price": PRICE}
    return profile_of(judge={"model": "small", "local": local}, **tracking, **sections)


def row(number: int, answer: str = "虾青素 服用方法", **fields: Any) -> Row:
    known = {"id": f"r{number:02}", "tenant": "t", "query": "虾青素咋吃", "source": "x", "split": "dev"}
    return Row(**known | {"answer": answer} | fields)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


@pytest.fixture
def models(database: str, tmp_path: Path) -> Models:
    return Models(database, f"qinglan.{tmp_path.name}", tmp_path)


def register(models: Models, profile: Profile, **fields: Any) -> str:
    prompt = prompt_digest(profile.model_copy(update={"recipe": "answer_judge"}))
    known = {"recipe": "answer_judge", "prompt_sha256": prompt} | fields
    return models.registry.promote(models.registry.register(models.candidate(**known)).version).version


def test_without_one_nobody_is_looked_for(profile_of: ProfileOf):
    assert released_judge(profile_of()) is None


def test_no_champion_is_said_before_anything_is_spent(profile_of: ProfileOf, models: Models):
    (problem,) = (c.problem for c in inspect_profile(judged(profile_of, models), "train") if c.name == "local judge")
    assert problem and problem.startswith(f"judge.local.model: {models.name} has no champion in the registry at sqlite")
    assert "qinglan run pipeline --profile answer_judge" in problem
    assert "local judge" not in {c.name for c in inspect_profile(judged(profile_of, models), "refresh")}


def test_looking_for_it_makes_no_database(profile_of: ProfileOf, tmp_path: Path):
    with pytest.raises(ConfigError, match="has no champion"):
        released_judge(judged(profile_of, tracking={"uri": f"sqlite:///{tmp_path / 'none.db'}"}))
    assert not (tmp_path / "none.db").exists()


def test_the_champion_judges_and_another_one_has_other_keys(profile_of: ProfileOf, models: Models):
    profile = judged(profile_of, models)
    register(models, profile)
    first = released_judge(profile)
    register(models, profile, weights="two")
    second = released_judge(profile)
    assert first and second
    assert (first.name, second.name) == (f"{models.name}-v1", f"{models.name}-v2")
    assert first.key_salt != second.key_salt and first.identity != second.identity
    assert JudgeServer(first, "http://x/v1", lambda: None).endpoint.model == first.name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_sha256": "of long ago"}, r"version 1 of .* was trained with another prompt"),
        ({"recipe": "query_rewrite"}, "its student gives no verdicts"),
    ],
)
def test_a_champion_that_can_t_judge_is_refused(
    profile_of: ProfileOf, models: Models, fields: dict[str, str], message: str
):
    profile = judged(profile_of, models)
    register(models, profile, **fields)
    with pytest.raises(ConfigError, match=message):
        released_judge(profile)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"recipe": "medical"}, "recipe `medical` retrieves nothing"),
        ({"trainer": {"ray_dashboard_url": "http://10.0.0.1:8265"}}, "served on this machine only"),
    ],
)
def test_a_run_that_can_t_ask_it_is_refused(profile_of: ProfileOf, sections: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        released_judge(judged(profile_of, **sections))


def test_the_estimate_takes_its_price(profile_of: ProfileOf):
    profile = judged(profile_of, rl={"total_steps": 10, "train_batch_size": 64})
    with site_ledger(profile) as ledger:
        parts = {part.what: part for part in estimate(profile, "train", [row(1, split="train")], ledger)}
    assert set(parts) == {"local judge", "rl verdicts", "evaluate"}
    assert (parts["rl verdicts"].model, parts["local judge"].model) == (MODEL, "small")
    assert parts["rl verdicts"].cost_usd > 0
    assert (parts["rl verdicts"].questions, parts["local judge"].questions) == (640, 800)


def test_a_question_and_two_passages_are_what_the_student_learnt_to_read(profile_of: ProfileOf):
    *_, user = JUDGE.verdict_messages("当前问题：虾青素\n咋吃", "每日一次。", "一天吃一回。", profile_of().tenant)
    assert user["content"] == "问题：当前问题：虾青素 咋吃\n标准答案：每日一次。\n待评答案：一天吃一回。"


def test_a_right_verdict_is_always_worth_more_than_a_wrong_one():
    verdicts = ("正确，完整", "正确，不完整", "正确，编造", "错误，不完整", "错误，编造", "错误，跑题")
    scores = [JUDGE.verdict_score(f"<think>无</think><output>{verdict}</output>") for verdict in verdicts]
    assert scores == [5, 4, 3, 2, 1, 0]
    assert (scores[0], scores[2]) == (BEST, RIGHT_FROM)
    with pytest.raises(TeacherError, match="no verdict"):
        JUDGE.verdict_score("都可以")


@pytest.mark.parametrize(("gold", "labels", "known"), [("g", True, True), ("h", True, False), ("h", False, True)])
def test_a_passage_that_a_label_refuses_is_no_reference(gold: str, labels: bool, known: bool):
    found = Retrieved(ids=("g", "h"), scores=(0.9, 0.5), first_passage="甲")
    assert bool(reference_of(found, gold, use_labels=labels)) == known


class Rag:
    """Finds by the text: the question itself finds 丙."""

    def __init__(self, **found: str) -> None:
        self.found = {"虾青素 服用方法": "甲", "服用方法": "乙"} | found

    async def retrieve(self, query: str, text: str | None = None) -> Retrieved:
        passage = self.found.get(text or "", "丙")
        if passage == "down":
            raise RetrievalError("rag", "rag_unavailable", transient=True)
        return Retrieved(ids=("g",), scores=(0.9,), first_passage=passage)


class Chat:
    """Answers by the last words of what it is asked."""

    def __init__(self, **answers: str) -> None:
        self.answers, self.asked = answers, list[str]()

    async def ask(self, messages: list[dict[str, str]], parse: Any, schema: Any = None) -> Answer[Any]:
        self.asked.append(messages[-1]["content"])
        said = next(answer for end, answer in self.answers.items() if self.asked[-1].endswith(end))
        if said == "down":
            raise TeacherError("judge", "teacher_timeout", transient=True)
        return Answer(parse(said), "key", False, 0.0, 1.0)


def compare(profile: Profile, rag: Rag, local: Chat, judge: Chat, *rows: Row) -> list[JudgedPassage]:
    judges = JudgeComparison(profile, RECIPE, JUDGE, local, judge, rag)  # type: ignore[arg-type]
    return asyncio.run(judges.compare(rows))


GOOD, BAD = "<think>无</think><output>正确，不完整</output>", "<think>无</think><output>错误，跑题</output>"


def test_both_are_asked_about_other_passages_and_the_reference_needs_one_alone(profile_of: ProfileOf):
    local, judge = Chat(乙=GOOD, 丙=BAD), Chat(甲='{"score": 5}', 乙='{"score": 4}', 丙='{"score": 1}')
    pairs = compare(profile_of(), Rag(), local, judge, row(1))
    assert [(pair.passage, pair.local, pair.judge) for pair in pairs] == [("甲", None, 5), ("丙", 0, 1), ("乙", 4, 4)]
    assert len(local.asked) == 2 and all("标准答案：甲" in text for text in local.asked)
    found = measure_agreement(pairs, 3.0)
    assert (found.pairs, found.share, found.kappa, found.references, found.reference_right) == (2, 1, 1, 1, 1)


def test_a_failed_call_is_no_opinion_and_an_unreadable_verdict_is_a_wrong_one(profile_of: ProfileOf):
    local, judge = Chat(乙="随便", 丙="down"), Chat(甲='{"score": 5}', 乙='{"score": 4}', 丙='{"score": 1}')
    pairs = compare(profile_of(), Rag(), local, judge, row(1))
    found = measure_agreement(pairs, 3.0)
    assert (found.pairs, found.failed, found.unreadable, found.share) == (1, 1, 1, 0)
    assert count_retryable(pairs) == 1
    with pytest.raises(StageError, match=r"calls failed for 1 of 3 passages \(teacher_timeout 1\)"):
        require_answers(pairs, 0.05)


def test_a_question_that_the_rag_fails_counts_as_failed(profile_of: ProfileOf):
    pair, *others = compare(profile_of(), Rag(服用方法="down"), Chat(), Chat(), row(1))
    assert others and all(each.failed == pair.failed for each in others), "as many as it would have had"
    assert pair.failed == "rag_unavailable" and measure_agreement([pair], 3.0).pairs == 0


def test_where_a_label_says_that_the_teacher_is_wrong_nobody_is_asked(profile_of: ProfileOf):
    assert compare(profile_of(), Rag(), Chat(), Chat(), row(1, gold_id="other")) == []


def test_dev_rows_are_drawn_by_their_ids():
    rows = [row(3), row(1), row(2, split="train"), row(4, status="failed"), row(0, answer="")]
    assert [each.id for each in choose_rows(rows, 5)] == ["r01", "r03"]
    assert [each.id for each in choose_rows(rows, 1)] == ["r01"]


def pair(number: int, local: float | None, judge: float) -> JudgedPassage:
    return JudgedPassage(
        row_id=f"{number}", group=f"{number}", question="问", reference="甲", passage="乙", local=local, judge=judge
    )


def test_a_judge_that_always_says_the_same_agrees_by_chance_alone():
    found = measure_agreement([pair(number, 0.0, 5.0 if number % 3 else 0.0) for number in range(30)], 3.0)
    assert found.share == pytest.approx(1 / 3) and found.kappa == pytest.approx(0)
    assert found.right == pytest.approx(2 / 3)


@pytest.mark.parametrize("kappa", [0.3, None])
def test_too_little_agreement_stops_the_run_and_says_the_number(kappa: float | None):
    found = JudgeAgreement(pairs=9, unreadable=0, failed=0, share=None if kappa is None else 0.7, kappa=kappa)
    with pytest.raises(StageError, match=r"below judge\.local\.min_agreement = 0\.6") as stopped:
        require_agreement(found, LocalJudge(model="m"), pytest.fail)
    assert ("κ 0.30 on 9 passages" in str(stopped.value)) == (kappa is not None)


def test_the_profile_may_go_on_all_the_same():
    told: list[str] = []
    found = JudgeAgreement(pairs=9, unreadable=2, failed=0, share=0.7, kappa=0.3, kappa_low=0.1, kappa_high=0.5)
    require_agreement(found, LocalJudge(model="m", when_below="go_on"), told.append)
    assert "κ 0.30 (0.10 to 0.50) on 9 passages, 2 of its answers without a verdict" in told[0]
    require_agreement(found, LocalJudge(model="m", min_agreement=0.3), pytest.fail)


def test_the_served_judge_s_identity_holds_what_its_answers_depend_on():
    released: Any = SimpleNamespace(name="m", version="1", sha256="x", recipe="answer_judge")
    one, other = (ReleasedJudge(LocalJudge(model="m", max_tokens=n), released) for n in (64, 128))
    slower = ReleasedJudge(LocalJudge(model="m", max_tokens=64, concurrency=1), released)
    assert one.identity == slower.identity != other.identity


def test_the_report_has_the_table(profile_of: ProfileOf, tmp_path: Path):
    found = measure_agreement([pair(number, 4.0 * (number % 2), 4.0 * (number % 2)) for number in range(8)], 3.0)
    table = agreement_finding(found)
    assert all(len(line.values) == len(table.columns) for line in table.rows)
    assert "8" in table.rows[0].label.en and describe_agreement(found).startswith("agreement 100%, κ 1.00")
    details = {"summary": {"steps": 1}, "findings": [table.model_dump(mode="json")]}
    rows = {"rows": write_jsonl(tmp_path / "rows.jsonl", [row(1)])}
    with open_run(profile_of(evaluate={"bootstrap_resamples": 200}), "refresh") as run:
        known = {"key": "k", "run_id": run.id, "seconds": 1.0}
        rl = StageResult(stage="rl", details=details, **known)
        report = build_report(run, [StageResult(stage="validate", artifacts=rows, **known), rl])
    assert [one.title.en for one in report.findings] == ["The local judge in RL: agreement with the judge"]


def test_rl_is_told_of_the_served_judge_in_the_judge_s_place(profile_of: ProfileOf, tmp_path: Path):
    profile = judged(profile_of)
    assert profile.judge.local
    released: Any = SimpleNamespace(name=MODEL, version="3", sha256="x", recipe="answer_judge")
    served = JudgeServer(ReleasedJudge(profile.judge.local, released), "http://127.0.0.1:9/v1", lambda: None)
    with open_run(profile, "train") as run:
        services = partial(Addresses, "", "http://paid/v1", "")
        own, paid = (rl_module._reward_service(run, services, tmp_path / "s", each) for each in (served, None))
    assert own.judge and paid.judge
    assert (own.judge.model, own.judge_url, own.judge_recipe) == (f"{MODEL}-v3", served.url, "answer_judge")
    assert (paid.judge.model, paid.judge_url, paid.judge_recipe) == ("small", "http://paid/v1", "")
    assert own.judge_key_salt != paid.judge_key_salt
