"""Brings the automations on a server up to date."""

import re
from collections.abc import Sequence
from typing import Any

import httpx

from qinglan.artifacts import hash_of
from qinglan.automations.deployments import deployments_of
from qinglan.automations.plan import SITE, Spec, prefix_of, profile_automations, site_automations
from qinglan.config import Profile, require_secret
from qinglan.errors import ConfigError

_PAGE = 200
_STAMP = "settings-"


def apply_automations(api: httpx.Client, profile: Profile) -> list[str]:
    """Make, update and remove this profile's automations and those that the server has once; what was done, by line.

    Automations of other profiles and of the users are left alone, and so is what somebody changed in the UI, as long
    as the profile's settings stay as they are; one that was switched off stays so in any case.

    Args:
        api: for requests below the address of Prefect's API.

    Raises:
        ConfigError: the webhook's variable is not set, or holds no address.
        httpx.HTTPError: the server can't be reached or refuses.
    """
    webhook = _webhook(api, profile)
    deployments = deployments_of(api)
    known = {entry["name"]: entry for entry in _all(api)}
    site, own = site_automations(profile), profile_automations(profile, deployments, webhook)
    done = [line for spec in (*site, *own) if (line := _apply(api, spec, known.get(spec["name"])))]
    wanted = {spec["name"] for spec in (*site, *own)}
    for name in sorted(known.keys() - wanted):
        if _is_ours(known[name]) and (_is_of_site(name) or _is_of(name, profile)):
            api.delete(f"automations/{known[name]['id']}").raise_for_status()
            done.append(f"automation removed: {name}")
    return done


def webhook_address(profile: Profile) -> str | None:
    """Where messages go: a secret. None where nobody is to be told.

    Raises:
        ConfigError: its variable is not set, or holds no address.
    """
    if (variable := profile.notify.webhook_url_env) is None:
        return None
    address = require_secret(variable, "notify.webhook_url_env")
    if not re.match(r"https?://[^/\s]", address):
        raise ConfigError(f"notify.webhook_url_env: the value of {variable} is no http(s) address; set it again")
    return address


def _apply(api: httpx.Client, spec: Spec, there: dict[str, Any] | None) -> str | None:
    stamp = _STAMP + hash_of(spec)[:12]
    if there and stamp in there["tags"]:
        return None
    body = spec | {"tags": ["qinglan", stamp], "enabled": there["enabled"] if there else True}
    if there:
        api.put(f"automations/{there['id']}", json=body).raise_for_status()
        return f"automation updated: {spec['name']}"
    api.post("automations/", json=body).raise_for_status()
    return f"automation made: {spec['name']}"


def _is_ours(there: dict[str, Any]) -> bool:
    return any(tag.startswith(_STAMP) for tag in there["tags"])


def _is_of(name: str, profile: Profile) -> bool:
    """Not also those of a profile whose name begins with this one's and a colon."""
    return name.startswith(prefix_of(profile)) and ": " not in name.removeprefix(prefix_of(profile))


def _is_of_site(name: str) -> bool:
    return name.startswith(SITE) and ": " not in name.removeprefix(SITE)


def _all(api: httpx.Client) -> Sequence[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while True:
        query = {"offset": len(found), "limit": _PAGE}
        page = api.post("automations/filter", json=query).raise_for_status().json()
        found += page
        if len(page) < _PAGE:
            return found


def _webhook(api: httpx.Client, profile: Profile) -> str | None:
    """The id of the block that keeps the webhook's address; a block that is not wanted any more is removed."""
    name = _block_name(profile)
    held = api.get(f"block_types/slug/webhook/block_documents/name/{name}")
    there = None if held.status_code == httpx.codes.NOT_FOUND else held.raise_for_status().json()
    if (address := webhook_address(profile)) is None:
        if there:
            api.delete(f"block_documents/{there['id']}").raise_for_status()
        return None
    # The server sends to addresses within the site as well: a webhook that the operator names is trusted.
    data = {"method": "POST", "url": address, "headers": {"content-type": "application/json"}}
    if there:
        changed = {"data": data, "merge_existing_data": False}
        api.patch(f"block_documents/{there['id']}", json=changed).raise_for_status()
        return str(there["id"])
    kind = api.get("block_types/slug/webhook").raise_for_status().json()["id"]
    query = {"block_schemas": {"block_type_id": {"any_": [kind]}}}
    schema = api.post("block_schemas/filter", json=query).raise_for_status().json()[0]["id"]
    body = {"name": name, "data": data, "block_type_id": kind, "block_schema_id": schema}
    return str(api.post("block_documents/", json=body).raise_for_status().json()["id"])


def _block_name(profile: Profile) -> str:
    """Prefect takes lower-case letters, digits and dashes."""
    plain = re.sub(r"[^a-z0-9]+", "-", profile.name.lower()).strip("-")
    return (
        f"qinglan-{plain}"
        if plain == profile.name
        else f"qinglan-{plain}-{hash_of(profile.name)[:6]}".replace("--", "-")
    )
