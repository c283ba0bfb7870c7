"""Flow runs whose process is gone: the server believes them at work until somebody tells it."""

from collections.abc import Sequence
from typing import Any

import httpx
import psutil

from qinglan.up.site import WORK_POOLS

_UNFINISHED = ["PENDING", "RUNNING", "CANCELLING"]
_PAGE_ROWS = 200
_MESSAGE = "its worker ended while this was at work"


def crash_interrupted(api: httpx.Client, pools: Sequence[str] = WORK_POOLS) -> list[dict[str, Any]]:
    """Mark what ended workers of these pools left behind as crashed, or as cancelled where it was to be.

    What a process of this machine is at work on stays as it is.

    Call it while this site's workers of these pools don't run: what they have just fetched has no process yet.

    Returns:
        The flow runs that were marked, as they were.

    Raises:
        httpx.HTTPError: the server doesn't answer as it should.
    """
    at_work = _at_work()
    interrupted = [run for run in _unfinished(api, pools) if run["id"] not in at_work]
    for run in interrupted:
        # A crashed run is put back into its queue by an automation: nobody wants that of one that they cancelled.
        state = {"type": "CANCELLED" if run["state_type"] == "CANCELLING" else "CRASHED", "message": _MESSAGE}
        api.post(f"flow_runs/{run['id']}/set_state", json={"state": state, "force": True}).raise_for_status()
    return interrupted


def _unfinished(api: httpx.Client, pools: Sequence[str]) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = []
    while len(runs) % _PAGE_ROWS == 0:
        query = {
            "flow_runs": {"state": {"type": {"any_": _UNFINISHED}}},
            "work_pools": {"name": {"any_": list(pools)}},
            "sort": "START_TIME_ASC",
            "limit": _PAGE_ROWS,
            "offset": len(runs),
        }
        page = api.post("flow_runs/filter", json=query).raise_for_status().json()
        if not page:
            break
        runs += page
    return runs


def _at_work() -> set[str]:
    """Ids of the flow runs that processes of this machine and user are at work on."""
    return {
        process.info["environ"]["PREFECT__FLOW_RUN_ID"]
        for process in psutil.process_iter(["environ"])
        if "PREFECT__FLOW_RUN_ID" in (process.info["environ"] or {})
    }
