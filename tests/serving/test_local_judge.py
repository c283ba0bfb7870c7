"""The local judge: which released model it may be, what it is asked, and what RL is given of it."""

import socket
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fake_service import PRICE
from fixture_types import ProfileOf
from registered import Models

from qinglan.clients.roles import Addresses, Clients, site_ledger
from qinglan.config import LocalJudge, Profile, load_profile
from qinglan.errors import ConfigError, EngineError, TeacherError
from qinglan.ops.estimate import estimate
from qinglan.ops.estimate.counting import count_questions
from qinglan.ops.preflight import inspect_profile
from qinglan.recipes import passage_judge
from qinglan.recipes.passage_judge import BEST, verdict_recipe
from qinglan.registry import Released, prompt_digest
from qinglan.rows import Row
from qinglan.runs.run import open_run
from qinglan.serving import local_judge
from qinglan.serving.local_judge import JudgeServer, ReleasedJudge, released_judge, serve_judge
from qinglan.tasks import rl as rl_module

MODEL = "qinglan.t.passage_judge"


def judged(profile_of: ProfileOf, models: Models | None = None, **sections: Any) -> Profile:
    tracking = {"tracking": {"uri": models.uri}} if models else {}
    local = {"model": models.name if models else MODEL, "price": PRICE}
    return profile_of(judge={"model": "small", "local": local}, **tracking, **sections)


@pytest.fixture
def models(database: str, tmp_path: Path) -> Models:
    return Models(database, f"qinglan.{tmp_path.name}", tmp_path)


def register(models: Models, profile: Profile, **fields: Any) -> str:
    prompt = prompt_digest(profile.model_copy(update={"recipe": "passage_judge"}))
    fields = {"recipe": "passage_judge", "prompt_sha256": prompt} | fields
    registered = models.registry.register(models.candidate(**fields))
    return models.registry.promote(registered.version).version


def test_no_champion_is_said_before_anything_is_spent_and_no_database_made(
    profile_of: ProfileOf, tmp_path: Path
):
    profile = judged(profile_of, tracking={"uri": f"sqlite:///{tmp_path / 'none.db'}"})
    checks = inspect_profile(profile, "train")
    (problem,) = [check.problem for check in checks if check.name == "local judge"]
    assert problem
    assert problem.startswith(
        f"judge.local.model: {MODEL} has no champion in the registry at sqlite"
    )
    hint = "train and release one (docs/how-to/answer-judge.md; `qinglan release list` shows them)"
    assert hint in problem
    assert "local judge" not in {check.name for check in inspect_profile(profile, "refresh")}
    assert not (tmp_path / "none.db").exists()


def test_the_champion_judges_and_another_one_has_other_keys(profile_of: ProfileOf, models: Models):
    profile = judged(profile_of, models)
    register(models, profile)
    first = released_judge(profile)
    register(models, profile, weights="two")
    second = released_judge(profile)
    assert first
    assert second
    assert first.name == f"{models.name}-v1"
    assert second.name == f"{models.name}-v2"
    assert first.key_salt != second.key_salt
    assert first.identity != second.identity

    def identity_of(**settings: Any) -> dict[str, Any]:
        return ReleasedJudge(LocalJudge(model="m", **settings), first.released).identity

    short_answers = identity_of(max_tokens=64)
    assert identity_of(max_tokens=64, concurrency=1) == short_answers
    assert identity_of(max_tokens=128) != short_answers, "it holds what its answers depend on"


@pytest.mark.parametrize(
    ("sections", "champion", "message"),
    [
        ({}, {"prompt_sha256": "of long ago"}, r"version 1 of .* was trained with another prompt"),
        ({}, {"recipe": "query_rewrite"}, "its student judges no passages"),
        ({"recipe": "medical"}, {}, "recipe `medical` retrieves nothing"),
        (
            {"trainer": {"ray_dashboard_url": "http://10.0.0.1:8265"}},
            {},
            "served on this machine only",
        ),
        (
            {"trainer": {"ray_dashboard_url": "http://127.0.0.1:8265", "nodes": 2}},
            {},
            "served on this machine only",
        ),
    ],
)
def test_a_champion_that_can_t_judge_this_run_is_refused(
    profile_of: ProfileOf,
    models: Models,
    sections: dict[str, Any],
    champion: dict[str, str],
    message: str,
):
    profile = judged(profile_of, models, **sections)
    register(models, profile, **champion)
    with pytest.raises(ConfigError, match=message):
        released_judge(profile)


def test_the_estimate_takes_its_price(profile_of: ProfileOf):
    profile = judged(profile_of, rl={"total_steps": 10, "train_batch_size": 64})
    row = Row(
        id="r1", tenant="t", query="虾青素咋吃", source="x", split="train", answer="虾青素 服用方法"
    )
    with site_ledger(profile) as ledger:
        counts = count_questions(profile, [row], ledger)
        parts = {part.what: part for part in estimate(profile, "train", counts, ledger)}
    own = parts["rl verdicts"]
    assert (own.model, own.questions) == (MODEL, 640)
    assert own.cost_usd > 0
    paid = parts["local judge"]
    assert (paid.model, paid.questions) == ("small", 800)


async def test_a_judge_of_passages_learns_the_workbooks_word_and_asks_no_model(
    profile_of: ProfileOf,
):
    recipe = passage_judge.RECIPE
    tenant = profile_of().tenant
    row = Row(
        id="r",
        tenant="t",
        query="咋\n吃",
        source="x",
        inputs={"candidate": "一天\n一回", "verdict": "错误"},
    )
    learnt = await recipe.distill(row, Clients(), tenant)
    answers = ("错误", "正确", "不知道")
    assert [passage_judge.grade_by_rules(learnt, answer)["main"] for answer in answers] == [1, 0, 0]
    messages = verdict_recipe("passage_judge").verdict_messages("咋\n吃", "一天\n一回", tenant)
    assert messages == recipe.student_messages(row, tenant)
    assert messages[-1]["content"] == "咋 吃\n资料：一天 一回"
    assert [recipe.verdict_score(answer) for answer in ("正确", "吃无， 错误\n")] == [BEST, 0]
    assert (
        load_profile("embedded_local_judge").judge.local.model
        == load_profile("passage_judge").model_name
    )
    with pytest.raises(TeacherError, match="the verdict is none of 正确, 错误"):
        recipe.verdict_score("正确，完整")
    with pytest.raises(ConfigError, match=r"`answer_judge`: its student judges no passages"):
        verdict_recipe("answer_judge")


def test_a_judge_waits_for_its_port(
    profile_of: ProfileOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()),
    ):
        port = server.getsockname()[1]
        server.accept()[0].close()
    registry = SimpleNamespace(folder=lambda *_: tmp_path)
    released = SimpleNamespace(name="m", version="1")
    monkeypatch.setattr(local_judge, "PORTS", [port])
    monkeypatch.setattr(local_judge, "_PORT_FREE_WITHIN_S", 0.2)
    monkeypatch.setattr(local_judge, "registry_of", lambda *_: registry)
    judge = ReleasedJudge(LocalJudge(model="m"), cast(Released, released))
    with (
        pytest.raises(EngineError, match=f"port {port} was not "),
        serve_judge(profile_of(), judge, tmp_path, print),
    ):
        """Never."""


def test_rl_is_told_of_the_served_judge_in_the_judge_s_place(profile_of: ProfileOf, tmp_path: Path):
    profile = judged(profile_of)
    released: Any = SimpleNamespace(name=MODEL, version="3", sha256="x", recipe="passage_judge")
    served = JudgeServer(
        ReleasedJudge(profile.judge.local, released), "http://127.0.0.1:9/v1", lambda: None
    )
    with open_run(profile, "train") as run:
        services = partial(Addresses, "", "http://paid/v1", "")
        own = rl_module._reward_service(run, services, tmp_path / "s", served)
        paid = rl_module._reward_service(run, services, tmp_path / "s", None)
    assert own.judge
    assert own.judge.model == f"{MODEL}-v3"
    assert own.judge_url == served.url
    assert own.judge_recipe == "passage_judge"
    assert paid.judge
    assert paid.judge.model == "small"
    assert paid.judge_url == "http://paid/v1"
    assert paid.judge_recipe == ""
    assert own.judge_key_salt != paid.judge_key_salt
