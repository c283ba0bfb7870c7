"""The page to try the models: what each arm answers, finds and costs, who may ask, and what is kept of it."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fake_service import completion, recall
from playwright.sync_api import Page, expect
from prefect_page import CHROMIUM, chromium
from question_rows import random_rows
from starlette.applications import Starlette
from starlette.testclient import TestClient

from qinglan.config import Profile
from qinglan.data.versions import publish
from qinglan.runs.artifacts import write_jsonl
from qinglan.serving import try_page
from qinglan.serving.router import create_app
from qinglan.serving.routes import Backend, Routes

QUESTION = "请问菌粉睡前吃行不行呀"
CAPITALS = str(Path(__file__).parents[1] / "support" / "capitals_recipe.py")
Try = Callable[..., TestClient]


@pytest.fixture
def make_router(profile_of: Callable[..., Profile], serve: Any, tmp_path: Path) -> Callable[..., Starlette]:
    """With a teacher, champion, challenger and RAG; each is a script, or the address of one that is away."""
    replies = {"teacher": "教师 改写", "champion": "旧 模型", "challenger": "新 模型"}

    def find(body: dict[str, Any]) -> tuple[int, Any]:
        return 200, recall((body.get("rewritten_query", "原"), 0.9), ("共有", 0.5))

    def make(*, try_page: str = "with_teacher", serving: Any = None, sections: Any = None, **scripts: Any) -> Starlette:
        services = {n: scripts.get(n, lambda _, text=text: (200, completion(text))) for n, text in replies.items()}
        services["rag"] = scripts.get("rag", find)
        urls = {name: each if isinstance(each, str) else serve(each).url for name, each in services.items()}
        champion, challenger = (
            Backend(url=urls[role], model="m", version=v) for role, v in (("champion", "7"), ("challenger", "8"))
        )
        Routes(champion=champion, challenger=challenger).write(tmp_path / "routes.json")
        values: dict[str, Any] = {
            "serve": {"try_page": try_page} | (serving or {}),
            "teacher": {"model": "big", "base_url": urls["teacher"], "max_retries": 0},
            "rag": {"url": urls["rag"]},
            "budget": {"per_run_usd": 1},
        }
        return create_app(profile_of(**values | (sections or {})), tmp_path / "routes.json")

    return make


@pytest.fixture
def open_page(make_router: Callable[..., Starlette]) -> Iterator[Try]:
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(TestClient(make_router(**settings)))


def ask(client: TestClient, arm: str, query: str = QUESTION, **more: Any) -> dict[str, Any]:
    body = {"arm": arm, "messages": [{"role": "user", "content": query}], **more}
    answer = client.post("/try", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_each_arm_has_its_text_its_time_and_what_it_finds(open_page: Try):
    client = open_page()
    settings = client.get("/try").json()
    assert settings["arms"] == ["original", "teacher", "champion", "challenger"]
    answers = [ask(client, arm) for arm in settings["arms"]]
    assert [(each["text"], each["version"], each["passages"][0]["id"]) for each in answers] == [
        (QUESTION, None, "原"),
        ("教师 改写", None, "教师 改写"),
        ("旧 模型", "7", "旧 模型"),
        ("新 模型", "8", "新 模型"),
    ]
    assert answers[2]["passages"][1] == {"id": "共有", "title": "正文共有", "score": 0.5}
    assert all(each["reason"] is None and each["ms"] >= 0 for each in answers)


def test_the_page_asks_nobody_else(open_page: Try):
    page = open_page().get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "connect-src 'self'" in page.headers["content-security-policy"]
    assert "innerHTML" not in page.text and "http" not in page.text.replace("HTTP ", "")


def test_an_arm_that_fails_gives_its_reason_and_the_others_answer(open_page: Try):
    client = open_page(champion="http://127.0.0.1:9/v1", teacher=lambda _: (500, {}))
    failed = [ask(client, arm) for arm in ("champion", "teacher")]
    assert [(each["text"], each["reason"]["en"]) for each in failed] == [
        (None, "the model's server can't be reached"), (None, "the teacher was unavailable"),
    ]  # fmt: skip
    assert ask(client, "challenger")["text"] == "新 模型"
    without = ask(open_page(rag=lambda _: (500, {})), "champion")
    assert (without["text"], without["passages"], without["reason"]["zh"]) == ("旧 模型", None, "RAG 不可用")


def test_a_slow_teacher_delays_no_other_and_is_paid_once(open_page: Try, monkeypatch: pytest.MonkeyPatch):
    asked, released = list[Any](), threading.Event()
    client = open_page(
        teacher=lambda body: asked.append(body) or (released.wait(60) and (200, completion("迟到 改写")))
    )
    monkeypatch.setattr(try_page, "TEACHER_WITHIN_S", 3.0)
    late: list[dict[str, Any]] = []
    waiting = threading.Thread(target=lambda: late.append(ask(client, "teacher")))
    waiting.start()
    assert [ask(client, "champion")["text"], late] == ["旧 模型", []]
    waiting.join()
    assert late[0]["reason"]["en"] == "the teacher timed out"
    released.set()
    monkeypatch.setattr(try_page, "TEACHER_WITHIN_S", 60.0)
    assert (ask(client, "teacher")["text"], len(asked)) == ("迟到 改写", 1)


def test_the_teacher_is_asked_within_the_budget_and_only_where_the_profile_allows_it(open_page: Try):
    client = open_page(sections={"budget": {"per_run_usd": 1e-9}})
    assert ask(client, "teacher")["text"] == "教师 改写"
    assert ask(client, "teacher", "另一个问题")["reason"]["en"] == "over the budget"
    client = open_page(try_page="models", sections={"budget": {}})
    assert client.get("/try").json()["arms"] == ["original", "champion", "challenger"]
    refused = client.post("/try", json={"arm": "teacher", "messages": [{"role": "user", "content": QUESTION}]})
    assert (refused.status_code, "there is no `teacher` here" in refused.text) == (400, True)


def test_only_so_many_are_asked_at_once(open_page: Try, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(try_page, "AT_ONCE", 0)
    assert ask(open_page(), "champion")["reason"]["en"] == "too many questions at once; try again"


def test_it_wants_the_key_of_the_api_and_no_page_from_elsewhere_may_ask(
    open_page: Try, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ROUTER_KEY", "s3cret")
    client = open_page(serving={"api_key_env": "ROUTER_KEY"})
    assert [client.get("/").status_code, client.get("/try").status_code, client.post("/try").status_code] == [
        200,
        401,
        401,
    ]
    client.headers["authorization"] = "Bearer s3cret"
    assert ask(client, "champion")["text"] == "旧 模型"
    assert client.post("/try", content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
    too_long = {"arm": "champion", "messages": [{"role": "user", "content": "长" * 513}]}
    assert "query_too_long" in client.post("/try", json=too_long).text


def test_switched_off_there_is_no_page(open_page: Try):
    client = open_page(try_page="none")
    assert [client.get("/").status_code, client.get("/try").status_code, client.post("/try").status_code] == [404] * 3


def test_what_is_asked_there_is_no_users_question(open_page: Try, tmp_path: Path):
    log = {"folder": str(tmp_path / "log"), "consent": "all"}
    client = open_page(serving={"request_log": log})
    for arm in ("original", "teacher", "champion"):
        ask(client, arm)
    assert "qinglan_router_answers_total{" not in client.get("/metrics").text
    client.__exit__(None, None, None)
    assert list((tmp_path / "log").iterdir()) == []


def test_examples_are_questions_of_the_test_split(open_page: Try, profile_of: Callable[..., Profile], tmp_path: Path):
    rows = [
        *random_rows(20, seed=1, split="train"),
        *random_rows(12, seed=2, split="test", gold_id="d", profile="孕妇"),
    ]
    publish(profile_of(), "r", {"rows": write_jsonl(tmp_path / "rows.jsonl", rows)})
    examples = open_page().get("/try").json()["examples"]
    assert len(examples) == try_page.EXAMPLES
    assert {each["question"] for each in examples} <= {row.query for row in rows[20:]}
    assert {(each["profile"], each["gold_id"], str(each["inputs"])) for each in examples} == {("孕妇", "d", "{}")}


def test_answers_are_shown_without_passages(open_page: Try):
    client = open_page(sections={"recipe": CAPITALS}, champion=lambda _: (200, completion("巴黎 是首都")))
    settings = client.get("/try").json()
    assert (settings["arms"], settings["searches"]) == (["teacher", "champion", "challenger"], False)
    assert settings["inputs"] == [{"name": "hint", "label": "提示"}]
    answer = ask(client, "champion", "法国", inputs={"hint": "塞纳河"})
    assert (answer["text"], answer["passages"]) == ("巴黎", None)


@pytest.fixture
def page(make_router: Callable[..., Starlette], monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    """The page of a router whose champion is away and whose teacher writes HTML, on a phone."""
    monkeypatch.setenv("ROUTER_KEY", "s3cret")
    settings = {"champion": "http://127.0.0.1:9/v1", "teacher": lambda _: (200, completion("<b>教师</b> " + "长" * 99))}
    app = make_router(serving={"api_key_env": "ROUTER_KEY"}, **settings)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    running = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    running.start()
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 390, "height": 800}, locale="zh-CN")
        page.goto(f"http://127.0.0.1:{listener.getsockname()[1]}/")
        yield page
    server.should_exit = True
    running.join()


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt install chromium)")
def test_in_a_browser_it_is_used_by_keyboard_in_both_languages_at_any_width(page: Page):
    said, hosts = list[str](), set[str]()
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    expect(page.get_by_label("接口密钥")).to_be_focused()
    for key, asks in (("wrong", False), ("s3cret", True)):
        page.get_by_label("接口密钥").fill(key)
        page.keyboard.press("Enter")
        expect(page.get_by_label("问题", exact=True)).to_be_visible(visible=asks)
    expect(page.get_by_label("问题", exact=True)).to_be_focused()
    page.keyboard.type("菌粉睡前吃吗")
    page.keyboard.press("Control+Enter")
    cards = page.get_by_role("article")
    expect(cards).to_have_count(4)
    expect(cards.nth(1)).to_contain_text("<b>教师</b>")
    expect(cards.nth(2)).to_contain_text("无法连接模型服务")
    expect(cards.nth(3).locator("mark")).to_have_text(["新", "模型"])
    expect(cards.nth(3)).to_contain_text("原问题没有找到")
    page.get_by_role("button", name="English").press("Enter")
    expect(page.locator("html")).to_have_attribute("lang", "en")
    expect(cards.nth(2)).to_contain_text("the model's server can't be reached")
    for width in (320, 390, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    tops = {card.bounding_box()["y"] for card in cards.all()}
    assert (len(tops), said, len(hosts)) == (1, [], 1), "side by side, and asking nobody else"
