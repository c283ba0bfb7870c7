"""Finding recipes, by name or in a file; what the base classes do for them."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from qinglan.config import Profile, Reward
from qinglan.errors import ConfigError, TeacherError
from qinglan.recipes import (
    AnswerRecipe,
    Input,
    RetrievalRecipe,
    get_recipe,
    identifying,
    parse_score,
    placeholders,
    recipe_key,
)

CAPITALS = Path(__file__).parents[1] / "support" / "capitals_recipe.py"


def test_shipped_recipes_are_found_by_their_names():
    assert isinstance(get_recipe("query_rewrite"), RetrievalRecipe)
    with pytest.raises(ConfigError, match=r"recipe `query_rewriter`.*did you mean `query_rewrite`"):
        get_recipe("query_rewriter")
    with pytest.raises(ConfigError, match="no such recipe"):
        get_recipe("_answer")


def test_a_file_is_identified_by_its_content(tmp_path: Path):
    path = tmp_path / "capitals_recipe.py"
    path.write_text(CAPITALS.read_text(encoding="utf-8"), encoding="utf-8")
    before, loaded = recipe_key(str(path)), get_recipe(str(path))
    assert (before["recipe"], before["version"]) == ("capitals_recipe", "1")
    path.write_text(CAPITALS.read_text(encoding="utf-8").replace('VERSION = "1"', 'VERSION = "2"'), encoding="utf-8")
    assert get_recipe(str(path)).VERSION == "2" and loaded.VERSION == "1"
    assert recipe_key(str(path))["sha256"] != before["sha256"]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("x.py", "import nowhere_to_be_found", "can't be loaded: ModuleNotFoundError"),
        ("x.py", "1 / 0", "can't be loaded: ZeroDivisionError"),
        ("x.py", "RECIPE = 1", "defines no `RECIPE`"),
        ("other.py", CAPITALS.read_text(encoding="utf-8"), "NAME is 'capitals_recipe'"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_in_one_line(tmp_path: Path, name: str, text: str, problem: str):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=problem) as caught:
        get_recipe(str(tmp_path / name))
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="No such file"):
        recipe_key(str(tmp_path / "absent.py"))


def test_a_profile_names_the_file_wherever_it_is_read(
    profile_of: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(CAPITALS.parent)
    profile = profile_of(recipe="capitals_recipe.py")
    assert (profile.recipe, profile.recipe_name) == (str(CAPITALS), "capitals_recipe")
    assert profile.model_name == "qinglan.default.capitals_recipe"


@pytest.mark.parametrize(
    ("parts", "earned"),
    [
        ({"right": 1.0, "short": 1.0, "logged": 0.0}, 1.0),
        ({"right": 0.0, "short": 1.0}, -0.5),
        ({"right": math.nan, "short": 0.0}, -1.0),
        ({"short": 1.0}, 1.0),
        ({"right": math.nan, "logged": 1.0}, math.nan),
    ],
)
def test_an_answer_earns_the_mean_of_the_parts_that_are_known(parts: Mapping[str, float], earned: float):
    recipe = get_recipe(str(CAPITALS))
    assert isinstance(recipe, AnswerRecipe)
    assert recipe.reward(Reward(), parts) == pytest.approx(earned, nan_ok=True)
    otherwise = Reward(part_weights={"right": 0.5, "short": 0.5})
    assert recipe.reward(otherwise, {"right": 1.0, "short": 0.0}) == pytest.approx(0.0)


def test_only_what_is_asked_identifies():
    inputs = (Input("a", "甲", required=True), Input("b", "乙", identifies=False), Input("c", "丙"))
    assert identifying({"a": "1", "b": "2"}, inputs) == {"a": "1"}
    assert placeholders(inputs, "x") == {"a": "x"}


@pytest.mark.parametrize("text", ["4", '{"grade": 4}', '{"score": 6}', '{"score": NaN}', '{"score": null}'])
def test_a_judge_that_gives_no_score_is_no_judge(text: str):
    with pytest.raises(TeacherError) as caught:
        parse_score(text)
    assert caught.value.reason == "judge_unreadable"
    assert parse_score('好的：{"score": "4.5", "reason": "x"}') == 4.5
