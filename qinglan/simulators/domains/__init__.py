"""Domains: a simulated sample, base model and services for each recipe.

Each is a module or package here and has the name of its recipe; `embedded.domain` lets a recipe
without a domain use another's. One server answers for the models of all domains, so a profile may
ask any of them by its name.
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
from typing import Any, NamedTuple, TypeVar, cast, get_args

import yaml
from pydantic import TypeAdapter

from qinglan.config import EMBEDDED, Embedded, NoiseKind, Profile
from qinglan.errors import ConfigError
from qinglan.noise import add_noise
from qinglan.recipes import get_recipe, one_line
from qinglan.recipes.grading_services import grading_services
from qinglan.rows import Row, Split, normalise
from qinglan.runs.artifacts import written_whole

Tables = TypeVar("Tables")
Item = TypeVar("Item")

_loading = threading.RLock()
"""Two threads that load parts of one package at once can wait for each other, which Python ends as
an ImportError."""
_MISSES_MAX = 2000
"""Draws in a row without a new row, before the sample counts as exhausted."""
_GREETING_CHARS = 3
_FIXED_TIME = (2026, 1, 1, 0, 0, 0)
"""The time in every workbook: the same rows give the same bytes."""
_FIXED_TIMESTAMP = b"2026-01-01T00:00:00Z"
_TIMESTAMP = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
_WORKBOOK_PROPERTIES = "docProps/core.xml"


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
    """Size of the tiny Qwen3, and length of its pretraining.

    All of it runs on the CPU, while the user waits.
    """

    steps: int = 600
    hidden_size: int = 128
    """A multiple of 64, so that two attention heads share one of keys and values."""
    layers: int = 4
    context_tokens: int = 1024
    tokens_per_step: int = 3072
    """The longest document must fit in."""
    noise_share: float = 0.0
    """Share of the dialogues with a question in which the question has noise (`noise.py`)."""
    documents_per_step: int = 60
    """Number of documents that are made per step.

    `tokens_per_step` holds about 75 of query rewriting's, so each is seen 1.25 times."""


@dataclass
class Domain:
    """All that a domain offers; its module or package has one as `DOMAIN`."""

    name: str
    """The recipe's name, and the module's own."""
    models: Mapping[str, SimulatedModel]
    """By a model name that no other domain uses."""
    write_sample: Callable[[Path, Embedded], SamplePaths]
    """Writes the workbook, and the knowledge base if there is one, into a folder.

    The same config gives the same bytes. Raises ConfigError where more rows are wanted than can be
    made."""
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
    # The loader in C takes a tenth of the time.
    return TypeAdapter(tables).validate_python(yaml.load(text, Loader=yaml.CSafeLoader))


# ---- texts of the base model ----


def chat(*turns: str, system: str | None = None) -> str:
    """A dialogue in Qwen's format, user first, as the base models read it in pretraining."""
    dialogue = ""
    if system is not None:
        dialogue += _turn("system", system)
    for number, text in enumerate(turns):
        role = "user" if number % 2 == 0 else "assistant"
        dialogue += _turn(role, text)
    return dialogue


def _turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


_QUESTION = re.compile(
    "(<\\|im_start\\|>user\n(?:(?!<\\|im_end\\|>).)*：)([^\n]+?)(?=<\\|im_end\\|>)", re.DOTALL
)
"""The first turn that puts a question after a task's name: what comes before the question, and the
question."""


def pretraining_texts(domain: Domain, seed: int, count: int) -> list[str]:
    """The documents of a domain, some questions with noise.

    Those that hold a question of the red team are left out.
    """
    # An empty pattern would match everything; "(?!)" matches nothing.
    red_team = re.compile(pattern_of_any(red_team_questions(domain.name)) or "(?!)")
    texts = []
    for number, document in enumerate(domain.documents(seed, count)):
        # Numbers of its own for each document: noise in one changes no other.
        rng = random_of("noise", seed, number)
        text = _with_noise(document, rng, domain.pretraining.noise_share)
        if not red_team.search(normalise(text)):
            texts.append(text)
    return texts


def _with_noise(text: str, rng: Random, share: float) -> str:
    if rng.random() >= share:
        return text
    kind = rng.choice(get_args(NoiseKind))

    def with_noisy_question(match: re.Match[str]) -> str:
        before, question = match.groups()
        return before + one_line(add_noise(kind, question, rng))

    return _QUESTION.sub(with_noisy_question, text, count=1)


@cache
def red_team_questions(recipe: str) -> tuple[str, ...]:
    """The questions of the recipe's own red team with their context, normalised.

    Questions that are as short as a greeting are left out.
    """
    question_text = get_recipe(recipe).question_text
    questions = []
    for case in _red_team_cases(recipe):
        context = {name: case[name] for name in ("profile", "history", "inputs") if name in case}
        row = Row(id=case["id"], tenant="", source="", query=case["query"], **context)
        question = normalise(question_text(row))
        if len(question) > _GREETING_CHARS:
            questions.append(question)
    return tuple(questions)


def _red_team_cases(recipe: str) -> list[dict[str, Any]]:
    path = files("qinglan.recipes").joinpath("redteam", f"{recipe}.jsonl")
    if not path.is_file():
        return []
    return list(map(json.loads, path.read_text(encoding="utf-8").splitlines()))


# ---- parts of texts, and choices ----


def parts_in(text: str, parts: Iterable[str]) -> list[str]:
    """Those of the parts that the text contains."""
    return [part for part in parts if part in text]


def pattern_of_any(parts: Iterable[str]) -> str:
    """A pattern of any of the parts, the longest first, as one may begin with another."""
    return "|".join(sorted(map(re.escape, parts), key=len, reverse=True))


def ngrams(text: str, size: int) -> list[str]:
    """All runs of `size` characters; none in a shorter text."""
    return [text[start : start + size] for start in range(len(text) - size + 1)]


def all_but(items: Iterable[Item], excluded: Item) -> list[Item]:
    """The items without one of them, to choose another than that."""
    return [item for item in items if item != excluded]


# ---- drawing a sample ----


def owner_of(fraction: float, p_test: float, p_dev: float) -> Split:
    """The split that has what is hashed to this fraction to itself."""
    if fraction < p_test:
        return "test"
    if fraction < p_test + p_dev:
        return "dev"
    return "train"


def random_of(*key: object) -> Random:
    """Random numbers that depend on the key alone."""
    return Random(hashlib.sha256("|".join(map(str, key)).encode()).digest())


def draw_splits(config: Embedded, draw: Callable[[Split, int, Random], list[Item]]) -> list[Item]:
    """Train, then dev, then test, each with its own random numbers."""
    rows: list[Item] = []
    for split in get_args(Split):
        count = getattr(config, f"sample_{split}_rows")
        # A seed for each split: more rows of one leave those of the others as they are.
        rows += draw(split, count, Random(f"{config.sample_seed}-{split}"))
    return rows


def draw_rows(split: Split, count: int, draw: Callable[[int], Item | None]) -> list[Item]:
    """Draw `count` different rows.

    Args:
        split: the split that they are for, named in the error.
        count: the number of rows.
        draw: gets the number of rows so far, and returns None where its row was drawn before.

    Raises:
        ConfigError: where there seem to be no further rows.
    """
    rows: list[Item] = []
    misses = 0
    while len(rows) < count:
        if misses == _MISSES_MAX:
            raise ConfigError(
                f"embedded.sample_{split}_rows: {count} is too many, "
                f"there are about {len(rows)} different questions"
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
        # All in turn rather than any: every pair is as frequent as any other.
        waiting = list(items)
        rng.shuffle(waiting)
        while waiting:
            yield waiting.pop()


def write_workbook(
    path: Path, sheet: str, header: Sequence[str], rows: Iterable[Sequence[str]]
) -> None:
    """Write an .xlsx of one sheet with a header row; it appears whole."""
    # The trainer's environment, which loads the domains too, is without openpyxl.
    from openpyxl import Workbook

    book = Workbook(write_only=True)
    table = book.create_sheet(sheet)
    table.append(list(header))
    for row in rows:
        table.append(list(row))
    # Saved into memory, as the archive has to be written once more without its timestamps.
    buffer = io.BytesIO()
    book.save(buffer)
    with written_whole(path) as partial:
        partial.write_bytes(_without_timestamps(buffer.getvalue()))


def _without_timestamps(workbook: bytes) -> bytes:
    """The same archive with fixed times.

    openpyxl stamps the current time on every member and into the properties.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(workbook)) as source, zipfile.ZipFile(buffer, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name == _WORKBOOK_PROPERTIES:
                content = _TIMESTAMP.sub(_FIXED_TIMESTAMP, content)
            target.writestr(zipfile.ZipInfo(name, _FIXED_TIME), content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


# ---- which domain a recipe, a profile or a model has ----


@cache
def domain_of(recipe: str) -> Domain:
    """The domain of that recipe; ConfigError where it has none."""
    if recipe not in _names():
        raise ConfigError(
            f"recipe {recipe} has no simulated domain; there are those of {', '.join(_names())}"
        )
    # Domains import this module, so it can't import them before it is complete.
    with _loading:
        return cast(Domain, importlib.import_module(f"{__name__}.{recipe}").DOMAIN)


def domain_for(profile: Profile, needed_by: str) -> Domain:
    """The domain that a profile names, or that of its recipe; ConfigError where there is none.

    `needed_by`: the setting whose value is `embedded`.
    """
    names = ", ".join(_names())
    domain = profile.embedded.domain
    if domain is not None and domain not in _names():
        raise ConfigError(
            f"embedded.domain: there is no domain {domain}; there are those of {names}"
        )
    if domain is None and profile.recipe_name not in _names():
        raise ConfigError(
            f"{needed_by}: recipe {profile.recipe_name} has no simulated domain; "
            f"give your own, or name another recipe's domain: embedded.domain ({names})"
        )
    return domain_of(domain or profile.recipe_name)


def sample_of(profile: Profile, needed_by: str) -> SamplePaths:
    """Write the sample.

    Raises ConfigError where there is no domain, or it can't make so many rows.
    """
    domain = domain_for(profile, needed_by)
    embedded = profile.embedded
    # The name tells samples apart: profiles may run at the same time.
    name_parts = (
        domain.name,
        embedded.sample_seed,
        embedded.sample_train_rows,
        embedded.sample_dev_rows,
        embedded.sample_test_rows,
    )
    folder = profile.paths.state / "sample" / "-".join(map(str, name_parts))
    return domain.write_sample(folder, embedded)


def embedded_knowledge_base(profile: Profile, sample: SamplePaths | None = None) -> Path | None:
    """The file that the simulated RAG serves; None where the profile needs none.

    Raises ConfigError where the sample's is wanted, and the domain has none. A `sample` that was
    written before may be given.
    """
    rag = grading_services(profile).get("rag")
    if rag is None or not rag.is_embedded:
        return None
    if profile.rag.knowledge_base != EMBEDDED:
        return Path(profile.rag.knowledge_base)
    if sample is None:
        sample = sample_of(profile, "rag.knowledge_base")
    if sample.knowledge_base is None:
        domain = domain_for(profile, "rag.knowledge_base").name
        raise ConfigError(
            f"rag.knowledge_base: the simulated domain {domain} has none; give your own"
        )
    return sample.knowledge_base


@cache
def simulated_models() -> Mapping[str, Domain]:
    """The names of all simulated models, each with its domain."""
    domains: dict[str, Domain] = {}
    for name in _names():
        domain = domain_of(name)
        domains.update(dict.fromkeys(domain.models, domain))
    return domains


def domain_of_model(model: str) -> Domain:
    """The domain of a simulated model; ConfigError where there is no such model."""
    models = simulated_models()
    if model not in models:
        raise ConfigError(
            f"no simulated model is called {model}; "
            f"there are {', '.join(models)}; or give a base_url"
        )
    return models[model]


@cache
def _names() -> tuple[str, ...]:
    """The names of all domains, those of the modules and packages here."""
    modules = pkgutil.iter_modules(__path__)
    return tuple(sorted(module.name for module in modules if not module.name.startswith("_")))
