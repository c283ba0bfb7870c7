"""The simulated batch API: OpenAI's shapes and statuses, by the clock, with the chat server's answers."""

import json
from typing import Any

from batch_api_simulator import SimulatedBatchStore, app_with_batches
from fastapi.testclient import TestClient
from openai.types import Batch, FileObject

QUESTIONS = ["虾青素怎么吃", "益生菌怎么保存", "鱼油什么时候吃", "钙片能和铁一起吃吗"]


class BatchServer:
    """The app under a clock that the test sets."""

    def __init__(self, batch_s: float = 100, **options: Any) -> None:
        self.now = 1_000.0
        store = SimulatedBatchStore(batch_s=batch_s, clock=lambda: self.now, **options)
        self.http = TestClient(app_with_batches(store))

    def upload(self, content: bytes | str, purpose: str = "batch") -> dict[str, Any]:
        files = {"file": ("requests.jsonl", content, "application/jsonl")}
        return self.http.post("/v1/files", data={"purpose": purpose}, files=files).json()

    def create(self, content: bytes | str, **metadata: str) -> dict[str, Any]:
        body = {
            "input_file_id": self.upload(content)["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
            "metadata": metadata,
        }
        return self.http.post("/v1/batches", json=body).json()

    def at(self, seconds: float, batch: dict[str, Any]) -> dict[str, Any]:
        self.now = 1_000.0 + seconds
        found = self.http.get(f"/v1/batches/{batch['id']}").json()
        Batch.model_validate(found)
        return found

    def lines(self, file_id: str) -> dict[str, dict[str, Any]]:
        content = self.http.get(f"/v1/files/{file_id}/content").content
        return {line["custom_id"]: line for line in map(json.loads, content.splitlines())}


def body(question: str, model: str = "simulated-rewriter") -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": question}]}


def line(custom_id: str, question: str = "虾青素怎么吃", **changes: Any) -> str:
    whole = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body(question)}
    return json.dumps(whole | changes, ensure_ascii=False) + "\n"


FOUR = "".join(line(str(number), question) for number, question in enumerate(QUESTIONS))


def test_files_come_back_as_they_were_sent():
    server = BatchServer()
    content = "一行\r\n\n--not-the-boundary\r\n两行\u2028".encode() + bytes(range(256)) + b"\n"
    stored = server.upload(content)
    FileObject.model_validate(stored)
    assert (stored["purpose"], stored["filename"], stored["bytes"]) == ("batch", "requests.jsonl", len(content))
    assert server.http.get(f"/v1/files/{stored['id']}/content").content == content
    assert server.http.delete(f"/v1/files/{stored['id']}").json()["deleted"] is True
    assert server.http.get(f"/v1/files/{stored['id']}/content").status_code == 404


def test_a_batch_goes_through_its_statuses():
    server = BatchServer()
    batch = server.create(FOUR, qinglan="d")
    Batch.model_validate(batch)
    assert batch["metadata"] == {"qinglan": "d"}
    seen = [server.at(seconds, batch) for seconds in (1, 10, 50, 96, 100)]
    statuses = ["validating", "in_progress", "in_progress", "finalizing", "completed"]
    assert [each["status"] for each in seen] == statuses
    assert [each["request_counts"]["completed"] for each in seen] == [0, 0, 2, 4, 4]
    assert [bool(each["output_file_id"]) for each in seen] == [False] * 4 + [True]
    assert seen[-1]["error_file_id"] is None


def test_an_unknown_model_fails_the_batch():
    server = BatchServer(batch_s=0)
    failed = server.at(0, server.create(line("a") + line("b", body=body("x", "gpt-4o"))))
    assert failed["status"] == "failed"
    assert [(each["code"], each["line"]) for each in failed["errors"]["data"]] == [("model_not_found", 2)]
    assert (failed["output_file_id"], failed["error_file_id"]) == (None, None)


def test_a_cancelled_batch_keeps_what_it_has():
    server = BatchServer()
    batch = server.create(FOUR)
    assert server.at(50, batch)["request_counts"]["completed"] == 2
    cancel = f"/v1/batches/{batch['id']}/cancel"
    assert server.http.post(cancel).json()["status"] == "cancelling"
    ended = server.at(60, batch)
    assert (ended["status"], ended["request_counts"]["completed"]) == ("cancelled", 2)
    assert server.lines(ended["output_file_id"]).keys() == {"0", "1"}
    assert {each["error"]["code"] for each in server.lines(ended["error_file_id"]).values()} == {"batch_cancelled"}
    assert server.http.post(cancel).status_code == 409
