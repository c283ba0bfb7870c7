"""Simulated domains: found by name, the same every time, and independent of one another."""

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from qinglan.config import Embedded, Profile
from qinglan.errors import ConfigError
from qinglan.simulators import base_model
from qinglan.simulators import domains as domains
from qinglan.simulators.domains import (
    Domain,
    Pretraining,
    SamplePaths,
    domain_for,
    domain_of,
    domain_of_model,
    embedded_knowledge_base,
    simulated_models,
)

ProfileOf = Callable[..., Profile]
NAMES = domains._names()
FEW = Embedded(sample_train_rows=30, sample_dev_rows=6, sample_test_rows=12)
OWN = {"url": "http://rag/q"}


def tiny_domain(**size: int) -> Domain:
    """A domain with as little as possible."""
    return Domain(
        name="query_rewrite",
        models={"simulated-echo": lambda text, _seed: text},
        write_sample=lambda directory, _config: SamplePaths(directory / "questions.csv"),
        documents=lambda _seed, count: iter(["水是湿的"] * count),
        words=lambda: ["湿的", "user"],
        characters=lambda: list("水是湿的user"),
        pretraining=Pretraining(**size),
    )


def test_a_profile_has_its_recipes_domain_or_names_another(profile_of: ProfileOf):
    assert domain_for(profile_of(), "data.workbook").name == "query_rewrite"
    borrowing = profile_of(recipe="/recipes/poetry.py", embedded={"domain": "query_rewrite"})
    assert domain_for(borrowing, "student.base_model").name == "query_rewrite"
    with pytest.raises(ConfigError, match=r"^student\.base_model: recipe poetry has no .* embedded\.domain \("):
        domain_for(profile_of(recipe="/recipes/poetry.py"), "student.base_model")
    with pytest.raises(ConfigError, match=r"^embedded\.domain: there is no domain poetry; .*query_rewrite"):
        domain_for(profile_of(embedded={"domain": "poetry"}), "data.workbook")


def test_the_embedded_rag_serves_the_sample_or_the_users_own(profile_of: ProfileOf, tmp_path: Path):
    rows = FEW.model_dump()
    sample = embedded_knowledge_base(profile_of(embedded=rows, paths={"state": str(tmp_path)}))
    assert sample == tmp_path / "sample" / "query_rewrite" / "kb.jsonl" and sample.is_file()
    assert embedded_knowledge_base(profile_of(rag={"knowledge_base": "own.jsonl"})) == Path("own.jsonl")
    assert embedded_knowledge_base(profile_of(rag=OWN)) is None


def test_a_domain_without_a_knowledge_base_has_no_rag(profile_of: ProfileOf, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(domains, "domain_of", lambda _name: tiny_domain())
    with pytest.raises(ConfigError, match=r"^rag\.knowledge_base: the simulated domain query_rewrite has none"):
        embedded_knowledge_base(profile_of())


def test_no_two_domains_share_a_models_name():
    assert sum(len(domain_of(name).models) for name in NAMES) == len(simulated_models())


@pytest.mark.parametrize("name", NAMES)
def test_the_sample_is_the_same_every_time(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = domain_of(name).write_sample(tmp_path / "a", FEW)
    monkeypatch.setattr(time, "time", lambda: 2_000_000_000.0)
    second = domain_of(name).write_sample(tmp_path / "b", FEW)
    for path, again in zip(first, second, strict=True):
        assert (path is None) == (again is None)
        assert path is None or path.read_bytes() == again.read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_documents_follow_the_seed(name: str):
    first, again, other = (list(domain_of(name).documents(seed, 40)) for seed in (1, 1, 2))
    assert first == again != other and len(first) == 40


@pytest.mark.parametrize("name", NAMES)
def test_the_vocabulary_spells_the_documents(name: str):
    domain = domain_of(name)
    known = set(domain.characters())
    assert all(len(character) == 1 for character in known)
    text = re.sub(r"<\|\w+\|>|</?think>", "", "".join(domain.documents(5, 300)))
    assert set(text) - known == set()


def test_the_base_models_key_follows_its_own_domain_only(monkeypatch: pytest.MonkeyPatch):
    key = base_model.cache_key(Embedded(), domain_of("query_rewrite"))
    monkeypatch.setattr(domains, "_names", lambda: ("another", "query_rewrite"))
    assert base_model.cache_key(Embedded(), domain_of("query_rewrite")) == key
    assert base_model.cache_key(Embedded(), domain_of("medical")) != key


def test_an_unknown_model_is_refused():
    assert domain_of_model("simulated-judge").name == "query_rewrite"
    with pytest.raises(ConfigError, match=r"no simulated model is called gpt-4o; there are .*simulated-judge"):
        domain_of_model("gpt-4o")


def test_loading_the_domains_needs_no_library_that_the_trainer_lacks():
    absent = ["jieba", "bm25s", "fastapi", "torch", "transformers", "prefect", "mlflow"]
    code = f"import sys, qinglan.simulators.domains as w; w.simulated_models(); print(set(sys.modules) & set({absent}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
