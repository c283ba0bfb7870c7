"""Recipes: what is trained. One module each, found by its name; the profile's `recipe` picks one."""

import difflib
import importlib
import pkgutil
from typing import Protocol, cast

from qinglan.config import Tenant
from qinglan.errors import ConfigError
from qinglan.rows import Row

Message = dict[str, str]


class Recipe(Protocol):
    """What every recipe module offers to the stages that are the same for all."""

    NAME: str

    def student_messages(self, row: Row, tenant: Tenant) -> list[Message]:
        """The student's prompt: the same in SFT, RL, evaluation and serving."""

    def user_text(self, query: str, profile: str = "", history: str = "") -> str:
        """The question as the student, the judge and the reward see it."""


def get_recipe(name: str) -> Recipe:
    """The recipe module of that name.

    Raises:
        ConfigError: there is none.
    """
    known = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"known recipes: {', '.join(known)}"
        raise ConfigError(f"recipe `{name}`: there is no such recipe; {hint}")
    return cast(Recipe, importlib.import_module(f"{__name__}.{name}"))
