"""Rows for tests of duplicates, splits and datasets, and the lines that are written of them."""

import json
import random
from pathlib import Path
from typing import Any

from qinglan.rows import Retrieved, Row, row_id

LONG = "我爷爷今年六十八岁，患高血压多年，最近早晨起床后经常头晕，想请问一下医生应该怎样治疗比较好"
SAME = LONG.replace("，", " ").replace("比较好", "比较好呢？")


def row(query: str, profile: str = "", history: str = "", **fields: Any) -> Row:
    question = {"tenant": "t", "query": query, "profile": profile, "history": history}
    return Row(id=row_id(*question.values()), source="q", **question, **fields)


def taught(query: str, **fields: Any) -> Row:
    """A training row, with retrieval results of its question and of its answer."""
    defaults: dict[str, Any] = {
        "id": row_id("t", query),
        "tenant": "t",
        "query": query,
        "original_retrieved": Retrieved(ids=("a",), scores=(0.5,), titles=("",)),
        "answer_retrieved": Retrieved(ids=("a",), scores=(0.8,), titles=("",)),
        "answer": f"{query} 用法",
        "answer_request": "e4a9",
        "split": "train",
        "source": "q.xlsx!问题!A2",
    }
    return Row(**defaults | fields)


def random_rows(count: int, seed: int = 0, **fields: Any) -> list[Row]:
    """Questions with next to no trigram in common."""
    rng = random.Random(seed)
    letters = [chr(0x4E00 + number) for number in range(3000)]
    return [row("".join(rng.sample(letters, 12)), **fields) for _ in range(count)]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
