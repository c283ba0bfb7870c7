"""Which schedules are on, across deployments: deploying sets what the file says, and would undo a switch in the UI."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from qinglan.artifacts import write_json
from qinglan.automations.deployments import entries_of, flow_of
from qinglan.engines.processes import Say
from qinglan.prefect_api import call

_DEPLOYED_FILE = "schedules_deployed.json"
"""Under the state directory: by schedule, whether the file had it on."""


class _Schedule(NamedTuple):
    url: str
    active: bool


_Schedules = dict[str, _Schedule]
"""By `flow/deployment/slug`."""


@contextmanager
def keep_switches(api: httpx.Client, state: Path, say: Say) -> Iterator[None]:
    """What people switched on or off stays so, as long as the file says of it what it said at the last deployment.

    Also where deploying fails midway; what the file says counts as deployed only where it did not.

    Args:
        state: the profile's `paths.state`.

    Raises:
        httpx.HTTPError: the server doesn't answer as it should.
    """
    file, before = state / _DEPLOYED_FILE, _schedules(api)
    then: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    try:
        yield
    except BaseException:
        _switch_back(api, before, _schedules(api), then, say)
        raise
    now = _schedules(api)
    _switch_back(api, before, now, then, say)
    write_json(file, {name: schedule.active for name, schedule in now.items()})


def _switch_back(api: httpx.Client, before: _Schedules, now: _Schedules, then: dict[str, Any], say: Say) -> None:
    for name, schedule in now.items():
        switched = name in before and before[name].active != schedule.active
        if switched and then.get(name) == schedule.active:
            call(api, "PATCH", schedule.url, {"active": before[name].active})
            say(f"schedule {name} stays {'on' if before[name].active else 'off'}, as it was switched by hand")


def _schedules(api: httpx.Client) -> _Schedules:
    return {
        f"{flow_of(entry)}/{entry['name']}/{schedule['slug']}": _Schedule(
            f"deployments/{entry['id']}/schedules/{schedule['id']}", schedule["active"]
        )
        for entry in entries_of(api)
        for schedule in entry["schedules"]
        if schedule.get("slug")
    }
