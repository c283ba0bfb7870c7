"""What a webhook is sent: Jinja templates that Prefect's server fills in and posts.

An event's text may come from outside. It is cut to its first line, can't notify users by `<at …>` or `<!channel>`, and
becomes JSON by `tojson`, so that it can't break out of its field.
"""

import json
from typing import NamedTuple

from qinglan.config import NotifyFormat, NotifyTopic

REASON_CHARS = 600
STATE_MESSAGE = "event.resource['prefect.state-message']"
"""Why a flow run is in the state that the event is about."""
_FORMS = {
    "feishu": '{"msg_type": "text", "content": {"text": %s}}',
    "dingtalk": '{"msgtype": "text", "text": {"content": %s}}',
    "wecom": '{"msgtype": "text", "text": {"content": %s}}',
    "slack": '{"text": %s}',
}
_TEXT = "{{ text | string | replace('\\n\\n', '\\n') | trim | tojson }}"


class Message(NamedTuple):
    """The parts of a message that are known beforehand."""

    topic: NotifyTopic
    says: str
    """After the flow run's name; like `advice` it may hold expressions in braces."""
    reason: str = "''"
    """A Jinja expression."""
    advice: str = ""


def payload(message: Message, profile: str, form: NotifyFormat, ui_url: str | None = None) -> str:
    """The template of a webhook's body; the link goes to Prefect's UI at `ui_url`, or where the server knows it."""
    page = "flow_run | ui_url" if ui_url is None else f"{literal(ui_url.rstrip('/'))} ~ '/runs/flow-run/' ~ flow_run.id"
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
        "profile": f"{{{{ {literal(profile)} | tojson }}}}",
    }
    values |= {key: f"{{{{ {key} | string | tojson }}}}" for key in ("name", "reason", "link")}
    return head + "{" + ", ".join(f'"{key}": {value}' for key, value in values.items()) + "}"


def literal(text: str) -> str:
    """A Jinja string."""
    return json.dumps(text, ensure_ascii=False)


def _line(expression: str) -> str:
    """The first line of what an expression gives, which may be nothing."""
    first = f"(({expression}) or '') | string | trim ~ '\\n'"
    return f"({first}).splitlines()[0] | replace('<', '‹') | truncate({REASON_CHARS})"
