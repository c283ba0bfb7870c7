"""Recipes: the things to train, one file each.

A recipe is found by its name; the profile's `recipe` picks one, or gives a file's path. Its file
defines `RECIPE`, an object of a class derived from `Recipe`, which has a grader: a
`RetrievalGrader` (the student's text is put to the retrieval service) or a `RuleGrader` (it is
graded by rules on the row, and by a judge). docs/how-to/add-a-recipe.md adds one.
"""

import hashlib
import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from qinglan.clients.openai_protocol import Message
from qinglan.errors import ConfigError
from qinglan.grading.by_retrieval import RetrievalGrader, RewriteScore
from qinglan.grading.by_rules import RuleGrader, bad_format
from qinglan.grading.grade import Grade
from qinglan.grading.grader import Grader
from qinglan.grading.judge_answers import SCORE_SCHEMA, parse_score, read_json
from qinglan.grading.metrics import JUDGE, JUDGE_SCORE, QUALITY, Metric, PrimaryMetric
from qinglan.grading.panel import Panel
from qinglan.recipes.base import Recipe
from qinglan.recipes.findings import Finding, FindingRow
from qinglan.recipes.inputs import Input, identifying, placeholders
from qinglan.recipes.prompting import DATA_RULE, delimited, one_line, prompt
from qinglan.text import did_you_mean

__all__ = [
    "DATA_RULE",
    "JUDGE",
    "JUDGE_SCORE",
    "QUALITY",
    "SCORE_SCHEMA",
    "Finding",
    "FindingRow",
    "Grade",
    "Grader",
    "Input",
    "Message",
    "Metric",
    "Panel",
    "PrimaryMetric",
    "Recipe",
    "RetrievalGrader",
    "RewriteScore",
    "RuleGrader",
    "bad_format",
    "delimited",
    "get_recipe",
    "identifying",
    "one_line",
    "parse_score",
    "placeholders",
    "prompt",
    "read_json",
    "recipe_key",
]


def get_recipe(name: str) -> Recipe:
    """The recipe of that name, or in that .py file; raises ConfigError where there is none."""
    if name.endswith(".py"):
        return _from_file(Path(name))[0]
    if name not in _built_in_names():
        raise ConfigError(f"recipe `{name}`: there is no such recipe; {_hint(name)}")
    return _recipe_of(importlib.import_module(f"{__name__}.{name}"), name)


def recipe_key(name: str) -> dict[str, str]:
    """The part of a stage's key that stands for the recipe.

    It holds the recipe's version and, for a file outside of the package, the file's content.
    """
    if not name.endswith(".py"):
        recipe = get_recipe(name)
        return {"recipe": recipe.NAME, "version": recipe.VERSION}
    recipe, digest = _from_file(Path(name))
    return {"recipe": recipe.NAME, "version": recipe.VERSION, "sha256": digest}


@cache
def _built_in_names() -> tuple[str, ...]:
    """The names of the modules beside this one that define a recipe; the others serve them."""
    modules = sorted(Path(__file__).parent.glob("*.py"))
    return tuple(
        module.stem for module in modules if "\nRECIPE = " in module.read_text(encoding="utf-8")
    )


def _hint(name: str) -> str:
    known_recipes = f"known recipes: {', '.join(_built_in_names())}, or a .py file's path"
    return did_you_mean(name, _built_in_names(), known_recipes)


def _from_file(path: Path) -> tuple[Recipe, str]:
    """The recipe in a file, and the SHA-256 of the file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"recipe {path}: can't be read: {error.strerror}; give the path of the recipe's file"
        ) from error
    digest = hashlib.sha256(content).hexdigest()
    module_name = f"qinglan_recipe_{digest[:16]}"
    module = sys.modules.get(module_name)
    if module is None:
        module = _load_module(module_name, path, content)
    return _recipe_of(module, path.stem), digest


def _load_module(module_name: str, path: Path, content: bytes) -> ModuleType:
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec and spec.loader, "a path that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    # Before its code runs, as dataclasses look their own module up.
    sys.modules[module_name] = module
    try:
        # The content that was hashed, not a stale .pyc.
        exec(compile(content, str(path), "exec"), vars(module))  # noqa: S102
    except Exception as error:
        del sys.modules[module_name]
        raise ConfigError(
            f"recipe {path}: can't be loaded: {type(error).__name__}: {error}"
        ) from error
    return module


def _recipe_of(module: ModuleType, name: str) -> Recipe:
    recipe = getattr(module, "RECIPE", None)
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"recipe `{name}`: its file defines no `RECIPE`, an object of a Recipe's class"
        )
    if name != recipe.NAME:
        raise ConfigError(
            f"recipe `{name}`: its NAME is {recipe.NAME!r}; call file and recipe the same"
        )
    return recipe
