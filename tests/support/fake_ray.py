"""A Ray dashboard's Jobs API that keeps jobs and runs none: a test says what becomes of them."""

from typing import Any

from fake_service import FakeService


class FakeRay(FakeService):
    def __init__(self) -> None:
        super().__init__()
        self.url = self.url.removesuffix("/v1")
        self.jobs: dict[str, dict[str, Any]] = {}
        self.calls: list[str] = []
        self.is_down = False
        self.loses_next_submission_answer = False
        self.refusal = ""
        self.nodes: list[dict[str, Any]] = [
            {"state": "ALIVE", "resources_total": {"CPU": 8.0, "GPU": 8.0}}
        ]

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any] | None:
        if self.is_down:
            return None
        self.calls.append(f"{method} {path}")
        if path == "/api/version":
            return 200, {"version": "4", "ray_version": "2.60.0", "session_name": "s"}
        if path == "/api/v0/nodes":
            nodes = {"total": len(self.nodes), "result": self.nodes}
            return 200, {"result": True, "data": {"result": nodes}}
        if path == "/api/jobs/" and method == "POST":
            return self._submit(body)
        if path == "/api/jobs/":
            return 200, [*self.jobs.values(), {"status": "RUNNING"}]
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
            error = f"RuntimeError: Request failed with status code 400: {name} already exists"
            return 500, f"Traceback\n{error}".encode()
        self.jobs[name] = body | {
            "status": "RUNNING",
            "message": "Job is currently running.",
            "start_time": 1_000,
        }
        if self.loses_next_submission_answer:
            self.loses_next_submission_answer = False
            return None
        return 200, {"job_id": name, "submission_id": name}

    def end(self, name: str, status: str, message: str = "", after_s: float = 600.0) -> None:
        self.jobs[name] |= {
            "status": status,
            "message": message,
            "end_time": int(1_000 + 1_000 * after_s),
        }

    def stopped(self) -> list[str]:
        """Jobs that somebody asked to stop."""
        return [call.split("/")[3] for call in self.calls if call.endswith("/stop")]
