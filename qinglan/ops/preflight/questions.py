"""Checks of the recipe and of the questions: what can be read, and what a training could learn."""

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from qinglan.config import EMBEDDED, Profile
from qinglan.data.sources.database import query_database
from qinglan.data.sources.files import list_files
from qinglan.data.workbook import read_rows
from qinglan.errors import ConfigError, QinglanError, WorkbookError
from qinglan.ops.estimate.counting import count_questions, questions_of
from qinglan.ops.forecast import find_problems, forecast
from qinglan.recipes import Recipe, get_recipe
from qinglan.recipes.requests import require_teacher_alone
from qinglan.rows import HINTS, RowCounts
from qinglan.simulators.domains import domain_for

_CHECKED_ROWS = 1000
"""Rows that are read before a run, which itself reads the rest before anything is spent."""


def check_recipe(profile: Profile) -> None:
    """Load the recipe, and compare it with the settings that it must know or allow."""
    recipe = get_recipe(profile.recipe)
    columns = profile.data.columns
    inputs = sorted(recipe_input.name for recipe_input in recipe.INPUTS)
    unknown_inputs = [name for name in columns.inputs if name not in inputs]
    if unknown_inputs:
        has = f"has no input `{unknown_inputs[0]}`; it has {', '.join(inputs) or 'none'}"
        raise ConfigError(f"data.columns.inputs: recipe `{recipe.NAME}` {has}")
    reads_dialogues = type(recipe).extract_messages is not Recipe.extract_messages
    if columns.dialogue and not reads_dialogues:
        raise ConfigError(
            f"data.columns.dialogue: recipe `{recipe.NAME}` reads no dialogues; leave it out"
        )
    recipe.grader.check_profile(profile)
    require_teacher_alone(profile)
    if profile.evaluate.teachers:
        _require_teacher_answers(recipe, "evaluate.teachers")


def check_compared_teachers(recipe: Recipe, teachers: Collection[str]) -> None:
    """Require teachers to compare with, and a recipe whose answers are a teacher's."""
    _require_teacher_answers(recipe, "compare")
    if not teachers:
        raise ConfigError(
            "compare.teachers: names none to compare with; add one: {name: {base_url: …, model: …}}"
        )


def check_workbook(profile: Profile, recipe: Recipe) -> str | None:
    """Read the header and the first rows; the note names files that are skipped."""
    data = profile.data
    if data.sql:
        next(query_database(data, recipe.INPUTS))
        return None
    if data.workbook == EMBEDDED:
        domain_for(profile, "data.workbook")
        return None
    path = Path(data.workbook)
    counts = RowCounts()
    rows = read_rows(path, data, profile.tenant, inputs=recipe.INPUTS)
    for _ in counts.pass_through(rows):
        if counts.total >= _CHECKED_ROWS and counts.ok:
            break
    if not counts.ok:
        reasons = "; ".join(f"{reason}: {HINTS[reason]}" for reason in sorted(counts.reasons))
        raise WorkbookError(
            f"{data.workbook}: no row can be used; {reasons or 'put questions in it'}"
        )
    skipped_names = [file.name for file in list_files(path).skipped]
    if not skipped_names:
        return None
    return f"skipped, by their suffix: {', '.join(skipped_names)}"


def check_schedule(profile: Profile) -> str | None:
    """Read every question; the note says what can't work in the training's schedule."""
    problems: list[str] = []
    # Questions that can't be read are the problem of the workbook's check.
    with suppress(QinglanError), questions_of(profile) as rows:
        counts = count_questions(profile, rows)
        problems = list(find_problems(profile, forecast(profile, counts)))
    return "; ".join(problems) or None


def _require_teacher_answers(recipe: Recipe, setting: str) -> None:
    """Raise ConfigError where the recipe's rows bring their answers themselves."""
    if type(recipe).own_answer is Recipe.own_answer:
        return
    problem = f"recipe `{recipe.NAME}` takes the answers that its rows bring, which no teacher gave"
    hint = "leave it out, or take a recipe that asks its teacher"
    raise ConfigError(f"{setting}: {problem}; {hint}")
