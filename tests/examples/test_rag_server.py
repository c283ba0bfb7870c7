"""examples/rag: the example keeps the contract, and its scores tell hits from misses."""

import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import uvicorn
from fastapi.testclient import TestClient

from qinglan.clients.contract import Ask, examine
from qinglan.clients.rag import request_body
from qinglan.clients.rag.answers import Passage, read_passages
from qinglan.config import Rag

SERVER = Path(__file__).parents[2] / "examples" / "rag" / "server.py"
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "rag.md"
RAG = Rag(top_k=3)
TEXTS = {
    "鱼油.txt": "鱼油一天吃两粒,随餐服用。\n\n" + "鱼油应放在阴凉干燥处,开封后放冰箱冷藏保存。" * 5,
    "钙/钙片.md": "钙片什么时候吃好?睡前或饭后半小时服用,不要和牛奶一起吃。",
    "益生菌.txt": "益生菌用温水冲服,水温不超过四十度,饭后服用效果最好。",
    "vitamin-c.md": (
        "Vitamin C tablets: one tablet a day after breakfast. Store them in a dry place."
    ),
    "empty.txt": " \n",
}


def start(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[Ask, int]:
    """Start the example by its command line, over TEXTS; how to ask it, and its port."""
    for name, text in TEXTS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    servers: list[tuple[TestClient, int]] = []
    monkeypatch.setattr(uvicorn, "run", lambda app, port: servers.append((TestClient(app), port)))
    monkeypatch.setattr(sys, "argv", ["server.py", str(folder), *words])
    runpy.run_path(str(SERVER), run_name="__main__")
    [(client, port)] = servers

    def ask(query: str, rewritten_query: str | None = None) -> list[Passage]:
        response = client.post("/search", json=request_body(RAG, "t", query, rewritten_query))
        return read_passages(RAG, response.content, "")

    findings = examine(ask, RAG, "鱼油一天吃几粒", "钙片什么时候吃")
    assert [finding.kind for finding in findings] == ["honoured"]
    return ask, port


def test_it_keeps_the_contract_and_tells_hits_from_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ask, port = start(tmp_path, monkeypatch)
    [limit] = re.findall(r"fewer than (\d+) lines", PAGE.read_text(encoding="utf-8"))
    assert port == 7861
    assert len(SERVER.read_text(encoding="utf-8").splitlines()) < int(limit)
    hits = {
        "钙片 什么时候吃": "钙/钙片.md",
        "鱼油 冷藏保存": "鱼油.txt",
        "Vitamin C a day": "vitamin-c.md",
    }
    for text, document in hits.items():
        best, *further = ask(text, None)
        assert best.id == document
        assert 0.7 < best.reranker_score < 1
        of_other_documents = [passage for passage in further if passage.id != document]
        assert high(of_other_documents) == []
    assert high(ask("怎么给汽车换机油", None)) == []


def high(passages: list[Passage]) -> list[Passage]:
    """Passages with a score that a miss must not have."""
    return [passage for passage in passages if passage.reranker_score >= 0.3]


def encode(texts: str | list[str], *, normalize_embeddings: bool) -> Any:
    """Vectors in the place of a model's: counts of six characters.

    The cosine of unlike texts is below 0, of equal ones above 1.
    """
    counts = [np.char.count(texts, character) - 0.3 for character in "鱼油钙片益菌"]
    vectors = np.stack(counts, axis=-1)
    if not normalize_embeddings:
        return vectors
    return vectors / (0.999999 * np.linalg.norm(vectors, axis=-1, keepdims=True))


def test_an_embedding_model_ranks_and_another_port_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    module = SimpleNamespace(
        SentenceTransformer={"some/model": SimpleNamespace(encode=encode)}.__getitem__
    )
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    ask, port = start(tmp_path, monkeypatch, "some/model", "--port", "7862")
    [passage] = ask("益生菌\n" + TEXTS["益生菌.txt"], None)
    assert (port, passage.id, passage.reranker_score) == (7862, "益生菌.txt", 1.0)
