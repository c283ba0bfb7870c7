"""Runs that Prefect's automations lost: at work as the server believes, but silent; or crashed, and left so.

The automations go by clocks that Prefect forgets when its server is away, as after a power cut of everything. So
whoever begins to work looks as well.
"""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx2

from qinglan.ops.prefect.api import TAG, call, pages
from qinglan.ops.prefect.automations.plan import GOES_ON

SILENT_FOR = timedelta(hours=1)
SETTLED_FOR, NOT_OLDER = timedelta(minutes=30), timedelta(days=1)
"""Prefect may take a quarter of an hour for an event that it received before the one it follows."""
_ANY_OF_A_RUN = {"prefix": ["prefect.flow-run."]}


def crash_lost(api: httpx2.Client, now: datetime | None = None) -> list[str]:
    """Mark them as crashed, so that they go on; their names.

    A server that is only just back has heard of nobody yet: it must have been there half an hour ago, too. And where
    no WebSocket gets through, nothing is ever heard of a run: silence counts only after a first sign of life.

    Raises:
        httpx2.HTTPError: the server can't be reached or refuses.
    """
    now = now or datetime.now(UTC)
    since = now - SILENT_FOR
    running = {
        "tags": {"all_": [TAG]},
        "state": {"operator": "or_", "type": {"any_": ["RUNNING"]}, "name": {"any_": ["Paused"]}},
        "start_time": {"before_": since.isoformat()},
    }
    found = pages(api, "flow_runs/filter", flow_runs=running, sort="START_TIME_ASC")
    if not found or not _happened(api, since, now - SILENT_FOR / 2):
        return []
    lost = [run for run in found if _gave_a_sign(api, run, since) and not _happened(api, since, now, run["id"])]
    state = {"type": "CRASHED", "message": "no sign of life for an hour: its process is gone"}
    return [run["name"] for run in lost if _accepted(api, run["id"], state)]


def crash_retries_on(api: httpx2.Client) -> int:
    """How often this server lets a crashed run go on: 0 where its automation is absent or was switched off.

    Raises:
        httpx2.HTTPError: the server can't be reached or refuses.
    """
    found = pages(api, "automations/filter", automations={"name": {"any_": [GOES_ON]}})
    counts = (each["trigger"].get("match", {}).get("prefect.run-count", []) for each in found if each["enabled"])
    return max((len(each) for each in counts), default=0)


def requeue_crashed(api: httpx2.Client, now: datetime | None = None, settled_for: timedelta = SETTLED_FOR) -> list[str]:
    """Put crashed runs that have tries left back into their queues, as the automation does; their names.

    Args:
        settled_for: after so long the automation won't do it any more.

    Raises:
        httpx2.HTTPError: the server can't be reached or refuses.
    """
    now = now or datetime.now(UTC)
    crashed = {
        "tags": {"all_": [TAG]},
        "state": {"name": {"any_": ["Crashed"]}},
        "end_time": {"after_": (now - NOT_OLDER).isoformat(), "before_": (now - settled_for).isoformat()},
        "deployment_id": {"is_null_": False},
    }
    found = pages(api, "flow_runs/filter", flow_runs=crashed, sort="START_TIME_ASC")
    retries = crash_retries_on(api) if found else 0
    left = [run for run in found if 1 <= run["run_count"] <= retries]
    state = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "crashed, and goes on from what is finished"}
    return [run["name"] for run in left if _is_still_so(api, run) and _accepted(api, run["id"], state)]


def _is_still_so(api: httpx2.Client, run: dict[str, Any]) -> bool:
    """Nobody was quicker: Prefect would also put a run back that is at work by now, and it would run twice."""
    now = call(api, "GET", f"flow_runs/{run['id']}", may_lack=True)
    return now is not None and now["state_id"] == run["state_id"]


def _accepted(api: httpx2.Client, run_id: str, state: dict[str, str]) -> bool:
    """Prefect answers 200 also where it lets the state be."""
    answer = call(api, "POST", f"flow_runs/{run_id}/set_state", {"state": state, "force": False})
    return bool(answer["status"] == "ACCEPT")


def _gave_a_sign(api: httpx2.Client, run: dict[str, Any], until: datetime) -> bool:
    """Did its heartbeats ever arrive?"""
    began = datetime.fromisoformat(run["start_time"])
    return _happened(api, began, until, run["id"], {"name": ["prefect.flow-run.heartbeat"]})


def _happened(
    api: httpx2.Client,
    since: datetime,
    until: datetime,
    run_id: str | None = None,
    event: Mapping[str, list[str]] = _ANY_OF_A_RUN,
) -> bool:
    """Anything at all, or a sign of life of a flow run."""
    asked: dict[str, object] = {"occurred": {"since": since.isoformat(), "until": until.isoformat()}}
    if run_id:
        asked |= {"resource": {"id": [f"prefect.flow-run.{run_id}"]}, "event": event}
    return bool(call(api, "POST", "events/filter", {"filter": asked, "limit": 1})["events"])
