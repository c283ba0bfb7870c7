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
    rows, paths = FEW.model_dump(), {"state": str(tmp_path)}
    sample = domains.embedded_knowledge_base(profile_of(embedded=rows, paths=paths))
    assert (
        sample == tmp_path / "sample" / "query_rewrite-13-30-6-12" / "kb.jsonl" and sample.is_file()
    )
    assert domains.embedded_knowledge_base(profile_of(rag={"knowledge_base": "own.jsonl"})) == Path(
        "own.jsonl"
    )
    assert domains.embedded_knowledge_base(profile_of(rag={"url": "http://rag/q"})) is None
    with pytest.raises(
        ConfigError, match=r"^rag\.knowledge_base: the simulated domain medical has none"
    ):
        domains.embedded_knowledge_base(
            profile_of(embedded=rows | {"domain": "medical"}, paths=paths)
        )


@pytest.mark.parametrize("name", NAMES)
def test_the_sample_is_the_same_every_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first = domain_of(name).write_sample(tmp_path / "a", FEW)
    monkeypatch.setattr(time, "time", lambda: 2_000_000_000.0)
    second = domain_of(name).write_sample(tmp_path / "b", FEW)
    for path, again in zip(first, second, strict=True):
        assert (path is None) == (again is None)
        assert path is None or path.read_bytes() == again.read_bytes()


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name != "passage_judge"]
)  # which has none
def test_the_red_team_is_in_no_text_of_the_base_model(name: str, monkeypatch: pytest.MonkeyPatch):
    domain, cases = domain_of(name), domains.red_team_questions(name)
    texts = pretraining_texts(domain, 1, 4000)
    assert cases and not [text for text in texts if any(case in normalise(text) for case in cases)]
    monkeypatch.setattr(domains, "red_team_questions", lambda _: (normalise(texts[0]),))
    assert texts[0] not in pretraining_texts(domain, 1, 20)


def test_the_base_model_reads_questions_with_noise():
    domain = domain_of("query_rewrite")
    first, again, other = (pretraining_texts(domain, seed, 400) for seed in (1, 1, 2))
    assert first == again != other
    silent = replace(domain, pretraining=replace(domain.pretraining, noise_share=0.0))
    pairs = [
        (noisy, text)
        for noisy, text in zip(first, pretraining_texts(silent, 1, 400), strict=True)
        if noisy != text
    ]
    assert (
        40 < len(pairs) < 100
    )  # a quarter of the dialogues with a question, where the kind can change anything
    assert all(
        noisy.split("<|im_end|>")[1:] == text.split("<|im_end|>")[1:] for noisy, text in pairs
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_vocabulary_spells_the_documents(name: str):
    domain = domain_of(name)
    known = set(domain.characters())
    assert all(len(character) == 1 for character in known)
    text = re.sub(r"<\|\w+\|>|</?think>", "", "".join(domain.documents(5, 300)))
    assert set(text) - known == set()


def test_a_model_belongs_to_one_domain_and_an_unknown_one_is_refused():
    assert sum(len(domain_of(name).models) for name in NAMES) == len(domains.simulated_models())
    assert domains.domain_of_model("simulated-judge").name == "query_rewrite"
    assert all(model.startswith(SIMULATED) for model in domains.simulated_models()), (
        "the ledger tells them by that"
    )
    with pytest.raises(
        ConfigError, match=r"no simulated model is called gpt-4o; there are .*simulated-judge"
    ):
        domains.domain_of_model("gpt-4o")


LOADED_BY_THREADS = """
import sys, threading
from qinglan.simulators import domains

sys.setswitchinterval(1e-6)
before, failures = set(sys.modules), []

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
    domains.domain_of.cache_clear(), domains.simulated_models.cache_clear()
    start, works = threading.Barrier(4), [lambda: domains.domain_of("query_rewrite"), domains.simulated_models] * 2
    threads = [threading.Thread(target=load, args=(start, work)) for work in works]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
sys.exit(str(failures) if failures else 0)
"""


def test_threads_may_load_them_at_once():
    """As doctor's checks do."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED_BY_THREADS], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
