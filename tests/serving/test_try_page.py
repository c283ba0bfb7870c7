"""The page to try the models: the arms' answers, passages and costs, and who may ask them."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import date, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from batch_api_simulator import running_app
from doubles import raising
from fake_service import completion, recall
from fixture_types import ProfileOf
from playwright.sync_api import Page, expect
from prefect_page import NEEDS_CHROMIUM, chromium
from question_rows import random_rows, row
from starlette.testclient import TestClient

from qinglan.data.versions import publish
from qinglan.runs.artifacts import write_jsonl
from qinglan.serving import try_page
from qinglan.serving.router import create_app
from qinglan.serving.routes import Backend, Routes

QUESTION = "请问菌粉睡前吃行不行呀"
LOOKS: dict[str, Literal["dark", "light"]] = {"中文": "dark", "English": "light"}
AWAY = "http://127.0.0.1:9/v1"
CAPITALS = str(Path(__file__).parents[1] / "support" / "capitals_recipe.py")
Try = Callable[..., TestClient]


@pytest.fixture
def router(profile_of: ProfileOf, serve: Any, tmp_path: Path) -> Callable[..., TestClient]:
    """A router whose teacher, champion, challenger and RAG are scripts.

    In place of a script there may be an address at which nobody answers; other values are sections
    of the profile.
    """

    def make(
        try_page: str = "with_teacher", *, key: str | None = None, **changes: Any
    ) -> TestClient:
        services: dict[str, Any] = {
            "teacher": lambda _: (200, completion("教师 改写")),
            "champion": lambda _: (200, completion("旧 模型")),
            "challenger": lambda _: (200, completion("新 模型")),
            "rag": retrieve_rewrite,
        }
        urls: dict[str, str] = {}
        for name, script in services.items():
            service = changes.pop(name, script)
            urls[name] = service if isinstance(service, str) else serve(service).url
        Routes(
            champion=Backend(url=urls["champion"], model="m", version="7"),
            challenger=Backend(url=urls["challenger"], model="m", version="7"),
        ).write(tmp_path / "routes.json")
        log = {"folder": str(tmp_path / "log"), "consent": "all"}
        sections = {
            "serve": {"try_page": try_page, "request_log": log, "api_key_env": key},
            "rag": {"url": urls["rag"]},
            "teacher": {"model": "big", "base_url": urls["teacher"], "max_retries": 0},
            "budget": {"per_run_usd": 1},
        }
        profile = profile_of(**sections | changes)
        return TestClient(create_app(profile, tmp_path / "routes.json"), "http://localhost")

    return make


def retrieve_rewrite(body: dict[str, Any]) -> Any:
    """The RAG's answer: a passage that is named as the rewrite, and one that is always found."""
    return 200, recall((body.get("rewritten_query", "原"), 0.9), ("共有", 0.5))


@pytest.fixture
def open_page(router: Callable[..., TestClient]) -> Iterator[Try]:
    with ExitStack() as stack:
        yield lambda *options, **more: stack.enter_context(router(*options, **more))


def body_of(arm: str, query: str = QUESTION, **more: Any) -> dict[str, Any]:
    return {"arm": arm, "messages": [{"role": "user", "content": query}], **more}


def ask(client: TestClient, *question: str, **more: Any) -> dict[str, Any]:
    answer: dict[str, Any] = (
        client.post("/try", json=body_of(*question, **more)).raise_for_status().json()
    )
    return answer


def test_each_arm_has_its_text_its_time_and_what_it_finds_and_none_is_a_users_question(
    open_page: Try, tmp_path: Path
):
    client = open_page()
    arms = client.get("/try").json()["arms"]
    assert arms == ["original", "teacher", "champion", "challenger"]
    answers = [ask(client, arm) for arm in arms]
    texts = [QUESTION, "教师 改写", "旧 模型", "新 模型"]
    assert [answer["text"] for answer in answers] == texts
    assert [answer["passages"][0]["id"] for answer in answers] == ["原", *texts[1:]]
    assert answers[2]["passages"][1] == {"id": "共有", "title": "正文共有", "score": 0.5}
    for answer in answers:
        assert answer["reason"] is None
        assert answer["ms"] >= 0
    assert "qinglan_router_answers_total{" not in client.get("/metrics").text
    client.__exit__(None, None, None)
    assert list((tmp_path / "log").iterdir()) == []


def test_a_teacher_is_offered_only_where_there_is_one_to_ask(open_page: Try):
    # The first recipe has none, the second's weak model is not named.
    for recipe in ("passage_judge", "answer_judge"):
        assert open_page(recipe=recipe).get("/try").json()["arms"] == ["champion", "challenger"]


def test_an_arm_that_fails_gives_its_reason_and_the_others_answer(
    open_page: Try, monkeypatch: pytest.MonkeyPatch
):
    client = open_page(champion=AWAY, teacher=lambda _: (500, {}))
    assert ask(client, "champion")["reason"]["en"] == "the model's server can't be reached"
    assert ask(client, "teacher")["reason"]["en"] == "the model asked was unavailable"
    assert ask(client, "challenger")["text"] == "新 模型"
    without_rag = ask(open_page(rag=lambda _: (500, {})), "champion")
    assert without_rag["text"] == "旧 模型"
    assert without_rag["passages"] is None
    assert without_rag["reason"]["zh"] == "RAG 不可用"
    monkeypatch.setattr(try_page, "AT_ONCE", 0)
    assert ask(open_page(), "champion")["reason"]["en"] == "too many questions at once; try again"


def test_a_slow_teacher_delays_no_other_and_is_paid_once(
    open_page: Try, monkeypatch: pytest.MonkeyPatch
):
    bodies: list[Any] = []
    released = threading.Event()
    late_answers: list[dict[str, Any]] = []

    def answer_late(body: Any) -> Any:
        bodies.append(body)
        released.wait(60)
        return 200, completion("迟到 改写")

    client = open_page(teacher=answer_late)
    monkeypatch.setattr(try_page, "TEACHER_WITHIN_S", 3.0)
    waiting = threading.Thread(target=lambda: late_answers.append(ask(client, "teacher")))
    waiting.start()
    assert ask(client, "champion")["text"] == "旧 模型"
    assert late_answers == []
    waiting.join()
    assert late_answers[0]["reason"]["en"] == "the model asked timed out"
    released.set()
    monkeypatch.setattr(try_page, "TEACHER_WITHIN_S", 60.0)
    assert ask(client, "teacher")["text"] == "迟到 改写"
    assert len(bodies) == 1


def test_the_teacher_is_asked_within_the_budget_of_a_day_and_only_where_the_profile_allows_it(
    open_page: Try, monkeypatch: pytest.MonkeyPatch
):
    client = open_page(budget={"per_run_usd": 1e-9})
    assert ask(client, "teacher")["text"] == "教师 改写"
    assert ask(client, "teacher", "另一个问题")["reason"]["en"] == "over the budget"
    # The run of tomorrow has a budget of its own.
    tomorrow = SimpleNamespace(today=lambda: date.today() + timedelta(days=1))
    monkeypatch.setattr(try_page, "date", tomorrow)
    with monkeypatch.context() as patch:
        patch.setattr(try_page, "open_clients", raising(OSError("away")))
        assert ask(client, "teacher", "另一个问题")["reason"]
    assert ask(client, "teacher", "另一个问题")["text"] == "教师 改写"
    refused = open_page("models", budget={}).post("/try", json=body_of("teacher"))
    assert refused.status_code == 400
    assert "no `teacher` here, but original, champion, challenger" in refused.text


def test_it_wants_the_key_of_the_api_and_its_own_page(
    open_page: Try, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ROUTER_KEY", "s3cret")
    client = open_page(key="ROUTER_KEY")
    assert client.get("/try").status_code == 401
    assert client.post("/try").status_code == 401
    page = client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "connect-src 'self'" in page.headers["content-security-policy"]
    assert "innerHTML" not in page.text
    client.headers["authorization"] = "Bearer s3cret"
    assert ask(client, "champion")["text"] == "旧 模型"
    assert ask(client, "champion", "长" * 513)["reason"]["en"] == "question too long"
    client = open_page("none")
    assert client.get("/").status_code == 404
    assert client.get("/try").status_code == 404
    assert client.post("/try").status_code == 404


def test_examples_are_questions_of_the_test_split(
    open_page: Try, profile_of: ProfileOf, tmp_path: Path
):
    rows = random_rows(12, split="test", gold_id="d; e", profile="孕妇")
    file = write_jsonl(tmp_path / "rows.jsonl", [*random_rows(20, seed=1, split="train"), *rows])
    publish(profile_of(), "r", {"rows": file})
    examples = open_page().get("/try").json()["examples"]
    assert len(examples) == try_page.EXAMPLES
    assert {example["question"] for example in examples} <= {row.query for row in rows}
    about_question = {
        "profile": "孕妇",
        "history": "",
        "inputs": {},
        "gold_ids": ["d; e", "d", "e"],
    }
    assert about_question.items() <= examples[0].items()


def test_answers_are_shown_without_passages(open_page: Try):
    client = open_page(recipe=CAPITALS, champion=lambda _: (200, completion("巴黎 是首都")))
    settings = client.get("/try").json()
    assert settings["arms"] == ["teacher", "champion", "challenger"]
    assert settings["inputs"] == [{"name": "hint", "label": "提示"}]
    answer = ask(client, "champion", "法国", inputs={"hint": "塞纳河"})
    assert answer["text"] == "巴黎"
    assert answer["passages"] is None


def look(page: Page, name: str) -> None:
    """Check that nothing is cut off at any width, and that axe finds nothing.

    `QINGLAN_SHOTS` names a folder for pictures.
    """
    pictures = os.environ.get("QINGLAN_SHOTS")
    for language, scheme in LOOKS.items():
        page.get_by_role("button", name=language).press("Enter")
        page.emulate_media(color_scheme=scheme)
        for width in (320, 390, 1280):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            if pictures:
                page.screenshot(path=f"{pictures}/try_{name}_{scheme}_{width}.png", full_page=True)
        results = Axe().run(page, options={"resultTypes": ["violations"]})
        assert not results.violations_count, results.generate_report()


@pytest.mark.slow
@pytest.mark.extended
@NEEDS_CHROMIUM
def test_a_browsers_page_is_used_by_keyboard_in_both_languages_at_any_width_and_shows_each_arm(
    router: Try, profile_of: ProfileOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ROUTER_KEY", "s3cret")
    rows = [row(QUESTION, "孕妇 28岁", "问过益生菌", split="test", gold_id="别处; 共有")]
    publish(profile_of(), "r", {"rows": write_jsonl(tmp_path / "rows.jsonl", rows)})
    released = threading.Event()
    killed = threading.Event()

    def teacher(_: Any) -> Any:
        released.wait(60)
        return 200, completion("<b>菌粉</b> LactobacillusBifidobacteriumStreptococcus")

    def champion(_: Any) -> Any:
        return None if killed.is_set() else (200, completion("益生菌 何时服"))

    client = router(key="ROUTER_KEY", teacher=teacher, champion=champion)
    with running_app(client.app) as url, chromium() as browser:
        page = browser.new_page(locale="zh-CN")
        errors: list[str] = []
        hosts: set[str] = set()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
        page.goto(url)
        cards = page.get_by_role("article")
        example = page.get_by_role("button", name=QUESTION)
        page.get_by_label("接口密钥").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_have_text("路由不接受这个密钥。")
        look(page, "wrong_key")
        expect(page.get_by_role("alert")).to_have_text("The router does not take this key.")
        page.get_by_label("Key of the API").fill("s3cret")
        page.keyboard.press("Enter")
        expect(page.get_by_label("Question")).to_be_focused()
        page.keyboard.type("菌粉睡前吃吗")
        page.keyboard.press("Control+Enter")
        expect(cards).to_contain_text(
            ["菌粉睡前吃吗", "Teacherasking…", "益生菌 何时服", "not found by the original"]
        )
        expect(cards.nth(3).locator("mark")).to_have_text(["新", "模型"])
        look(page, "slow_teacher")
        expect(page.locator("html")).to_have_attribute("lang", "en")
        released.set()
        expect(cards.nth(1)).to_contain_text("<b>菌粉</b>")
        example.click()
        expect(cards.filter(has_text="✓ the right passage")).to_have_count(4)
        look(page, "healthy")
        killed.set()
        example.click()
        expect(cards).to_contain_text(
            [QUESTION, "<b>", "version 7the model's server can't be reached", "新 模型"]
        )
        look(page, "champion_killed")
        heights = {card.bounding_box()["y"] for card in cards.all()}
        assert len(heights) == 1
        assert errors == []
        assert len(hosts) == 1
