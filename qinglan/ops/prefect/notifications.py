"""The messages that Prefect's server sends about a profile's runs, and when it sends them.

Messages are Jinja templates that the server fills in and posts. An event's text may come from
outside: it is cut to its first line, can't notify users by `<at …>` or `<!channel>`, and becomes
JSON by `tojson`, so that it can't break out of its field.
"""

import glob
import json
from collections.abc import Sequence
from typing import NamedTuple

from qinglan.config import NotifyFormat, NotifyTopic, Profile
from qinglan.ops.prefect.deployments import Deployment, names_profile, trains_by_itself
from qinglan.ops.prefect.triggers import (
    ANY_RUN,
    ENDED,
    Spec,
    event_trigger,
    proactive_trigger,
    reactive_trigger,
)
from qinglan.text import duration

STATE_MESSAGE = "event.resource['prefect.state-message']"
"""Why a flow run is in the state that the event is about."""
_STATE = "event.resource['prefect.state-name']"
_REASON_CHARS = 600
_TAKEN = ("Pending", "Running", *ENDED)
"""States of a run that a worker has taken."""
_SAME_CRASH_S = 10
_BODIES = {
    "feishu": '{"msg_type": "text", "content": {"text": %s}}',
    "dingtalk": '{"msgtype": "text", "text": {"content": %s}}',
    "wecom": '{"msgtype": "text", "text": {"content": %s}}',
    "slack": '{"text": %s}',
}
_TEXT = "{{ text | string | replace('\\n\\n', '\\n') | trim | tojson }}"


class Notification(NamedTuple):
    """A message about a flow run: parts of the template that the server fills in."""

    topic: NotifyTopic
    statement: str
    """The words after the flow run's name; may hold expressions in braces."""
    reason: str = "''"
    """A Jinja expression."""
    advice: str = ""
    """The next step for users; may hold expressions in braces."""


class _Notice(NamedTuple):
    """A notification and what it is sent at."""

    subject: str
    """The words in the automation's name for what the message is about."""
    notification: Notification
    trigger: Spec


def notification_automations(
    profile: Profile, deployments: Sequence[Deployment], webhook_id: str
) -> list[Spec]:
    """The automations that send the messages which the profile asks for in `notify.about`."""
    own_deployments = [
        deployment for deployment in deployments if names_profile(deployment.profile, profile)
    ]
    notices = _notices_of_named_runs(profile, deployments)
    if own_deployments:
        notices += _notices_of_deployments(profile, own_deployments)
    return [
        _automation(profile, notice, webhook_id)
        for notice in notices
        if notice.notification.topic in profile.notify.about
    ]


def _automation(profile: Profile, notice: _Notice, webhook_id: str) -> Spec:
    notify = profile.notify
    body = payload(notice.notification, profile.name, notify.format, notify.ui_url)
    return {
        "name": f"qinglan: {profile.name}: message about {notice.subject}",
        "description": f"Sends a message to the webhook in {notify.webhook_url_env}.",
        "trigger": notice.trigger,
        "actions": [{"type": "call-webhook", "block_document_id": webhook_id, "payload": body}],
    }


def _notices_of_named_runs(profile: Profile, deployments: Sequence[Deployment]) -> list[_Notice]:
    """Notices of runs that have begun, which are known by the profile in their name or event."""
    # Flow runs are named after their flow and their parameter `profile`, which is a name or a path.
    name = glob.escape(profile.name)
    run_names = [f"* {name}", f"*[ /]{name}.yaml", f"*[ /]{name}.yml"]
    match = {"prefect.resource.id": ANY_RUN, "prefect.resource.name": run_names}
    refused = Notification("refused", "releases no model", "event.payload.sentence")
    approval = Notification(
        "approval",
        "waits for an approval until {{ event.payload.until }}",
        "event.payload.sentence",
        # The command names a profile as the user did.
        "Answer on its page (Resume), or: {{ event.payload.command | replace('<', '‹') }}",
    )
    return [
        _Notice("a run failed", _failure(profile), _failure_trigger() | {"match": match}),
        _Notice(
            "a release that waits for approval", approval, event_trigger(profile, "gate.waiting")
        ),
        _Notice(
            "a refused release", refused, event_trigger(profile, "gate.refuse", "gate.undecided")
        ),
        _Notice("an alarm", _alarm(profile, deployments), event_trigger(profile, "alarm.*")),
    ]


def _notices_of_deployments(
    profile: Profile, own_deployments: Sequence[Deployment]
) -> list[_Notice]:
    """Notices of runs that are known by their deployment alone."""
    notify = profile.notify
    deployment_ids = [f"prefect.deployment.{deployment.id}" for deployment in own_deployments]
    of_own = {"match_related": {"prefect.resource.id": deployment_ids}}
    # Until a run begins it has a random name without a space, and nothing that names its profile.
    unnamed = {"match": {"prefect.resource.id": ANY_RUN, "prefect.resource.name": "!* *"}}
    waiting = Notification(
        "waiting",
        f"has waited {duration(notify.waiting_s)} for a worker",
        advice="Is a worker online, or does another run hold the device? See the work pool's page.",
    )
    running = Notification(
        "running",
        f"has not ended after {duration(notify.running_s)}",
        advice="Its log says what it does; cancel it at the link if it is stuck.",
    )
    late_trigger = proactive_trigger(_TAKEN, ("Late",), notify.waiting_s)
    endless_trigger = proactive_trigger(ENDED, ("Running",), notify.running_s)
    return [
        _Notice(
            "a run failed before it began", _failure(profile), _failure_trigger() | unnamed | of_own
        ),
        _Notice("a run that waits", waiting, late_trigger | of_own),
        _Notice("a run that does not end", running, endless_trigger | of_own),
    ]


def _failure_trigger() -> Spec:
    # A worker reports the same crash more than once, with different messages.
    return reactive_trigger(("Failed", "Crashed", "TimedOut"), within_s=_SAME_CRASH_S)


def _failure(profile: Profile) -> Notification:
    retries = profile.automations.crash_retries
    retried = f"It goes back into its queue by itself, {retries} times at most." if retries else ""
    advice = (
        f"{{% if {_STATE} == 'Crashed' %}}{retried}"
        "{% else %}Remove the cause, then retry it there.{% endif %}"
    )
    return Notification("failed", f"is {{{{ {_STATE} }}}}", STATE_MESSAGE, advice)


def _alarm(profile: Profile, deployments: Sequence[Deployment]) -> Notification:
    pause_at = profile.automations.pause_at
    paused_deployments = trains_by_itself(deployments, profile)
    advice = ""
    if pause_at and paused_deployments:
        trainings = ", ".join(deployment.full_name for deployment in paused_deployments)
        paused = f"No training starts by itself until someone resumes {trainings}."
        advice = (
            f"{{% if event.resource['qinglan.alarm'] in {_quoted(pause_at)} %}}"
            f"{{{{ {_quoted(paused)} }}}}{{% endif %}}"
        )
    statement = "alarms at step {{ event.payload.step }} ({{ event.payload.name }})"
    return Notification("alarm", statement, "event.payload.message", advice)


def payload(
    notification: Notification, profile: str, form: NotifyFormat, ui_url: str | None = None
) -> str:
    """The template of a webhook's body.

    The link goes to Prefect's UI at `ui_url`, or where the server knows it.
    """
    if ui_url is None:
        page = "flow_run | ui_url"
    else:
        page = f"{_quoted(ui_url.rstrip('/'))} ~ '/runs/flow-run/' ~ flow_run.id"
    definitions = (
        f"{{% set name = {_first_line_of('flow_run.name if flow_run else event.resource.id')} %}}"
        f"{{% set reason = {_first_line_of(notification.reason)} %}}"
        f"{{% set link = (({page}) or '') if flow_run else '' %}}"
        f"{{% set text %}}Qinglan: {{{{ name }}}} {notification.statement}"
        "{% if reason %}: {{ reason }}{% endif %}\n"
        f"{notification.advice}\n"
        "{{ link }}{% endset %}"
    )
    if form in _BODIES:
        return definitions + _BODIES[form] % _TEXT
    fields = {
        "text": _TEXT,
        "topic": json.dumps(notification.topic),
        "profile": f"{{{{ {_quoted(profile)} | tojson }}}}",
    }
    for variable in ("name", "reason", "link"):
        fields[variable] = f"{{{{ {variable} | string | tojson }}}}"
    pairs = [f'"{field}": {value}' for field, value in fields.items()]
    return definitions + "{" + ", ".join(pairs) + "}"


def _first_line_of(expression: str) -> str:
    """A Jinja expression for the first line of what another gives, which may be nothing."""
    lines = f"(({expression}) or '') | string | trim ~ '\\n'"
    return f"({lines}).splitlines()[0] | replace('<', '‹') | truncate({_REASON_CHARS})"


def _quoted(value: str | Sequence[str]) -> str:
    """A string, or a list of strings, as it is written in Jinja."""
    return json.dumps(value, ensure_ascii=False)
