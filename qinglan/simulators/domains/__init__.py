"""Domains: a simulated sample, base model and services for each recipe, as one module or package
here.

A domain has the name of its recipe; `embedded.domain` lets a recipe without a domain use another's.
One server answers for the models of all domains, so a profile may ask any of them by its name.
"""

import hashlib
import importlib
import io
import json
import pkgutil
import re
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import NamedTuple, TypeVar, cast, get_args

import yaml
from pydantic import TypeAdapter

from qinglan.config import EMBEDDED, Embedded, NoiseKind, Profile
from qinglan.errors import ConfigError
from qinglan.noise import add_noise
from qinglan.recipes import get_recipe, one_line
from qinglan.rows import Row, Split, normalise
from qinglan.runs.artifacts import written_whole

Tables = TypeVar("Tables")
Item = TypeVar("Item")

_loading = threading.RLock()
"""Two threads that load parts of one package at once can wait for each other, which Python ends as
an ImportError."""
_MISSES_MAX = 2000
"""For one row of a sample, before the sample counts as exhausted."""
_GREETING_CHARS = 3
_FIXED_TIME = (2026, 1, 1, 0, 0, 0)
"""Of a workbook: the same rows give the same bytes."""


class SamplePaths(NamedTuple):
    workbook: Path
    knowledge_base: Path | None = None
    """None in a domain without retrieval."""


class ReasonedAnswer(NamedTuple):
    """A reasoning model's answer, and the thoughts before it (`reasoning_content`)."""

    answer: str
    reasoning: str


SimulatedModel = Callable[[str, int], str | ReasonedAnswer]
"""The last message of the user and a seed → the answer; the same two give the same answer."""


@dataclass(frozen=True)
class Pretraining:
    """Size of the tiny Qwen3, and how long it is pretrained: all on the CPU, while the user
    waits."""

    steps: int = 600
    hidden_size: int = 128
    """A multiple of 64, so that two attention heads share one of keys and values."""
    layers: int = 4
    context_tokens: int = 1024
    tokens_per_step: int = 3072
    """The longest document must fit in."""
    noise_share: float = 0.0
    """Of the dialogues that ask about a question, those in which it has noise (`noise.py`)."""
    documents_per_step: int = 60
    """How many are made per step; `tokens_per_step` holds about 75 of query rewriting's, so each is
    seen 1.25 times."""


@dataclass
class Domain:
    """What a domain offers; its module or package has one as `DOMAIN`."""

    name: str
    """The recipe's name, and the module's own."""
    models: Mapping[str, SimulatedModel]
    """By a model name that no other domain uses."""
    write_sample: Callable[[Path, Embedded], SamplePaths]
    """Writes the workbook, and the knowledge base if there is one, into a folder; the same bytes
    for the same config. Raises ConfigError where more rows are wanted than can be made."""
    documents: Callable[[int, int], Iterator[str]]
    """Seed and count → the base model's texts: passages, and dialogues as `chat` writes them.

    Of a dialogue only the assistant's turns are learnt. No text may show what the test split asks.
    Take them from `pretraining_texts`."""
    words: Callable[[], list[str]]
    """Words of prompts and answers that get a token of their own; up to six Chinese characters
    each."""
    characters: Callable[[], list[str]]
    """Every character that prompts and answers may hold, each a token; others fall back to
    bytes."""
    pretraining: Pretraining = Pretraining()


def load_facts(package: str, tables: type[Tables]) -> Tables:
    """The tables in `facts.yaml` of a domain's package, as a dataclass."""
    text = files(package).joinpath("facts.yaml").read_text(encoding="utf-8")
    return TypeAdapter(tables).validate_python(yaml.load(text, Loader=yaml.CSafeLoader))


def chat(*turns: str, system: str | None = None) -> str:
    """A dialogue in Qwen's format, user first, as the base models read it in pretraining."""
    roles = ("user", "assistant")
    spoken = [(roles[n % 2], text) for n, text in enumerate(turns)]
    if system is not None:
        spoken.insert(0, ("system", system))
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in spoken)


_ASKED = re.compile(
    "(<\\|im_start\\|>user\n(?:(?!<\\|im_end\\|>).)*：)([^\n]+?)(?=<\\|im_end\\|>)", re.DOTALL
)
"""The first turn that puts a question after a task's name: what comes before the question, and the
question."""


def pretraining_texts(domain: Domain, seed: int, count: int) -> list[str]:
    """The documents of a domain, some questions with noise, without those that hold a question of
    the red team."""
    known = re.compile(
        "|".join(map(re.escape, red_team_questions(domain.name))) or "(?!)"
    )  # none matches nothing
    documents = enumerate(domain.documents(seed, count))
    texts = (
        _with_noise(text, random_of("noise", seed, n), domain.pretraining.noise_share)
        for n, text in documents
    )
    return [text for text in texts if not known.search(normalise(text))]


def _with_noise(text: str, rng: Random, share: float) -> str:
    if rng.random() >= share:
        return text
    kind = rng.choice(get_args(NoiseKind))
    return _ASKED.sub(
        lambda found: found[1] + one_line(add_noise(kind, found[2], rng)), text, count=1
    )


@cache
def red_team_questions(recipe: str) -> tuple[str, ...]:
    """What the recipe's own red team asks, with its context, normalised; what is as short as a
    greeting is left out."""
    asks, path = get_recipe(recipe), files("qinglan.recipes").joinpath("redteam", f"{recipe}.jsonl")
    found = []
    for case in map(
        json.loads, path.read_text(encoding="utf-8").splitlines() if path.is_file() else ()
    ):
        context = {name: case[name] for name in ("profile", "history", "inputs") if name in case}
        row = Row(id=case["id"], tenant="", source="", query=case["query"], **context)
        found.append(normalise(asks.question_text(row)))
    return tuple(text for text in found if len(text) > _GREETING_CHARS)


def owner_of(fraction: float, p_test: float, p_dev: float) -> Split:
    """The split that has what is hashed to this fraction to itself."""
    return "test" if fraction < p_test else "dev" if fraction < p_test + p_dev else "train"


def random_of(*key: object) -> Random:
    """Random numbers that depend on the key alone."""
    return Random(hashlib.sha256("|".join(map(str, key)).encode()).digest())


def draw_splits(config: Embedded, draw: Callable[[Split, int, Random], list[Item]]) -> list[Item]:
    """Train, then dev, then test, each with its own random numbers."""
    counts: dict[Split, int] = {
        split: getattr(config, f"sample_{split}_rows") for split in get_args(Split)
    }
    return [
        row
        for split, n in counts.items()
        for row in draw(split, n, Random(f"{config.sample_seed}-{split}"))
    ]


def draw_rows(split: Split, count: int, draw: Callable[[int], Item | None]) -> list[Item]:
    """`count` rows; `draw` gets the number of rows so far, and returns None where its row was drawn
    before."""
    rows: list[Item] = []
    misses = 0
    while len(rows) < count:
        if misses == _MISSES_MAX:
            raise ConfigError(
                f"embedded.sample_{split}_rows: {count} is too many, there are about {len(rows)} different questions"
            )
        row = draw(len(rows))
        misses += 1
        if row is not None:
            rows.append(row)
            misses = 0
    return rows


def rounds(items: Iterable[Item], rng: Random) -> Iterator[Item]:
    """All items again and again, in a new order each round."""
    while True:
        waiting = list(items)
        rng.shuffle(waiting)
        while waiting:
            yield waiting.pop()


def write_workbook(
    path: Path, sheet: str, header: Sequence[str], rows: Iterable[Sequence[str]]
) -> None:
    """Write an .xlsx of one sheet with a header row; it appears whole."""
    from openpyxl import (
        Workbook,
    )  # absent from the trainer's environment, which loads the domains too

    book = Workbook(write_only=True)
    table = book.create_sheet(sheet)
    table.append(list(header))
    for row in rows:
        table.append(list(row))
    buffer = io.BytesIO()
    book.save(buffer)
    with written_whole(path) as partial:
        partial.write_bytes(_without_timestamps(buffer.getvalue()))


def _without_timestamps(workbook: bytes) -> bytes:
    """The same archive with fixed times; openpyxl stamps the current one on every member and into
    the properties."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(workbook)) as source, zipfile.ZipFile(buffer, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name == "docProps/core.xml":
                content = re.sub(
                    rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", b"2026-01-01T00:00:00Z", content
                )
            target.writestr(zipfile.ZipInfo(name, _FIXED_TIME), content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


@cache
def domain_of(recipe: str) -> Domain:
    """The domain of that recipe; ConfigError where it has none."""
    if recipe not in _names():
        raise ConfigError(
            f"recipe {recipe} has no simulated domain; there are those of {', '.join(_names())}"
        )
    with _loading:
        return cast(Domain, importlib.import_module(f"{__name__}.{recipe}").DOMAIN)


def domain_for(profile: Profile, needed_by: str) -> Domain:
    """The domain that a profile names, or that of its recipe; ConfigError where there is none.

    `needed_by`: the setting whose value is `embedded`.
    """
    domain, domains = profile.embedded.domain, ", ".join(_names())
    if domain is not None and domain not in _names():
        raise ConfigError(
            f"embedded.domain: there is no domain {domain}; there are those of {domains}"
        )
    if domain is None and profile.recipe_name not in _names():
        raise ConfigError(
            f"{needed_by}: recipe {profile.recipe_name} has no simulated domain; "
            f"give your own, or name another recipe's domain: embedded.domain ({domains})"
        )
    return domain_of(domain or profile.recipe_name)


def sample_of(profile: Profile, needed_by: str) -> SamplePaths:
    """Write the sample; ConfigError where there is no domain, or it can't make so many rows."""
    domain = domain_for(profile, needed_by)
    rows = (
        profile.embedded.sample_train_rows,
        profile.embedded.sample_dev_rows,
        profile.embedded.sample_test_rows,
    )
    name = "-".join(
        map(str, (domain.name, profile.embedded.sample_seed, *rows))
    )  # profiles may run at the same time
    return domain.write_sample(profile.paths.state / "sample" / name, profile.embedded)


def embedded_knowledge_base(profile: Profile, sample: SamplePaths | None = None) -> Path | None:
    """The file that the simulated RAG serves; None where the profile needs none.

    ConfigError where the sample's is wanted, and the domain has none. A `sample` that was written
    before may be given.
    """
    if profile.rag.url != EMBEDDED or "rag" not in get_recipe(profile.recipe).grader.services:
        return None
    if profile.rag.knowledge_base != EMBEDDED:
        return Path(profile.rag.knowledge_base)
    found = (sample or sample_of(profile, "rag.knowledge_base")).knowledge_base
    if found is None:
        domain = domain_for(profile, "rag.knowledge_base").name
        raise ConfigError(
            f"rag.knowledge_base: the simulated domain {domain} has none; give your own"
        )
    return found


@cache
def simulated_models() -> Mapping[str, Domain]:
    return {model: domain for domain in map(domain_of, _names()) for model in domain.models}


def domain_of_model(model: str) -> Domain:
    """The domain of a simulated model; ConfigError where there is no such model."""
    if model not in simulated_models():
        raise ConfigError(
            f"no simulated model is called {model}; there are {', '.join(simulated_models())}; or give a base_url"
        )
    return simulated_models()[model]


@cache
def _names() -> tuple[str, ...]:
    return tuple(
        sorted(
            module.name
            for module in pkgutil.iter_modules(__path__)
            if not module.name.startswith("_")
        )
    )
