"""Finding recipes, by name or in a file; their base classes; distilling and validating one row."""

from pathlib import Path
from typing import Any

import pytest
from fake_model import FakeModel, FakeRag
from fixture_types import ProfileOf

from qinglan import recipes
from qinglan.clients.roles import Clients
from qinglan.config import Tenant
from qinglan.errors import ConfigError, RetrievalError, TeacherError
from qinglan.grading.by_retrieval import RetrievalGrader
from qinglan.grading.validation import validate
from qinglan.recipes import Input, get_recipe, query_rewrite
from qinglan.recipes.prompting import undelimited
from qinglan.recipes.requests import require_teacher_alone
from qinglan.rows import Retrieved, Row

SUPPORT = Path(__file__).parents[1] / "support"
CAPITALS = SUPPORT / "capitals_recipe.py"
JUDGING = SUPPORT / "judging_recipe.py"
ROW = Row(id="1", tenant="t", query="它咋吃", history="上轮问了虾青素", source="f!A1")
ANSWERED = ROW.model_copy(update={"answer": "虾青素 服用方法"})
REWRITER = query_rewrite.RECIPE
GOOD = Retrieved(ids=("g", "x"), scores=(0.9, 0.5))
BAD = Retrieved(ids=("x", "g"), scores=(0.6, 0.5))


def test_shipped_recipes_are_found_by_their_names():
    assert isinstance(get_recipe("query_rewrite").grader, RetrievalGrader)
    with pytest.raises(ConfigError, match=r"recipe `query_rewriter`.*did you mean `query_rewrite`"):
        get_recipe("query_rewriter")
    shipped = "answer_judge, medical, passage_judge, query_rewrite"
    for name in ("base", "prompting"):
        with pytest.raises(ConfigError, match=f"no such recipe; known recipes: {shipped}, or"):
            get_recipe(name)


def test_a_file_is_identified_by_its_content(tmp_path: Path):
    path = tmp_path / "capitals_recipe.py"
    path.write_text(CAPITALS.read_text(encoding="utf-8"), encoding="utf-8")
    before = recipes.recipe_key(str(path))
    loaded = get_recipe(str(path))
    assert (before["recipe"], before["version"]) == ("capitals_recipe", "1")
    path.write_text(
        CAPITALS.read_text(encoding="utf-8").replace('VERSION = "1"', 'VERSION = "2"'),
        encoding="utf-8",
    )
    assert get_recipe(str(path)).VERSION == "2"
    assert loaded.VERSION == "1"
    assert recipes.recipe_key(str(path))["sha256"] != before["sha256"]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("x.py", "import nowhere_to_be_found", "can't be loaded: ModuleNotFoundError"),
        ("x.py", "1 / 0", "can't be loaded: ZeroDivisionError"),
        ("x.py", "RECIPE = 1", "defines no `RECIPE`"),
        ("other.py", CAPITALS.read_text(encoding="utf-8"), "NAME is 'capitals_recipe'"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_in_one_line(
    tmp_path: Path, name: str, text: str, problem: str
):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=problem) as caught:
        get_recipe(str(tmp_path / name))
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="No such file"):
        recipes.recipe_key(str(tmp_path / "absent.py"))


def test_a_profile_names_the_file_wherever_it_is_read(
    profile_of: ProfileOf, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(CAPITALS.parent)
    profile = profile_of(recipe="capitals_recipe.py")
    assert (profile.recipe, profile.recipe_name) == (str(CAPITALS), "capitals_recipe")
    assert profile.model_name == "qinglan.default.capitals_recipe"


def test_only_what_is_asked_identifies():
    inputs = (Input("a", "甲", required=True), Input("b", "乙", identifies=False), Input("c", "丙"))
    assert recipes.identifying({"a": "1", "b": "2"}, inputs) == {"a": "1"}
    assert recipes.placeholders(inputs, "x") == {"a": "x"}


def clients(teacher: str = "", judge: str = '{"score": 4}', rewritten: Any = GOOD) -> Clients:
    rag = FakeRag(lambda _, rewrite: rewritten if rewrite else BAD)
    models = {"teacher": FakeModel(teacher), "judge": FakeModel(judge)}
    return Clients(models, rag)  # type: ignore[arg-type]


async def test_distilling_keeps_what_it_cost():
    services = clients("“虾青素  服用方法”")
    distilled = await REWRITER.distill(ROW, services, Tenant(domain="保健品"))
    assert distilled.answer == "虾青素 服用方法"
    assert distilled.answer_request == "hash of “虾青素  服用方法”"
    assert (distilled.answer_cost_usd, distilled.answer_latency_ms) == (0.5, 12.0)
    assert "保健品" in services.teacher.asked[0][0]["content"]  # type: ignore[attr-defined]
    with pytest.raises(TeacherError) as caught:
        await REWRITER.distill(ROW, clients(" ``` "), Tenant())
    assert caught.value.reason == "empty_answer", "the question takes no rewrite's place"


def test_only_the_teacher_alone_can_be_asked_in_bulk(profile_of: ProfileOf):
    answerer = {"model": "small"}
    by_batch = {"mode": "batch_api"}
    require_teacher_alone(profile_of(recipe=str(CAPITALS), distill=by_batch))
    require_teacher_alone(profile_of(recipe=str(JUDGING), answerer=answerer))
    with pytest.raises(
        ConfigError, match=r"distill\.mode: batch_api .*asks answerer and teacher .*; set it"
    ):
        require_teacher_alone(profile_of(recipe=str(JUDGING), answerer=answerer, distill=by_batch))


async def test_validating_retrieves_twice_and_asks_the_judge():
    services = clients()
    judged = await validate(ANSWERED, REWRITER.grader, services, Tenant(), judge=True)
    assert (judged.original_retrieved, judged.answer_retrieved) == (BAD, GOOD)
    assert judged.judge_score == 4.0
    message = undelimited(services.judge.asked[0][1]["content"])  # type: ignore[attr-defined]
    assert message.endswith("当前问题：它咋吃\n改写：虾青素 服用方法")
    unjudged = await validate(ANSWERED, REWRITER.grader, services, Tenant(), judge=False)
    assert unjudged.judge_score is None
    assert len(services.judge.asked) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("failing", "error", "reason"),
    [
        (clients(judge="great!"), TeacherError, "judge_unreadable"),
        (
            clients(rewritten=RetrievalError("down", "rag_unavailable")),
            RetrievalError,
            "rag_unavailable",
        ),
    ],
)
async def test_a_failed_call_is_no_score(
    failing: Clients, error: type[TeacherError | RetrievalError], reason: str
):
    with pytest.raises(error) as caught:
        await validate(ANSWERED, REWRITER.grader, failing, Tenant(), judge=True)
    assert caught.value.reason == reason
