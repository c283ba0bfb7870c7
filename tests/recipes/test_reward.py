"""Scoring a sample in the reward service: a failed call is no number and never silent."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doubles import Clock
from fake_service import FakeService, completion, recall
from fixture_types import Serve
from ledger_calls import ledger_in
from reward_service import extra_info, reward_service, rewritten_row

from qinglan.config import Budget, Endpoint, Rag, RagMapping, Reward
from qinglan.errors import LedgerError
from qinglan.recipes import RewriteScore
from qinglan.training.reward_service import function as reward
from qinglan.training.reward_service import scorer as scorer_module
from qinglan.training.reward_service.function import RewardActor, close_reward_service
from qinglan.training.reward_service.samples import SampleWatch, write_sample
from qinglan.training.reward_service.scorer import judge_asked
from qinglan.training.reward_service.settings import RewardService

SiteOf = Callable[..., "Site"]
REWRITE = "虾青素 推荐用量"
FOUND = (200, recall(("g", 0.9), ("x", 0.6)))
JUDGED = (200, completion('{"score": 4}'))
VERDICTS = {"judge_recipe": "passage_judge", "judge": Endpoint(model="m-v1", max_retries=0)}
PARTS = frozenset(RewriteScore.__dataclass_fields__)
KEYS = PARTS | {
    "invalid",
    "rag_calls",
    "rag_cached",
    "judge_asked",
    "judge_cached",
    "judge_cost_usd",
    "latency_ms",
}


def test_the_judged_share_is_stable_and_right():
    is_judged = [judge_asked("q", str(number), 0.3) for number in range(2000)]
    assert is_judged == [judge_asked("q", str(number), 0.3) for number in range(2000)]
    assert 0.26 < sum(is_judged) / 2000 < 0.34


class Site:
    """A reward service's surroundings: RAG and judge by script, the ledger, the samples log."""

    def __init__(self, folder: Path, rag: FakeService, judge: FakeService) -> None:
        self.rag = rag
        self.judge = judge
        self.folder = folder
        self.log = folder / "samples.jsonl"
        self.opened: list[RewardActor] = []

    def service(self, **settings: Any) -> RewardService:
        defaults = {
            "reward": Reward(relevance_gate=False),
            "rag": Rag(max_retries=0),
            "rag_url": self.rag.url,
            "judge": Endpoint(model="j", max_retries=0),
            "judge_url": self.judge.url,
        }
        return reward_service(self.folder, **defaults | settings)

    def open(self, **settings: Any) -> "Worker":
        self.opened.append(RewardActor(self.service(**settings).model_dump_json()))
        return Worker(self.opened[-1])

    def entries(self) -> list[dict[str, Any]]:
        return [
            json.loads(line, parse_constant=pytest.fail)
            for line in self.log.read_text().splitlines()
        ]

    def invalid(self) -> list[str]:
        return [entry["invalid"] for entry in self.entries() if "invalid" in entry]


class Worker:
    """Asks the service as verl's reward workers do, less Ray."""

    def __init__(self, actor: RewardActor) -> None:
        self._actor = actor

    async def score(self, text: str, **changes: Any) -> dict[str, float]:
        return await self._actor.score(extra_info(rewritten_row(**changes)), text)

    async def score_all(self, texts: list[str]) -> list[dict[str, float]]:
        return await asyncio.wait_for(asyncio.gather(*map(self.score, texts)), 60)


@pytest.fixture
async def site_of(tmp_path: Path, serve: Serve) -> AsyncIterator[SiteOf]:
    sites: list[Site] = []

    def service(reply: Any) -> FakeService:
        return serve(reply if callable(reply) else lambda _: reply)

    def make(rag: Any = FOUND, judge: Any = JUDGED) -> Site:
        sites.append(Site(tmp_path, service(rag), service(judge)))
        return sites[-1]

    yield make
    for site in sites:
        for actor in site.opened:
            await actor.close()


@pytest.fixture
def site(site_of: SiteOf) -> Site:
    return site_of()


def rewrites(number: int) -> list[str]:
    return [f"虾青素 用量{dose}" for dose in range(number)]


async def test_a_sample_is_scored_logged_and_paid_once(site: Site):
    worker = site.open()
    first = await worker.score("虾青素  推荐用量<|im_end|>")
    again = await worker.score("虾青素 推荐用量")
    assert first.keys() == KEYS
    assert again.keys() == KEYS
    assert site.rag.bodies[0]["rewritten_query"] == "虾青素 推荐用量"
    assert (len(site.rag.bodies), len(site.judge.bodies)) == (1, 1)
    figures = (
        "score",
        "invalid",
        "rag_calls",
        "rag_cached",
        "judge_asked",
        "judge_cached",
        "judge_cost_usd",
    )
    assert [first[name] for name in figures] == [first["score"], 0, 1, 0, 1, 0, 110e-6]
    assert [again[name] for name in figures] == [first["score"], 0, 0, 1, 1, 1, 0]
    new, cached = site.entries()
    assert (new["rag_cached"], new["judge_cached"], new["rag_calls"]) == (False, False, 1)
    assert (cached["rag_cached"], cached["judge_cached"], cached["rag_calls"]) == (True, True, 0)
    assert "gold_top1" not in new


async def test_another_run_or_another_request_asks_the_rag_anew(site: Site):
    renamed_title = Rag(max_retries=0, mapping=RagMapping(title="name"))
    for setting, requests in (
        ({"retrieval_scope": "run 1"}, 1),
        ({"retrieval_scope": "run 2"}, 2),
        ({"retrieval_scope": "run 1"}, 2),
        ({"retrieval_scope": "run 1", "rag": Rag(max_retries=0, kb_name="other")}, 3),
        ({"retrieval_scope": "run 1", "rag": Rag(max_retries=0, top_k=3)}, 4),
        ({"retrieval_scope": "run 1", "rag": renamed_title}, 5),
    ):
        await site.open(**setting).score(REWRITE)
        await site.opened[-1].close()
        assert len(site.rag.bodies) == requests
    assert len(site.judge.bodies) == 1


@pytest.mark.parametrize(
    ("reward", "gold_id", "relevant", "teacher_quality", "win"),
    [(Reward(), "", 0.0, 0.5, Reward().loss), (Reward(), "g", math.nan, 0.01, 0.0)],
)
async def test_an_empty_rewrite_is_the_policys_failure_and_asks_nobody(
    site: Site, reward: Reward, gold_id: str, relevant: float, teacher_quality: float, win: float
):
    """It loses only to a teacher that found something.

    It is irrelevant only where relevance is asked for.
    """
    scored = await site.open(reward=reward).score(
        "<|im_end|>", gold_id=gold_id, teacher_quality=teacher_quality
    )
    assert (scored["score"], scored["invalid"]) == (-1.0, 0.0)
    assert (scored["win"], scored["rq_gain"]) == (win, -teacher_quality)
    assert scored["relevant"] == pytest.approx(relevant, nan_ok=True)
    assert scored["judge"] == 0.0
    gold_top1 = 0.0 if gold_id else math.nan
    assert scored["gold_top1"] == pytest.approx(gold_top1, nan_ok=True)
    assert scored.keys() == KEYS
    assert site.rag.bodies == []
    assert site.judge.bodies == []


async def test_the_judge_is_asked_about_the_rewrite_and_without_a_label_about_the_passage(
    site_of: SiteOf,
):
    def judge(body: dict[str, Any]) -> Any:
        is_about_passage = "检索结果" in str(body)
        return 200, completion('{"score": 1}' if is_about_passage else '{"score": 5}')

    site = site_of(judge=judge)
    unlabelled = await site.open(reward=Reward()).score(REWRITE)
    assert (unlabelled["judge"], unlabelled["relevant"], unlabelled["judge_asked"]) == (5, 0, 2)
    assert unlabelled["score"] == Reward().gold_gate_cap
    assert site.entries()[-1]["passage"] == "正文g"
    labelled = await site.open(reward=Reward()).score(REWRITE, gold_id="g")
    assert (labelled["judge_asked"], labelled["judge_cached"], labelled["gold_top1"]) == (1, 1, 1)
    assert math.isnan(labelled["relevant"])
    unused = await site.open(reward=Reward(use_labels=False)).score(REWRITE, gold_id="other")
    assert (unused["judge_asked"], unused["relevant"], unused["gold_top1"]) == (2, 0, 0)
    unweighted = Reward(judge_weight=0, guard_min_judge=0, relevance_gate=False)
    unasked = await site.open(reward=unweighted).score("虾青素 怎么吃")
    assert (unasked["judge_asked"], unasked["judge_cost_usd"], unasked["invalid"]) == (0, 0, 0)
    assert math.isnan(unasked["judge"])
    assert math.isnan(unasked["judge_cached"])
    found_nothing = await site_of(rag=(200, recall())).open(reward=Reward()).score("虾青素 没有")
    assert (found_nothing["relevant"], found_nothing["judge_asked"]) == (0, 1)


@pytest.mark.parametrize(
    ("rag", "judge", "failed_by", "message"),
    [
        ((400, {}), JUDGED, "rag", "HTTP 400"),
        ((200, {"recall": []}), JUDGED, "rag", "breaks the contract"),
        (FOUND, (200, completion("fine")), "judge", "no score"),
        (FOUND, (401, {}), "judge", "refuses the key"),
    ],
)
async def test_a_failed_call_is_not_a_number(
    site_of: SiteOf, rag: Any, judge: Any, failed_by: str, message: str
):
    site = site_of(rag, judge)
    scored = await site.open().score(REWRITE)
    assert scored.keys() == KEYS
    assert (scored["score"], scored["invalid"], scored["rag_calls"]) == (0.0, 1.0, 1.0)
    assert {part for part in PARTS if not math.isnan(scored[part])} == {"score"}
    (entry,) = site.entries()
    assert message in entry["invalid"]
    assert "score" not in entry
    assert (entry["failed_by"], entry["rag_calls"]) == (failed_by, 1)
    assert entry["rag_failed"] == int(failed_by == "rag")


async def test_a_spent_budget_is_logged(site: Site):
    worker = site.open(budget=Budget(per_run_usd=1e-6))
    assert [(await worker.score(text))["invalid"] for text in rewrites(2)] == [0, 1]
    assert "budget.per_run_usd = 1e-06: nothing is left to spend" in site.invalid()[0]


@pytest.mark.parametrize("down", ["rag", "judge"])
async def test_an_outage_costs_no_sample(site_of: SiteOf, down: str):
    replies = {"rag": FOUND, "judge": JUDGED}
    calls_since_noticed = 0

    def away(_: Any) -> Any:
        """The service, which is down until that was noticed, and a little longer."""
        nonlocal calls_since_noticed
        if site.log.exists() and '"began"' in site.log.read_text():
            calls_since_noticed += 1
        return replies[down] if calls_since_noticed > 2 else (503, {})

    site = site_of(**(replies | {down: away}))
    scored = await site.open().score_all(rewrites(20))
    assert {sample["invalid"] for sample in scored} == {0}
    outages = [(entry["outage"], entry["state"]) for entry in site.entries() if "outage" in entry]
    assert outages == [(down, "began"), (down, "ended")]


async def test_an_unreachable_ledger_is_not_tried_for_every_sample(
    site: Site, monkeypatch: pytest.MonkeyPatch
):
    clock = Clock()
    clock.now = 0.0
    attempts_s: list[float] = []

    def unreachable(*_: object) -> None:
        attempts_s.append(clock.now)
        raise LedgerError("no ledger there")

    with monkeypatch.context() as patch:
        patch.setattr(scorer_module, "Scorer", unreachable)
        actor = RewardActor(site.service().model_dump_json(), clock=clock)
        site.opened.append(actor)
        for now_s in (0.0, 1.0, 29.0, 31.0, 32.0):
            clock.now = now_s
            assert (await Worker(actor).score(REWRITE))["invalid"] == 1
    assert attempts_s == [0.0, 31.0]
    assert site.invalid() == ["no ledger there"] * 5
    clock.now = 62.0
    assert (await Worker(actor).score(REWRITE))["invalid"] == 0


async def test_a_bug_costs_its_samples_and_is_heard_of(site: Site):
    assert (await site.open().score(REWRITE, answer_retrieved=None))["invalid"] == 1
    assert "only rows with a baseline get here" in site.invalid()[0]


def test_the_services_file_holds_no_secret_and_names_the_training(
    site: Site, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    service = site.service(judge=Endpoint(model="j", api_key_env="JUDGE_KEY"), run_id="2026/运行 1")
    assert "s3cret" not in service.model_dump_json()
    read_again = RewardService.model_validate_json(service.model_dump_json())
    assert read_again.actor_name == service.actor_name
    assert service.actor_name.isascii()
    assert "/" not in service.actor_name
    assert site.service().actor_name != site.service().actor_name


async def test_a_lost_service_and_a_bug_make_invalid_samples(
    site: Site, monkeypatch: pytest.MonkeyPatch
):
    exceptions = pytest.importorskip("ray.exceptions")
    path = site.folder / "reward.json"
    path.write_text(site.service().model_dump_json())

    async def ask(answer: Any) -> dict[str, float | str]:
        async def remote(*_: Any) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(
            reward, "_service", lambda _: SimpleNamespace(score=SimpleNamespace(remote=remote))
        )
        info = {"row_id": "1", "gold_id": "d; e", "unit": "d"}
        return await reward.compute_score(
            "query_rewrite", "x", "", info, config_path=str(path), split="t"
        )

    for error in (exceptions.RayActorError(), ZeroDivisionError()):
        lost = await ask(error)
        assert (lost["invalid"], lost["score"]) == (1.0, 0.0)
        assert lost.keys() == KEYS | {"row_id", "target"}
    assert await ask({"score": 0.5}) == {"score": 0.5, "row_id": "1", "target": "d"}


def test_an_error_without_a_message_is_logged_by_its_name():
    log = BytesIO()
    write_sample(log, {"row_id": "1"}, AssertionError())
    assert json.loads(log.getvalue()) == {"row_id": "1", "invalid": "AssertionError"}


def test_a_failure_to_close_costs_no_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    ray = pytest.importorskip("ray")

    def get(_: object, *, timeout: float) -> None:
        raise ray.exceptions.GetTimeoutError(f"not within {timeout:g} s")

    monkeypatch.setattr(ray, "get", get)
    close_reward_service(SimpleNamespace(close=SimpleNamespace(remote=lambda: "reference")))
    assert caplog.messages == [
        "the reward service could not write the last samples: not within 75 s"
    ]


def append(path: Path, *entries: dict[str, Any]) -> None:
    with path.open("a") as stream:
        stream.writelines(json.dumps(entry) + "\n" for entry in entries)


def test_watch_counts_all_attempts_and_reports_outages_of_this_one(tmp_path: Path):
    log = tmp_path / "samples.jsonl"
    messages: list[str] = []
    sample = {
        "row_id": "t",
        "rag_cached": False,
        "rag_calls": 1,
        "judge_asked": True,
        "judge_cost_usd": 0.5,
    }
    dev_sample = {
        "row_id": "d",
        "rag_cached": True,
        "judge_asked": True,
        "judge_cached": True,
        "score": 1,
    }
    failed_retrieval = {"rag_calls": 3, "rag_failed": 3, "invalid": "y", "failed_by": "rag"}
    began = {"outage": "rag", "state": "began", "seconds": 0.0, "error": "HTTP 503"}
    append(
        log,
        sample | {"judge_cached": False, "score": 1},
        sample | {"invalid": "x", "failed_by": "judge"},
        began,
        {"outage": "rag", "state": "ended", "seconds": 30.0},
    )
    watch = SampleWatch(log, dev_rows=["d"], say=messages.append)
    append(
        log,
        dev_sample,
        sample | failed_retrieval,
        {"invalid": "no key"},
        began,
        {"outage": "rag", "state": "ended", "seconds": 61.2},
        {"outage": "judge", "state": "given up", "seconds": 600.0},
    )
    watch()
    assert watch.summary == {
        "samples": 4,
        "dev_samples": 1,
        "samples_invalid": 3,
        "samples_invalid_rag": 1,
        "samples_invalid_judge": 1,
        "rag_outage_s": 91.2,
        "judge_outage_s": 600.0,
        "judge_cost_usd": 1.5,
    }
    assert watch.calls == {
        "rag": {"calls": 5, "failed": 3, "cached": 1},
        "judge": {"asked": 4, "cached": 1},
    }
    assert watch.last_invalid == "no key"
    assert messages == [
        "the rag is down, samples wait for it: HTTP 503",
        "the rag is back after 61 s",
        "the judge was still down after 600 s; its samples have no score",
    ]


def passages(body: dict[str, Any]) -> Any:
    """The teacher's rewrite retrieves `g`, another one the document that it ends with."""
    rewrite = body["rewritten_query"]
    document = "g" if rewrite == rewritten_row().answer else rewrite[-1]
    return 200, recall((document, 0.9))


async def test_a_served_judges_verdict_on_the_passage_may_cap_the_reward_and_none_is_no_score(
    site_of: SiteOf,
):
    texts = iter([(200, completion("虾青素有，正确")), (200, completion("虾青素无，错误"))])
    site = site_of(passages, lambda _: next(texts, (200, completion("随便"))))
    worker = site.open(reward=Reward(), **VERDICTS)
    scored = await worker.score("虾青素 x")
    assert (scored["judge"], scored["relevant"]) == (5, 1)
    assert (scored["judge_asked"], scored["invalid"]) == (1, 0)
    assert site.judge.bodies[0]["messages"][-1]["content"] == "虾青素咋吃\n资料：正文x"
    with ledger_in(site.folder) as ledger:
        assert ledger.usage("r", "judge.local").calls == 1
        assert ledger.usage("r", "judge").calls == 0
    teachers = await worker.score("虾青素 g")
    assert (teachers["judge"], teachers["relevant"], teachers["judge_asked"]) == (0, 0, 1), (
        "it is asked about it too"
    )
    assert teachers["score"] <= Reward().guard_cap
    assert (await worker.score("虾青素 y"))["invalid"] == 1
    assert "the verdict is none of" in site.invalid()[0]
