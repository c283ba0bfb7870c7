"""A model's server without a model, for tests of the router that stands before it.

    python stub_model.py FOLDER PORT NAME

FOLDER/behaviour says how it answers: `good` (the question itself, which retrieves something),
`nonsense` (words that retrieve nothing), `error` (HTTP 500), `hang` (never). It is read at every
question, so that a model can turn bad; the warm-up is always answered well.
"""

import sys
import time
from pathlib import Path
from typing import Any, ClassVar

from fake_service import FakeService

WARM_UP = "这个怎么吃"
NONSENSE = ("窗外 下雨", "火车 时刻", "电影 票价", "足球 比分")


class StubModel(FakeService):
    REPLY_HEADERS: ClassVar[dict[str, str]] = {"content-type": "application/json"}

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if method == "GET":
            return 200, {"data": [{"id": NAME}]}
        question = body["messages"][-1]["content"].splitlines()[-1].removeprefix("当前问题：")
        behaviour = "good" if question == WARM_UP else (FOLDER / "behaviour").read_text().strip()
        if behaviour == "error":
            return 500, {"error": "broken"}
        if behaviour == "hang":
            time.sleep(30)
        text = NONSENSE[len(question) % len(NONSENSE)] if behaviour == "nonsense" else question
        return 200, {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    NAME = sys.argv[3]
    StubModel(port=int(sys.argv[2]))
