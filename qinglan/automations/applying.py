"""Brings the automations on a server up to date."""

import re
from typing import Any

import httpx

from qinglan.artifacts import hash_of
from qinglan.automations.deployments import deployments_of
from qinglan.automations.plan import SITE, Spec, prefix_of, profile_automations, site_automations
from qinglan.config import Profile, require_secret
from qinglan.errors import ConfigError
from qinglan.prefect_api import call, pages

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
    known = {entry["name"]: entry for entry in pages(api, "automations/filter")}
    site, own = site_automations(profile), profile_automations(profile, deployments, webhook)
    done = [line for spec in (*site, *own) if (line := _apply(api, spec, known.get(spec["name"])))]
    wanted = {spec["name"] for spec in (*site, *own)}
    for name in sorted(known.keys() - wanted):
        if _is_ours(known[name]) and (_is_of_site(name) or _is_of(name, profile)):
            call(api, "DELETE", f"automations/{known[name]['id']}")
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
        call(api, "PUT", f"automations/{there['id']}", body)
        return f"automation updated: {spec['name']}"
    call(api, "POST", "automations/", body)
    return f"automation made: {spec['name']}"


def _is_ours(there: dict[str, Any]) -> bool:
    return any(tag.startswith(_STAMP) for tag in there["tags"])


def _is_of(name: str, profile: Profile) -> bool:
    """Not also those of a profile whose name begins with this one's and a colon."""
    return name.startswith(prefix_of(profile)) and ": " not in name.removeprefix(prefix_of(profile))


def _is_of_site(name: str) -> bool:
    return name.startswith(SITE) and ": " not in name.removeprefix(SITE)


def _webhook(api: httpx.Client, profile: Profile) -> str | None:
    """The id of the block that keeps the webhook's address; a block that is not wanted any more is removed."""
    name = _block_name(profile)
    there = call(api, "GET", f"block_types/slug/webhook/block_documents/name/{name}", may_lack=True)
    if (address := webhook_address(profile)) is None:
        if there:
            call(api, "DELETE", f"block_documents/{there['id']}")
        return None
    # The server sends to addresses within the site as well: a webhook that the operator names is trusted.
    data = {"method": "POST", "url": address, "headers": {"content-type": "application/json"}}
    if there:
        call(api, "PATCH", f"block_documents/{there['id']}", {"data": data, "merge_existing_data": False})
        return str(there["id"])
    kind = call(api, "GET", "block_types/slug/webhook")["id"]
    schemas = call(api, "POST", "block_schemas/filter", {"block_schemas": {"block_type_id": {"any_": [kind]}}})
    body = {"name": name, "data": data, "block_type_id": kind, "block_schema_id": schemas[0]["id"]}
    return str(call(api, "POST", "block_documents/", body)["id"])


def _block_name(profile: Profile) -> str:
    """Prefect takes lower-case letters, digits and dashes."""
    plain = re.sub(r"[^a-z0-9]+", "-", profile.name.lower()).strip("-")
    return (
        f"qinglan-{plain}"
        if plain == profile.name
        else f"qinglan-{plain}-{hash_of(profile.name)[:6]}".replace("--", "-")
    )
