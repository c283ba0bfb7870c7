"""Prefect's flow runs that ended long ago, over its API.

The server deletes a run's task runs and logs with it, but not its artifacts. Events it removes by itself after a week.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, get_args

import httpx2

from qinglan.config import EMBEDDED, FlowName, Profile, load_profile
from qinglan.errors import ConfigError, QinglanError, first_line
from qinglan.ops.cleanup.records import Removed
from qinglan.ops.prefect.api import TAG, pages
from qinglan.ops.prefect.server import PrefectServer

_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")


def remove_flow_runs(
    server: PrefectServer, profile: Profile, days: float, now: datetime, *, dry_run: bool
) -> Iterator[Removed]:
    """Delete this profile's flow runs that ended so many days ago, whether by a schedule or by hand.

    Raises:
        ConfigError: the server can't be reached, or refuses.
    """
    before = now - timedelta(days=days)
    try:
        with server.client() as api:
            for run in _ended(api, before):
                if not _is_of(run, profile):
                    continue
                if not dry_run:
                    for artifact in pages(api, "artifacts/filter", artifacts={"flow_run_id": {"any_": [run["id"]]}}):
                        _delete(api, f"artifacts/{artifact['id']}")
                    _delete(api, f"flow_runs/{run['id']}")
                yield Removed(kind="flow_run", name=run["name"], why=f"ended {str(run['end_time'])[:10]}")
    except httpx2.HTTPError as error:
        raise ConfigError(f"Prefect at {server.shown_url}: {first_line(error)}; named by {server.origin}") from error


def _ended(api: httpx2.Client, before: datetime) -> list[dict[str, Any]]:
    ended = {"state": {"type": {"any_": list(_ENDED)}}, "end_time": {"before_": before.isoformat()}}
    deployed = {"flow_runs": ended, "deployments": {"tags": {"all_": [TAG]}}}
    by_hand = {
        "flow_runs": ended | {"deployment_id": {"is_null_": True}},
        "flows": {"name": {"any_": list(get_args(FlowName))}},
    }
    found = [run for query in (deployed, by_hand) for run in pages(api, "flow_runs/filter", **query)]
    return list({run["id"]: run for run in found}.values())


def _is_of(run: Mapping[str, Any], profile: Profile) -> bool:
    """Prefect keeps all parameters with a flow run, the deployment's own among them.

    Started by hand it has ours with their defaults; without a profile it is another project's of the same name.
    """
    if not run["deployment_id"] and "profile" not in run["parameters"]:
        return False
    given = str(run["parameters"].get("profile", EMBEDDED))
    if given == profile.name:
        return True
    try:
        return load_profile(given).name == profile.name
    except QinglanError:  # that profile was removed
        return False


def _delete(api: httpx2.Client, address: str) -> None:
    response = api.delete(address)
    if response.status_code != httpx2.codes.NOT_FOUND:  # another clean-up was quicker
        response.raise_for_status()
