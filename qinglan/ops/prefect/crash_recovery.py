"""Crash recovery: finds flow runs whose process is dead, and lets crashed runs go on.

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
SETTLED_FOR = timedelta(minutes=30)
"""Prefect may take a quarter of an hour for an event that it received before the one it follows."""
NOT_OLDER = timedelta(days=1)
_FLOW_RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"
"""The variable by which a worker tells a flow's process which run it is."""


def recover_runs(profile: Profile, warn: Say) -> None:
    """Mark silent runs as crashed and let crashed runs go on.

    An error is only a warning: the new run comes first.
    """
    try:
        server = find_server(profile.paths.state)
        if server is None:
            return
        with server.client() as api:
            for name in crash_silent(api):
                silence = "gave no heartbeat for an hour"
                warn(f"flow run {name} {silence}; it is now marked as crashed")
            for name in requeue_crashed(api):
                warn(f"flow run {name} had crashed; it goes on now")
    except (httpx2.HTTPError, QinglanError, ValueError, KeyError) as error:
        warn(f"could not look for dead flow runs: {first_line(error)}")


def crash_silent(api: httpx2.Client, now: datetime | None = None) -> list[str]:
    """Mark running flow runs without an event for an hour as crashed, and return their names.

    A server that was only just started has received no events yet: it must have received some half
    an hour ago. And where WebSockets are blocked no event of a run arrives: only a run that sent a
    heartbeat before can be silent.
    """
    now = now or datetime.now(UTC)
    since = now - SILENT_FOR
    query = {"tags": {"all_": [TAG]}, "start_time": {"before_": since.isoformat()}}
    runs = _unfinished(api, ["RUNNING"], flow_runs=query)
    if not runs or not _has_event(api, since, now - SILENT_FOR / 2):
        return []
    state = {"type": "CRASHED", "message": "no heartbeat for an hour: its process has ended"}
    crashed_names = []
    for run in runs:
        if _fell_silent(api, run, since, now) and _set_state(api, run["id"], state):
            crashed_names.append(run["name"])
    return crashed_names


def _fell_silent(
    api: httpx2.Client, run: Mapping[str, Any], since: datetime, now: datetime
) -> bool:
    """Tell whether a run sent heartbeats before `since`, and no event after that."""
    resource = {"id": [f"prefect.flow-run.{run['id']}"]}
    heartbeat = {"name": ["prefect.flow-run.heartbeat"]}
    any_of_a_run = {"prefix": ["prefect.flow-run."]}
    started = datetime.fromisoformat(run["start_time"])
    if not _has_event(api, started, since, resource=resource, event=heartbeat):
        return False
    return not _has_event(api, since, now, resource=resource, event=any_of_a_run)


def crash_interrupted(api: httpx2.Client, pools: Sequence[str]) -> list[dict[str, Any]]:
    """Mark unfinished runs of these pools without a process on this machine as crashed.

    Those that were to be cancelled are marked as cancelled. Call it while no worker of these pools
    runs: a run that a worker has just fetched has no process yet. The flow runs are returned as
    they were before.
    """
    running_ids = _ids_with_a_process()
    runs = _unfinished(
        api, ["PENDING", "RUNNING", "CANCELLING"], work_pools={"name": {"any_": list(pools)}}
    )
    interrupted = [run for run in runs if run["id"] not in running_ids]
    for run in interrupted:
        # An automation puts a crashed run back into its queue, which is not wanted for a cancelled
        # one.
        state_type = "CANCELLED" if run["state_type"] == "CANCELLING" else "CRASHED"
        state = {"type": state_type, "message": "its worker ended while it was running"}
        _set_state(api, run["id"], state, force=True)
    return interrupted


def _ids_with_a_process() -> set[str]:
    """The ids of the flow runs that have a process on this machine."""
    flow_run_ids = set()
    for process in psutil.process_iter(["environ"]):
        # None where the process belongs to another user.
        environ = process.info["environ"] or {}
        if _FLOW_RUN_VARIABLE in environ:
            flow_run_ids.add(environ[_FLOW_RUN_VARIABLE])
    return flow_run_ids


def stop_cancelled(cancelled: Mapping[str, Any], say: Say) -> None:
    """Stop the Ray jobs of a cancelled flow run, as its worker would have done.

    They outlive the flow's process.
    """
    parameters = cancelled["parameters"]
    was_cancelled = f"{cancelled['name']} was cancelled"
    try:
        # The form's other settings can't change where runs are.
        profile = load_profile(parameters.get("profile", EMBEDDED), parameters.get("overrides", ()))
        if profile.trainer.ray_dashboard_url is None:
            return
        if not stop_jobs_of(profile, cancelled["id"], lambda line: say(f"{was_cancelled}: {line}")):
            problem = f"it has no run under {profile.paths.runs.resolve()}"
            say(f"{was_cancelled}; {problem}, so no Ray job was stopped")
    except QinglanError as error:
        say(f"{was_cancelled}; its Ray jobs may still be running: {error}")


def crash_retries_on(api: httpx2.Client) -> int:
    """The number of times that this server lets a crashed run go on.

    0 where its automation is absent or was switched off.
    """
    retries = [0]
    for automation in pages(api, "automations/filter", automations={"name": {"any_": [GOES_ON]}}):
        if automation["enabled"]:
            # The automation lists the run counts after which it lets a run go on.
            match = automation["trigger"].get("match", {})
            retries.append(len(match.get("prefect.run-count", [])))
    return max(retries)


def requeue_crashed(
    api: httpx2.Client, now: datetime | None = None, settled_for: timedelta = SETTLED_FOR
) -> list[str]:
    """Put crashed runs that have retries left back into their queues, and return their names.

    The automation does the same. A run must have crashed `settled_for` ago, so that the automation
    won't do it any more.
    """
    now = now or datetime.now(UTC)
    ended = {
        "after_": (now - NOT_OLDER).isoformat(),
        "before_": (now - settled_for).isoformat(),
    }
    query = {
        "tags": {"all_": [TAG]},
        "state": {"name": {"any_": ["Crashed"]}},
        "end_time": ended,
        "deployment_id": {"is_null_": False},
    }
    crashed_runs = pages(api, "flow_runs/filter", flow_runs=query, sort="START_TIME_ASC")
    retries = crash_retries_on(api) if crashed_runs else 0
    state = {
        "type": "SCHEDULED",
        "name": "AwaitingRetry",
        "message": "crashed, and goes on from what is finished",
    }
    requeued_names = []
    for run in crashed_runs:
        if not 1 <= run["run_count"] <= retries:
            continue
        # Prefect would also put a run back that another process has restarted meanwhile, and it
        # would run twice.
        current = call(api, "GET", f"flow_runs/{run['id']}", may_lack=True)
        is_unchanged = current and current["state_id"] == run["state_id"]
        if is_unchanged and _set_state(api, run["id"], state):
            requeued_names.append(run["name"])
    return requeued_names


def _unfinished(
    api: httpx2.Client, types: Sequence[str], **query: dict[str, Any]
) -> list[dict[str, Any]]:
    """Flow runs in states of these types, and paused runs.

    A paused run waits for an answer in its process; a suspended one, of the same type, has none.
    """
    state = {"operator": "or_", "type": {"any_": list(types)}, "name": {"any_": ["Paused"]}}
    query["flow_runs"] = query.get("flow_runs", {}) | {"state": state}
    return pages(api, "flow_runs/filter", **query, sort="START_TIME_ASC")


def _set_state(
    api: httpx2.Client, run_id: str, state: dict[str, str], *, force: bool = False
) -> bool:
    """Propose a state; False where Prefect keeps the old one, which it answers with 200 too."""
    answer = call(api, "POST", f"flow_runs/{run_id}/set_state", {"state": state, "force": force})
    return bool(answer.get("status") == "ACCEPT")


def _has_event(api: httpx2.Client, since: datetime, until: datetime, **query: Any) -> bool:
    occurred = {"since": since.isoformat(), "until": until.isoformat()}
    body = {"filter": {"occurred": occurred} | query, "limit": 1}
    return bool(call(api, "POST", "events/filter", body)["events"])
