"""Scoring a sample in a reward worker: a failed call is never a number, nor ever silent."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import FakeService, Script, completion, recall

from qinglan.config import Budget, Endpoint, LedgerStore, Price, Rag, Reward, Tenant
from qinglan.errors import ConfigError, QinglanError, StageError
from qinglan.recipes import Baseline
from qinglan.reward import function
from qinglan.reward.samples import SampleWatch
from qinglan.reward.service import RewardService, judge_asked

Serve = Callable[[Script], FakeService]
BASE = Baseline(
    row_id="1",
    question="虾青素咋吃",
    gold_id="",
    teacher_rewrite="虾青素 服用方法",
    teacher_quality=0.5,
    teacher_judge=3.0,
)
REWRITE = "虾青素 推荐用量"


def test_weights_can_not_vanish():
    with pytest.raises(ValueError, match="must be above 0"):
        Reward(retrieval_weight=0, win_weight=0)


def test_the_judged_share_is_stable_and_right():
    asked = [judge_asked("q", str(n), 0.3) for n in range(2000)]
    assert asked == [judge_asked("q", str(n), 0.3) for n in range(2000)]
    assert 0.26 < sum(asked) / 2000 < 0.34
    assert judge_asked("q", "r", 1.0)
    assert not judge_asked("q", "r", 0.0)


class Site:
    """A reward worker's surroundings: RAG and judge by script, the service file, the samples log."""

    def __init__(self, folder: Path, rag: FakeService, judge: FakeService, **judge_options: Any) -> None:
        self.log = folder / "samples.jsonl"
        self.rag, self.judge, self.path = rag, judge, folder / "reward.json"
        service = RewardService(
            recipe="query_rewrite",
            reward=Reward(),
            rag=Rag(max_retries=0),
            rag_url=rag.url,
            judge=Endpoint(model="j", max_retries=0, **judge_options),
            judge_url=judge.url,
            judge_price=Price(input_per_million_usd=1, output_per_million_usd=1),
            judge_key_salt="",
            tenant=Tenant(),
            ledger=LedgerStore(),
            state=folder,
            budget=Budget(),
            run_id="r",
            samples_log=self.log,
        )
        self.path.write_text(service.model_dump_json())

    async def score(self, text: str, info: dict[str, Any] | None = None) -> dict[str, float]:
        info = BASE.model_dump() if info is None else info
        return await function.compute_score("query_rewrite", text, "", info, config_path=str(self.path), split="train")

    def entries(self) -> list[dict[str, Any]]:
        return [json.loads(line, parse_constant=pytest.fail) for line in self.log.read_text().splitlines()]


FOUND = (200, recall(("g", 0.9), ("x", 0.6)))
JUDGED = (200, completion('{"score": 4}'))


@pytest.fixture
async def site_of(tmp_path: Path, serve: Serve) -> AsyncIterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(rag: Any = FOUND, judge: Any = JUDGED, **judge_options: Any) -> Site:
        made.append(Site(tmp_path, serve(lambda _: rag), serve(lambda _: judge), **judge_options))
        return made[-1]

    yield make
    if function._scorer.cache_info().currsize:
        await function._scorer(str(made[0].path)).close()
    function._scorer.cache_clear()


@pytest.fixture
def site(site_of: Callable[..., Site]) -> Site:
    return site_of()


async def test_a_sample_is_scored_logged_and_paid_once(site: Site):
    first = await site.score("虾青素  推荐用量<|im_end|>")
    assert await site.score("虾青素 推荐用量") == pytest.approx(first, nan_ok=True)
    assert site.rag.bodies[0]["rewritten_query"] == "虾青素 推荐用量"
    assert (len(site.rag.bodies), len(site.judge.bodies)) == (1, 1)
    assert [(e["rag_cached"], e["judge_cached"], e["rag_calls"]) for e in site.entries()] == [
        (False, False, 1),
        (True, True, 0),
    ]
    assert "gold_top1" not in site.entries()[0]


async def test_an_empty_rewrite_is_the_policys_failure(site: Site):
    assert (await site.score("<|im_end|>"))["score"] == -1.0
    assert site.rag.bodies == site.judge.bodies == []


@pytest.mark.parametrize(
    ("rag", "judge", "failed_by", "message"),
    [
        ((500, {}), JUDGED, "rag", "HTTP 500"),
        ((200, {"recall": []}), JUDGED, "rag", "breaks the contract"),
        (FOUND, (500, {}), "judge", "judge"),
        (FOUND, (200, completion("fine")), "judge", "no score"),
        (FOUND, (401, {}), "judge", "refuses the key"),
    ],
)
async def test_a_failed_call_is_not_a_number(
    site_of: Callable[..., Site], rag: Any, judge: Any, failed_by: str, message: str
):
    site = site_of(rag, judge)
    with pytest.raises(QinglanError):
        await site.score(REWRITE)
    (entry,) = site.entries()
    assert message in entry["invalid"]
    assert "score" not in entry
    assert (entry["failed_by"], entry["rag_calls"], entry["rag_failed"]) == (failed_by, 1, int(failed_by == "rag"))


async def test_a_key_that_only_the_worker_lacks_is_heard_of(site_of: Callable[..., Site]):
    site = site_of(api_key_env="NO_SUCH_KEY")
    with pytest.raises(ConfigError):
        await site.score(REWRITE)
    assert "NO_SUCH_KEY" in site.entries()[0]["invalid"]


async def test_a_row_without_a_baseline_is_heard_of(site: Site):
    with pytest.raises(ValueError, match="teacher_quality"):
        await site.score(REWRITE, {"row_id": "1"})
    assert "validation errors for Baseline" in site.entries()[0]["invalid"]


def append(path: Path, *entries: dict[str, Any]) -> None:
    with path.open("a") as stream:
        stream.writelines(json.dumps(entry) + "\n" for entry in entries)


def test_watch_counts_all_attempts_and_tells_training_from_dev(tmp_path: Path):
    log = tmp_path / "samples.jsonl"
    called, cached = {"row_id": "t", "rag_cached": False, "rag_calls": 1}, {"row_id": "t", "rag_cached": True}
    append(log, called | {"judge_cached": False, "score": 1}, called | {"invalid": "x", "failed_by": "judge"})
    watch = SampleWatch(log, Reward(), dev_rows=["d"])
    append(log, cached | {"row_id": "d", "judge_cached": True, "score": 1})
    append(log, called | {"rag_calls": 3, "rag_failed": 3, "invalid": "x", "failed_by": "rag"}, {"invalid": "no key"})
    watch()
    invalid = {"samples_invalid": 3, "samples_invalid_rag": 1, "samples_invalid_judge": 1}
    assert watch.summary == {"samples": 4, "dev_samples": 1, **invalid}
    assert watch.calls == {"rag": {"calls": 5, "failed": 3, "cached": 1}, "judge": {"asked": 3, "cached": 1}}


def test_the_alarm_forgets_earlier_attempts(tmp_path: Path):
    log = tmp_path / "samples.jsonl"
    append(log, *[{"invalid": "rag was down"}] * 50)
    watch = SampleWatch(log, Reward(max_invalid_share=0.05, invalid_window=100))
    append(log, *[{"invalid": "x"}] * 5)
    watch()
    assert watch.summary["samples_invalid"] == 55


def test_watch_stops_a_run_that_can_not_be_scored(tmp_path: Path):
    log = tmp_path / "samples.jsonl"
    watch = SampleWatch(log, Reward(max_invalid_share=0.05, invalid_window=100))
    append(log, *[{"score": 1}] * 200, *[{"invalid": "rag down"}] * 5)
    watch()
    append(log, {"invalid": "rag down"})
    with pytest.raises(StageError, match=r"6 of the last 100 samples could not be scored.* last: rag down"):
        watch()


def test_watch_forgets(tmp_path: Path):
    watch = SampleWatch(tmp_path / "samples.jsonl", Reward(invalid_window=20, max_invalid_share=0.05))
    for _ in range(3):
        append(tmp_path / "samples.jsonl", {"invalid": "x"}, *[{"score": 1}] * 20)
    watch()
    assert watch.summary["samples_invalid"] == 3
