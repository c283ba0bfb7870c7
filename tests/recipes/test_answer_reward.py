"""Rewards of answers in the reward service: by rule and judge, the same keys for every sample, no RAG."""

import json
import math
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import letters
import pytest
from fake_service import FakeService, Script, completion
from reward_service import reward_service

from qinglan.clients.roles import Addresses
from qinglan.config import Endpoint, Profile, Reward, Tenant
from qinglan.recipes import AnswerRecipe
from qinglan.recipes.scoring.keys import scoring_key
from qinglan.recipes.scoring.scorer import AnswerScorer
from qinglan.recipes.scoring.service import RewardService
from qinglan.rows import Row
from qinglan.runs.run import Run
from qinglan.tasks import rl as rl_module
from qinglan.training.reward import RewardActor

ROW = Row(id="1", tenant="t", query="q", source="f:1", inputs={"letter": "a"}, group="g")
COMMON = {"score", "judge", "invalid", "judge_asked", "judge_cached", "judge_cost_usd", "latency_ms"}
KEYS = COMMON | {"share", "format", "pure"}
Serve = Callable[[Script], FakeService]


def service_of(folder: Path, judge_url: str = "", **settings: Any) -> RewardService:
    defaults = {
        "recipe": letters.__file__,
        "parts": letters.Letters().score_parts,
        "reward": Reward(),
        "rag": None,
        "judge": Endpoint(model="j", max_retries=0) if judge_url else None,
        "judge_url": judge_url,
    }
    return reward_service(folder, **defaults | settings)


Score = Callable[..., Any]


@pytest.fixture
async def score(tmp_path: Path, serve: Serve) -> AsyncIterator[Score]:
    """Score one text, by a recipe, with a judge that answers so."""
    opened: list[AnswerScorer] = []

    async def one(text: str, recipe: AnswerRecipe, reply: Any = None, row: Row = ROW, **settings: Any) -> Any:
        url = serve(lambda _: reply).url if reply else ""
        opened.append(AnswerScorer(service_of(tmp_path, url, **settings), recipe))
        info = recipe.rl_record(row, Tenant())["extra_info"]
        return await opened[-1].score(info, text)

    yield one
    for scorer in opened:
        await scorer.close()


def entries(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line, parse_constant=pytest.fail) for line in (folder / "samples.jsonl").read_text().splitlines()
    ]


JUDGED = (200, completion('{"score": 4}'))


async def test_rules_alone_need_neither_judge_nor_rag(tmp_path: Path, score: Score):
    scored = await score(" ab<|im_end|>\n", letters.Letters())
    assert scored.keys() == KEYS
    assert scored["score"] == pytest.approx(2 * (0.75 * 0.5 + 0.25) - 1)
    assert (scored["share"], scored["format"], scored["pure"], scored["judge_asked"]) == (0.5, 1.0, 0.0, 0)
    assert math.isnan(scored["judge"]) and scored["invalid"] == 0
    (entry,) = entries(tmp_path)
    assert (entry["row_id"], entry["text"], entry["share"]) == ("1", "ab", 0.5)
    assert "judge" not in entry
    assert (await score("a\na", letters.Letters()))["format"] == 0.0, "its lines stay as they are"


async def test_the_judge_weighs_in_on_the_same_scale(score: Score):
    scored = await score("ab", letters.JudgedLetters(), JUDGED)
    assert scored["score"] == pytest.approx(2 * (0.5 * 0.5 + 0.5 * 0.8) - 1)
    assert (scored["judge"], scored["judge_asked"], scored["judge_cost_usd"]) == (4.0, 1, 110e-6)


async def test_a_part_that_is_not_known_counts_neither_way(score: Score):
    unlabelled = await score("ab", letters.JudgedLetters(), JUDGED, row=ROW.model_copy(update={"inputs": {}}))
    assert unlabelled["score"] == pytest.approx(2 * 0.8 - 1)
    assert unlabelled.keys() == KEYS and math.isnan(unlabelled["share"]) and math.isnan(unlabelled["pure"])


async def test_profiles_weigh_otherwise(score: Score):
    only_format = Reward(part_weights={"share": 0, "format": 1, "judge": 0})
    scored = await score("b", letters.JudgedLetters(), JUDGED, reward=only_format)
    assert (scored["score"], scored["judge_asked"]) == (1.0, 0), "a judge that can't matter is not asked"


@pytest.mark.parametrize(("text", "share", "worth"), [("?a", 1.0, 0.0), ("ab", 0.0, 0.0), ("<|im_end|>", 1.0, -1.0)])
async def test_without_the_judge_the_rules_decide(score: Score, text: str, share: float, worth: float):
    scored = await score(text, letters.JudgedLetters(), JUDGED, reward=Reward(judge_share=share))
    assert (scored["score"], scored["judge_asked"], scored["invalid"]) == (worth, 0, 0.0)


@pytest.mark.parametrize("reply", [(400, {}), (200, completion("fine"))])
async def test_a_failed_judge_is_not_a_score(tmp_path: Path, score: Score, reply: Any):
    scored = await score("aa", letters.JudgedLetters(), reply)
    assert scored.keys() == KEYS
    assert (scored["score"], scored["invalid"], scored["judge_asked"]) == (0.0, 1.0, 1)
    assert all(math.isnan(scored[part]) for part in ("judge", "share", "format", "pure"))
    (entry,) = entries(tmp_path)
    assert entry["failed_by"] == "judge" and "score" not in entry


async def test_where_nothing_that_counts_is_known_there_is_no_score(tmp_path: Path, score: Score):
    row, weights = ROW.model_copy(update={"inputs": {}}), Reward(part_weights={"share": 1, "format": 0})
    assert (await score("aa", letters.Letters(), row=row, reward=weights))["invalid"] == 1
    assert "no part with a weight is known for this row (known: format)" in entries(tmp_path)[0]["invalid"]


def test_a_recipe_that_asks_nobody_depends_on_no_service(tmp_path: Path, profile_of: Callable[..., Profile]):
    profile = profile_of(recipe=letters.__file__)
    run = Run(id="r", flow="train", profile=profile, directory=tmp_path)
    service = rl_module._reward_service(run, partial(Addresses, "", "", ""), tmp_path / "samples.jsonl")
    assert (service.rag, service.judge, service.parts) == (None, None, ("judge", "share", "format", "pure"))
    assert set(scoring_key(profile)) == {"recipe", "tenant"}
    rewriting_run = run.model_copy(update={"profile": profile_of()})
    addresses = partial(Addresses, "", "http://j", "http://r")
    rewriting = rl_module._reward_service(rewriting_run, addresses, tmp_path / "s.jsonl")
    assert (rewriting.rag_url, rewriting.judge_url, rewriting.retrieval_scope) == ("http://r", "http://j", "kb:")


async def test_the_actor_opens_the_recipes_scorer(tmp_path: Path):
    service = service_of(tmp_path)
    actor = RewardActor(service.model_dump_json())
    info = letters.Letters().rl_record(ROW, Tenant())["extra_info"]
    assert (await actor.score(info, "aaa"))["score"] == 1.0
    await actor.close()
    gone = RewardActor(service.model_copy(update={"recipe": "/no/such.py"}).model_dump_json())
    lost = await gone.score(info, "aaa")
    assert (lost["invalid"], lost.keys()) == (1.0, KEYS)
