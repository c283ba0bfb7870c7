"""Embedded worlds: what stands in for a recipe's data, base model and services. One module or package each.

A world bears the name of the recipe that it is made for; `embedded.world` lets a recipe without one borrow another's.
The stand-in models of all worlds are served together, so a profile may ask any of them by its name.
"""

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, cast

from qinglan.config import EMBEDDED, Embedded, Profile
from qinglan.errors import ConfigError
from qinglan.recipes import get_recipe


class SamplePaths(NamedTuple):
    """Where the sample was written."""

    workbook: Path
    knowledge_base: Path | None = None
    """None in a world without retrieval."""


class Spoken(NamedTuple):
    """What a reasoning model says: its answer, and the thoughts before it (`reasoning_content`)."""

    answer: str
    reasoning: str


Speaker = Callable[[str, int], str | Spoken]
"""The last message of the user and a seed → the answer; the same two give the same answer."""


@dataclass(frozen=True)
class Pretraining:
    """Size of the tiny Qwen3, and how long it is pretrained: all on the CPU, with the user waiting."""

    steps: int = 600
    hidden_size: int = 128
    """A multiple of 64, so that two attention heads share one of keys and values."""
    layers: int = 4
    context_tokens: int = 1024
    tokens_per_step: int = 3072
    """The longest document must fit in."""
    documents_per_step: int = 60
    """How many are made per step; `tokens_per_step` holds about 75 of query rewriting's, so each is seen 1.25 times."""


class World(ABC):
    """What a world offers; its module or package has one as `WORLD`."""

    NAME: str
    """Of the recipe: the module's own name."""
    SPEAKERS: Mapping[str, Speaker]
    """Stand-in models by their names, which no other world uses."""
    PRETRAINING: Pretraining = Pretraining()

    @abstractmethod
    def write_sample(self, directory: Path, config: Embedded) -> SamplePaths:
        """Write the workbook, and the knowledge base if there is one; the same bytes for the same config.

        Raises:
            ConfigError: more rows are wanted than can be made.
        """

    @abstractmethod
    def documents(self, seed: int, count: int) -> Iterator[str]:
        """What the base model reads: passages, and dialogues as `dialogue.chat` writes them.

        Of a dialogue only the assistant's turns are learnt. Nothing may give away what the test split asks.
        """

    @abstractmethod
    def words(self) -> list[str]:
        """What prompts and answers are made of, and deserves a token of its own; up to six Chinese characters each."""

    def characters(self) -> list[str]:
        """Every character that prompts and answers may hold, each a token; others fall back to bytes."""
        return sorted(set("".join((*self.documents(0, 3000), *self.words()))))


@cache
def world_of(recipe: str) -> World:
    """The world of that recipe.

    Raises:
        ConfigError: it has none.
    """
    if recipe not in _names():
        raise ConfigError(f"recipe {recipe} has no embedded world; there are those of {', '.join(_names())}")
    return cast(World, importlib.import_module(f"{__name__}.{recipe}").WORLD)


def world_for(profile: Profile, needed_by: str) -> World:
    """The world that a profile asks for, or that of its recipe.

    Args:
        needed_by: the setting that says `embedded`.

    Raises:
        ConfigError: there is none.
    """
    world, worlds = profile.embedded.world, ", ".join(_names())
    if world is not None and world not in _names():
        raise ConfigError(f"embedded.world: there is no world {world}; there are those of {worlds}")
    if world is None and profile.recipe_name not in _names():
        raise ConfigError(
            f"{needed_by}: recipe {profile.recipe_name} has no embedded world; "
            f"give your own, or name one to borrow from: embedded.world ({worlds})"
        )
    return world_of(world or profile.recipe_name)


def sample_of(profile: Profile, needed_by: str) -> SamplePaths:
    """The sample of the profile's world, written anew.

    Raises:
        ConfigError: there is no world, or it can't make so many rows.
    """
    world = world_for(profile, needed_by)
    return world.write_sample(profile.paths.state / "sample" / world.NAME, profile.embedded)


def embedded_knowledge_base(profile: Profile, sample: SamplePaths | None = None) -> Path | None:
    """The file that the embedded RAG serves; None where it is not needed.

    Args:
        sample: where it has been written already.

    Raises:
        ConfigError: it shall be the sample's, and there is none.
    """
    if profile.rag.url != EMBEDDED or "rag" not in get_recipe(profile.recipe).graders:
        return None
    if profile.rag.knowledge_base != EMBEDDED:
        return Path(profile.rag.knowledge_base)
    found = (sample or sample_of(profile, "rag.knowledge_base")).knowledge_base
    if found is None:
        world = world_for(profile, "rag.knowledge_base").NAME
        raise ConfigError(f"rag.knowledge_base: the embedded world {world} has none; give your own")
    return found


@cache
def speakers() -> Mapping[str, World]:
    """Of every stand-in model the world that it belongs to."""
    return {model: world for world in map(world_of, _names()) for model in world.SPEAKERS}


def speaking_world(model: str) -> World:
    """The world that a stand-in model belongs to.

    Raises:
        ConfigError: there is no such model.
    """
    if model not in speakers():
        raise ConfigError(f"no stand-in is called {model}; there are {', '.join(speakers())}; or give a base_url")
    return speakers()[model]


@cache
def _names() -> tuple[str, ...]:
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")))
