"""The simulated teacher and judge: what they understand and answer, and that the server follows OpenAI's protocol."""

from collections import Counter

import pytest
from fastapi.testclient import TestClient

from qinglan.config import Tenant
from qinglan.recipes.query_rewrite import RECIPE, user_text
from qinglan.simulators import chat_server
from qinglan.simulators.chat_server import create_app
from qinglan.simulators.domains import Domain, ReasonedAnswer
from qinglan.simulators.domains.query_rewrite import facts as domain
from qinglan.simulators.domains.query_rewrite.teacher import (
    PANEL_BIAS,
    Reading,
    judge,
    judge_panel,
    rewrite,
    understand,
)
from qinglan.simulators.server import Faults


@pytest.mark.parametrize("intent", domain.INTENTS)
def test_reads_every_phrasing(intent: str):
    spec = domain.INTENTS[intent]
    for phrasing in spec.phrasings + spec.test_phrasings:
        for product, aliases in domain.PRODUCTS.items():
            question = phrasing.format(p=aliases[0])
            assert understand(question) == Reading(product, intent), question


@pytest.mark.parametrize(
    ("text", "reading"),
    [
        ("历史摘要：上轮问了鱼油\n当前问题：那它孕妇能吃吗", Reading("深海鱼油", "preg")),
        ("历史摘要：上轮问了鱼油\n当前问题：钙片怎么保存", Reading("碳酸钙", "store")),
        ("用户画像：孕28周\n当前问题：燕窝能吃吗", Reading("燕窝", "preg")),
        ("用户画像：孕28周\n当前问题：燕窝怎么保存", Reading("燕窝", "store")),
        ("退黑素有付作用吗", Reading("褪黑素", "side")),
        ("腿黑素安全吗", Reading(None, "side")),
        ("ＮＭＮ怎么吃", Reading("烟酰胺单核苷酸", "how")),
    ],
)
def test_reads_context_and_typos(text: str, reading: Reading):
    assert understand(text) == reading


def test_rewrites_by_habit_with_some_alternatives():
    answers = Counter(rewrite(f"{prefix}虾青素怎么吃", seed) for prefix in ("", "请问") for seed in range(200))
    assert answers.most_common(1)[0][0] == "虾青素 服用方法 推荐用量"
    assert 0.70 < answers["虾青素 服用方法 推荐用量"] / 400 < 0.82
    assert 0.05 < answers["虾青素 食用建议 每日摄入量"] / 400 < 0.16


@pytest.mark.parametrize(
    ("rewritten", "low", "high"),
    [
        ("胶原蛋白肽 服用方法 推荐用量", 5, 5),
        ("胶原蛋白肽 食用建议 每日摄入量", 5, 5),
        ("胶原蛋白肽", 2, 2),
        ("虾青素 食用建议 每日摄入量", 0, 2),
        ("胶原蛋白肽 食用建议 食用建议 食用建议", 4, 4),
        ("", 0, 0),
    ],
)
def test_judges_supplements(rewritten: str, low: float, high: float):
    assert low <= judge(f"请问胶原怎么吃\n改写：{rewritten}").score <= high


def test_judges_open_text_and_passages():
    question = "我有高血压，高血压患者能吃党参吗？"
    good, bad = (judge(f"{question}\n改写：{text}").score for text in ("高血压 党参", "感冒 发烧 咳嗽"))
    assert bad < 2 and good > 4
    asked = "虾青素有没有副作用\n检索结果：《虾青素 不良反应 耐受性评价》虾青素是一种……"
    answered = [judge(asked, seed).score for seed in range(400)]
    assert 0.86 < answered.count(5.0) / 400 < 0.94, "one verdict in ten is wrong"


def _ask(model: str, content: str, **more: object):
    body = {"model": model, "messages": [{"role": "user", "content": content}], **more}
    return TestClient(create_app()).post("/v1/chat/completions", json=body)


def test_judge_answers_in_json():
    text = _ask("simulated-judge", "益生菌怎么保存\n改写：益生菌 保存方法").json()["choices"][0]["message"]["content"]
    assert RECIPE.parse_judge(text) == 5


def test_reasoning_is_returned_beside_the_answer_and_counted(monkeypatch: pytest.MonkeyPatch):
    models = {"reasoner": lambda text, _: ReasonedAnswer("对", f"{text}？想了想"), "plain": lambda *_: "对"}
    domain = Domain("x", models, *[lambda *_: None] * 4)  # type: ignore[arg-type,list-item]
    monkeypatch.setattr(chat_server, "simulated_models", lambda: dict.fromkeys(models, domain))
    reasoned, plain = (_ask(model, "水是湿的").json() for model in models)
    message = reasoned["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("对", "水是湿的？想了想")
    assert "reasoning_content" not in plain["choices"][0]["message"]
    tokens = reasoned["usage"]["completion_tokens"] - plain["usage"]["completion_tokens"]
    assert tokens == reasoned["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_unknown_model_and_bad_body():
    assert _ask("gpt-4o", "x").status_code == 404
    assert _ask("gpt-4o", "x").json()["error"]["code"] == "model_not_found"
    assert _ask("simulated-rewriter", "x", stream=True).status_code == 400
    refused = TestClient(create_app()).post("/v1/chat/completions", json={"model": "simulated-rewriter"})
    assert refused.status_code == 400
    assert "messages" in refused.json()["error"]["message"]


def test_faults_are_seeded_and_come_in_thirds():
    assert TestClient(Faults(create_app(), fault_rate=1.0)).get("/health").json() == {"status": "ok"}
    faults = [Faults(create_app(), fault_rate=0.3, seed=1) for _ in range(2)]
    first, second = ([faults.next_fault() for _ in range(3000)] for faults in faults)
    counts = Counter(first)
    assert first == second
    assert all(240 < counts[fault] < 360 for fault in ("rate_limit", "server_error", "drop"))


def test_rate_limit_says_when_to_return():
    client = TestClient(Faults(create_app(), fault_rate=1.0, seed=0))
    faults = Faults(create_app(), fault_rate=1.0, seed=0)
    while faults.next_fault() != "rate_limit":
        client.post("/v1/chat/completions")
    answer = client.post("/v1/chat/completions")
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"


TEXTS = ["虾青素 服用方法 推荐用量", "虾青素", "胶原蛋白肽 功效", "虾青素 保存方法"]


def panel(*texts: str, seed: int = 7) -> list[float]:
    return judge_panel(RECIPE.panel_messages("虾青素怎么吃", texts, Tenant())[-1]["content"], seed)


def alone(text: str) -> float:
    return judge(RECIPE.judge_messages("虾青素怎么吃", text, Tenant())[-1]["content"]).score


def test_a_panel_scores_as_the_judge_does_alone_up_to_a_position_bias():
    for seed in range(50):
        assert panel(*TEXTS, seed=seed) == pytest.approx([alone(text) for text in TEXTS], abs=PANEL_BIAS)
    assert panel(TEXTS[1]) == [alone(TEXTS[1])]


def test_the_judge_answers_panels_over_http():
    messages = RECIPE.panel_messages(user_text("这个怎么吃", history="用户问过虾青素"), TEXTS, Tenant())
    with TestClient(create_app()) as client:
        body = {"model": "simulated-judge", "messages": messages}
        answer = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    scores = RECIPE.parse_panel(answer, len(TEXTS))
    assert scores.index(max(scores)) == 0
