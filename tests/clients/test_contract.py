"""The contract probe over real HTTP, against services that each have one defect, and against the
simulator itself."""

import itertools
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from fake_service import SIMULATED, FakeService, Script, trickle
from fixture_types import ProfileOf, Serve

from qinglan.clients.contract import FALLBACK, ContractFinding, examine, pair_of, probe_rag
from qinglan.clients.rag.answers import Passage
from qinglan.config import Profile, Rag
from qinglan.errors import ConfigError, QinglanError
from qinglan.ops.preflight import inspect_profile, require

pytestmark = pytest.mark.slow

Body = dict[str, Any]
Found = dict[str, Any]

A = "鱼油一天吃几粒"
B = "维生素C什么时候吃"
PRODUCTS = ("鱼油", "维生素C", "钙片", "阿胶", "益生菌", "虾青素")
INTENTS = ("一天吃几粒", "什么时候吃", "能不能长期吃", "怎么存放")
BOOKS = [product + intent for product in PRODUCTS for intent in INTENTS]


def likeness(text: str, book: str) -> float:
    return round(len(set(text) & set(book)) / len(set(text) | set(book)), 6)


def search(
    text: str, rerank_by: str | None = None, top_k: int = 5, books: list[str] = BOOKS
) -> list[Found]:
    best_books = sorted(books, key=lambda book: -likeness(text, book))[:top_k]
    scored = [
        {
            "id": f"d{books.index(book)}",
            "content": book,
            "reranker_score": likeness(rerank_by or text, book),
        }
        for book in best_books
    ]
    return sorted(scored, key=lambda passage: -passage["reranker_score"])


def service(answer: Callable[[Body], list[Found]]) -> Script:
    return lambda body: (200, {"data": {"recall": answer(body)}})


def honest(body: Body) -> list[Found]:
    return search(body.get("rewritten_query") or body["query"])


def ignoring(body: Body) -> list[Found]:
    return search(body["query"])


def reranking_by_query(body: Body) -> list[Found]:
    return search(body.get("rewritten_query") or body["query"], body["query"])


def cutting_after_reranking_by_query(candidates: int) -> Callable[[Body], list[Found]]:
    return lambda body: search(
        body.get("rewritten_query") or body["query"], body["query"], top_k=candidates
    )[:5]


def with_id(make: Callable[[], Any]) -> Callable[[Body], list[Found]]:
    def answer(body: Body) -> list[Found]:
        return [passage | {"id": make()} for passage in honest(body)]

    return answer


def with_logits(body: Body) -> list[Found]:
    return [passage | {"reranker_score": 6.5} for passage in honest(body)]


without_ids = with_id(lambda: None)


def few(text: str, rerank_by: str | None = None) -> list[Found]:
    """A knowledge base that recalls all it has for every question."""
    return search(text, rerank_by, books=BOOKS[:3])


def refusing_the_field(body: Body) -> tuple[int, Any]:
    status = 422 if "rewritten_query" in body else 200
    return status, {"data": {"recall": []}}


def probe(
    serve: Serve, script: Script, **options: Any
) -> tuple[list[ContractFinding], FakeService]:
    started = serve(script)
    rag = Rag.model_validate({"url": started.url, "top_k": 5} | options)
    return probe_rag(rag, "t", [A, B]), started


def kinds(serve: Serve, script: Script, **options: Any) -> list[str]:
    return [finding.kind for finding in probe(serve, script, **options)[0]]


@pytest.mark.parametrize(
    ("answer", "kind", "calls"),
    [
        (honest, "honoured", 3),
        (
            lambda body: search(body.get("rewritten_query") or f"{body['query']} 怎么存放"),
            "honoured",
            3,
        ),
        (ignoring, "ignored", 3),
        (reranking_by_query, "reranked_by_query", 4),
        (cutting_after_reranking_by_query(10), "mixed", 4),
        (cutting_after_reranking_by_query(14), "reranked_by_query", 4),
        (cutting_after_reranking_by_query(24), "ignored", 3),
        (lambda body: search(body["query"] + body.get("rewritten_query", "")), "mixed", 4),
        (lambda _: [], "undecidable", 3),
        (lambda _: search("同样的"), "undecidable", 3),
        (lambda body: few(body.get("rewritten_query") or body["query"]), "honoured", 3),
        (lambda body: few(body["query"]), "ignored", 3),
    ],
)
def test_what_becomes_of_the_rewrite(
    serve: Serve, answer: Callable[[Body], list[Found]], kind: str, calls: int
):
    findings, started = probe(serve, service(answer))
    assert [finding.kind for finding in findings] == [kind]
    assert [(body["query"], body.get("rewritten_query")) for body in started.bodies][:3] == [
        (A, None),
        (A, B),
        (B, B),
    ]
    assert len(started.bodies) == calls


def verdict(answer: Callable[[Body], list[Found]]) -> str:
    """The finding about the rewrite, without HTTP."""

    def ask(query: str, rewrite: str | None) -> list[Passage]:
        body = {"query": query} if rewrite is None else {"query": query, "rewritten_query": rewrite}
        return [Passage.model_validate(passage) for passage in answer(body)]

    return examine(ask, Rag(top_k=5), A, B)[0].kind


@pytest.mark.parametrize("seed", range(200))
def test_an_answer_by_chance_is_never_taken_for_a_verdict(seed: int):
    rng = Random(seed)

    def chance(_: Body) -> list[Found]:
        scores = sorted((rng.random() for _ in range(5)), reverse=True)
        drawn = rng.sample(BOOKS, 5)
        return [
            {"id": b, "content": b, "reranker_score": s} for b, s in zip(drawn, scores, strict=True)
        ]

    assert verdict(chance) == "unstable"


def test_little_noise_does_not_hide_the_verdict():
    rng = Random(7)

    def noisy(answer: Callable[[Body], list[Found]]) -> Callable[[Body], list[Found]]:
        def reply(body: Body) -> list[Found]:
            moved = [
                p | {"reranker_score": p["reranker_score"] * rng.uniform(0.97, 1)}
                for p in answer(body)
            ]
            return sorted(moved, key=lambda passage: -passage["reranker_score"])

        return reply

    for _ in range(100):
        assert (verdict(noisy(honest)), verdict(noisy(ignoring))) == ("honoured", "ignored")


def test_ids_are_noted(serve: Serve):
    findings, _ = probe(serve, service(without_ids))
    assert [finding.kind for finding in findings] == ["honoured", "ids_missing"]
    assert findings[1].text.startswith("no passage has an `id`: gold top-1 can't be measured")
    half = service(lambda body: [*without_ids(body)[:1], *honest(body)[1:]])
    assert "3 of 15 passages lack an `id`" in probe(serve, half)[0][1].text
    number = itertools.count()
    assert kinds(serve, service(with_id(lambda: next(number)))) == ["honoured", "ids_change"]
    chunks_of_one_document = service(with_id(lambda: "d"))
    assert kinds(serve, chunks_of_one_document) == ["honoured"]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (lambda body: (200, {"docs": honest(body)}), "`data` is missing (found: docs)"),
        (service(with_logits), "looks like a logit"),
        (service(lambda b: honest(b)[::-1]), "not sorted by reranker_score"),
        (
            refusing_the_field,
            "refuses the field",
        ),
        (lambda _: (302, {}), "answers HTTP 302"),
        (
            lambda _: (404, b"no\nsuch\x1b[31m route"),
            'answers HTTP 404: "no such [31m route"; '
            "rag.url needs the whole address that takes a POST, with its path",
        ),
        (
            lambda body: (400, f"no: {body['query']}".encode()),
            'answers HTTP 400: "no: …"; compare what it expects',
        ),
        (
            lambda body: (200, f"no: {body['query']}".encode()),
            '"application/json"): "no: …"; send JSON',
        ),
        (lambda _: (401, {}), "; check the variable that rag.api_key_env names"),
        (lambda _: (500, {}), "; see the service's own log"),
        (lambda _: None, "rag.url can't be reached"),
        (
            lambda _: (200, trickle()),
            "rag.url can't be reached: the answer is not whole after 0.5 s",
        ),
    ],
)
def test_what_ends_the_probe(serve: Serve, script: Script, message: str):
    with pytest.raises(QinglanError) as caught:
        probe(serve, script, timeout_s=0.5)
    assert message in str(caught.value)
    assert str(caught.value).isprintable()


def test_the_probes_are_two_questions_that_differ():
    assert pair_of(["鱼油咋吃？", " 鱼油咋吃", "鱼油咋吃呢", "钙片怎么存放", "鱼油吃多少"]) == (
        "鱼油咋吃？", "钙片怎么存放",
    )  # fmt: skip
    assert pair_of(["鱼油咋吃？", "鱼油咋吃", "！"]) == FALLBACK == pair_of([])


def checked(profile: Profile) -> Any:
    return next(check for check in inspect_profile(profile, "refresh") if check.name == "rag")


def test_doctor_says_so_and_a_run_starts_only_if_no_problem(
    profile_of: ProfileOf, serve: Serve, tmp_path: Any
):
    book = tmp_path / "q.jsonl"
    book.write_text(f'{{"问题": "{A}"}}\n{{"问题": ""}}\n{{"问题": "{B}"}}\n', encoding="utf-8")

    def profile(answer: Callable[[Body], list[Found]]) -> tuple[Profile, FakeService]:
        started = serve(service(answer))
        sections = {"data": {"workbook": str(book)}, "rag": {"url": started.url, "top_k": 5}}
        return profile_of(**SIMULATED, **sections), started

    good, started = profile(honest)
    assert checked(good).detail == f"{started.url} (`rewritten_query` is honoured)"
    assert {body["query"] for body in started.bodies} == {A, B}
    require(good, "refresh")

    nameless, _ = profile(without_ids)
    assert checked(nameless).note.startswith("no passage has an `id`")
    assert "is honoured" in checked(nameless).detail

    doubtful, _ = profile(reranking_by_query)
    assert checked(doubtful).note.startswith("retrieves by `rewritten_query` but scores")
    require(doubtful, "refresh")

    bad, started = profile(ignoring)
    assert checked(bad).problem.startswith(
        f"rag {started.url}: gives the same answer with and without"
    )
    with pytest.raises(ConfigError, match=r"docs/how-to/rag\.md"):
        require(bad, "refresh")
