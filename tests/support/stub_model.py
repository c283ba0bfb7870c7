"""A model's server without a model, for tests of what stands before it: `stub_model.py FOLDER PORT NAME`.

FOLDER/behaviour says how it answers: `good` (the question itself, which retrieves something), `nonsense` (words that
retrieve nothing), `error` (HTTP 500), `hang` (never). It is read at every question, so that a model can turn bad; the
warm-up is always answered well.
"""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

WARM_UP = "这个怎么吃"
NONSENSE = ("窗外 下雨", "火车 时刻", "电影 票价", "足球 比分")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": NAME}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        question = body["messages"][-1]["content"].splitlines()[-1].removeprefix("当前问题：")
        behaviour = "good" if question == WARM_UP else (FOLDER / "behaviour").read_text().strip()
        if behaviour == "error":
            self._send(500, {"error": "broken"})
            return
        if behaviour == "hang":
            time.sleep(30)
        text = NONSENSE[len(question) % len(NONSENSE)] if behaviour == "nonsense" else question
        self._send(200, {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})

    def _send(self, status: int, body: object) -> None:
        content = json.dumps(body, ensure_ascii=False).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


if __name__ == "__main__":
    FOLDER, PORT, NAME = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    Server(("127.0.0.1", PORT), Handler).serve_forever()
