"""A Prefect server for one run where there is no other."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from qinglan.ops.prefect.server import find_server
from qinglan.ops.up.site import Site
from qinglan.runs.launcher import QUIET_ENV
from qinglan.runs.processes import Processes, Say, free_port, health_problem


@contextmanager
def prefect_for(state: Path, say: Say) -> Iterator[Callable[[], None]]:
    """Point this process at a Prefect server, before Prefect is imported; gives a function that waits until it answers.

    The user's own where one is configured, `qinglan up`'s where it runs, else one that lives as long as the run does.
    Prefect's own temporary server survives a killed run. Ours takes seconds to start, in which the caller can work.
    """
    os.environ.update(QUIET_ENV)
    server = find_server(state)
    if server and not server.is_of_up:
        yield lambda: None
        return
    if server and not health_problem(f"{server.api_url}/health"):
        os.environ |= {"PREFECT_API_URL": server.api_url}
        yield lambda: None
        return
    site = Site(state, "", prefect_port=free_port())
    site.prepare()
    with Processes(state.resolve() / "logs", lambda _: None) as processes:
        processes.start(f"prefect_server_{site.prefect_port}", site.prefect_server())
        os.environ.update(site.prefect_env)

        def wait_until_ready() -> None:
            say("starting a Prefect server for this run")
            processes.wait_for("Prefect's server", f"{site.api_url}/health")

        yield wait_until_ready
