"""The simulated RAG: ranking, the HTTP contract, and bad knowledge bases."""

from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from qinglan.clients.rag.answers import read_answer
from qinglan.config import Rag
from qinglan.errors import WorkbookError
from qinglan.simulators import rag_server
from qinglan.simulators.domains.query_rewrite.facts import Document, documents, title
from qinglan.simulators.retriever import Retriever, load_documents


@pytest.fixture(scope="module")
def retriever() -> Retriever:
    return Retriever(documents())


@pytest.fixture(scope="module")
def client(retriever: Retriever) -> TestClient:
    return TestClient(rag_server.create_app(retriever))


def test_a_title_finds_its_document(retriever: Retriever):
    hits = retriever.search(title("虾青素", "side"), 5)
    assert hits[0].document.id == "虾青素-side"
    assert hits[0].score > 0.95
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    assert len(hits) == 5
    assert retriever.search("zzz ？") == []


def test_all_that_is_recalled_equally_well_is_reranked():
    for place in (0, 25, 59):
        knowledge_base = [Document(f"{n}", "甲乙丙丁", "虾青素 作用") for n in range(60)]
        knowledge_base.insert(place, Document("titled", "虾青素 作用", "甲乙丙丁"))
        hits = Retriever(knowledge_base).search("虾青素 作用", 1)
        assert hits[0].document.id == "titled", place


def ids_of(client: TestClient, body: dict[str, object]) -> tuple[str | None, ...]:
    """The documents that our own client reads in the answer to a request."""
    return read_answer(Rag(), client.post("/retrieve", json=body).content, "x").ids


def test_rewritten_query_is_honoured(client: TestClient):
    body = {
        "query": "虾青素 适用人群",
        "tenant_id": "t",
        "kb_name": "k",
        "top_k": 3,
        "score_threshold": 0,
    }
    ids = ids_of(client, body)
    assert ids[0] == "虾青素-who"
    assert len(ids) == 3
    assert ids_of(client, body | {"rewritten_query": "阿胶 适用人群"})[0] == "阿胶-who"
    assert ids_of(client, body | {"score_threshold": 0.9}) == ("虾青素-who",)
    assert client.post("/retrieve", json={"query": "x", "top_k": 0}).status_code == 422
    assert client.get("/health").json() == {"status": "ok", "documents": 528}


def test_a_line_of_the_knowledge_base_may_hold_what_ends_lines_elsewhere(tmp_path: Path):
    path = tmp_path / "kb.jsonl"
    path.write_text('\ufeff{"id": "1", "title": "a", "content": "b\u2028c"}\n', encoding="utf-8")
    assert [document.content for document in load_documents(path)] == ["b\u2028c"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"id": "1", "title": "a", "content": "b"}\n{oops', "line 2: `content`: Invalid JSON"),
        ('{"id": "1", "title": "a"}', "line 1: `content`: Field required"),
        ('{"id": "1", "title": "a", "content": "b"}\n' * 2, "line 2: id '1' occurs twice"),
        ("", "holds no text"),
    ],
)
def test_bad_knowledge_base(tmp_path: Path, lines: str, message: str):
    path = tmp_path / "kb.jsonl"
    with pytest.raises(WorkbookError, match=r"kb\.jsonl: can't be read"):
        load_documents(path)
    path.write_text(lines, encoding="utf-8")
    with pytest.raises(WorkbookError, match=message):
        load_documents(path)
