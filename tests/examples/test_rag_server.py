"""examples/rag: the example keeps the contract, and its scores tell hits from misses."""

import runpy
from pathlib import Path

from fastapi.testclient import TestClient

from qinglan.clients.contract import examine
from qinglan.clients.rag import Passage, read_passages, request_body
from qinglan.config import Rag

SERVER = Path(__file__).parents[2] / "examples" / "rag" / "server.py"
RAG = Rag(top_k=3)
TEXTS = {
    "鱼油.txt": "鱼油一天吃两粒,随餐服用。\n\n" + "鱼油应放在阴凉干燥处,开封后放冰箱冷藏保存。" * 5,
    "钙/钙片.md": "钙片什么时候吃好?睡前或饭后半小时服用,不要和牛奶一起吃。",
    "益生菌.txt": "益生菌用温水冲服,水温不超过四十度,饭后服用效果最好。",
    "vitamin-c.md": "Vitamin C tablets: one tablet a day after breakfast. Store them in a dry place.",
    "empty.txt": " \n",
}


def test_it_keeps_the_contract_and_tells_hits_from_misses(tmp_path: Path):
    for name, text in TEXTS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    client = TestClient(runpy.run_path(str(SERVER))["create_app"](tmp_path))

    def ask(query: str, rewritten_query: str | None = None) -> list[Passage]:
        response = client.post("/search", json=request_body(RAG, "t", query, rewritten_query))
        return read_passages(RAG, response.content, "")

    assert [finding.kind for finding in examine(ask, RAG, "鱼油一天吃几粒", "钙片什么时候吃")] == ["honoured"]
    hits = {"钙片 什么时候吃": "钙/钙片.md", "鱼油 冷藏保存": "鱼油.txt", "Vitamin C a day": "vitamin-c.md"}
    for text, document in hits.items():
        best, *others = ask(text)
        assert best.id == document and 0.7 < best.reranker_score < 1
        assert all(other.id == document or other.reranker_score < 0.3 for other in others)
    assert all(passage.reranker_score < 0.3 for passage in ask("怎么给汽车换机油"))
