"""Whoever begins to work looks for runs that were lost, so that they go on."""

import httpx2
from prefect.logging import get_run_logger

from qinglan.config import Profile
from qinglan.errors import QinglanError, first_line
from qinglan.ops.prefect.crash_recovery import crash_lost, requeue_crashed
from qinglan.ops.prefect.server import find_server


def resume_lost_runs(profile: Profile) -> None:
    """Never in the way of the run that looks."""
    log = get_run_logger()
    try:
        if server := find_server(profile.paths.state):
            with server.client() as api:
                for name in crash_lost(api):
                    log.warning("flow run %s was lost, now marked as crashed: no sign of life for an hour", name)
                for name in requeue_crashed(api):
                    log.warning("flow run %s had crashed and was left so; it goes on now", name)
    except (httpx2.HTTPError, httpx2.InvalidURL, QinglanError, ValueError, KeyError) as error:
        log.warning("could not look for lost runs: %s", first_line(error))
