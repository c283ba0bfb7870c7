"""Which automations a profile wants: as Prefect's API takes them, and nothing done yet."""

import glob
from collections.abc import Sequence
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
    return f"{SITE}{profile.name}: "


def site_automations(profile: Profile) -> list[Spec]:
    """Those that a server has once, for the runs of all of Qinglan's deployments."""
    settings = profile.automations
    ours = {"match_related": {"prefect.resource.id": "prefect.tag.qinglan"}}
    # A paused run waits for an answer in its process and sends heartbeats; a suspended one has no process.
    silent = _spec(
        f"{SITE}a run that sends no heartbeat has crashed",
        f"No heartbeat for {duration(settings.crashed_after_s)}, and no end: its process and its worker have ended.",
        _trigger(("heartbeat", "AwaitingRetry", "Suspended", *ENDED), ("heartbeat",), settings.crashed_after_s) | ours,
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
        _trigger(("Scheduled", "AwaitingRetry", "Late", *_TAKEN_UP), ("Crashed",), settings.retry_after_s)
        | {"match": begun}
        | ours,
        [_to_state("SCHEDULED", "crashed, and goes on from its finished stages", name="AwaitingRetry")],
    )
    # A run that crashed before it began has the count 0 each time; it gets one more try a day.
    unbegun = _spec(
        f"{SITE}a run that crashed before it began has another try",
        "Back into its queue, once in 24 hours.",
        _trigger(("Crashed",), within_s=_DAY_S)
        | {"match": {"prefect.resource.id": f"{_RUN}*", "prefect.run-count": "0"}}
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
    specs = _notices(profile, deployments, webhook) if webhook else []
    stopped, pause_at = trains_by_itself(deployments, profile), profile.automations.pause_at
    if not (pause_at and stopped):
        return specs
    pause = _spec(
        f"{prefix_of(profile)}an alarm pauses training",
        f"Paused: {', '.join(each.full_name for each in stopped)}. Resume them after a check.",
        _on_event(profile, *(f"alarm.{name}" for name in pause_at)),
        [{"type": "pause-deployment", "source": "selected", "deployment_id": each.id} for each in stopped],
    )
    return [pause, *specs]


def _notices(profile: Profile, deployments: Sequence[Deployment], webhook: str) -> list[Spec]:
    notify, own = profile.notify, [each for each in deployments if each.is_of(profile)]
    of_own = {"match_related": {"prefect.resource.id": [f"prefect.deployment.{each.id}" for each in own]}}
    # A worker reports the same crash more than once, with different messages.
    once, runs = _trigger(("Failed", "Crashed", "TimedOut"), within_s=_SAME_CRASH_S), f"{_RUN}*"
    retries = profile.automations.crash_retries
    retried = f"It goes back into its queue by itself, {retries} times at most." if retries else ""
    failed = Message(
        "failed",
        f"is {{{{ {_STATE} }}}}",
        STATE_MESSAGE,
        f"{{% if {_STATE} == 'Crashed' %}}{retried}{{% else %}}Remove the cause, then retry it there.{{% endif %}}",
    )
    waiting = Message(
        "waiting",
        f"has waited {duration(notify.waiting_s)} for a worker",
        advice="Is a worker online, or does another run hold the device? See the work pool's page.",
    )
    running = Message(
        "running",
        f"has not ended after {duration(notify.running_s)}",
        advice="Its log says what it does; cancel it at the link if it is stuck.",
    )
    refused = Message("refused", "releases no model", "event.payload.sentence")
    # Its command names a profile as the user did.
    command = "{{ event.payload.command | replace('<', '‹') }}"
    approval = Message(
        "approval",
        "waits for an approval until {{ event.payload.until }}",
        "event.payload.sentence",
        f"Answer on its page (Resume), or: {command}",
    )
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
        # Until a run begins it has a random name without a space, and nothing that names its profile.
        unnamed = {"match": {"prefect.resource.id": runs, "prefect.resource.name": "!* *"}}
        wanted += [
            ("a run failed before it began", failed, once | unnamed | of_own),
            ("a run that waits", waiting, _trigger(_TAKEN, ("Late",), notify.waiting_s) | of_own),
            ("a run that does not end", running, _trigger(ENDED, ("Running",), notify.running_s) | of_own),
        ]
    action = {"type": "call-webhook", "block_document_id": webhook}
    return [
        _spec(
            f"{prefix_of(profile)}message about {subject}",
            f"Sends a message to the webhook in {notify.webhook_url_env}.",
            trigger,
            [action | {"payload": payload(message, profile.name, notify.format, notify.ui_url)}],
        )
        for subject, message, trigger in wanted
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
    return Message("alarm", says, "event.payload.message", advice)


def _spec(name: str, description: str, trigger: Spec, actions: list[Spec]) -> Spec:
    return {"name": name, "description": description, "trigger": trigger, "actions": actions}


def _on_event(profile: Profile, *events: str) -> Spec:
    """What `emit_run_event` in tasks/stage.py emits."""
    match = {"prefect.resource.id": "qinglan.run.*", "qinglan.profile": glob.escape(profile.name)}
    return _trigger(()) | {"expect": [f"qinglan.{event}" for event in events], "match": match}


def _trigger(expect: Sequence[str], after: Sequence[str] = (), within_s: float = 0) -> Spec:
    """A flow run gets into one of the states; with `after`: does not do so within this time after one of those."""
    trigger = {
        "type": "event",
        "posture": "Proactive" if after else "Reactive",
        "match": {"prefect.resource.id": f"{_RUN}*"},
        "for_each": ["prefect.resource.id"],
        "threshold": 1,
        "expect": [f"{_RUN}{state}" for state in expect],
        "within": within_s,
    }
    return trigger | ({"after": [f"{_RUN}{state}" for state in after]} if after else {})


def _to_state(kind: str, message: str, name: str | None = None) -> Spec:
    return {"type": "change-flow-run-state", "state": kind, "name": name, "message": message, "force": False}
