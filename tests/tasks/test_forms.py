"""The run form as Prefect's page and server see it, and the overrides that it becomes."""

from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import ValidationError, validate
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from qinglan.config import Profile, load_profile, profile_names
from qinglan.tasks import forms
from qinglan.tasks.forms import Changes, PipelineChanges, RefreshChanges, Sets, overrides_of

ROOT = Path(__file__).parents[2]
FLOWS = sorted(path.stem for path in (ROOT / "qinglan" / "flows").glob("[a-z]*.py"))
FORMS = [
    form for form in vars(forms).values() if isinstance(form, type) and issubclass(form, Changes)
]


def schema_of(flow: str) -> dict[str, Any]:
    function = getattr(import_module(f"qinglan.flows.{flow}"), flow)
    return parameter_schema(function).model_dump_for_openapi()


@pytest.mark.parametrize("flow", FLOWS)
def test_every_parameter_is_described_and_nothing_has_to_be_filled_in(flow: str):
    schema = schema_of(flow)
    own_forms = {
        f"#/definitions/{name}": form for name, form in schema.get("definitions", {}).items()
    }
    for form in (schema, *own_forms.values()):
        for name, setting in form["properties"].items():
            # As the page does.
            resolved = own_forms.get(setting.get("$ref", ""), {}) | setting
            assert resolved["title"], name
            assert len(resolved["description"]) > 5, name
    for form in own_forms.values():
        assert form["additionalProperties"] is False
        for name, setting in form["properties"].items():
            assert setting["type"] in ("string", "integer", "number"), name
            # Prefect's page shows `anyOf` as buttons, and an optional switch as off.
            assert not {"anyOf", "default"} & setting.keys(), name
    assert "required" not in schema
    defaults = {name: setting["default"] for name, setting in schema["properties"].items()}
    validate(defaults, schema, raise_on_error=True)


def test_the_profile_is_chosen_or_given_by_path():
    by_name, by_path = schema_of("pipeline")["properties"]["profile"]["anyOf"]
    names = set(by_name["enum"])
    assert names == set(profile_names())
    assert {"embedded", "answer_judge", "medical"} <= names
    assert "type" not in by_path, "else Prefect's page takes a path that is typed for a name"


@pytest.mark.parametrize(
    ("parameters", "is_right"),
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
def test_the_server_refuses_a_typo(parameters: dict[str, Any], is_right: bool):
    with nullcontext() if is_right else pytest.raises(ValidationError):
        validate(parameters, schema_of("train"), raise_on_error=True)


@pytest.mark.parametrize("form", [form for form in FORMS if form.model_fields])
def test_every_setting_is_one_of_the_profile(form: type[Changes]):
    for name, setting in form.model_fields.items():
        (sets,) = [entry for entry in setting.metadata if isinstance(entry, Sets)]
        section: Any = Profile
        for part in sets.key.split("."):
            section = section_of(section.model_fields[part])
        assert section is None, f"{name} sets {sets.key}, a whole section"


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section of the profile that a field holds, if it holds one."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def test_changes_become_overrides_and_those_by_key_count_more():
    changes = PipelineChanges(max_rows=20, run_budget_usd=1.5, at_alarm="off", approval="none")
    profile = load_profile("embedded", overrides_of(changes, ["data.limit=30"]))
    assert (profile.data.limit, profile.budget.per_run_usd) == (30, 1.5)
    assert (profile.rl.alarms.default_action, profile.gate.approval) == ("off", "none")
    assert profile.rl == load_profile("embedded", ["rl.alarms.default_action=off"]).rl
    assert overrides_of(RefreshChanges(), ()) == ()
