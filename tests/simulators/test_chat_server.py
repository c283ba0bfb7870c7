"""The simulated models over HTTP: OpenAI's protocol, and injected faults."""

from collections import Counter
from typing import Any

import pytest
from fastapi.testclient import TestClient

from qinglan.simulators import chat_server
from qinglan.simulators.chat_server import create_app
from qinglan.simulators.domains import Domain, ReasonedAnswer
from qinglan.simulators.server import Faults


def _ask(model: str, content: str, **more: object) -> Any:
    body = {"model": model, "messages": [{"role": "user", "content": content}], **more}
    return TestClient(create_app()).post("/v1/chat/completions", json=body)


def test_reasoning_is_returned_beside_the_answer_and_counted(monkeypatch: pytest.MonkeyPatch):
    models = {
        "reasoner": lambda text, _: ReasonedAnswer("对", f"{text}？想了想"),
        "plain": lambda *_: "对",
    }
    # Nothing of a domain but its models is used.
    domain = Domain("x", models, *[lambda *_: None] * 4)  # type: ignore[arg-type,list-item]
    monkeypatch.setattr(chat_server, "simulated_models", lambda: dict.fromkeys(models, domain))
    reasoned, plain = (_ask(model, "水是湿的").json() for model in models)
    message = reasoned["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("对", "水是湿的？想了想")
    assert "reasoning_content" not in plain["choices"][0]["message"]
    tokens = reasoned["usage"]["completion_tokens"] - plain["usage"]["completion_tokens"]
    assert tokens == reasoned["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_a_model_has_a_further_name():
    client = TestClient(create_app(names={"gpt-5": "simulated-rewriter"}))
    body = {"messages": [{"role": "user", "content": "纤维粉啥时候吃呀"}]}
    by_further_name, by_own_name = (
        client.post("/v1/chat/completions", json=body | {"model": model}).json()
        for model in ("gpt-5", "simulated-rewriter")
    )
    assert by_further_name["model"] == "gpt-5"
    assert by_further_name["choices"] == by_own_name["choices"]


def test_unknown_model_and_bad_body():
    assert _ask("gpt-4o", "x").status_code == 404
    assert _ask("gpt-4o", "x").json()["error"]["code"] == "model_not_found"
    assert _ask("simulated-rewriter", "x", stream=True).status_code == 400
    refused = TestClient(create_app()).post(
        "/v1/chat/completions", json={"model": "simulated-rewriter"}
    )
    assert refused.status_code == 400
    assert "messages" in refused.json()["error"]["message"]


def test_faults_are_seeded_and_come_in_thirds_and_a_rate_limit_says_when_to_return():
    assert TestClient(Faults(create_app(), fault_rate=1.0)).get("/health").json() == {
        "status": "ok"
    }
    faults = [Faults(create_app(), fault_rate=0.3, seed=1) for _ in range(2)]
    first, second = ([faults.next_fault() for _ in range(3000)] for faults in faults)
    counts = Counter(first)
    assert first == second
    for fault in ("rate_limit", "server_error", "drop"):
        assert 240 < counts[fault] < 360, fault
    client = TestClient(Faults(create_app(), fault_rate=1.0, seed=0))
    # It draws what the client's server draws, and so says when a rate limit comes.
    same = Faults(create_app(), fault_rate=1.0, seed=0)
    while same.next_fault() != "rate_limit":
        client.post("/v1/chat/completions")
    answer = client.post("/v1/chat/completions")
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
