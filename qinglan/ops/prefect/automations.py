"""What Prefect does by itself: crashed runs go on, alarms pause training, messages are sent
(docs/how-to/prefect.md).

The automations of a profile are called `qinglan: PROFILE: …`, the server's own `qinglan: …`; others
are never changed. Messages are Jinja templates that the server fills in and posts. An event's text
may come from outside: it is cut to its first line, can't notify users by `<at …>` or `<!channel>`,
and becomes JSON by `tojson`, so that it can't break out of its field.
"""

import glob
import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import httpx2

from qinglan.config import NotifyFormat, NotifyTopic, Profile, require_secret
from qinglan.errors import ConfigError
from qinglan.ops.prefect.api import TAG, call, pages
from qinglan.ops.prefect.deployments import Deployment, deployments_of, names, trains_by_itself
from qinglan.runs.artifacts import hash_of
from qinglan.text import duration, slug

Spec = dict[str, Any]
"""An automation as Prefect's API takes it."""
SITE = "qinglan: "
GOES_ON = f"{SITE}a crashed run goes on"
_STAMP = "settings-"
_ENDED = (
    "Completed",
    "Skipped",
    "Failed",
    "TimedOut",
    "Crashed",
    "Superseded",
    "Cancelled",
    "Cancelling",
)
_TAKEN_UP = ("Pending", "Submitting", "Running", *(state for state in _ENDED if state != "Crashed"))
_TAKEN = ("Pending", "Running", *_ENDED)
_DAY_S, _SAME_CRASH_S = 86_400, 10
_RUN, _STATE = "prefect.flow-run.", "event.resource['prefect.state-name']"
_REASON_CHARS = 600
STATE_MESSAGE = "event.resource['prefect.state-message']"
"""Why a flow run is in the state that the event is about."""
_STATE_CHANGE = {"type": "change-flow-run-state", "name": None, "force": False}
_RETRY = _STATE_CHANGE | {"state": "SCHEDULED", "name": "AwaitingRetry"}
_FORMS = {
    "feishu": '{"msg_type": "text", "content": {"text": %s}}',
    "dingtalk": '{"msgtype": "text", "text": {"content": %s}}',
    "wecom": '{"msgtype": "text", "text": {"content": %s}}',
    "slack": '{"text": %s}',
}
_TEXT = "{{ text | string | replace('\\n\\n', '\\n') | trim | tojson }}"
_quoted = partial(json.dumps, ensure_ascii=False)
"""A Jinja string, or a list of them."""


class Message(NamedTuple):
    topic: NotifyTopic
    says: str
    """After the flow run's name; like `advice` it may hold expressions in braces."""
    reason: str = "''"
    """A Jinja expression."""
    advice: str = ""


def apply_automations(api: httpx2.Client, profile: Profile) -> list[str]:
    """Make, update and remove this profile's automations and those that the server has once; what
    was done, by line.

    Automations of other profiles and of the users are left alone, and so is what somebody changed
    in the UI, as long as the profile's settings stay as they are; one that was switched off stays
    so in any case.
    """
    webhook = _webhook(api, profile)
    specs = [
        *site_automations(profile),
        *profile_automations(profile, deployments_of(api), webhook),
    ]
    known, done = _copies(api, profile), []
    for spec in specs:
        stamp, there = _STAMP + hash_of(spec)[:12], next(iter(known.get(spec["name"], ())), None)
        wanted_one = spec | {"tags": [TAG, stamp], "enabled": there is None or there["enabled"]}
        if there is None:
            call(api, "POST", "automations/", wanted_one)
            done.append(f"automation made: {spec['name']}")
        elif stamp not in there["tags"]:
            call(api, "PUT", f"automations/{there['id']}", wanted_one)
            done.append(f"automation updated: {spec['name']}")
    wanted = {spec["name"] for spec in specs}
    # Another deployment at the same time may have made the same. The last one to read sees all of
    # them, and every deployment keeps the same copy.
    for name, copies in sorted((_copies(api, profile) if done else known).items()):
        for copy in copies[1 if name in wanted else 0 :]:
            call(api, "DELETE", f"automations/{copy['id']}", may_lack=True)
            done.append(
                f"automation removed{', as it was there twice' if name in wanted else ''}: {name}"
            )
    return done


def webhook_address(profile: Profile) -> str | None:
    """Where messages go: a secret. None where no message is to be sent."""
    if (variable := profile.notify.webhook_url_env) is None:
        return None
    address = require_secret(variable, "notify.webhook_url_env")
    if not re.match(r"https?://[^/\s]", address):
        raise ConfigError(
            f"notify.webhook_url_env: the value of {variable} is no http(s) address; set it again"
        )
    return address


def site_automations(profile: Profile) -> list[Spec]:
    """Those that a server has once, for the runs of all of Qinglan's deployments."""
    settings, silence_s = profile.automations, profile.automations.crashed_after_s
    ours = {"match_related": {"prefect.resource.id": "prefect.tag.qinglan"}}
    crash = {
        "state": "CRASHED",
        "message": f"no heartbeat for {duration(silence_s)}: its process has ended",
    }
    # A paused run waits for an answer in its process and sends heartbeats; a suspended one has no
    # process.
    silent = {
        "name": f"{SITE}a run that sends no heartbeat has crashed",
        "description": f"No heartbeat for {duration(silence_s)}, and no end: its process and its worker have ended.",
        "trigger": _trigger(
            ("heartbeat", "AwaitingRetry", "Suspended", *_ENDED), ("heartbeat",), silence_s
        )
        | ours,
        "actions": [_STATE_CHANGE | crash],
    }
    if not settings.crash_retries:
        return [silent]
    # The first run that a flow run makes has the count 1.
    counts = [str(count) for count in range(1, settings.crash_retries + 1)]
    begun = {"prefect.resource.id": f"{_RUN}*", "prefect.run-count": counts}
    queued = ("Scheduled", "AwaitingRetry", "Late", *_TAKEN_UP)
    again = {
        "name": GOES_ON,
        "description": f"Back into its queue after {duration(settings.retry_after_s)}, {settings.crash_retries} times.",
        "trigger": _trigger(queued, ("Crashed",), settings.retry_after_s) | {"match": begun} | ours,
        "actions": [_RETRY | {"message": "crashed, and goes on from its finished stages"}],
    }
    # A run that crashed before it began has the count 0 each time; it gets one more try a day.
    unbegun = {
        "name": f"{SITE}a run that crashed before it began has another try",
        "description": "Back into its queue, once in 24 hours.",
        "trigger": _trigger(("Crashed",), within_s=_DAY_S)
        | {"match": begun | {"prefect.run-count": "0"}}
        | ours,
        "actions": [_RETRY | {"message": "crashed before it began"}],
    }
    return [silent, again, unbegun]


def profile_automations(
    profile: Profile, deployments: Sequence[Deployment], webhook: str | None
) -> list[Spec]:
    """Those of the profile; `webhook` is the block that holds the address, None where no message is
    to be sent."""
    specs = _notices(profile, deployments, webhook) if webhook else []
    stopped, pause_at = trains_by_itself(deployments, profile), profile.automations.pause_at
    if not (pause_at and stopped):
        return specs
    pause = {
        "name": f"{SITE}{profile.name}: an alarm pauses training",
        "description": f"Paused: {', '.join(each.full_name for each in stopped)}. Resume them after a check.",
        "trigger": _on_event(profile, *(f"alarm.{name}" for name in pause_at)),
        "actions": [
            {"type": "pause-deployment", "source": "selected", "deployment_id": each.id}
            for each in stopped
        ],
    }
    return [pause, *specs]


def _notices(profile: Profile, deployments: Sequence[Deployment], webhook: str) -> list[Spec]:
    notify, own = profile.notify, [each for each in deployments if names(each.profile, profile)]
    of_own = {
        "match_related": {"prefect.resource.id": [f"prefect.deployment.{each.id}" for each in own]}
    }
    # A worker reports the same crash more than once, with different messages.
    once, runs = _trigger(("Failed", "Crashed", "TimedOut"), within_s=_SAME_CRASH_S), f"{_RUN}*"
    retries = profile.automations.crash_retries
    retried = f"It goes back into its queue by itself, {retries} times at most." if retries else ""
    advice = f"{{% if {_STATE} == 'Crashed' %}}{retried}{{% else %}}Remove the cause, then retry it there.{{% endif %}}"
    failed = Message("failed", f"is {{{{ {_STATE} }}}}", STATE_MESSAGE, advice)
    advice = "Is a worker online, or does another run hold the device? See the work pool's page."
    waiting = Message(
        "waiting", f"has waited {duration(notify.waiting_s)} for a worker", advice=advice
    )
    advice = "Its log says what it does; cancel it at the link if it is stuck."
    running = Message("running", f"has not ended after {duration(notify.running_s)}", advice=advice)
    sentence, until = (
        "event.payload.sentence",
        "waits for an approval until {{ event.payload.until }}",
    )
    refused = Message("refused", "releases no model", sentence)
    # Its command names a profile as the user did.
    advice = "Answer on its page (Resume), or: {{ event.payload.command | replace('<', '‹') }}"
    approval = Message("approval", until, sentence, advice)
    # Flow runs are named after their flow and their parameter `profile`, which is a name or a path.
    name = glob.escape(profile.name)
    named = {"prefect.resource.name": [f"* {name}", f"*[ /]{name}.yaml", f"*[ /]{name}.yml"]}
    wanted: list[tuple[str, Message, Spec]] = [
        ("a run failed", failed, once | {"match": {"prefect.resource.id": runs, **named}}),
        ("a release that waits for approval", approval, _on_event(profile, "gate.waiting")),
        ("a refused release", refused, _on_event(profile, "gate.refuse", "gate.undecided")),
        ("an alarm", _alarm_message(profile, deployments), _on_event(profile, "alarm.*")),
    ]
    if own:
        # Until a run begins it has a random name without a space, and nothing that names its
        # profile.
        unnamed = {"match": {"prefect.resource.id": runs, "prefect.resource.name": "!* *"}}
        wanted += [
            ("a run failed before it began", failed, once | unnamed | of_own),
            ("a run that waits", waiting, _trigger(_TAKEN, ("Late",), notify.waiting_s) | of_own),
            (
                "a run that does not end",
                running,
                _trigger(_ENDED, ("Running",), notify.running_s) | of_own,
            ),
        ]
    action = {"type": "call-webhook", "block_document_id": webhook}
    return [
        {
            "name": f"{SITE}{profile.name}: message about {subject}",
            "description": f"Sends a message to the webhook in {notify.webhook_url_env}.",
            "trigger": trigger,
            "actions": [
                action | {"payload": payload(message, profile.name, notify.format, notify.ui_url)}
            ],
        }
        for subject, message, trigger in wanted
        if message.topic in notify.about
    ]


def _alarm_message(profile: Profile, deployments: Sequence[Deployment]) -> Message:
    trainings = ", ".join(each.full_name for each in trains_by_itself(deployments, profile))
    advice = ""
    if profile.automations.pause_at and trainings:
        pausing = _quoted(profile.automations.pause_at)
        paused = f"No training starts by itself until someone resumes {trainings}."
        advice = f"{{% if event.resource['qinglan.alarm'] in {pausing} %}}{{{{ {_quoted(paused)} }}}}{{% endif %}}"
    says = "alarms at step {{ event.payload.step }} ({{ event.payload.name }})"
    return Message("alarm", says, "event.payload.message", advice)


def payload(message: Message, profile: str, form: NotifyFormat, ui_url: str | None = None) -> str:
    """The template of a webhook's body; the link goes to Prefect's UI at `ui_url`, or where the
    server knows it."""
    page = (
        "flow_run | ui_url"
        if ui_url is None
        else f"{_quoted(ui_url.rstrip('/'))} ~ '/runs/flow-run/' ~ flow_run.id"
    )
    head = (
        f"{{% set name = {_line('flow_run.name if flow_run else event.resource.id')} %}}"
        f"{{% set reason = {_line(message.reason)} %}}"
        f"{{% set link = (({page}) or '') if flow_run else '' %}}"
        f"{{% set text %}}Qinglan: {{{{ name }}}} {message.says}{{% if reason %}}: {{{{ reason }}}}{{% endif %}}"
        f"\n{message.advice}\n{{{{ link }}}}{{% endset %}}"
    )
    if form in _FORMS:
        return head + _FORMS[form] % _TEXT
    values = {
        "text": _TEXT,
        "topic": json.dumps(message.topic),
        "profile": f"{{{{ {_quoted(profile)} | tojson }}}}",
    }
    values |= {key: f"{{{{ {key} | string | tojson }}}}" for key in ("name", "reason", "link")}
    return head + "{" + ", ".join(f'"{key}": {value}' for key, value in values.items()) + "}"


def _line(expression: str) -> str:
    """The first line of what an expression gives, which may be nothing."""
    first = f"(({expression}) or '') | string | trim ~ '\\n'"
    return f"({first}).splitlines()[0] | replace('<', '‹') | truncate({_REASON_CHARS})"


def _on_event(profile: Profile, *events: str) -> Spec:
    """What `emit_run_event` in tasks/stage.py emits."""
    match = {"prefect.resource.id": "qinglan.run.*", "qinglan.profile": glob.escape(profile.name)}
    return _trigger(()) | {"expect": [f"qinglan.{event}" for event in events], "match": match}


def _trigger(expect: Sequence[str], after: Sequence[str] = (), within_s: float = 0) -> Spec:
    """Fires when a run enters one of the states; with `after`, when it enters none within this time
    after those."""
    waits = (
        {"posture": "Proactive", "after": [f"{_RUN}{state}" for state in after]} if after else {}
    )
    return {
        "type": "event",
        "posture": "Reactive",
        "match": {"prefect.resource.id": f"{_RUN}*"},
        "for_each": ["prefect.resource.id"],
        "threshold": 1,
        "expect": [f"{_RUN}{state}" for state in expect],
        "within": within_s,
    } | waits


def _copies(api: httpx2.Client, profile: Profile) -> dict[str, list[dict[str, Any]]]:
    """The profile's and the server's own, by name, the one to keep first: Prefect lets several have
    the same name.

    Kept is the oldest of those that are on: a user who got each message twice may have switched one
    of the two off.
    """
    # After its prefix a name has no colon: a profile's name may begin with that of another one and
    # a colon.
    own = re.compile(rf"{SITE}({re.escape(profile.name)}: )?(?!.*: )")
    stamped = (
        each
        for each in pages(api, "automations/filter")
        if any(t.startswith(_STAMP) for t in each["tags"])
    )
    copies: dict[str, list[dict[str, Any]]] = {}
    for entry in sorted(
        stamped, key=lambda each: (not each["enabled"], each["created"], each["id"])
    ):
        if own.match(entry["name"]):
            copies.setdefault(entry["name"], []).append(entry)
    return copies


def _webhook(api: httpx2.Client, profile: Profile) -> str | None:
    """The id of the block that keeps the webhook's address; a block that is not wanted any more is
    removed."""
    plain = slug(profile.name)
    suffix = "" if plain == profile.name else f"-{hash_of(profile.name)[:6]}"
    name = f"qinglan-{plain}{suffix}".replace("--", "-")
    there = call(api, "GET", f"block_types/slug/webhook/block_documents/name/{name}", may_lack=True)
    if (address := webhook_address(profile)) is None:
        if there:
            call(api, "DELETE", f"block_documents/{there['id']}")
        return None
    # The server sends to addresses within the site as well: a webhook that the operator names is
    # trusted.
    data = {"method": "POST", "url": address, "headers": {"content-type": "application/json"}}
    if there:
        call(
            api,
            "PATCH",
            f"block_documents/{there['id']}",
            {"data": data, "merge_existing_data": False},
        )
        return str(there["id"])
    kind = call(api, "GET", "block_types/slug/webhook")["id"]
    schemas = call(
        api, "POST", "block_schemas/filter", {"block_schemas": {"block_type_id": {"any_": [kind]}}}
    )
    body = {"name": name, "data": data, "block_type_id": kind, "block_schema_id": schemas[0]["id"]}
    return str(call(api, "POST", "block_documents/", body)["id"])
