"""The run form as Prefect's page and server see it, and what it comes to."""

from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import ValidationError, validate
from pydantic import BaseModel

from qinglan.config import Profile, load_profile, profile_names
from qinglan.tasks import forms
from qinglan.tasks.forms import Changes, PipelineChanges, RefreshChanges, Sets, overrides_of

FLOWS = sorted(path.stem for path in (Path(__file__).parents[2] / "flows").glob("[a-z]*.py"))
FORMS = [
    each for each in vars(forms).values() if isinstance(each, type) and issubclass(each, Changes)
]


def schema_of(flow: str) -> dict[str, Any]:
    return parameter_schema(getattr(import_module(f"flows.{flow}"), flow)).model_dump_for_openapi()


@pytest.mark.parametrize("flow", FLOWS)
def test_every_parameter_is_described_and_nothing_has_to_be_filled_in(flow: str):
    schema = schema_of(flow)
    known = {f"#/definitions/{name}": form for name, form in schema.get("definitions", {}).items()}
    for name, shown in (
        item for form in (schema, *known.values()) for item in form["properties"].items()
    ):
        resolved = known.get(shown.get("$ref", ""), {}) | shown  # as the page does
        assert resolved["title"] and len(resolved["description"]) > 5, name
    for form in known.values():
        assert form["additionalProperties"] is False
        for shown in form[
            "properties"
        ].values():  # Prefect's page shows `anyOf` as buttons, an optional switch as off
            assert (
                shown["type"] in ("string", "integer", "number")
                and not {"anyOf", "default"} & shown.keys()
            )
    assert "required" not in schema
    validate(
        {name: shown["default"] for name, shown in schema["properties"].items()},
        schema,
        raise_on_error=True,
    )


def test_the_profile_is_chosen_or_given_by_path():
    known, own = schema_of("pipeline")["properties"]["profile"]["anyOf"]
    assert {"embedded", "answer_judge", "medical"} <= {*known["enum"]} == {*profile_names()}
    assert "type" not in own  # else Prefect's page takes a path that is typed for one of the names


@pytest.mark.parametrize(
    ("given", "is_right"),
    [
        ({"profile": "/srv/own.yaml", "source": "20261101-020000-abcd"}, True),
        (
            {
                "changes": {"rl_steps": 5, "at_alarm": "off"},
                "overrides": ["prices.big={a: 1}", "sft.extra.x=1"],
            },
            True,
        ),
        ({"profile": "embeded"}, False),
        ({"changes": {"rl_step": 5}}, False),
        ({"changes": {"rl_steps": 0}}, False),
        ({"overrides": ["Data.limit=3"]}, False),
    ],
)
def test_the_server_refuses_a_typo(given: dict[str, Any], is_right: bool):
    with nullcontext() if is_right else pytest.raises(ValidationError):
        validate(given, schema_of("train"), raise_on_error=True)


@pytest.mark.parametrize("form", [form for form in FORMS if form.model_fields])
def test_every_setting_is_one_of_the_profile(form: type[Changes]):
    settings = {
        name: each.key
        for name, field in form.model_fields.items()
        for each in field.metadata
        if isinstance(each, Sets)
    }
    assert settings.keys() == form.model_fields.keys()
    for key in settings.values():
        section: Any = Profile
        for part in key.split("."):
            field = section.model_fields[part]
            kinds = [
                kind
                for kind in (field.annotation, *get_args(field.annotation))
                if isinstance(kind, type)
            ]
            section = next((kind for kind in kinds if issubclass(kind, BaseModel)), None)
        assert section is None, f"{key} is a whole section"


def test_changes_become_overrides_and_those_by_key_count_more():
    changes = PipelineChanges(max_rows=20, run_budget_usd=1.5, at_alarm="off", approval="none")
    profile = load_profile("embedded", overrides_of(changes, ["data.limit=30"]))
    assert (profile.data.limit, profile.budget.per_run_usd) == (30, 1.5)
    assert (profile.rl.alarms.default_action, profile.gate.approval) == ("off", "none")
    assert profile.rl == load_profile("embedded", ["rl.alarms.default_action=off"]).rl
    assert overrides_of(RefreshChanges(), ()) == ()
