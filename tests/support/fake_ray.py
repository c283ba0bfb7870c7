"""A Ray dashboard's Jobs API that keeps jobs and runs none: a test says what becomes of them."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeRay:
    """A real HTTP server on loopback."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.calls: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.is_down = False
        self.loses_next_submission_answer = False
        self.refusal = ""
        self.nodes: list[dict[str, Any]] = [{"state": "ALIVE", "resources_total": {"CPU": 8.0, "GPU": 8.0}}]
        ray = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
                ray.headers.append({name.lower(): value for name, value in self.headers.items()})
                answer = None if ray.is_down else ray.answer(self.command, self.path, body)
                if answer is None:
                    return  # the connection ends without an answer
                status, content = answer
                self.send_response(status)
                self.end_headers()
                self.wfile.write(content if isinstance(content, bytes) else json.dumps(content).encode())

            do_GET = do_POST  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any] | None:
        self.calls.append(f"{method} {path}")
        if path == "/api/version":
            return 200, {"version": "4", "ray_version": "2.60.0", "session_name": "s"}
        if path == "/api/v0/nodes":
            return 200, {"result": True, "data": {"result": {"total": len(self.nodes), "result": self.nodes}}}
        if path == "/api/jobs/":
            return self._submit(body) if method == "POST" else (200, [*self.jobs.values(), {"status": "RUNNING"}])
        name, _, verb = path.removeprefix("/api/jobs/").partition("/")
        if name not in self.jobs:
            return 404, f"Job {name} does not exist".encode()
        if verb == "stop":
            was_active = self.jobs[name]["status"] in ("PENDING", "RUNNING")
            if was_active:
                self.end(name, "STOPPED")
            return 200, {"stopped": was_active}
        return 200, self.jobs[name]

    def _submit(self, body: dict[str, Any]) -> tuple[int, Any] | None:
        if self.refusal:
            return 500, self.refusal.encode()
        name = body["submission_id"]
        if name in self.jobs:
            return 500, f"Traceback\nRuntimeError: Request failed with status code 400: {name} already exists".encode()
        self.jobs[name] = body | {"status": "RUNNING", "message": "Job is currently running.", "start_time": 1_000}
        if self.loses_next_submission_answer:
            self.loses_next_submission_answer = False
            return None
        return 200, {"job_id": name, "submission_id": name}

    def end(self, name: str, status: str, message: str = "", after_s: float = 600.0) -> None:
        self.jobs[name] |= {"status": status, "message": message, "end_time": int(1_000 + 1_000 * after_s)}

    def stopped(self) -> list[str]:
        """Jobs that somebody asked to stop."""
        return [call.split("/")[3] for call in self.calls if call.endswith("/stop")]
