"""Every ✗ says what to do: our own messages by themselves, others by the check that they come from."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_ray import FakeRay

from qinglan.clients import contract
from qinglan.config import Profile
from qinglan.ops import doctor, preflight
from qinglan.ops.checks import HINTS, Check
from qinglan.ops.preflight import services as preflight_services

MODULES = [
    *sorted(Path(doctor.__file__).parent.glob("*.py")),
    *(Path(str(module.__file__)) for module in (preflight, preflight_services, contract)),
]

PASSED_ON = {"{} (the probe cost {})", "{} ({}): {}", "rag {}: {}", "{}.model: {}"}
"""Where another message stands, whole: it says what to do."""


def text_of(node: ast.expr) -> str:
    """What is literally there; a value that is filled in is `{}`."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "{}"
    return "".join(text_of(each) for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr))


def messages(source: str) -> Iterator[tuple[int, str]]:
    """The literal texts of errors that are raised and of problems that a check is made with, by line."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id.endswith("Error") and node.args:
            problem: ast.expr = node.args[0]
        elif node.func.id == "Check" and len(node.args) > 2:
            problem = node.args[2]
        else:
            continue
        if any(isinstance(each, ast.JoinedStr) for each in ast.walk(problem)):
            yield node.lineno, text_of(problem)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_a_message_of_ours_says_what_to_do(path: Path):
    silent = [
        f"{path.name}:{line}: {text}"
        for line, text in messages(path.read_text(encoding="utf-8"))
        if "; " not in text and text not in PASSED_ON
    ]
    assert silent == []


def test_a_message_that_does_not_is_found():
    source = 'raise ConfigError(f"{x} is wrong")\nCheck("a", "", f"{x}: no")\nCheck("a", f"{x}", f"{x}; correct it")'
    assert list(messages(source)) == [(1, "{} is wrong"), (2, "{}: no"), (3, "{}; correct it")]


def test_every_check_has_a_hint_of_its_own(profile_of: object, ray: FakeRay):
    chat = {"model": "big", "base_url": "http://127.0.0.1:9/v1"}
    cluster: Profile = profile_of(  # type: ignore[operator]
        teacher=chat,
        judge=chat,
        compare={"teachers": {"other": chat}},
        evaluate={"teachers": ["other"]},
        rl={"critic_model": "x"},
        trainer={"ray_dashboard_url": ray.url},
    )
    here = cluster.model_copy(update={"trainer": cluster.trainer.model_copy(update={"ray_dashboard_url": None})})
    names = {
        probe.name
        for profile in (cluster, here)
        for flow in ("pipeline", "refresh", "compare", "release")
        for probe in doctor.plan_checks(profile, flow, may_pay=True)  # type: ignore[arg-type]
        if probe.group != doctor.MACHINE
    }
    roles = {"teacher", "judge", "compare.teachers.other"}
    assert names >= {*roles, "teacher answers", "rag", "ray", "mount", "trainer packages", "prefect", "compare"}
    others = {name for name in names if name.removesuffix(" answers") not in roles} - {"keys", "answers"}
    assert others <= HINTS.keys()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rag", "correct the service, or what the rag section names (docs/rag-service.md)"),
        ("compare.teachers.other", "correct compare.teachers.other in the profile, or ask the service by hand"),
        ("judge answers", "correct judge in the profile, or ask the service by hand"),
        ("something new", "see docs/doctor.md"),
    ],
)
def test_a_problem_without_a_hint_is_given_one(name: str, said: str):
    assert Check(name, "x", "it is wrong.").with_hint() == Check(name, "x", f"it is wrong; {said}")


def test_what_says_what_to_do_or_is_fine_stays_as_it_is():
    for check in (Check("rag", "x"), Check("rag", "x", note="well"), Check("rag", "x", "it is wrong; correct it")):
        assert check.with_hint() == check


def test_a_flow_that_starts_says_it_too(profile_of: object):
    profile: Profile = profile_of(evaluate={"red_team": "embedded"}, rag={"knowledge_base": __file__})  # type: ignore[operator]
    problems = {check.name: check.problem for check in preflight.inspect_profile(profile, "refresh")}
    assert "not JSON" in (problems["rag"] or "")
    assert "; " in (problems["rag"] or "")
