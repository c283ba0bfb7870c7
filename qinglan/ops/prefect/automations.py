"""Prefect's automations: what they do, and how they get to its server (docs/how-to/prefect.md).

Crashed runs go on, alarms pause training, messages are sent. The automations of a profile are
called `qinglan: PROFILE: …`, the server's own `qinglan: …`; others are never changed.
"""

import re
from collections.abc import Collection, Sequence
from typing import Any

import httpx2

from qinglan.config import Profile, require_secret
from qinglan.errors import ConfigError
from qinglan.ops.prefect.api import TAG, call, pages
from qinglan.ops.prefect.deployments import Deployment, deployments_of, trains_by_itself
from qinglan.ops.prefect.notifications import notification_automations
from qinglan.ops.prefect.triggers import (
    ANY_RUN,
    ENDED,
    Spec,
    event_trigger,
    proactive_trigger,
    reactive_trigger,
)
from qinglan.runs.artifacts import hash_of
from qinglan.text import duration, slug

GOES_ON = "qinglan: a crashed run goes on"
_STAMP = "settings-"
"""Begins the tag that tells by which settings an automation was made."""
_DAY_S = 86_400
_QUEUED = ("Scheduled", "AwaitingRetry", "Late")
_TAKEN_UP = ("Pending", "Submitting", "Running")
_STATE_CHANGE = {"type": "change-flow-run-state", "name": None, "force": False}
_RETRY = _STATE_CHANGE | {"state": "SCHEDULED", "name": "AwaitingRetry"}
_OF_OURS = {"match_related": {"prefect.resource.id": "prefect.tag.qinglan"}}
"""Limits a trigger to the runs of Qinglan's deployments."""

_Automation = dict[str, Any]
"""An automation as the server tells of it."""


def apply_automations(api: httpx2.Client, profile: Profile) -> list[str]:
    """Make, update and remove this profile's automations and those that the server has once.

    Returns what was done, by line. Automations of other profiles and of the users are left alone,
    and so is what somebody changed in the UI, as long as the profile's settings stay as they are;
    one that was switched off stays so in any case.
    """
    webhook_id = _apply_webhook(api, profile)
    specs = [
        *site_automations(profile),
        *profile_automations(profile, deployments_of(api), webhook_id),
    ]
    copies = _copies_by_name(api, profile)
    changes = []
    for spec in specs:
        existing = copies.get(spec["name"])
        change = _apply(api, spec, existing[0] if existing else None)
        if change is not None:
            changes.append(change)
    if changes:
        # Another deployment at the same time may have made the same. The last one to read sees all
        # of them, and every deployment keeps the same copy.
        copies = _copies_by_name(api, profile)
    return changes + _remove_extra(api, copies, {spec["name"] for spec in specs})


def _apply(api: httpx2.Client, spec: Spec, existing: _Automation | None) -> str | None:
    """Make or update one automation; a line about it, None where it is up to date."""
    stamp = _STAMP + hash_of(spec)[:12]
    is_enabled = existing is None or existing["enabled"]
    body = spec | {"tags": [TAG, stamp], "enabled": is_enabled}
    if existing is None:
        call(api, "POST", "automations/", body)
        return f"automation made: {spec['name']}"
    if stamp in existing["tags"]:
        return None
    call(api, "PUT", f"automations/{existing['id']}", body)
    return f"automation updated: {spec['name']}"


def _remove_extra(
    api: httpx2.Client, copies_by_name: dict[str, list[_Automation]], wanted_names: Collection[str]
) -> list[str]:
    """Remove automations that are not wanted any more, and second copies; a line for each."""
    changes = []
    for name, copies in sorted(copies_by_name.items()):
        if name in wanted_names:
            extra_copies = copies[1:]
            reason = ", as it was there twice"
        else:
            extra_copies = copies
            reason = ""
        for automation in extra_copies:
            call(api, "DELETE", f"automations/{automation['id']}", may_lack=True)
            changes.append(f"automation removed{reason}: {name}")
    return changes


def webhook_address(profile: Profile) -> str | None:
    """The address that messages go to, a secret; None where no message is to be sent.

    Raises ConfigError where the variable that the profile names holds no address.
    """
    variable = profile.notify.webhook_url_env
    if variable is None:
        return None
    address = require_secret(variable, "notify.webhook_url_env")
    if not re.match(r"https?://[^/\s]", address):
        problem = f"the value of {variable} is no http(s) address; set it again"
        raise ConfigError(f"notify.webhook_url_env: {problem}")
    return address


def site_automations(profile: Profile) -> list[Spec]:
    """The automations that a server has once, for the runs of all of Qinglan's deployments."""
    settings = profile.automations
    crash_silent = _crash_silent(settings.crashed_after_s)
    if not settings.crash_retries:
        return [crash_silent]
    return [
        crash_silent,
        _requeue_crashed(settings.crash_retries, settings.retry_after_s),
        _requeue_unbegun(),
    ]


def _crash_silent(silence_s: int) -> Spec:
    # A paused run waits for an answer in its process and sends heartbeats; a suspended one has no
    # process.
    heard_of = ("heartbeat", "AwaitingRetry", "Suspended", *ENDED)
    crash = {
        "state": "CRASHED",
        "message": f"no heartbeat for {duration(silence_s)}: its process has ended",
    }
    return {
        "name": "qinglan: a run that sends no heartbeat has crashed",
        "description": f"No heartbeat for {duration(silence_s)}, and no end: "
        "its process and its worker have ended.",
        "trigger": proactive_trigger(heard_of, ("heartbeat",), silence_s) | _OF_OURS,
        "actions": [_STATE_CHANGE | crash],
    }


def _requeue_crashed(retries: int, retry_after_s: int) -> Spec:
    # The first run that a flow run makes has the count 1.
    run_counts = [str(count) for count in range(1, retries + 1)]
    match = {"prefect.resource.id": ANY_RUN, "prefect.run-count": run_counts}
    ended_otherwise = [state for state in ENDED if state != "Crashed"]
    moved_on = (*_QUEUED, *_TAKEN_UP, *ended_otherwise)
    trigger = proactive_trigger(moved_on, ("Crashed",), retry_after_s)
    return {
        "name": GOES_ON,
        "description": f"Back into its queue after {duration(retry_after_s)}, {retries} times.",
        "trigger": trigger | {"match": match} | _OF_OURS,
        "actions": [_RETRY | {"message": "crashed, and goes on from its finished stages"}],
    }


def _requeue_unbegun() -> Spec:
    # A run that crashed before it began has the count 0 each time; it gets one more try a day.
    match = {"prefect.resource.id": ANY_RUN, "prefect.run-count": "0"}
    trigger = reactive_trigger(("Crashed",), within_s=_DAY_S)
    return {
        "name": "qinglan: a run that crashed before it began has another try",
        "description": "Back into its queue, once in 24 hours.",
        "trigger": trigger | {"match": match} | _OF_OURS,
        "actions": [_RETRY | {"message": "crashed before it began"}],
    }


def profile_automations(
    profile: Profile, deployments: Sequence[Deployment], webhook_id: str | None
) -> list[Spec]:
    """The automations of a profile.

    `webhook_id` is the block that holds the webhook's address, None where no message is to be sent.
    """
    specs = []
    paused_deployments = trains_by_itself(deployments, profile)
    if profile.automations.pause_at and paused_deployments:
        specs.append(_pause_training(profile, paused_deployments))
    if webhook_id:
        specs += notification_automations(profile, deployments, webhook_id)
    return specs


def _pause_training(profile: Profile, deployments: Sequence[Deployment]) -> Spec:
    names = ", ".join(deployment.full_name for deployment in deployments)
    alarms = [f"alarm.{name}" for name in profile.automations.pause_at]
    return {
        "name": f"qinglan: {profile.name}: an alarm pauses training",
        "description": f"Paused: {names}. Resume them after a check.",
        "trigger": event_trigger(profile, *alarms),
        "actions": [
            {"type": "pause-deployment", "source": "selected", "deployment_id": deployment.id}
            for deployment in deployments
        ],
    }


def _copies_by_name(api: httpx2.Client, profile: Profile) -> dict[str, list[_Automation]]:
    """The profile's and the server's own automations by name, the one to keep first.

    Prefect lets several have the same name. The oldest of those that are on is kept: a user who got
    each message twice may have switched one of the two off.
    """
    # After its prefix a name has no colon: a profile's name may begin with that of another one and
    # a colon.
    own_name = re.compile(rf"qinglan: ({re.escape(profile.name)}: )?(?!.*: )")
    own_automations = []
    for automation in pages(api, "automations/filter"):
        is_stamped = any(tag.startswith(_STAMP) for tag in automation["tags"])
        if is_stamped and own_name.match(automation["name"]):
            own_automations.append(automation)
    own_automations.sort(key=lambda entry: (not entry["enabled"], entry["created"], entry["id"]))
    copies: dict[str, list[_Automation]] = {}
    for automation in own_automations:
        copies.setdefault(automation["name"], []).append(automation)
    return copies


def _apply_webhook(api: httpx2.Client, profile: Profile) -> str | None:
    """Make, update or remove the block that keeps the webhook's address; its id, if there is one.

    The server sends to addresses within the site as well: a webhook that the operator names is
    trusted.
    """
    name = _webhook_name(profile)
    existing = call(
        api, "GET", f"block_types/slug/webhook/block_documents/name/{name}", may_lack=True
    )
    address = webhook_address(profile)
    if address is None:
        if existing:
            call(api, "DELETE", f"block_documents/{existing['id']}")
        return None
    data = {"method": "POST", "url": address, "headers": {"content-type": "application/json"}}
    if existing:
        body = {"data": data, "merge_existing_data": False}
        call(api, "PATCH", f"block_documents/{existing['id']}", body)
        return str(existing["id"])
    type_id = call(api, "GET", "block_types/slug/webhook")["id"]
    query = {"block_schemas": {"block_type_id": {"any_": [type_id]}}}
    schemas = call(api, "POST", "block_schemas/filter", query)
    body = {
        "name": name,
        "data": data,
        "block_type_id": type_id,
        "block_schema_id": schemas[0]["id"],
    }
    return str(call(api, "POST", "block_documents/", body)["id"])


def _webhook_name(profile: Profile) -> str:
    """The block's name, of letters, digits and dashes as Prefect wants it."""
    plain = slug(profile.name)
    # Two profiles may have the same letters and digits.
    suffix = "" if plain == profile.name else f"-{hash_of(profile.name)[:6]}"
    return f"qinglan-{plain}{suffix}".replace("--", "-")
