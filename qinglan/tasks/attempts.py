"""The files by which an attempt at a stage lets the next one go on with its work.

`started.json` says what the files of the folder were made of, and by which code. A killed attempt
is continued where both are unchanged, or where the user wants it all the same.
"""

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ValidationError

from qinglan.config import Profile
from qinglan.recipes import get_recipe
from qinglan.runs.artifacts import MANIFEST, hash_of, write_json
from qinglan.runs.code_digest import code_imported_by, code_of, module_path
from qinglan.runs.run import Run

STARTED = "started.json"
CONTINUED_ANYWAY = "continued_anyway"
"""In a stage's details: the code that changed while it was interrupted (`--continue-anyway`)."""
_KEEP_EVERY_S = 5.0
_MOST_MODULES_NAMED = 3


class Started(BaseModel):
    """`started.json`: what a stage's files were made of and by, its MLflow run, and the work that
    went into it."""

    key: str
    inputs: str = ""
    """Digest of everything that the result depends on beside the code."""
    code: dict[str, str] = {}
    """Digest of each module whose code can change the result."""
    continued_anyway: list[str] = []
    """The code that changed between two attempts, where the user wanted to continue all the
    same."""
    mlflow_run_id: str = ""
    seconds: float = 0.0
    """Seconds of all attempts; those of a killed one up to its last progress."""
    tracked: bool = False
    """MLflow has the end of it."""

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """The file's content; None where there is none that can be read."""
        try:
            return cls.model_validate_json((directory / STARTED).read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def write(self, directory: Path) -> None:
        write_json(directory / STARTED, self.model_dump())

    def with_seconds(self, seconds: float, *, tracked: bool) -> Self:
        return self.model_copy(update={"seconds": seconds, "tracked": tracked})

    def tracked_as(self, mlflow_run_id: str, seconds: float) -> Self:
        """A further attempt, in this MLflow run and with the seconds of those before."""
        changes = {"mlflow_run_id": mlflow_run_id, "seconds": seconds, "tracked": False}
        return self.model_copy(update=changes)

    def continued_by(self, key: str, code: Mapping[str, str]) -> Self:
        """The attempt, continued by other code under another key."""
        changed = changed_modules(self.code, code)
        all_changed = sorted({*self.continued_anyway, *changed})
        changes = {"key": key, "code": dict(code), "continued_anyway": all_changed}
        return self.model_copy(update=changes)


class Clock:
    """Counts the seconds of this attempt onto those of earlier ones, and keeps them where a kill
    can't take them."""

    def __init__(self, directory: Path, started: Started) -> None:
        self.started = started
        self._directory = directory
        self._earlier_s = started.seconds
        self._start = time.monotonic()
        self._last_kept = self._start

    @property
    def seconds(self) -> float:
        return self._earlier_s + time.monotonic() - self._start

    def keep(self, *, tracked: bool = False, at_once: bool = True) -> None:
        """Write the seconds down; unless `at_once`, at most every few of them."""
        now = time.monotonic()
        if not at_once and now - self._last_kept < _KEEP_EVERY_S:
            return
        self._last_kept = now
        self.started = self.started.with_seconds(self.seconds, tracked=tracked)
        self.started.write(self._directory)


def digests_of(profile: Profile, stage_module: str) -> dict[str, str]:
    """The digests of the code that a stage's result depends on, by module.

    It is the import closure of the stage's module and, for a stage that asks the recipe, of the
    recipe's file.
    """
    digests = dict(code_of(stage_module))
    if "qinglan.recipes" in digests:
        recipe_module = type(get_recipe(profile.recipe)).__module__
        if module_path(recipe_module):
            digests |= code_of(recipe_module)
        else:
            # A file outside of the package: its own content is in the key by `recipe_key`.
            file = sys.modules[recipe_module].__file__
            assert file, "a recipe is loaded from a file"
            digests |= code_imported_by(Path(file))
    return digests


def choose_key(
    run: Run,
    name: str,
    inputs: str,
    code: Mapping[str, str],
    has_checkpoints: bool,
    warn: Callable[[str], None],
) -> Started:
    """The key to search for and to work under, with what it is made of.

    An attempt of other code that is continued on the user's request gets a key of its own: its
    result is the result of neither code, so no other run may reuse it.
    """
    new = Started(key=hash_of(inputs, dict(code)), inputs=inputs, code=dict(code))
    directory = run.directory / name
    previous = Started.read(directory)
    if previous is None or previous.inputs != inputs:
        return new
    if previous.code == code:
        return previous
    if not (run.continue_anyway and has_checkpoints):
        return new
    changed = listed_modules(changed_modules(previous.code, code))
    warn(
        f"{name}: the code of {changed} changed since the last attempt; "
        "it continues all the same, as --continue-anyway was given"
    )
    is_finished = (directory / MANIFEST).exists()
    key = previous.key if is_finished else hash_of(new.key, previous.key)
    continued = previous.continued_by(key, code)
    continued.write(directory)
    return continued


def changed_modules(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The modules whose digests differ, or that only one side has."""
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def listed_modules(modules: list[str]) -> str:
    """The modules in a sentence; of many only the first."""
    listed = ", ".join(modules[:_MOST_MODULES_NAMED])
    more = len(modules) - _MOST_MODULES_NAMED
    return f"{listed} and {more} more modules" if more > 0 else listed


def set_aside(
    directory: Path, previous: Started | None, started: Started, warn: Callable[[str], None]
) -> None:
    """Keep what was made of other inputs or by other code: it may hold hours of training."""
    aside = _free_name(directory)
    directory.rename(aside)
    cause = "its inputs"
    hint = "delete it when you don't need it"
    if previous is not None and previous.inputs == started.inputs:
        changed = listed_modules(changed_modules(previous.code, started.code))
        cause = f"the code of {changed}"
        hint = (
            f"to continue with it all the same, stop this run, rename that folder to "
            f"{directory.name} and run again with --continue-anyway; else delete it"
        )
    warn(
        f"{directory.name}: {cause} changed since the last attempt, so it starts anew; "
        f"what that attempt left is now in {aside}; {hint}"
    )


def _free_name(directory: Path) -> Path:
    number = 1
    while True:
        aside = directory.with_name(f"{directory.name}.superseded-{number}")
        if not aside.exists():
            return aside
        number += 1
