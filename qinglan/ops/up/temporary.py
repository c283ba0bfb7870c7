"""A Prefect server for one run where there is no other."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qinglan.ops.prefect.server import find_server
from qinglan.ops.up.site import Site
from qinglan.runs.command import QUIET_ENV
from qinglan.runs.processes import Processes, Say, answers, free_port


@contextmanager
def prefect_for(state: Path, say: Say) -> Iterator[None]:
    """Point this process at a Prefect server, before Prefect is imported.

    The user's own where one is configured, `qinglan up`'s where it runs, else one that lives as long as the run does.
    Prefect's own temporary server would survive a killed run.
    """
    os.environ.update(QUIET_ENV)
    server = find_server(state)
    if server and not server.is_of_up:
        yield
        return
    if server and answers(f"{server.api_url}/health"):
        os.environ |= {"PREFECT_API_URL": server.api_url}
        yield
        return
    site = Site(state, "", prefect_port=free_port())
    site.prepare()
    with Processes(state.resolve() / "logs", lambda _: None) as processes:
        say("starting a Prefect server for this run")
        processes.start(f"prefect_server_{site.prefect_port}", site.prefect_server())
        processes.wait_for("Prefect's server", f"{site.api_url}/health")
        os.environ.update(site.prefect_env)
        yield
