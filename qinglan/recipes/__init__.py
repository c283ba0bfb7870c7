"""Recipes: what is trained. One file each, found by its name; the profile's `recipe` picks one, or
gives a file's path.

A recipe's file defines `RECIPE`, an object of a class derived from `RetrievalRecipe` (the student's
text is put to the retrieval service) or from `AnswerRecipe` (it is graded by rules on the row, and
by a judge). Files whose names begin with an underscore are no recipes. docs/how-to/add-a-recipe.md
adds one.
"""

import difflib
import hashlib
import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path
from typing import Any

from qinglan.errors import ConfigError
from qinglan.recipes.kinds.answer import AnswerRecipe
from qinglan.recipes.kinds.elements import (
    JUDGE,
    QUALITY,
    SCORE_SCHEMA,
    Finding,
    FindingRow,
    Input,
    Message,
    Metric,
    PrimaryMetric,
    identifying,
    placeholders,
    prompt,
)
from qinglan.recipes.kinds.recipe import Recipe, answered
from qinglan.recipes.kinds.retrieval import RetrievalRecipe
from qinglan.recipes.kinds.untrusted import DATA_RULE, delimited, one_line, parse_score, read_json
from qinglan.recipes.scoring.service import Baseline, GradedRewrite, Scored

__all__ = [
    "DATA_RULE", "JUDGE", "QUALITY", "SCORE_SCHEMA", "AnswerRecipe", "Baseline", "Finding", "FindingRow",
    "GradedRewrite", "Input", "Message", "Metric", "PrimaryMetric", "Recipe", "RetrievalRecipe", "Scored",
    "answered", "delimited", "get_recipe", "identifying", "one_line", "parse_score", "placeholders", "prompt",
    "read_json", "recipe_key",
]  # fmt: skip


def get_recipe(name: str) -> Recipe:
    """The recipe of that name, or in that .py file; raises ConfigError where there is none."""
    if name.endswith(".py"):
        return _from_file(Path(name))[0]
    modules = pkgutil.iter_modules(__path__)
    known = sorted(module.name for module in modules if not module.ispkg)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = (
            f"did you mean `{near[0]}`?"
            if near
            else f"known recipes: {', '.join(known)}, or a .py file's path"
        )
        raise ConfigError(f"recipe `{name}`: there is no such recipe; {hint}")
    return _recipe_of(importlib.import_module(f"{__name__}.{name}"), name)


def recipe_key(name: str) -> dict[str, str]:
    """What the key of a stage that uses this recipe must hold; of a file outside the package, its
    content too."""
    recipe, digest = _from_file(Path(name)) if name.endswith(".py") else (get_recipe(name), "")
    return {"recipe": recipe.NAME, "version": recipe.VERSION} | (
        {"sha256": digest} if digest else {}
    )


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
    if (loaded := sys.modules.get(module_name)) is None:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec and spec.loader
        loaded = sys.modules[module_name] = importlib.util.module_from_spec(
            spec
        )  # dataclasses look themselves up
        try:
            exec(compile(content, str(path), "exec"), vars(loaded))  # noqa: S102 (what was hashed, not a stale .pyc)
        except Exception as error:
            del sys.modules[module_name]
            raise ConfigError(
                f"recipe {path}: can't be loaded: {type(error).__name__}: {error}"
            ) from error
    return _recipe_of(loaded, path.stem), digest


def _recipe_of(module: Any, name: str) -> Recipe:
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
