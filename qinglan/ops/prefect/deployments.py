"""The deployments on a server, which of them belong to a profile, and what users and alarms have
switched on them.

`prefect deploy` sets everything as its file says. So it is given a file that already says what is
to be: no switch is undone even for a moment, and a deployment that is killed midway leaves nothing
to put right.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import httpx2
import yaml

from qinglan.config import Profile
from qinglan.errors import ConfigError, first_line
from qinglan.ops.prefect.api import TAG, call, pages
from qinglan.runs.processes import Say

TRAIN_DEPLOYMENT = "train/train"
"""What trains on a new dataset where the profile has no deployment of its own for that."""
_NOTE = "qinglan_schedules_on"
"""A variable on the server, as any machine may deploy next: the schedules that prefect.yaml had on
the last time."""
_Entry = dict[str, Any]


class Deployment(NamedTuple):
    id: str
    full_name: str
    """`flow/name`, as Prefect's commands take it."""
    profile: str
    """The parameter, as it stands there: a name or a path."""
    paused: bool


def names(given: str, profile: Profile) -> bool:
    """Is a flow run's or deployment's parameter, a name or a path, this profile?"""
    path = Path(given)
    return profile.name == (path.stem if path.suffix in (".yaml", ".yml") else given)


def deployments_of(api: httpx2.Client) -> list[Deployment]:
    found = []
    for entry in filter(_is_ours, pages(api, "deployments/filter", sort="NAME_ASC")):
        profile = str(entry["parameters"].get("profile", ""))
        found.append(Deployment(entry["id"], _name(entry), profile, bool(entry["paused"])))
    return found


def training_of(deployments: Sequence[Deployment], profile: Profile) -> Deployment | None:
    """What a refresh of this profile starts: its own deployment of `train`, else the common one."""
    trains = [each for each in deployments if each.full_name.startswith("train/")]
    own = [each for each in trains if names(each.profile, profile)]
    return next(
        iter([*own, *(each for each in trains if each.full_name == TRAIN_DEPLOYMENT)]), None
    )


def trains_by_itself(deployments: Sequence[Deployment], profile: Profile) -> list[Deployment]:
    """What trains this profile at night: `training_of`, and its own pipelines."""
    started = training_of(deployments, profile)
    pipelines = [each for each in deployments if each.full_name.startswith("pipeline/")]
    return [
        *([started] if started else []),
        *(each for each in pipelines if names(each.profile, profile)),
    ]


def read_deployments(prefect_file: Path) -> _Entry:
    try:
        content = yaml.safe_load(prefect_file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{prefect_file}: can't be read: {first_line(error)}") from error
    if not (isinstance(content, dict) and isinstance(content.get("deployments"), list)):
        raise ConfigError(f"{prefect_file}: has no `deployments`")
    for number, each in enumerate(content["deployments"], 1):
        is_entry = isinstance(each, dict) and all(
            isinstance(one, dict) for one in each.get("schedules") or ()
        )
        if not is_entry or (
            _is_ours(each) and not (each.get("name") and (each.get("work_pool") or {}).get("name"))
        ):
            needed = "needs `name`, `work_pool: {name: …}` and, if any, a list of `schedules`"
            raise ConfigError(
                f"{prefect_file}: deployment {number}: {needed}; compare it with those before"
            )
    return content


@contextmanager
def with_server_switches(api: httpx2.Client, prefect_file: Path, say: Say) -> Iterator[Path]:
    """The file to deploy within the `with` instead: `prefect_file` with switches and pauses as the
    server has them.

    What the file says of a schedule counts where the server does not have it yet, and where the
    file said something else when it was deployed last. Where nothing is known of that, the server's
    switch stays. Each difference is said.
    """
    content, on_server = (
        read_deployments(prefect_file),
        pages(api, "deployments/filter", sort="NAME_ASC"),
    )
    there = {_name(entry): entry for entry in on_server if _is_ours(entry)}
    ours = {_name(each): each for each in content["deployments"] if _is_ours(each)}
    variable = call(api, "GET", f"variables/name/{_NOTE}", may_lack=True)
    value = variable and variable["value"]
    noted = {str(name) for name in value} if isinstance(value, list) else None
    for name, schedule in (
        (name, each) for name, entry in there.items() for each in entry["schedules"]
    ):
        listed = {each.get("slug") for each in ours.get(name, {}).get("schedules") or ()}
        if schedule["active"] and schedule.get("slug") and schedule["slug"] not in listed:
            say(
                f"schedule {name}/{schedule['slug']} stays on; it is not in this prefect.yaml: switch it off by hand"
            )
    kept = {
        name: _kept(name, each, there[name], noted, say)
        for name, each in ours.items()
        if name in there
    }
    deployments = [
        kept.get(_name(each), each) if _is_ours(each) else each for each in content["deployments"]
    ]
    with NamedTemporaryFile("w", prefix="qinglan-", suffix=".yaml", encoding="utf-8") as file:
        yaml.safe_dump(content | {"deployments": deployments}, file, sort_keys=False)
        file.flush()
        yield Path(file.name)
    # Another folder's prefect.yaml may have deployments of its own on this server.
    elsewhere = {
        name for name in noted or () if (of := name.rpartition("/")[0]) in there and of not in ours
    }
    on = {
        f"{name}/{schedule['slug']}"
        for name, each in ours.items()
        for schedule in each.get("schedules") or ()
        if schedule.get("slug") and _is_on(schedule)
    }
    _note(api, noted, elsewhere | on, say)


def _is_ours(entry: _Entry) -> bool:
    """Is a deployment, on a server or in prefect.yaml, Qinglan's? Known by its entrypoint."""
    return str(entry.get("entrypoint")).startswith("qinglan.flows.")


def _name(entry: _Entry) -> str:
    """`flow/name`, as Prefect's commands take it."""
    return f"{str(entry['entrypoint']).rpartition('.')[2]}/{entry['name']}"


def _kept(name: str, wanted: _Entry, there: _Entry, noted: set[str] | None, say: Say) -> _Entry:
    """As the file wants it, but paused and switched as the server has it."""
    switches = {each["slug"]: each["active"] for each in there["schedules"] if each.get("slug")}
    kept = wanted | ({"paused": True} if there["paused"] else {})
    if schedules := wanted.get("schedules"):
        kept["schedules"] = [
            _switched(name, schedule, switches, noted, say) for schedule in schedules
        ]
        for planned in (each["schedule"] for each in there["schedules"] if not each.get("slug")):
            # As one made on the page. Prefect then makes them all anew, from the file alone.
            when = planned.get("cron") or planned.get("interval") or planned.get("rrule")
            say(
                f"schedule {name} ({when}) is removed: it has no slug, and prefect.yaml has others there"
            )
    return kept


def _switched(
    name: str, wanted: _Entry, switches: Mapping[str, bool], noted: set[str] | None, say: Say
) -> _Entry:
    is_on, file_has_on = switches.get(str(wanted.get("slug"))), _is_on(wanted)
    if is_on is None or file_has_on is None or is_on == file_has_on:
        return wanted
    title = f"{name}/{wanted['slug']}"
    there, here = ("on", "off") if is_on else ("off", "on")
    if noted is not None and (title in noted) != file_has_on:
        say(f"schedule {title} is switched {here}, as prefect.yaml has it {here} now")
        return wanted
    why = (
        "it was switched by hand"
        if noted is not None
        else f"it is on the server; prefect.yaml has it {here}"
    )
    say(f"schedule {title} stays {there}, as {why}")
    return wanted | {"active": is_on}


def _is_on(schedule: _Entry) -> bool | None:
    """Does the file have it on? None where only Prefect knows: a template, such as a variable of
    the environment."""
    active = schedule.get("active")
    return True if active is None else active if isinstance(active, bool) else None


def _note(api: httpx2.Client, before: set[str] | None, on: set[str], say: Say) -> None:
    value: list[str] | None = sorted(on)
    if len(json.dumps(value)) > 5_000:  # Prefect's limit, about 130 schedules
        say(
            f"prefect.yaml has {len(on)} schedules on, too many to note: later changes of them there are only reported"
        )
        value = None
    if value is not None and before == on:
        return
    answer = api.patch(f"variables/name/{_NOTE}", json={"value": value})
    if answer.status_code == httpx2.codes.NOT_FOUND:
        answer = api.post("variables/", json={"name": _NOTE, "value": value, "tags": [TAG]})
        if answer.status_code == httpx2.codes.CONFLICT:  # another deployment has just made it
            return
    answer.raise_for_status()
