"""The whole endpoint under load: canaries, models that die, a rollback by hand, no orphans.

Router, simulator RAG and models' servers are processes of their own. Most models are stubs that
speak the protocol; one test serves a tiny Qwen3 by ms-swift from MLflow's registry.
"""

import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx2
import psutil
import pytest
from fake_registry import FakeRegistry
from qinglan_process import RunningQinglan
from registered import Models
from toy_rl import NEEDS_VLLM, make_model
from waiting import processes_with, wait_until

from qinglan.config import load_profile
from qinglan.registry import Registry, prompt_digest, registry_of
from qinglan.runs.artifacts import Artifact
from qinglan.runs.launcher import Command
from qinglan.runs.processes import health_problem
from qinglan.runs.schema_version import read_record
from qinglan.serving.canary_observer import CanaryVerdict
from qinglan.serving.routes import Backend
from qinglan.serving.site import HISTORY_FILE, STEP_S, ServingSite, open_site
from qinglan.simulators.domains.query_rewrite import build_sample

pytestmark = [
    pytest.mark.slow,
    # They are MLflow's own.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

ROOT = Path(__file__).parents[2]
STUB = Path(__file__).parents[1] / "support" / "stub_model.py"
AT_ONCE = 8
SETTLED = 100
ARMS = ("teacher", "champion")
DEADLINE_S = 30
"""Deadline of an answer: only what hangs takes as long, whatever else has the cores."""
CANARY = (
    "serve.canary.share=0.3",
    "serve.canary.compare_share=1.0",
    "serve.canary.check_every_s=1",
)


def behave(registry: FakeRegistry, version: str, behaviour: str) -> None:
    (registry.version(version).folder / "behaviour").write_text(behaviour)


def stub(folder: Path, backend: Backend, port: int, gpus: list[str]) -> Command:
    return Command([sys.executable, str(STUB), str(folder), str(port), backend.model])


@contextmanager
def running(
    folder: Path, deadline_s: int = DEADLINE_S
) -> Iterator[tuple[ServingSite, FakeRegistry]]:
    """A site that answers, stepped by a thread of its own."""
    overrides = [
        f"paths.state={folder / 'state'}",
        f"serve.deadline_ms={1000 * deadline_s}",
        *CANARY,
    ]
    registry = FakeRegistry(folder / "models", champion="1")
    ends = Event()
    for version in ("1", "2"):
        behave(registry, version, "good")

    def run() -> None:
        while not ends.wait(STEP_S):
            site.step()

    profile = load_profile("embedded", overrides)
    with open_site(
        profile, folder / "serving", print, port=0, registry=registry, command_of=stub
    ) as site:
        thread = Thread(target=run)
        thread.start()
        try:
            wait_until("a champion", lambda: site.routes.champion)
            wait_until("the router to know it", lambda: _source(site.router.url) == "model")
            yield site, registry
        finally:
            ends.set()
            thread.join()


QUESTIONS = [
    row.question.query
    for row in build_sample(load_profile("embedded").embedded)[0]
    if row.split == "test"
]


def body_of(question: str) -> dict[str, Any]:
    return {"model": "champion", "messages": [{"role": "user", "content": question}]}


class Load:
    """Requests without end from several clients, and what became of each."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: list[dict[str, str]] = []
        self.lost: list[str] = []
        self._ends = Event()
        self._clients = [Thread(target=self._ask, args=(number,)) for number in range(AT_ONCE)]

    def __enter__(self) -> "Load":
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for client in self._clients:
            client.join()

    def _ask(self, number: int) -> None:
        with httpx2.Client(trust_env=False, timeout=120) as client:
            while not self._ends.is_set():
                number += AT_ONCE
                body = body_of(QUESTIONS[number % len(QUESTIONS)])
                try:
                    answer = client.post(f"{self.url}/v1/chat/completions", json=body)
                except httpx2.HTTPError as error:
                    self.lost.append(repr(error))
                    continue
                if answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"]:
                    self.answers.append(dict(answer.headers))
                else:
                    self.lost.append(f"{answer.status_code} {answer.text}")

    def settle(self) -> None:
        """Wait until version 1 answers everything, for a while without another among them."""
        wait_until(
            "version 1 to answer",
            lambda: by(self.answers[-SETTLED:]) == {("1", "model"): SETTLED},
            explain=lambda: by(self.answers[-SETTLED:]),
        )


def by(answers: list[dict[str, str]]) -> Counter[tuple[str, str]]:
    return Counter(
        (answer.get("x-qinglan-version", ""), answer["x-qinglan-source"]) for answer in answers
    )


def sources(answers: list[dict[str, str]]) -> set[str]:
    return {answer["x-qinglan-source"] for answer in answers}


def versions(answers: list[dict[str, str]]) -> set[str]:
    return {answer.get("x-qinglan-version", "") for answer in answers}


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("error", "were not answered by it"),
        ("hang", "were not answered by it"),
        ("nonsense", "retrieval of the same questions is worse"),
    ],
)
def test_a_broken_challenger_is_rolled_back_by_itself_and_no_request_is_lost(
    tmp_path: Path, behaviour: str, reason: str
):
    deadline_s = 3 if behaviour == "hang" else DEADLINE_S
    with running(tmp_path, deadline_s) as (site, registry), Load(site.router.url) as load:
        behave(registry, "2", behaviour)
        registry.named["challenger"] = "2"
        wait_until("a canary", lambda: site.routes.challenger, explain=lambda: site.routes)
        answers_before = len(load.answers)
        took_s = wait_until(
            "its end", lambda: "challenger" not in registry.named, explain=lambda: site.routes
        )
        wait_until("its verdict", (tmp_path / "serving" / HISTORY_FILE).exists)
        counts = by(load.answers[answers_before:])
        load.settle()
    verdict = read_record(CanaryVerdict, tmp_path / "serving" / HISTORY_FILE)
    print(
        f"{behaviour}: {verdict.requests} requests, {took_s:.1f} s, {dict(counts)}: "
        f"{verdict.judgement.reason}"
    )
    assert load.lost == []
    assert verdict.judgement.outcome == "roll_back"
    assert reason in verdict.judgement.reason
    assert registry.withdrawn
    assert reason in registry.withdrawn[0]


def test_a_champion_that_dies_costs_rewrites_and_no_request(tmp_path: Path):
    with running(tmp_path) as (site, _), Load(site.router.url) as load:
        load.settle()
        _kill(f"{tmp_path / 'models' / '1'}")
        wait_until("a fallback", lambda: "fallback" in sources(load.answers))
        load.settle()
    assert load.lost == []


def test_a_router_that_is_killed_comes_back_on_its_port(tmp_path: Path):
    with running(tmp_path) as (site, _):
        url = site.router.url
        _kill("qinglan.serving.router", str(tmp_path))
        wait_until("the router", lambda: health_problem(f"{url}/health") is None)
        with Load(url) as load:
            wait_until("answers", lambda: len(load.answers) >= SETTLED or load.lost)
        # The page to try the models works as well, with simulators.
        with httpx2.Client(base_url=url, trust_env=False, timeout=120) as page:
            for arm in ARMS:
                body = body_of("膳食纤维粉怎么吃") | {"arm": arm}
                answer = page.post("/try", json=body).json()
                assert answer["text"], answer
                assert answer["passages"], answer
                assert not answer["reason"], answer
    assert load.lost == []
    assert set(by(load.answers)) == {("1", "model")}


def _kill(*words: str) -> None:
    processes = processes_with(*words)
    assert processes
    for process in processes:
        process.kill()


def _source(url: str) -> str:
    answer = httpx2.post(
        f"{url}/v1/chat/completions", json=body_of(QUESTIONS[0]), trust_env=False, timeout=120
    )
    return answer.headers["x-qinglan-source"]


class ServedSite(RunningQinglan):
    """`qinglan serve` as a process, on real models."""

    def __init__(self, folder: Path, profile: str, *settings: str) -> None:
        words = ["serve", "--port=0", f"--profile={profile}"]
        words += [f"--set={setting}" for setting in settings]
        super().__init__(folder / "serve.log", *words, cwd=ROOT)

    @property
    def url(self) -> str:
        (url,) = re.findall(r"^Router   (\S+)/v1\nTry it   \1/$", self.output, re.MULTILINE)
        return url

    def version(self) -> str:
        answer = httpx2.post(
            f"{self.url}/v1/chat/completions", json=body_of("letters"), trust_env=False, timeout=120
        )
        assert answer.status_code == 200
        return answer.headers.get("x-qinglan-version", "")


@pytest.fixture(
    scope="module",
    params=["embedded", pytest.param("embedded_vllm", marks=[pytest.mark.extended, NEEDS_VLLM])],
)
def toys(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ServedSite, Registry]]:
    """Two random models from MLflow's registry, by ms-swift; version 2 is the champion.

    Version 1 was the champion before it.
    """
    folder = tmp_path_factory.mktemp("serve")
    settings = (f"paths.state={folder / 'state'}", "serve.deadline_ms=60000", "trainer.threads=1")
    profile = load_profile(request.param, settings)
    models = Models(profile.tracking_uri, profile.model_name, folder)
    registry = registry_of(profile)
    models.registry = registry
    # Their heads are of 32 and 64, as vLLM knows no smaller ones.
    for name, size in (("small", 128), ("large", 256)):
        weights = Artifact.of(make_model(folder / name, hidden_size=size, vocab_size=None))
        candidate = models.candidate(
            name, model=weights, recipe=profile.recipe, prompt_sha256=prompt_digest(profile)
        )
        registry.promote(registry.register(candidate).version)
    served = ServedSite(folder, request.param, *settings)
    yield served, registry
    if served.process.poll() is None:
        served.process.kill()
    served.process.wait()


def test_a_killed_model_comes_back_and_a_challenger_joins_it_under_load(
    toys: tuple[ServedSite, Registry],
):
    served, registry = toys
    served.wait_for("version 1: ready")
    with Load(served.url) as load:

        def wait_for(version: str) -> None:
            answers_before = len(load.answers)
            wait_until(
                f"an answer of version {version}, or of none",
                lambda: version in versions(load.answers[answers_before:]),
                explain=lambda: by(load.answers[answers_before:]),
            )

        wait_for("2")
        for process in served.process.children(recursive=True):
            if process.cmdline()[1:3] == ["-m", "swift.cli.deploy"]:
                process.kill()
        wait_for("")
        wait_for("2")
        registry.challenge("1", force_reason="a test")
        wait_for("1")
        registry.withdraw_challenger("a test")
    assert load.lost == []


def test_a_rollback_by_hand_starts_no_model(toys: tuple[ServedSite, Registry]):
    served, registry = toys
    served.wait_for("version 1: ready")
    assert served.version() == "2"
    starts = served.output.count("version 1: ready")
    registry.roll_back("a test")
    took_s = wait_until("version 1", lambda: served.version() == "1", explain=served.log.read_text)
    print(f"rolled back within {took_s:.1f} s")
    served.wait_for("serving: version 1")
    assert served.output.count("version 1: ready") == starts, "it was there all the time"


def test_kill_9_leaves_no_server(toys: tuple[ServedSite, Registry]):
    """Last: it ends the site."""
    served, _ = toys
    family = served.process.children(recursive=True)
    assert len(family) >= 7, "a supervisor and a server each for router and two models, and the RAG"
    served.process.send_signal(signal.SIGKILL)
    served.process.wait()
    _, alive = psutil.wait_procs(family, timeout=300)
    assert alive == []
