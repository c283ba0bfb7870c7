"""Simulated domains: found by name, the same every time, and independent of one another."""

import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fixture_types import ProfileOf

from qinglan.config import Embedded
from qinglan.errors import ConfigError
from qinglan.ledger import SIMULATED
from qinglan.rows import normalise
from qinglan.simulators import domains
from qinglan.simulators.domains import domain_for, domain_of, pretraining_texts

NAMES = domains._names()
FEW = Embedded(sample_train_rows=30, sample_dev_rows=6, sample_test_rows=12)


def test_a_profile_has_its_recipes_domain_or_names_another(profile_of: ProfileOf):
    assert domain_for(profile_of(), "data.workbook").name == "query_rewrite"
    borrowing = profile_of(recipe="/recipes/poetry.py", embedded={"domain": "query_rewrite"})
    assert domain_for(borrowing, "student.base_model").name == "query_rewrite"
    with pytest.raises(
        ConfigError, match=r"^student\.base_model: recipe poetry has no .* embedded\.domain \("
    ):
        domain_for(profile_of(recipe="/recipes/poetry.py"), "student.base_model")
    with pytest.raises(
        ConfigError, match=r"^embedded\.domain: there is no domain poetry; .*query_rewrite"
    ):
        domain_for(profile_of(embedded={"domain": "poetry"}), "data.workbook")


def test_the_embedded_rag_serves_the_sample_or_the_users_own_knowledge_base(
    profile_of: ProfileOf, tmp_path: Path
):
    rows = FEW.model_dump()
    paths = {"state": str(tmp_path)}
    sample = domains.embedded_knowledge_base(profile_of(embedded=rows, paths=paths))
    assert sample == tmp_path / "sample" / "query_rewrite-13-30-6-12" / "kb.jsonl"
    assert sample.is_file()
    with_own_file = profile_of(rag={"knowledge_base": "own.jsonl"})
    assert domains.embedded_knowledge_base(with_own_file) == Path("own.jsonl")
    with_own_service = profile_of(rag={"url": "http://rag/q"})
    assert domains.embedded_knowledge_base(with_own_service) is None
    without_any = profile_of(embedded=rows | {"domain": "medical"}, paths=paths)
    problem = r"^rag\.knowledge_base: the simulated domain medical has none"
    with pytest.raises(ConfigError, match=problem):
        domains.embedded_knowledge_base(without_any)


@pytest.mark.parametrize("name", NAMES)
def test_the_sample_is_the_same_every_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first = domain_of(name).write_sample(tmp_path / "a", FEW)
    monkeypatch.setattr(time, "time", lambda: 2_000_000_000.0)
    second = domain_of(name).write_sample(tmp_path / "b", FEW)
    for path, second_path in zip(first, second, strict=True):
        if path is None:
            assert second_path is None
        else:
            assert second_path is not None
            assert path.read_bytes() == second_path.read_bytes()


# The judge of passages has no red team.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "passage_judge"])
def test_the_red_team_is_in_no_text_of_the_base_model(name: str, monkeypatch: pytest.MonkeyPatch):
    domain = domain_of(name)
    cases = domains.red_team_questions(name)
    assert cases
    texts = pretraining_texts(domain, 1, 4000)
    for text in texts:
        assert domains.parts_in(normalise(text), cases) == [], text
    monkeypatch.setattr(domains, "red_team_questions", lambda _: (normalise(texts[0]),))
    assert texts[0] not in pretraining_texts(domain, 1, 20)


def test_the_base_model_reads_questions_with_noise():
    domain = domain_of("query_rewrite")
    first = pretraining_texts(domain, 1, 400)
    assert pretraining_texts(domain, 1, 400) == first
    assert pretraining_texts(domain, 2, 400) != first
    silent = replace(domain, pretraining=replace(domain.pretraining, noise_share=0.0))
    texts = zip(first, pretraining_texts(silent, 1, 400), strict=True)
    changed = [(noisy, text) for noisy, text in texts if noisy != text]
    # A quarter of the dialogues with a question, where the kind can change anything.
    assert 40 < len(changed) < 100
    for noisy, text in changed:
        assert noisy.split("<|im_end|>")[1:] == text.split("<|im_end|>")[1:]


@pytest.mark.parametrize("name", NAMES)
def test_the_vocabulary_spells_the_documents(name: str):
    domain = domain_of(name)
    vocabulary = set(domain.characters())
    assert {len(character) for character in vocabulary} == {1}
    text = re.sub(r"<\|\w+\|>|</?think>", "", "".join(domain.documents(5, 300)))
    assert set(text) - vocabulary == set()


def test_a_model_belongs_to_one_domain_and_an_unknown_one_is_refused():
    assert sum(len(domain_of(name).models) for name in NAMES) == len(domains.simulated_models())
    assert domains.domain_of_model("simulated-judge").name == "query_rewrite"
    for model in domains.simulated_models():
        assert model.startswith(SIMULATED), "the ledger tells them by that"
    problem = r"no simulated model is called gpt-4o; there are .*simulated-judge"
    with pytest.raises(ConfigError, match=problem):
        domains.domain_of_model("gpt-4o")


LOADED_BY_THREADS = """
import sys, threading
from qinglan.simulators import domains

sys.setswitchinterval(1e-6)
before = set(sys.modules)
failures = []

def load(start, work):
    start.wait()
    try:
        work()
    except Exception as error:
        failures.append(error)

for _ in range(10):
    for name in set(sys.modules) - before:
        if name.startswith(domains.__name__ + "."):
            del sys.modules[name]
    domains.domain_of.cache_clear()
    domains.simulated_models.cache_clear()
    start = threading.Barrier(4)
    works = [lambda: domains.domain_of("query_rewrite"), domains.simulated_models] * 2
    threads = [threading.Thread(target=load, args=(start, work)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
sys.exit(str(failures) if failures else 0)
"""


def test_threads_may_load_them_at_once():
    """Doctor's checks do so."""
    process = subprocess.run(
        [sys.executable, "-c", LOADED_BY_THREADS], capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stderr) == (0, "")
