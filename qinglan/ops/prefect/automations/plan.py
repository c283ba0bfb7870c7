"""Which automations a profile wants: as Prefect's API takes them, and nothing done yet."""

import glob
from collections.abc import Iterable, Sequence
from typing import Any

from qinglan.config import Profile
from qinglan.ops.prefect.automations.messages import STATE_MESSAGE, Message, literal, payload
from qinglan.ops.prefect.deployments import Deployment, trains_by_itself
from qinglan.text import duration

Spec = dict[str, Any]
SITE = "qinglan: "
GOES_ON = f"{SITE}a crashed run goes on"
ENDED = ("Completed", "Skipped", "Failed", "TimedOut", "Crashed", "Superseded", "Cancelled", "Cancelling")
_TAKEN_UP = ("Pending", "Submitting", "Running", *(state for state in ENDED if state != "Crashed"))
_TAKEN = ("Pending", "Running", *ENDED)
_DAY_S, _SAME_CRASH_S = 86_400, 10
_RUN, _STATE = "prefect.flow-run.", "event.resource['prefect.state-name']"


def prefix_of(profile: Profile) -> str:
    """What the names of a profile's automations begin with."""
    return f"{SITE}{profile.name}: "


def site_automations(profile: Profile) -> list[Spec]:
    """Those that a server has once, for the runs of all of Qinglan's deployments."""
    settings = profile.automations
    ours = {"match_related": {"prefect.resource.id": "prefect.tag.qinglan"}}
    # A paused run waits for an answer in its process and sends heartbeats; a suspended one has no process.
    silent = _spec(
        f"{SITE}a run that sends no heartbeat has crashed",
        f"No heartbeat for {duration(settings.crashed_after_s)}, and no end: its process and its worker have ended.",
        _absent(after=("heartbeat",), expect=("heartbeat", "AwaitingRetry", "Suspended", *ENDED))
        | {"within": settings.crashed_after_s}
        | ours,
        [_to_state("CRASHED", f"no heartbeat for {duration(settings.crashed_after_s)}: its process has ended")],
    )
    if not settings.crash_retries:
        return [silent]
    # The first run that a flow run makes has the count 1.
    counts = [str(count) for count in range(1, settings.crash_retries + 1)]
    begun = {"prefect.resource.id": f"{_RUN}*", "prefect.run-count": counts}
    again = _spec(
        GOES_ON,
        f"Back into its queue after {duration(settings.retry_after_s)}, {settings.crash_retries} times.",
        _absent(after=("Crashed",), expect=("Scheduled", "AwaitingRetry", "Late", *_TAKEN_UP))
        | {"within": settings.retry_after_s, "match": begun}
        | ours,
        [_to_state("SCHEDULED", "crashed, and goes on from its finished stages", name="AwaitingRetry")],
    )
    # A run that crashed before it began has the count 0 each time; it gets one more try a day.
    unbegun = _spec(
        f"{SITE}a run that crashed before it began has another try",
        "Back into its queue, once in 24 hours.",
        _present(("Crashed",))
        | {"within": _DAY_S, "match": {"prefect.resource.id": f"{_RUN}*", "prefect.run-count": "0"}}
        | ours,
        [_to_state("SCHEDULED", "crashed before it began", name="AwaitingRetry")],
    )
    return [silent, again, unbegun]


def profile_automations(profile: Profile, deployments: Sequence[Deployment], webhook: str | None) -> list[Spec]:
    """Those of the profile.

    Args:
        deployments: all of Qinglan's on the server.
        webhook: id of the block that holds the webhook's address; None where no message is to be sent.
    """
    pause = _pause(profile, deployments)
    return [*([pause] if pause else []), *(_notices(profile, deployments, webhook) if webhook else ())]


def _pause(profile: Profile, deployments: Sequence[Deployment]) -> Spec | None:
    stopped = trains_by_itself(deployments, profile)
    if not (profile.automations.pause_at and stopped):
        return None
    names = ", ".join(each.full_name for each in stopped)
    return _spec(
        f"{prefix_of(profile)}an alarm pauses training",
        f"Paused: {names}. Resume them after a check.",
        _alarms(profile, profile.automations.pause_at),
        [{"type": "pause-deployment", "source": "selected", "deployment_id": each.id} for each in stopped],
    )


def _notices(profile: Profile, deployments: Sequence[Deployment], webhook: str) -> list[Spec]:
    notify, own = profile.notify, [each for each in deployments if each.is_of(profile)]
    of_own = {"match_related": {"prefect.resource.id": [f"prefect.deployment.{each.id}" for each in own]}}
    # A worker reports the same crash more than once, with different messages.
    once, runs = _present(("Failed", "Crashed", "TimedOut")) | {"within": _SAME_CRASH_S}, f"{_RUN}*"
    retried = (
        f"It goes back into its queue by itself, {profile.automations.crash_retries} times at most."
        if profile.automations.crash_retries
        else ""
    )
    failed = Message(
        "failed",
        profile.name,
        f"is {{{{ {_STATE} }}}}",
        STATE_MESSAGE,
        f"{{% if {_STATE} == 'Crashed' %}}{retried}{{% else %}}Remove the cause, then retry it there.{{% endif %}}",
    )
    waiting = Message(
        "waiting",
        profile.name,
        f"has waited {duration(notify.waiting_s)} for a worker",
        advice="Is a worker online, or does another run hold the device? See the work pool's page.",
    )
    running = Message(
        "running",
        profile.name,
        f"has not ended after {duration(notify.running_s)}",
        advice="Its log says what it does; cancel it at the link if it is stuck.",
    )
    refused = Message("refused", profile.name, "releases no model", "event.payload.sentence")
    # Its command names a profile as the user did.
    command = "{{ event.payload.command | replace('<', '‹') }}"
    approval = Message(
        "approval",
        profile.name,
        "waits for an approval until {{ event.payload.until }}",
        "event.payload.sentence",
        f"Answer on its page (Resume), or: {command}",
    )
    wanted: list[tuple[str, Message, Spec]] = [
        ("a run failed", failed, once | {"match": {"prefect.resource.id": runs, **_named(profile)}}),
        ("a release that waits for approval", approval, _on_event(profile, "gate.waiting")),
        ("a refused release", refused, _on_event(profile, "gate.refuse", "gate.undecided")),
        ("an alarm", _alarm_message(profile, deployments), _alarms(profile)),
    ]
    if own:
        # Until a run begins it has a random name without a space, and nothing that names its profile.
        unnamed = {"match": {"prefect.resource.id": runs, "prefect.resource.name": "!* *"}}
        wanted += [
            ("a run failed before it began", failed, once | unnamed | of_own),
            ("a run that waits", waiting, _absent(("Late",), _TAKEN) | {"within": notify.waiting_s} | of_own),
            ("a run that does not end", running, _absent(("Running",), ENDED) | {"within": notify.running_s} | of_own),
        ]
    return [
        _spec(
            f"{prefix_of(profile)}message about {name}",
            f"Sends a message to the webhook in {notify.webhook_url_env}.",
            trigger,
            [
                {
                    "type": "call-webhook",
                    "block_document_id": webhook,
                    "payload": payload(message, notify.format, notify.ui_url),
                }
            ],
        )
        for name, message, trigger in wanted
        if message.topic in notify.about
    ]


def _alarm_message(profile: Profile, deployments: Sequence[Deployment]) -> Message:
    names = ", ".join(each.full_name for each in trains_by_itself(deployments, profile))
    advice = ""
    if profile.automations.pause_at and names:
        pausing = "[" + ", ".join(map(literal, profile.automations.pause_at)) + "]"
        paused = f"No training starts by itself until someone resumes {names}."
        advice = f"{{% if event.resource['qinglan.alarm'] in {pausing} %}}{{{{ {literal(paused)} }}}}{{% endif %}}"
    says = "alarms at step {{ event.payload.step }} ({{ event.payload.name }})"
    return Message("alarm", profile.name, says, "event.payload.message", advice)


def _spec(name: str, description: str, trigger: Spec, actions: list[Spec]) -> Spec:
    return {"name": name, "description": description, "trigger": trigger, "actions": actions}


def _present(states: Iterable[str]) -> Spec:
    return _trigger("Reactive") | {"expect": _events(states), "within": 0}


def _absent(after: Iterable[str], expect: Iterable[str]) -> Spec:
    return _trigger("Proactive") | {"after": _events(after), "expect": _events(expect)}


def _alarms(profile: Profile, names: Sequence[str] = ("*",)) -> Spec:
    return _on_event(profile, *(f"alarm.{name}" for name in names))


def _on_event(profile: Profile, *events: str) -> Spec:
    """What tasks/events.py emits."""
    match = {"prefect.resource.id": "qinglan.run.*", "qinglan.profile": glob.escape(profile.name)}
    return _trigger("Reactive") | {"expect": [f"qinglan.{event}" for event in events], "match": match, "within": 0}


def _trigger(posture: str) -> Spec:
    match = {"prefect.resource.id": f"{_RUN}*"}
    return {"type": "event", "posture": posture, "match": match, "for_each": ["prefect.resource.id"], "threshold": 1}


def _events(names: Iterable[str]) -> list[str]:
    return [f"{_RUN}{name}" for name in names]


def _named(profile: Profile) -> Spec:
    """Flow runs are named after their flow and their parameter `profile`, which is a name or a path."""
    name = glob.escape(profile.name)
    return {"prefect.resource.name": [f"* {name}", f"*[ /]{name}.yaml", f"*[ /]{name}.yml"]}


def _to_state(kind: str, message: str, name: str | None = None) -> Spec:
    return {"type": "change-flow-run-state", "state": kind, "name": name, "message": message, "force": False}
