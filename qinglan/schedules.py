"""Which schedules are on, across deployments: deploying sets what the file says, and would undo a switch in the UI."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from qinglan.artifacts import write_json
from qinglan.engines.processes import Say

_DEPLOYED_FILE = "schedules_deployed.json"
"""Under the state directory: by schedule, whether the file had it on."""


class _Schedule(NamedTuple):
    url: str
    active: bool


@contextmanager
def keep_switches(api: httpx.Client, state: Path, say: Say) -> Iterator[None]:
    """What people switched on or off stays so, as long as the file says of it what it said at the last deployment.

    Args:
        state: the profile's `paths.state`.

    Raises:
        httpx.HTTPError: the server doesn't answer as it should.
    """
    before = _schedules(api)
    yield
    file, now = state / _DEPLOYED_FILE, _schedules(api)
    then: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for name, schedule in now.items():
        switched = name in before and before[name].active != schedule.active
        if switched and then.get(name) == schedule.active:
            api.patch(schedule.url, json={"active": before[name].active}).raise_for_status()
            say(f"schedule {name} stays {'on' if before[name].active else 'off'}, as it was switched by hand")
    write_json(file, {name: schedule.active for name, schedule in now.items()})


def _schedules(api: httpx.Client) -> dict[str, _Schedule]:
    found: dict[str, _Schedule] = {}
    for deployment in api.post("deployments/filter", json={}).raise_for_status().json():
        for schedule in deployment["schedules"]:
            if schedule.get("slug"):
                url = f"deployments/{deployment['id']}/schedules/{schedule['id']}"
                found[f"{deployment['name']}/{schedule['slug']}"] = _Schedule(url, schedule["active"])
    return found
