"""Deploying prefect.yaml without undoing what users and alarms have switched and paused on the server.

`prefect deploy` sets everything as its file says. So it is given a file that already says what is to be: no switch is
undone even for a moment, and a deployment that is killed midway leaves nothing to put right.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import httpx2
import yaml

from qinglan.errors import ConfigError, first_line
from qinglan.ops.prefect.api import TAG, call
from qinglan.ops.prefect.deployments import entries_of, flow_of, is_ours
from qinglan.runs.processes import Say

_NOTE = "qinglan_schedules_on"
"""A variable on the server, as any machine may deploy next: the schedules that prefect.yaml had on the last time."""
_MOST_CHARS = 5_000
"""Of a variable's value, as JSON: Prefect's limit, about 130 schedules that are on in the file."""

_Entry = dict[str, Any]


def read_deployments(prefect_file: Path) -> _Entry:
    try:
        content = yaml.safe_load(prefect_file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{prefect_file}: can't be read: {first_line(error)}") from error
    if not (isinstance(content, dict) and content.get("deployments")):
        raise ConfigError(f"{prefect_file}: has no `deployments`")
    return content


@contextmanager
def as_switched(api: httpx2.Client, prefect_file: Path, say: Say) -> Iterator[Path]:
    """The file to deploy within the `with` instead: `prefect_file` with switches and pauses as the server has them.

    What the file says of a schedule counts where the server does not have it yet, and where the file said something
    else when it was deployed last. Where nothing is known of that, the server's switch stays. Each difference is said.
    """
    content, there = read_deployments(prefect_file), {_name(entry): entry for entry in entries_of(api)}
    ours = {_name(each): each for each in content["deployments"] if is_ours(each)}
    variable = call(api, "GET", f"variables/name/{_NOTE}", may_lack=True)
    value = variable and variable["value"]
    noted = {str(name) for name in value} if isinstance(value, list) else None
    kept = {name: _kept(name, each, there[name], noted, say) for name, each in ours.items() if name in there}
    deployments = [kept.get(_name(each), each) if is_ours(each) else each for each in content["deployments"]]
    with NamedTemporaryFile("w", prefix="qinglan-", suffix=".yaml", encoding="utf-8") as file:
        yaml.safe_dump(content | {"deployments": deployments}, file, sort_keys=False)
        file.flush()
        yield Path(file.name)
    # Another folder's prefect.yaml may have deployments of its own on this server.
    elsewhere = {name for name in noted or () if (of := name.rpartition("/")[0]) in there and of not in ours}
    on = {
        f"{name}/{schedule['slug']}"
        for name, each in ours.items()
        for schedule in each.get("schedules") or ()
        if schedule.get("slug") and _is_on(schedule)
    }
    _note(api, noted, elsewhere | on, say)


def _name(entry: _Entry) -> str:
    return f"{flow_of(entry)}/{entry['name']}"


def _kept(name: str, wanted: _Entry, there: _Entry, noted: set[str] | None, say: Say) -> _Entry:
    """As the file wants it, but paused and switched as the server has it."""
    switches = {each["slug"]: each["active"] for each in there["schedules"] if each.get("slug")}
    kept = wanted | ({"paused": True} if there["paused"] else {})
    if schedules := wanted.get("schedules"):
        kept["schedules"] = [_switched(name, schedule, switches, noted, say) for schedule in schedules]
        for planned in (each["schedule"] for each in there["schedules"] if not each.get("slug")):
            # As one made on the page. Prefect then makes them all anew, from the file alone.
            when = planned.get("cron") or planned.get("interval") or planned.get("rrule")
            say(f"schedule {name} ({when}) is removed: it has no slug, and prefect.yaml has others there")
    return kept


def _switched(name: str, wanted: _Entry, switches: Mapping[str, bool], noted: set[str] | None, say: Say) -> _Entry:
    is_on, file_has_on = switches.get(str(wanted.get("slug"))), _is_on(wanted)
    if is_on is None or file_has_on is None or is_on == file_has_on:
        return wanted
    title, words = f"{name}/{wanted['slug']}", {True: "on", False: "off"}
    there, here = words[is_on], words[file_has_on]
    if noted is None:
        say(f"schedule {title} stays {there}, as it is on the server; prefect.yaml has it {here}")
    elif (title in noted) == file_has_on:
        say(f"schedule {title} stays {there}, as it was switched by hand")
    else:
        say(f"schedule {title} is switched {here}, as prefect.yaml has it {here} now")
        return wanted
    return wanted | {"active": is_on}


def _is_on(schedule: _Entry) -> bool | None:
    """Does the file have it on? None where only Prefect knows: a template, such as a variable of the environment."""
    active = schedule.get("active")
    return True if active is None else active if isinstance(active, bool) else None


def _note(api: httpx2.Client, before: set[str] | None, on: set[str], say: Say) -> None:
    value: list[str] | None = sorted(on)
    if len(json.dumps(value)) > _MOST_CHARS:
        say(f"prefect.yaml has {len(on)} schedules on, too many to note: later changes of them there are only reported")
        value = None
    if value is not None and before == on:
        return
    answer = api.patch(f"variables/name/{_NOTE}", json={"value": value})
    if answer.status_code == httpx2.codes.NOT_FOUND:
        answer = api.post("variables/", json={"name": _NOTE, "value": value, "tags": [TAG]})
        if answer.status_code == httpx2.codes.CONFLICT:  # another deployment has just made it
            return
    answer.raise_for_status()
