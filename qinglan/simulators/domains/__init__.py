"""Embedded worlds: what stands in for a recipe's data, base model and services. One module or package each.

A world bears the name of the recipe that it is made for; `embedded.domain` lets a recipe without one borrow another's.
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


class ReasonedAnswer(NamedTuple):
    """What a reasoning model says: its answer, and the thoughts before it (`reasoning_content`)."""

    answer: str
    reasoning: str


SimulatedModel = Callable[[str, int], str | ReasonedAnswer]
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


class Domain(ABC):
    """What a world offers; its module or package has one as `DOMAIN`."""

    NAME: str
    """Of the recipe: the module's own name."""
    MODELS: Mapping[str, SimulatedModel]
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
def domain_of(recipe: str) -> Domain:
    """The world of that recipe.

    Raises:
        ConfigError: it has none.
    """
    if recipe not in _names():
        raise ConfigError(f"recipe {recipe} has no embedded world; there are those of {', '.join(_names())}")
    return cast(Domain, importlib.import_module(f"{__name__}.{recipe}").DOMAIN)


def domain_for(profile: Profile, needed_by: str) -> Domain:
    """The world that a profile asks for, or that of its recipe.

    Args:
        needed_by: the setting that says `embedded`.

    Raises:
        ConfigError: there is none.
    """
    domain, domains = profile.embedded.domain, ", ".join(_names())
    if domain is not None and domain not in _names():
        raise ConfigError(f"embedded.domain: there is no world {domain}; there are those of {domains}")
    if domain is None and profile.recipe_name not in _names():
        raise ConfigError(
            f"{needed_by}: recipe {profile.recipe_name} has no embedded world; "
            f"give your own, or name one to borrow from: embedded.domain ({domains})"
        )
    return domain_of(domain or profile.recipe_name)


def sample_of(profile: Profile, needed_by: str) -> SamplePaths:
    """The sample of the profile's world, written anew.

    Raises:
        ConfigError: there is no world, or it can't make so many rows.
    """
    domain = domain_for(profile, needed_by)
    return domain.write_sample(profile.paths.state / "sample" / domain.NAME, profile.embedded)


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
        domain = domain_for(profile, "rag.knowledge_base").NAME
        raise ConfigError(f"rag.knowledge_base: the embedded world {domain} has none; give your own")
    return found


@cache
def simulated_models() -> Mapping[str, Domain]:
    """Of every stand-in model the world that it belongs to."""
    return {model: domain for domain in map(domain_of, _names()) for model in domain.MODELS}


def domain_of_model(model: str) -> Domain:
    """The world that a stand-in model belongs to.

    Raises:
        ConfigError: there is no such model.
    """
    if model not in simulated_models():
        raise ConfigError(
            f"no stand-in is called {model}; there are {', '.join(simulated_models())}; or give a base_url"
        )
    return simulated_models()[model]


@cache
def _names() -> tuple[str, ...]:
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")))
