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
from qinglan.ops.estimate import count_questions, estimate
from qinglan.ops.preflight import inspect_profile
from qinglan.recipes import passage_judge
from qinglan.recipes.passage_judge import BEST, verdict_recipe
from qinglan.registry import Released, prompt_digest
from qinglan.rows import Row
from qinglan.runs.run import open_run
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
    known = {"recipe": "passage_judge", "prompt_sha256": prompt} | fields
    return models.registry.promote(
        models.registry.register(models.candidate(**known)).version
    ).version


def test_no_champion_is_said_before_anything_is_spent_and_no_database_made(
    profile_of: ProfileOf, tmp_path: Path
):
    profile = judged(profile_of, tracking={"uri": f"sqlite:///{tmp_path / 'none.db'}"})
    (problem,) = (
        check.problem for check in inspect_profile(profile, "train") if check.name == "local judge"
    )
    assert problem and problem.startswith(
        f"judge.local.model: {MODEL} has no champion in the registry at sqlite"
    )
    assert (
        "train and release one (docs/how-to/answer-judge.md; `qinglan release list` shows them)"
        in problem
    )
    assert "local judge" not in {check.name for check in inspect_profile(profile, "refresh")}
    assert not (tmp_path / "none.db").exists()


def test_the_champion_judges_and_another_one_has_other_keys(profile_of: ProfileOf, models: Models):
    profile = judged(profile_of, models)
    register(models, profile)
    first = released_judge(profile)
    register(models, profile, weights="two")
    second = released_judge(profile)
    assert first and second
    assert (first.name, second.name) == (f"{models.name}-v1", f"{models.name}-v2")
    assert first.key_salt != second.key_salt and first.identity != second.identity
    one, other, slower = (
        ReleasedJudge(LocalJudge(model="m", **settings), first.released)
        for settings in (
            {"max_tokens": 64},
            {"max_tokens": 128},
            {"max_tokens": 64, "concurrency": 1},
        )
    )
    assert one.identity == slower.identity != other.identity, "it holds what its answers depend on"


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
    own, paid = parts["rl verdicts"], parts["local judge"]
    assert (own.model, own.questions, paid.model, paid.questions) == (MODEL, 640, "small", 800)
    assert own.cost_usd > 0


async def test_a_judge_of_passages_learns_the_workbooks_word_and_asks_no_model(
    profile_of: ProfileOf,
):
    recipe, tenant = passage_judge.RECIPE, profile_of().tenant
    row = Row(
        id="r",
        tenant="t",
        query="咋\n吃",
        source="x",
        inputs={"candidate": "一天\n一回", "verdict": "错误"},
    )
    learnt = await recipe.distill(row, Clients(), tenant)
    assert [recipe.parts(learnt, said)["main"] for said in ("错误", "正确", "不知道")] == [1, 0, 0]
    asked = verdict_recipe("passage_judge").verdict_messages("咋\n吃", "一天\n一回", tenant)
    assert (
        asked == recipe.student_messages(row, tenant)
        and asked[-1]["content"] == "咋 吃\n资料：一天 一回"
    )
    assert [recipe.verdict_score(said) for said in ("正确", "吃无， 错误\n")] == [BEST, 0]
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
    folders, released = (
        SimpleNamespace(folder=lambda *_: tmp_path),
        SimpleNamespace(name="m", version="1"),
    )
    for name, value in {
        "PORTS": [port],
        "_PORT_FREE_WITHIN_S": 0.2,
        "registry_of": lambda *_: folders,
    }.items():
        monkeypatch.setattr(f"qinglan.serving.local_judge.{name}", value)
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
        own, paid = (
            rl_module._reward_service(run, services, tmp_path / "s", each)
            for each in (served, None)
        )
    assert own.judge and paid.judge
    assert (own.judge.model, own.judge_url, own.judge_recipe) == (
        f"{MODEL}-v3",
        served.url,
        "passage_judge",
    )
    assert (paid.judge.model, paid.judge_url, paid.judge_recipe) == ("small", "http://paid/v1", "")
    assert own.judge_key_salt != paid.judge_key_salt
