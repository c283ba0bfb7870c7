"""The deployments on a server, which of them belong to a profile, and how users switched them.

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
"""The deployment that trains on a new dataset where the profile has none of its own for that."""
_NOTE = "qinglan_schedules_on"
"""A variable on the server, as any machine may deploy next: the schedules that prefect.yaml had on
the last time."""
_NOTE_CHARS = 5_000
"""Prefect's limit for a variable; enough for about 130 schedules."""
_Entry = dict[str, Any]
"""A deployment or a schedule, as prefect.yaml or the server tells of it."""


class Deployment(NamedTuple):
    """A deployment of one of our flows, as the server has it."""

    id: str
    full_name: str
    """`flow/name`, as Prefect's commands take it."""
    profile: str
    """The parameter, as it stands there: a name or a path."""
    paused: bool


def names_profile(parameter: str, profile: Profile) -> bool:
    """Tell whether a flow run's or deployment's parameter, a name or a path, is this profile."""
    path = Path(parameter)
    name = path.stem if path.suffix in (".yaml", ".yml") else parameter
    return profile.name == name


def deployments_of(api: httpx2.Client) -> list[Deployment]:
    """Our deployments on a server, by name."""
    deployments = []
    for entry in pages(api, "deployments/filter", sort="NAME_ASC"):
        if _is_ours(entry):
            profile = str(entry["parameters"].get("profile", ""))
            is_paused = bool(entry["paused"])
            deployments.append(Deployment(entry["id"], _full_name(entry), profile, is_paused))
    return deployments


def training_of(deployments: Sequence[Deployment], profile: Profile) -> Deployment | None:
    """The deployment that a refresh of this profile starts: its own of `train`, else the common."""
    trainings = [
        deployment for deployment in deployments if deployment.full_name.startswith("train/")
    ]
    for deployment in trainings:
        if names_profile(deployment.profile, profile):
            return deployment
    for deployment in trainings:
        if deployment.full_name == TRAIN_DEPLOYMENT:
            return deployment
    return None


def trains_by_itself(deployments: Sequence[Deployment], profile: Profile) -> list[Deployment]:
    """The deployments that train this profile at night: `training_of`, and its own pipelines."""
    trainings = []
    started_by_refresh = training_of(deployments, profile)
    if started_by_refresh is not None:
        trainings.append(started_by_refresh)
    for deployment in deployments:
        is_pipeline = deployment.full_name.startswith("pipeline/")
        if is_pipeline and names_profile(deployment.profile, profile):
            trainings.append(deployment)
    return trainings


def read_deployments(prefect_file: Path) -> _Entry:
    """The content of a prefect.yaml.

    Raises ConfigError where it can't be read, or lacks what we read of it.
    """
    try:
        content = yaml.safe_load(prefect_file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{prefect_file}: can't be read: {first_line(error)}") from error
    if not (isinstance(content, dict) and isinstance(content.get("deployments"), list)):
        raise ConfigError(f"{prefect_file}: has no `deployments`")
    for number, entry in enumerate(content["deployments"], 1):
        if not _is_complete(entry):
            needs = "needs `name`, `work_pool: {name: …}` and, if any, a list of `schedules`"
            problem = f"deployment {number}: {needs}; compare it with those before"
            raise ConfigError(f"{prefect_file}: {problem}")
    return content


def _is_complete(entry: object) -> bool:
    """Tell whether a deployment of the file has what we read of it."""
    if not isinstance(entry, dict):
        return False
    if not all(isinstance(schedule, dict) for schedule in entry.get("schedules") or ()):
        return False
    if not _is_ours(entry):
        return True
    return bool(entry.get("name") and (entry.get("work_pool") or {}).get("name"))


@contextmanager
def with_server_switches(api: httpx2.Client, prefect_file: Path, say: Say) -> Iterator[Path]:
    """Give the file to deploy instead: `prefect_file` with switches and pauses as on the server.

    What the file says of a schedule counts where the server does not have it yet, and where the
    file said something else when it was deployed last. Where nothing is known of that, the server's
    switch stays. Each difference is said.
    """
    content = read_deployments(prefect_file)
    on_server = _ours_by_name(pages(api, "deployments/filter", sort="NAME_ASC"))
    in_file = _ours_by_name(content["deployments"])
    noted_titles = _read_note(api)
    _report_unlisted(on_server, in_file, say)
    switched = {}
    for name, entry in in_file.items():
        if name in on_server:
            switched[name] = _with_switches(name, entry, on_server[name], noted_titles, say)
    deployments = []
    for entry in content["deployments"]:
        is_switched = _is_ours(entry) and _full_name(entry) in switched
        deployments.append(switched[_full_name(entry)] if is_switched else entry)
    with NamedTemporaryFile("w", prefix="qinglan-", suffix=".yaml", encoding="utf-8") as file:
        yaml.safe_dump(content | {"deployments": deployments}, file, sort_keys=False)
        file.flush()
        yield Path(file.name)
    # Another folder's prefect.yaml may have deployments of its own on this server.
    titles = _titles_of_others(noted_titles or set(), on_server, in_file)
    titles |= _titles_on(in_file)
    _write_note(api, noted_titles, titles, say)


def _is_ours(entry: _Entry) -> bool:
    """Tell by its entrypoint whether a deployment, on a server or in prefect.yaml, is Qinglan's."""
    return str(entry.get("entrypoint")).startswith("qinglan.flows.")


def _full_name(entry: _Entry) -> str:
    """`flow/name`, as Prefect's commands take it."""
    flow = str(entry["entrypoint"]).rpartition(".")[2]
    return f"{flow}/{entry['name']}"


def _ours_by_name(entries: Sequence[_Entry]) -> dict[str, _Entry]:
    return {_full_name(entry): entry for entry in entries if _is_ours(entry)}


def _report_unlisted(
    on_server: Mapping[str, _Entry], in_file: Mapping[str, _Entry], say: Say
) -> None:
    """Say which schedules are on although the file does not have them."""
    for name, entry in on_server.items():
        file_schedules = in_file.get(name, {}).get("schedules") or ()
        listed_slugs = {schedule.get("slug") for schedule in file_schedules}
        for schedule in entry["schedules"]:
            slug = schedule.get("slug")
            if schedule["active"] and slug and slug not in listed_slugs:
                hint = "it is not in this prefect.yaml: switch it off by hand"
                say(f"schedule {name}/{slug} stays on; {hint}")


def _with_switches(
    name: str, file_entry: _Entry, server_entry: _Entry, noted_titles: set[str] | None, say: Say
) -> _Entry:
    """A deployment as the file has it, but paused and switched as on the server."""
    switched = dict(file_entry)
    if server_entry["paused"]:
        switched["paused"] = True
    file_schedules = file_entry.get("schedules")
    if not file_schedules:
        return switched
    switches = {
        schedule["slug"]: schedule["active"]
        for schedule in server_entry["schedules"]
        if schedule.get("slug")
    }
    switched["schedules"] = [
        _switched_schedule(name, schedule, switches, noted_titles, say)
        for schedule in file_schedules
    ]
    for schedule in server_entry["schedules"]:
        if not schedule.get("slug"):
            # A schedule made on the page has no slug. Prefect then makes them all anew, from the
            # file alone.
            timing = schedule["schedule"]
            when = timing.get("cron") or timing.get("interval") or timing.get("rrule")
            reason = "it has no slug, and prefect.yaml has others there"
            say(f"schedule {name} ({when}) is removed: {reason}")
    return switched


def _switched_schedule(
    name: str,
    schedule: _Entry,
    switches: Mapping[str, bool],
    noted_titles: set[str] | None,
    say: Say,
) -> _Entry:
    """A schedule as the file has it, but switched as on the server unless the file has changed."""
    server_is_on = switches.get(str(schedule.get("slug")))
    file_is_on = _is_on(schedule)
    if server_is_on is None or file_is_on is None or server_is_on == file_is_on:
        return schedule
    title = f"{name}/{schedule['slug']}"
    server_switch, file_switch = ("on", "off") if server_is_on else ("off", "on")
    if noted_titles is None:
        say(
            f"schedule {title} stays {server_switch}, as it is on the server; "
            f"prefect.yaml has it {file_switch}"
        )
        return schedule | {"active": server_is_on}
    was_on_in_file = title in noted_titles
    if was_on_in_file != file_is_on:
        say(f"schedule {title} is switched {file_switch}, as prefect.yaml has it {file_switch} now")
        return schedule
    say(f"schedule {title} stays {server_switch}, as it was switched by hand")
    return schedule | {"active": server_is_on}


def _is_on(schedule: _Entry) -> bool | None:
    """Tell whether a schedule of the file is on.

    None where only Prefect knows: a template, such as a variable of the environment.
    """
    active = schedule.get("active")
    if active is None:
        return True
    return active if isinstance(active, bool) else None


def _titles_on(in_file: Mapping[str, _Entry]) -> set[str]:
    """The schedules that the file has on, as `flow/name/slug`."""
    titles = set()
    for name, entry in in_file.items():
        for schedule in entry.get("schedules") or ():
            if schedule.get("slug") and _is_on(schedule):
                titles.add(f"{name}/{schedule['slug']}")
    return titles


def _titles_of_others(
    noted_titles: set[str], on_server: Mapping[str, _Entry], in_file: Mapping[str, _Entry]
) -> set[str]:
    """The noted schedules of deployments that are on the server but not in the file."""
    titles = set()
    for title in noted_titles:
        name = title.rpartition("/")[0]
        if name in on_server and name not in in_file:
            titles.add(title)
    return titles


def _read_note(api: httpx2.Client) -> set[str] | None:
    """The schedules that prefect.yaml had on the last time; None where that was not noted."""
    variable = call(api, "GET", f"variables/name/{_NOTE}", may_lack=True)
    titles = variable["value"] if variable else None
    if not isinstance(titles, list):
        return None
    return {str(title) for title in titles}


def _write_note(
    api: httpx2.Client, noted_titles: set[str] | None, titles: set[str], say: Say
) -> None:
    """Note which schedules prefect.yaml has on now, where that has changed."""
    value: list[str] | None = sorted(titles)
    if len(json.dumps(value)) > _NOTE_CHARS:
        say(
            f"prefect.yaml has {len(titles)} schedules on, too many to note: "
            "later changes of them there are only reported"
        )
        value = None
    if value is not None and noted_titles == titles:
        return
    response = api.patch(f"variables/name/{_NOTE}", json={"value": value})
    if response.status_code == httpx2.codes.NOT_FOUND:
        body = {"name": _NOTE, "value": value, "tags": [TAG]}
        response = api.post("variables/", json=body)
        if response.status_code == httpx2.codes.CONFLICT:
            # Another deployment at the same time has just made it.
            return
    response.raise_for_status()
