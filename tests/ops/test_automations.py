"""Automations as a profile wants them, and how they are brought to a server; the server is a
dictionary."""

import copy
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from fake_prefect import api_of
from fixture_types import ProfileOf
from prefect.server.events.jinja_filters import all_filters
from prefect.server.events.schemas.automations import AutomationCreate
from prefect.server.utilities.user_templates import (
    register_user_template_filters,
    render_user_template_sync,
)

from qinglan.config import NotifyFormat, Profile
from qinglan.ops.prefect.automations import apply_automations, profile_automations
from qinglan.ops.prefect.deployments import Deployment, training_of
from qinglan.ops.prefect.notifications import STATE_MESSAGE, Notification, payload

TRAIN = Deployment("00000000-0000-0000-0000-000000000001", "train/train", "embedded", paused=False)
NIGHTLY = Deployment(
    "00000000-0000-0000-0000-000000000002", "refresh/refresh-night", "night", paused=False
)
TEXT_IN = {"feishu": "content.text", "slack": "text", "json": "text"}
TEXT_IN |= dict.fromkeys(("dingtalk", "wecom"), "text.content")
WEBHOOK = "https://hooks.example/secret-part"


class Prefect:
    """A server that answers as much as automations need."""

    def __init__(self) -> None:
        self.automations: dict[str, dict[str, Any]] = {}
        self.blocks: dict[str, dict[str, Any]] = {}
        self.deployments = [TRAIN, NIGHTLY]
        self.writes: list[str] = []
        self.meanwhile: list[Callable[[], object]] = []
        """What others do before the next automation is made."""
        self.api = api_of(self._answer)

    def names(self) -> set[str]:
        return {entry["name"] for entry in self.automations.values()}

    def copy(self, name: str, of_day: int, **changed: Any) -> None:
        """Another of the same name, made on another day."""
        key = f"{name} {of_day}"
        origin = {"id": key, "created": f"2026-11-{of_day:02}T00:00:00Z"}
        self.automations[key] = copy.deepcopy(self.named(name)) | origin | changed

    def named(self, name: str) -> dict[str, Any]:
        return next(entry for entry in self.automations.values() if entry["name"] == name)

    def _answer(self, method: str, path: str, body: Any) -> Any:
        if method != "GET" and not path.endswith("/filter"):
            self.writes.append(f"{method} {path.split('/')[0]}")
        where, _, rest = path.partition("/")
        if where == "deployments":
            return self._deployments()
        if where == "automations":
            return self._automation(method, rest, body)
        return self._block(method, where, rest, body)

    def _automation(self, method: str, rest: str, body: Any) -> Any:
        if rest == "filter":
            return list(self.automations.values())
        if method == "DELETE":
            return 204 if self.automations.pop(rest, None) else 404
        # As the real server does.
        AutomationCreate.model_validate(copy.deepcopy(body))
        while method == "POST" and self.meanwhile:
            self.meanwhile.pop()()
        key = rest or f"a{len(self.writes)}"
        created = {"created": datetime.now(UTC).isoformat()} if method == "POST" else {}
        self.automations[key] = self.automations.get(key, {}) | created | body | {"id": key}
        return 201

    def _deployments(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = [
            {"entrypoint": "jobs.py:train", "name": "other", "parameters": {}}
        ]
        for deployment in self.deployments:
            flow, _, name = deployment.full_name.partition("/")
            entry = {
                "id": deployment.id,
                "name": name,
                "paused": deployment.paused,
                "parameters": {"profile": deployment.profile},
                "entrypoint": f"qinglan.flows.{flow}.{flow}",
            }
            entries.append(entry)
        return entries

    def _block(self, method: str, where: str, rest: str, body: Any) -> Any:
        if where == "block_types":
            return (
                {"id": "webhooks"}
                if rest == "slug/webhook"
                else self.blocks.get(rest.rpartition("/")[2], 404)
            )
        if where == "block_schemas":
            return [{"id": "schema"}]
        if method == "DELETE":
            self.blocks = {
                name: block for name, block in self.blocks.items() if block["id"] != rest
            }
            return 204
        if method == "PATCH":
            assert body["merge_existing_data"] is False
            next(block for block in self.blocks.values() if block["id"] == rest).update(
                data=body["data"]
            )
            return 204
        self.blocks[body["name"]] = body | {
            "id": f"00000000-0000-0000-0000-{len(self.blocks) + 100:012}"
        }
        return self.blocks[body["name"]]


@pytest.fixture
def prefect(monkeypatch: pytest.MonkeyPatch) -> Prefect:
    monkeypatch.setenv("NIGHT_WEBHOOK", WEBHOOK)
    return Prefect()


def night(profile_of: ProfileOf, name: str = "night", **notify: Any) -> Profile:
    return profile_of(name=name, notify={"webhook_url_env": "NIGHT_WEBHOOK"} | notify)


def test_the_address_stands_in_the_block_alone_and_changes_alone_are_brought(
    prefect: Prefect, profile_of: ProfileOf
):
    changes = apply_automations(prefect.api, night(profile_of))
    assert len(changes) == len(prefect.automations) == 11
    (block,) = prefect.blocks.values()
    assert (block["name"], block["data"]["url"]) == ("qinglan-night", WEBHOOK)
    assert "secret-part" not in json.dumps(prefect.automations)
    prefect.writes.clear()
    assert apply_automations(prefect.api, night(profile_of)) == []
    assert set(prefect.writes) == {"PATCH block_documents"}, "the address may have changed"
    name = "qinglan: night: message about a run failed"
    prefect.named(name)["enabled"] = False
    assert f"automation updated: {name}" in apply_automations(
        prefect.api, night(profile_of, format="feishu")
    )
    assert "msg_type" in prefect.named(name)["actions"][0]["payload"]
    assert prefect.named(name)["enabled"] is False, "what was switched off stays so"


def test_what_is_not_wanted_any_more_goes_and_others_stay(prefect: Prefect, profile_of: ProfileOf):
    for name in ("tell the team", "qinglan: my own"):
        prefect.automations[name] = {"id": name, "name": name, "tags": ["qinglan"], "enabled": True}
    apply_automations(prefect.api, night(profile_of))
    apply_automations(prefect.api, night(profile_of, "day"))
    apply_automations(prefect.api, night(profile_of, "night: two"))
    apply_automations(prefect.api, night(profile_of, about=("alarm",)))
    assert [name for name in prefect.names() if "night: message" in name] == [
        "qinglan: night: message about an alarm"
    ]
    changes = apply_automations(prefect.api, night(profile_of, webhook_url_env=None))
    assert "automation removed: qinglan: night: message about an alarm" in changes
    names = prefect.names()
    assert [name for name in names if name.startswith("qinglan: night: message")] == []
    of_other_profiles = {
        f"qinglan: {profile}: message about an alarm" for profile in ("day", "night: two")
    }
    assert {"tell the team", "qinglan: my own", *of_other_profiles} <= names
    assert [block["data"]["url"] for block in prefect.blocks.values()] == [WEBHOOK, WEBHOOK]


def test_two_who_deploy_at_once_make_each_automation_once(prefect: Prefect, profile_of: ProfileOf):
    prefect.meanwhile = [lambda: apply_automations(prefect.api, night(profile_of, "day"))]
    changes = apply_automations(prefect.api, night(profile_of))
    twice = [
        line
        for line in changes
        if line.startswith("automation removed, as it was there twice: qinglan: ")
    ]
    assert len(twice) == 3, "those that a server has once"
    assert len(prefect.automations) == len(prefect.names()) > len(twice)
    assert apply_automations(prefect.api, night(profile_of)) == []


def test_of_several_copies_the_oldest_that_is_on_is_kept(prefect: Prefect, profile_of: ProfileOf):
    apply_automations(prefect.api, night(profile_of))
    failed, alarm = (
        f"qinglan: night: message about {name}" for name in ("a run failed", "an alarm")
    )
    prefect.copy(failed, 3)
    prefect.copy(failed, 2)
    prefect.copy(failed, 1, enabled=False)
    prefect.named(alarm)["enabled"] = False
    prefect.copy(alarm, 1)
    changes = apply_automations(prefect.api, night(profile_of))
    assert changes == [
        f"automation removed, as it was there twice: {name}"
        for name in (failed, failed, failed, alarm)
    ]
    assert (prefect.named(failed)["id"], prefect.named(alarm)["id"]) == (
        f"{failed} 2",
        f"{alarm} 1",
    )
    assert len(prefect.automations) == len(prefect.names())


def filled_in(template: str, event: dict[str, Any], flow_run: str) -> Any:
    """Fill in a template as Prefect's server does it."""
    register_user_template_filters(all_filters)
    context = {"event": event, "flow_run": {"name": flow_run, "id": "f1"}}
    return json.loads(render_user_template_sync(template, context))


def rendered(form: NotifyFormat, reason: str | None) -> Any:
    message = Notification("failed", "is Failed", STATE_MESSAGE, "Look.")
    template = payload(message, 'a"b {{ 7 * 7 }}', form, "http://ui.example/")
    return filled_in(template, {"resource": {"prefect.state-message": reason}}, "refresh night")


def test_a_gate_that_waits_is_told_with_the_command_that_answers(profile_of: ProfileOf):
    specs = profile_automations(night(profile_of), [], "b")
    (waiting,) = [
        spec
        for spec in specs
        if spec["name"].endswith("message about a release that waits for approval")
    ]
    assert waiting["trigger"]["expect"] == ["qinglan.gate.waiting"]
    said = {
        "sentence": "Release it.",
        "until": "2026-11-23T03:00:00+00:00",
        "command": "qinglan release approve r <x",
    }
    (action,) = waiting["actions"]
    text = filled_in(action["payload"], {"payload": said}, "pipeline night")["text"]
    until = "2026-11-23T03:00:00+00:00"
    assert text.splitlines()[:2] == [
        f"Qinglan: pipeline night waits for an approval until {until}: Release it.",
        "Answer on its page (Resume), or: qinglan release approve r ‹x",
    ]


def test_an_alarm_pauses_what_trains_this_profile(profile_of: ProfileOf):
    own = Deployment("d-own", "train/train-night", "configs/night.yaml", paused=False)
    whole = Deployment("d-whole", "pipeline/pipeline-night", "night", paused=False)
    for deployments, stopped in (
        ([TRAIN, NIGHTLY], [TRAIN.id]),
        ([TRAIN, own, whole], ["d-own", "d-whole"]),
    ):
        (pausing,) = profile_automations(profile_of(name="night"), deployments, None)
        assert [action["deployment_id"] for action in pausing["actions"]] == stopped
    assert "qinglan.alarm.reward_up_gold_down" in pausing["trigger"]["expect"]
    assert "qinglan.alarm.zero_variance" not in pausing["trigger"]["expect"]
    assert profile_automations(profile_of(), [NIGHTLY], None) == []
    assert training_of([NIGHTLY], profile_of()) is None


def test_runs_of_a_profile_are_known_by_their_names(profile_of: ProfileOf):
    specs = profile_automations(night(profile_of, "a[b"), [], "b")
    failed = next(spec for spec in specs if spec["name"].endswith("message about a run failed"))
    body = failed | {"actions": [{"type": "do-nothing"}], "tags": []}
    trigger = AutomationCreate.model_validate(body).trigger.model_dump(mode="json")
    assert trigger["match"]["prefect.resource.name"] == [
        "* a[[]b",
        "*[ /]a[[]b.yaml",
        "*[ /]a[[]b.yml",
    ]


@pytest.mark.parametrize(("form", "path"), TEXT_IN.items())
def test_every_service_gets_the_reason_and_the_link(form: NotifyFormat, path: str):
    text = rendered(form, 'StageError: "{{ none }}" of the rows\nTraceback')
    for key in path.split("."):
        text = text[key]
    link = "http://ui.example/runs/flow-run/f1"
    assert text == (
        f'Qinglan: refresh night is Failed: StageError: "{{{{ none }}}}" of the rows\nLook.\n{link}'
    )


def test_an_event_calls_nobody_and_may_say_nothing():
    called = rendered("json", '<at user_id="all">all</at> <!channel>')
    assert called["reason"] == '‹at user_id="all">all‹/at> ‹!channel>'
    silent = rendered("json", None)
    assert (
        silent["text"]
        == "Qinglan: refresh night is Failed\nLook.\nhttp://ui.example/runs/flow-run/f1"
    )
    assert (silent["topic"], silent["profile"], silent["reason"]) == (
        "failed",
        'a"b {{ 7 * 7 }}',
        "",
    )
    assert len(rendered("json", "x" * 5_000)["reason"]) == 600
