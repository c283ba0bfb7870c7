"""Flow runs whose process is gone: the server believes them at work until somebody tells it."""

from collections.abc import Mapping, Sequence
from typing import Any

import httpx2
import psutil

from qinglan.config import EMBEDDED, load_profile
from qinglan.errors import QinglanError
from qinglan.ops.prefect.api import call, pages
from qinglan.ops.up.site import WORK_POOLS
from qinglan.runs.processes import Say
from qinglan.training.engines.ray_jobs import stop_jobs_of

# A paused one waits for a person in its process; a suspended one, of the same type, needs none.
_UNFINISHED = {"operator": "or_", "type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}, "name": {"any_": ["Paused"]}}
_MESSAGE = "its worker ended while this was at work"


def crash_interrupted(api: httpx2.Client, pools: Sequence[str] = WORK_POOLS) -> list[dict[str, Any]]:
    """Mark what ended workers of these pools left behind as crashed, or as cancelled where it was to be.

    What a process of this machine is at work on stays as it is.

    Call it while this site's workers of these pools don't run: what they have just fetched has no process yet.

    Returns:
        The flow runs that were marked, as they were.

    Raises:
        httpx2.HTTPError: the server doesn't answer as it should.
    """
    at_work = _at_work()
    interrupted = [run for run in _unfinished(api, pools) if run["id"] not in at_work]
    for run in interrupted:
        # A crashed run is put back into its queue by an automation: nobody wants that of one that they cancelled.
        state = {"type": "CANCELLED" if run["state_type"] == "CANCELLING" else "CRASHED", "message": _MESSAGE}
        call(api, "POST", f"flow_runs/{run['id']}/set_state", {"state": state, "force": True})
    return interrupted


def stop_cancelled(cancelled: Mapping[str, Any], say: Say) -> None:
    """What the worker of a cancelled flow run does if it lives: Ray's jobs outlive the flow's process.

    Args:
        cancelled: the flow run, as Prefect tells of it; its profile need not be the one of this site.
    """
    name, given = cancelled["name"], cancelled["parameters"]
    try:
        # No setting of the form tells where runs are; only these can.
        profile = load_profile(given.get("profile", EMBEDDED), given.get("overrides", ()))
        if profile.trainer.ray_dashboard_url is None:
            return
        if not stop_jobs_of(profile, cancelled["id"], lambda line: say(f"{name} was cancelled: {line}")):
            say(f"{name} was cancelled; it has no run under {profile.paths.runs.resolve()}, so no Ray job was stopped")
    except QinglanError as error:
        say(f"{name} was cancelled; its Ray jobs may still be at work: {error}")


def _unfinished(api: httpx2.Client, pools: Sequence[str]) -> list[dict[str, Any]]:
    query = {"flow_runs": {"state": _UNFINISHED}, "work_pools": {"name": {"any_": list(pools)}}}
    return pages(api, "flow_runs/filter", **query, sort="START_TIME_ASC")


def _at_work() -> set[str]:
    """Ids of the flow runs that processes of this machine and user are at work on."""
    return {
        process.info["environ"]["PREFECT__FLOW_RUN_ID"]
        for process in psutil.process_iter(["environ"])
        if "PREFECT__FLOW_RUN_ID" in (process.info["environ"] or {})
    }
