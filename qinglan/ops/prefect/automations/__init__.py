"""What Prefect does by itself: crashed runs go on, alarms pause training, messages are sent. See docs/automations.md.

The automations of a profile are called `qinglan: PROFILE: …`, the server's own `qinglan: …`; others are never changed.
"""

import re
from typing import Any

import httpx2

from qinglan.config import Profile, require_secret
from qinglan.errors import ConfigError
from qinglan.ops.prefect.api import TAG, call, pages
from qinglan.ops.prefect.automations.plan import SITE, prefix_of, profile_automations, site_automations
from qinglan.ops.prefect.deployments import deployments_of
from qinglan.runs.artifacts import hash_of

_STAMP = "settings-"


def apply_automations(api: httpx2.Client, profile: Profile) -> list[str]:
    """Make, update and remove this profile's automations and those that the server has once; what was done, by line.

    Automations of other profiles and of the users are left alone, and so is what somebody changed in the UI, as long
    as the profile's settings stay as they are; one that was switched off stays so in any case.
    """
    webhook = _webhook(api, profile)
    deployments = deployments_of(api)
    known = _copies(api, profile)
    specs = [*site_automations(profile), *profile_automations(profile, deployments, webhook)]
    done = []
    for spec in specs:
        stamp, there = _STAMP + hash_of(spec)[:12], next(iter(known.get(spec["name"], ())), None)
        if there is None:
            call(api, "POST", "automations/", spec | {"tags": [TAG, stamp], "enabled": True})
            done.append(f"automation made: {spec['name']}")
        elif stamp not in there["tags"]:
            body = spec | {"tags": [TAG, stamp], "enabled": there["enabled"]}
            call(api, "PUT", f"automations/{there['id']}", body)
            done.append(f"automation updated: {spec['name']}")
    wanted = {spec["name"] for spec in specs}
    # Another deployment at the same time may have made the same. The last one to read sees all of them, and every
    # deployment keeps the same copy.
    for name, copies in sorted((_copies(api, profile) if done else known).items()):
        for copy in copies[1 if name in wanted else 0 :]:
            call(api, "DELETE", f"automations/{copy['id']}", may_lack=True)
            done.append(f"automation removed{', as it was there twice' if name in wanted else ''}: {name}")
    return done


def webhook_address(profile: Profile) -> str | None:
    """Where messages go: a secret. None where no message is to be sent."""
    if (variable := profile.notify.webhook_url_env) is None:
        return None
    address = require_secret(variable, "notify.webhook_url_env")
    if not re.match(r"https?://[^/\s]", address):
        raise ConfigError(f"notify.webhook_url_env: the value of {variable} is no http(s) address; set it again")
    return address


def _copies(api: httpx2.Client, profile: Profile) -> dict[str, list[dict[str, Any]]]:
    """The profile's and the server's own, by name, the one to keep first: Prefect lets several have the same name.

    Kept is the oldest of those that are on: a user who got each message twice may have switched one of the two off.
    """
    found = pages(api, "automations/filter")
    ours = [entry for entry in found if any(tag.startswith(_STAMP) for tag in entry["tags"])]
    prefixes = (SITE, prefix_of(profile))
    # After its prefix a name has no colon: a profile's name may begin with that of another one and a colon.
    of_profile = [
        entry
        for entry in ours
        if any(entry["name"].startswith(each) and ": " not in entry["name"].removeprefix(each) for each in prefixes)
    ]
    copies: dict[str, list[dict[str, Any]]] = {}
    for entry in sorted(of_profile, key=lambda each: (not each["enabled"], each["created"], each["id"])):
        copies.setdefault(entry["name"], []).append(entry)
    return copies


def _webhook(api: httpx2.Client, profile: Profile) -> str | None:
    """The id of the block that keeps the webhook's address; a block that is not wanted any more is removed."""
    # Prefect takes lower-case letters, digits and dashes.
    plain = re.sub(r"[^a-z0-9]+", "-", profile.name.lower()).strip("-")
    suffix = "" if plain == profile.name else f"-{hash_of(profile.name)[:6]}"
    name = f"qinglan-{plain}{suffix}".replace("--", "-")
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
