"""The deployments on a server, and which of them belong to a profile."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from qinglan.config import Profile
from qinglan.ops.prefect.api import pages

TRAIN_DEPLOYMENT = "train/train"
"""What trains on a new dataset where the profile has no deployment of its own for that."""


class Deployment(NamedTuple):
    id: str
    flow: str
    name: str
    profile: str
    """The parameter, as it stands there: a name or a path."""
    paused: bool

    @property
    def full_name(self) -> str:
        """`flow/name`, as Prefect's commands take it."""
        return f"{self.flow}/{self.name}"

    def is_of(self, profile: Profile) -> bool:
        path = Path(self.profile)
        return profile.name == (path.stem if path.suffix in (".yaml", ".yml") else self.profile)


def deployments_of(api: httpx2.Client) -> list[Deployment]:
    """All of Qinglan's on this server."""
    found = []
    for entry in entries_of(api):
        profile = str(entry["parameters"].get("profile", ""))
        found.append(Deployment(entry["id"], flow_of(entry), entry["name"], profile, bool(entry["paused"])))
    return found


def entries_of(api: httpx2.Client) -> list[dict[str, Any]]:
    """The same as the server describes them."""
    return [entry for entry in pages(api, "deployments/filter", sort="NAME_ASC") if is_ours(entry)]


def is_ours(entry: dict[str, Any]) -> bool:
    """Is a deployment, on a server or in prefect.yaml, Qinglan's? Known by its entrypoint."""
    return str(entry.get("entrypoint")).startswith("qinglan.flows.")


def flow_of(entry: dict[str, Any]) -> str:
    return str(entry["entrypoint"]).rpartition(".")[2]


def training_of(deployments: Sequence[Deployment], profile: Profile) -> Deployment | None:
    """What a refresh of this profile starts: its own deployment of `train`, else the common one."""
    trains = [each for each in deployments if each.flow == "train"]
    own = [each for each in trains if each.is_of(profile)]
    return next(iter([*own, *(each for each in trains if each.full_name == TRAIN_DEPLOYMENT)]), None)


def trains_by_itself(deployments: Sequence[Deployment], profile: Profile) -> list[Deployment]:
    """What trains this profile at night: `training_of`, and its own pipelines."""
    started = training_of(deployments, profile)
    pipelines = [each for each in deployments if each.flow == "pipeline" and each.is_of(profile)]
    return [*([started] if started else []), *pipelines]
