"""A Prefect server as `qinglan up` starts it, with its database under the state folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qinglan.ops.prefect.api import RetryingClient, call
from qinglan.ops.up.site import Site
from qinglan.runs.launcher import Command
from qinglan.runs.processes import Processes

NO_SCHEDULER = {"PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false"}
"""Settings of a server that makes no new runs of a schedule while a test removes some."""


@contextmanager
def prefect_process(site: Site, logs: Path, **env: str) -> Iterator[RetryingClient]:
    command = site.prefect_server()
    with Processes(logs, print) as processes:
        processes.start("prefect", Command(command.argv, command.env | env))
        processes.wait_for("Prefect", f"{site.api_url}/health")
        # On SQLite the server answers 503 while it works itself, as when it has just started.
        with RetryingClient(base_url=site.api_url, trust_env=False, timeout=120) as client:
            yield client


def post(api: RetryingClient, path: str, /, **body: Any) -> Any:
    return call(api, "POST", path, body)
