"""The reward: its formula, guards and gate; and that a failed call is never a number, nor ever silent."""

import json
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import FakeService, Script, completion, recall

from qinglan import reward
from qinglan.config import Endpoint, Price, Rag, Reward, Tenant
from qinglan.errors import ConfigError, QinglanError, StageError
from qinglan.reward import Baseline, RewardService, SampleWatch, combine, entity_kept, is_repetitive, judge_asked
from qinglan.rows import Retrieved

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


def found(*scores: float, first: str = "g") -> Retrieved:
    return Retrieved(ids=tuple([first, "x", "y"][: len(scores)]), scores=scores)


def score(baseline: Baseline = BASE, rewrite: str = REWRITE, judge: float | None = None, **config: Any) -> float:
    return combine(Reward(**config), baseline, rewrite, found(0.9, 0.6, 0.3), judge).score


def with_gold(gold: str) -> Baseline:
    return BASE.model_copy(update={"gold_id": gold})


def test_formula_with_all_parts():
    rq_gain = 0.6 * 0.9 + 0.4 * 0.6 - 0.5
    expected = 0.35 * math.tanh(3 * 2 / 5) + 0.40 * math.tanh(3 * rq_gain) + 0.25 * 0.5
    assert score(judge=5.0) == pytest.approx(expected)


def test_an_unasked_judge_is_not_a_tie():
    rq_gain = 0.6 * 0.9 + 0.4 * 0.6 - 0.5
    assert score() == pytest.approx((0.40 * math.tanh(3 * rq_gain) + 0.25 * 0.5) / 0.65)
    unjudged = BASE.model_copy(update={"teacher_judge": -1.0})
    assert score(unjudged, judge=5.0) == pytest.approx(score())


def test_doing_as_the_teacher_does_is_zero():
    same = BASE.model_copy(update={"teacher_quality": found(0.9, 0.6, 0.3).quality})
    assert score(same, judge=3.0) == pytest.approx(0.0)


def test_losing_to_the_teacher_costs():
    better = BASE.model_copy(update={"teacher_quality": 1.0})
    assert combine(Reward(), better, REWRITE, found(0.1), None).win == -0.3
    assert score(better) < 0


@pytest.mark.parametrize(
    "rewrite", ["鱼油 推荐用量", "虾青素 虾青素", "虾虾虾虾虾虾虾", "虾青素" + "好" * 200, "astaxanthin dosage"]
)
def test_guard_caps_what_lost_the_question(rewrite: str):
    assert score(rewrite=rewrite) == -0.5
    assert score(rewrite=rewrite, preservation_guard=False) > 0


def test_guard_caps_what_the_judge_finds_wanting():
    assert score(judge=2.9) <= -0.5
    assert score(judge=3.0) > 0


def test_gold_gate():
    assert score(with_gold("g")) > 0
    assert score(with_gold("x")) == -0.3
    assert score(with_gold("x"), gold_gate=False) > 0


def test_unknown_parts_are_nan_and_the_score_never_is():
    scored = combine(Reward(), BASE, REWRITE, Retrieved(), None)
    assert math.isnan(scored.judge)
    assert math.isnan(scored.gold_top1)
    assert -1 <= scored.score < 0


def test_weights_can_not_vanish():
    with pytest.raises(ValueError, match="must be above 0"):
        Reward(retrieval_weight=0, win_weight=0)


def test_entity_kept_has_nothing_to_hold_on_to_without_overlap():
    assert entity_kept("那个咋吃", "虾青素 服用方法", "鱼油")
    assert entity_kept("NMN咋吃", "NMN 服用方法", "nmn 用量")
    assert not entity_kept("NMN咋吃", "NMN 服用方法", "鱼油 用量")


@pytest.mark.parametrize(
    ("text", "repeats"), [("虾青素 用量", False), ("a b a", True), ("啊啊啊啊啊啊", True), ("啊啊", False)]
)
def test_is_repetitive(text: str, repeats: bool):
    assert is_repetitive(text) is repeats


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
            reward=Reward(),
            rag=Rag(max_retries=0),
            rag_url=rag.url,
            judge=Endpoint(model="j", max_retries=0, **judge_options),
            judge_url=judge.url,
            judge_price=Price(input_per_million_usd=1, output_per_million_usd=1),
            judge_key_salt="",
            tenant=Tenant(),
            ledger=folder / "ledger.db",
            run_id="r",
            samples_log=self.log,
        )
        self.path.write_text(service.model_dump_json())

    async def score(self, text: str, info: dict[str, Any] | None = None) -> dict[str, float]:
        info = BASE.model_dump() if info is None else info
        return await reward.compute_score("query_rewrite", text, "", info, config_path=str(self.path), split="train")

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
    if reward._scorer.cache_info().currsize:
        await reward._scorer(str(made[0].path)).close()
    reward._scorer.cache_clear()


@pytest.fixture
def site(site_of: Callable[..., Site]) -> Site:
    return site_of()


async def test_a_sample_is_scored_logged_and_paid_once(site: Site):
    first = await site.score("虾青素  推荐用量<|im_end|>")
    assert await site.score("虾青素 推荐用量") == pytest.approx(first, nan_ok=True)
    assert site.rag.bodies[0]["rewritten_query"] == "虾青素 推荐用量"
    assert (len(site.rag.bodies), len(site.judge.bodies)) == (1, 1)
    assert [entry["rag_cached"] for entry in site.entries()] == [False, True]
    assert "gold_top1" not in site.entries()[0]


async def test_an_empty_rewrite_is_the_policys_failure(site: Site):
    assert (await site.score("<|im_end|>"))["score"] == -1.0
    assert site.rag.bodies == site.judge.bodies == []


@pytest.mark.parametrize(
    ("rag", "judge", "message"),
    [
        ((500, {}), JUDGED, "HTTP 500"),
        ((200, {"recall": []}), JUDGED, "breaks the contract"),
        (FOUND, (500, {}), "judge"),
        (FOUND, (200, completion("fine")), "no score"),
        (FOUND, (401, {}), "refuses the key"),
    ],
)
async def test_a_failed_call_is_not_a_number(site_of: Callable[..., Site], rag: Any, judge: Any, message: str):
    site = site_of(rag, judge)
    with pytest.raises(QinglanError):
        await site.score(REWRITE)
    (entry,) = site.entries()
    assert message in entry["invalid"]
    assert "score" not in entry


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


def test_watch_counts_what_is_new(tmp_path: Path):
    log = tmp_path / "samples.jsonl"
    append(log, {"invalid": "earlier attempt"})
    watch = SampleWatch(log, Reward())
    append(log, {"score": 1, "rag_cached": True}, {"score": 0, "rag_cached": False}, {"invalid": "x"})
    watch()
    assert (watch.samples, watch.invalid, watch.rag_cached, watch.rag_calls) == (3, 1, 1, 2)


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
    assert watch.invalid == 3
