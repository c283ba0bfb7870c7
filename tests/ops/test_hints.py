"""Every problem says what to do: our own messages by themselves, others by the check that they come from."""

import pytest
from fake_ray import FakeRay

from qinglan.config import Profile
from qinglan.ops import doctor
from qinglan.ops.checks import HINTS, Check


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
        ("judge answers", "correct judge in the profile, or ask the service by hand"),
        ("something new", "see docs/doctor.md"),
    ],
)
def test_a_problem_without_a_hint_is_given_one(name: str, said: str):
    assert Check(name, "x", "it is wrong.").with_hint() == Check(name, "x", f"it is wrong; {said}")
    for check in (Check(name, "x", note="well"), Check(name, "x", "it is wrong; correct it")):
        assert check.with_hint() == check
