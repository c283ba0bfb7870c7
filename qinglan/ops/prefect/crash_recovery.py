"""Crash recovery: finds flow runs whose process is dead, marks them as crashed, and lets crashed
runs go on.

Prefect's automations do this while its server runs (`automations.py`). But their timers are lost
when the server stops, as in a power cut. Therefore every flow that starts, and `qinglan up`, look
for such runs as well. A run is dead if its events have stopped, or if no process belongs to it on
the machine of its workers.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx2
import psutil

from qinglan.config import EMBEDDED, Profile, load_profile
from qinglan.errors import QinglanError, first_line
from qinglan.ops.prefect.api import TAG, call, pages
from qinglan.ops.prefect.automations import GOES_ON
from qinglan.ops.prefect.server import find_server
from qinglan.runs.processes import Say
from qinglan.training.engines.ray_jobs import stop_jobs_of

SILENT_FOR = timedelta(hours=1)
SETTLED_FOR, NOT_OLDER = timedelta(minutes=30), timedelta(days=1)
"""Prefect may take a quarter of an hour for an event that it received before the one it follows."""


def recover_runs(profile: Profile, warn: Say) -> None:
    """Mark silent runs as crashed and let crashed runs go on. An error is only a warning: the new
    run comes first."""
    try:
        if server := find_server(profile.paths.state):
            with server.client() as api:
                for name in crash_silent(api):
                    warn(
                        f"flow run {name} gave no heartbeat for an hour; it is now marked as crashed"
                    )
                for name in requeue_crashed(api):
                    warn(f"flow run {name} had crashed; it goes on now")
    except (httpx2.HTTPError, QinglanError, ValueError, KeyError) as error:
        warn(f"could not look for dead flow runs: {first_line(error)}")


def crash_silent(api: httpx2.Client, now: datetime | None = None) -> list[str]:
    """Mark running flow runs without an event for an hour as crashed; their names.

    A server that was only just started has received no events yet: it must have received some half
    an hour ago. And where WebSockets are blocked no event of a run arrives: only a run that sent a
    heartbeat before can be silent.
    """
    now = now or datetime.now(UTC)
    since = now - SILENT_FOR
    begun = {"tags": {"all_": [TAG]}, "start_time": {"before_": since.isoformat()}}
    found = _unfinished(api, ["RUNNING"], flow_runs=begun)
    if not found or not _has_event(api, since, now - SILENT_FOR / 2):
        return []
    state = {"type": "CRASHED", "message": "no heartbeat for an hour: its process has ended"}
    heartbeat, any_of_a_run = (
        {"name": ["prefect.flow-run.heartbeat"]},
        {"prefix": ["prefect.flow-run."]},
    )
    crashed = []
    for run in found:
        of_run = {"resource": {"id": [f"prefect.flow-run.{run['id']}"]}}
        sent_one = _has_event(
            api, datetime.fromisoformat(run["start_time"]), since, **of_run, event=heartbeat
        )
        is_silent = sent_one and not _has_event(api, since, now, **of_run, event=any_of_a_run)
        if is_silent and _set_state(api, run["id"], state):
            crashed.append(run["name"])
    return crashed


def crash_interrupted(api: httpx2.Client, pools: Sequence[str]) -> list[dict[str, Any]]:
    """Mark unfinished runs of these pools without a process on this machine as crashed, or as
    cancelled if they were.

    Call it while no worker of these pools runs: a run that a worker has just fetched has no process
    yet. The flow runs are returned as they were before.
    """
    running = {
        process.info["environ"]["PREFECT__FLOW_RUN_ID"]
        for process in psutil.process_iter(["environ"])
        if "PREFECT__FLOW_RUN_ID" in (process.info["environ"] or {})
    }
    found = _unfinished(
        api, ["PENDING", "RUNNING", "CANCELLING"], work_pools={"name": {"any_": list(pools)}}
    )
    interrupted = [run for run in found if run["id"] not in running]
    for run in interrupted:
        # An automation puts a crashed run back into its queue, which is not wanted for a cancelled
        # one.
        kind = "CANCELLED" if run["state_type"] == "CANCELLING" else "CRASHED"
        _set_state(
            api,
            run["id"],
            {"type": kind, "message": "its worker ended while it was running"},
            force=True,
        )
    return interrupted


def stop_cancelled(cancelled: Mapping[str, Any], say: Say) -> None:
    """Stop the Ray jobs of a cancelled flow run, as its worker would have done: they outlive the
    flow's process."""
    name, given = cancelled["name"], cancelled["parameters"]
    try:
        # The form's other settings can't change where runs are.
        profile = load_profile(given.get("profile", EMBEDDED), given.get("overrides", ()))
        if profile.trainer.ray_dashboard_url is None:
            return
        if not stop_jobs_of(
            profile, cancelled["id"], lambda line: say(f"{name} was cancelled: {line}")
        ):
            say(
                f"{name} was cancelled; it has no run under {profile.paths.runs.resolve()}, so no Ray job was stopped"
            )
    except QinglanError as error:
        say(f"{name} was cancelled; its Ray jobs may still be running: {error}")


def crash_retries_on(api: httpx2.Client) -> int:
    """How often this server lets a crashed run go on: 0 where its automation is absent or was
    switched off."""
    found = pages(api, "automations/filter", automations={"name": {"any_": [GOES_ON]}})
    counts = (
        each["trigger"].get("match", {}).get("prefect.run-count", [])
        for each in found
        if each["enabled"]
    )
    return max((len(each) for each in counts), default=0)


def requeue_crashed(
    api: httpx2.Client, now: datetime | None = None, settled_for: timedelta = SETTLED_FOR
) -> list[str]:
    """Put crashed runs that have retries left back into their queues, as the automation does; their
    names.

    A run must have crashed `settled_for` ago, so that the automation won't do it any more.
    """
    now = now or datetime.now(UTC)
    crashed = {
        "tags": {"all_": [TAG]},
        "state": {"name": {"any_": ["Crashed"]}},
        "end_time": {
            "after_": (now - NOT_OLDER).isoformat(),
            "before_": (now - settled_for).isoformat(),
        },
        "deployment_id": {"is_null_": False},
    }
    found = pages(api, "flow_runs/filter", flow_runs=crashed, sort="START_TIME_ASC")
    retries = crash_retries_on(api) if found else 0
    state = {
        "type": "SCHEDULED",
        "name": "AwaitingRetry",
        "message": "crashed, and goes on from what is finished",
    }
    requeued = []
    for run in found:
        if not 1 <= run["run_count"] <= retries:
            continue
        # Prefect would also put a run back that another process has restarted meanwhile, and it
        # would run twice.
        current = call(api, "GET", f"flow_runs/{run['id']}", may_lack=True)
        if current and current["state_id"] == run["state_id"] and _set_state(api, run["id"], state):
            requeued.append(run["name"])
    return requeued


def _unfinished(
    api: httpx2.Client, types: Sequence[str], **query: dict[str, Any]
) -> list[dict[str, Any]]:
    """Also paused runs, which wait for an answer in their process; a suspended one, of the same
    type, has none."""
    state = {"operator": "or_", "type": {"any_": list(types)}, "name": {"any_": ["Paused"]}}
    query["flow_runs"] = query.get("flow_runs", {}) | {"state": state}
    return pages(api, "flow_runs/filter", **query, sort="START_TIME_ASC")


def _set_state(
    api: httpx2.Client, run_id: str, state: dict[str, str], *, force: bool = False
) -> bool:
    """Was it accepted? Prefect answers 200 also where it keeps the old state."""
    answer = call(api, "POST", f"flow_runs/{run_id}/set_state", {"state": state, "force": force})
    return bool(answer.get("status") == "ACCEPT")


def _has_event(api: httpx2.Client, since: datetime, until: datetime, **query: Any) -> bool:
    asked = {"occurred": {"since": since.isoformat(), "until": until.isoformat()}} | query
    return bool(call(api, "POST", "events/filter", {"filter": asked, "limit": 1})["events"])
