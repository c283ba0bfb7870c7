"""The paid probe: the parameters of a run, a price, and no answer that passes as one."""

from collections.abc import Callable
from typing import Any

import pytest
from fake_service import FakeService, Script, completion

from qinglan.clients.roles import site_ledger
from qinglan.config import Profile
from qinglan.ops.checks import Check
from qinglan.ops.doctor.services import check_answer

ProfileOf = Callable[..., Profile]
Serve = Callable[[Script], FakeService]


def asked(profile_of: ProfileOf, service: FakeService, role: str = "teacher", **settings: Any) -> tuple[Profile, Check]:
    endpoint = {"model": "big", "base_url": service.url} | settings
    profile = profile_of(**{role: endpoint})
    return profile, check_answer(profile, role, getattr(profile, role))


def test_an_answer_says_what_it_cost_and_the_ledger_knows(profile_of: ProfileOf, serve: Serve):
    service = serve(lambda _: (200, completion("ready")))
    profile, check = asked(profile_of, service)
    assert (check.problem, check.detail[-12:]) == (None, " for $0.0002")
    asked(profile_of, service)
    with site_ledger(profile) as ledger:
        (spent,) = ledger.spending("role")
        assert (spent.key, spent.calls) == ("teacher-probe", 2)
        assert ledger.mean_tokens("big", "teacher") is None


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((200, completion("")), "teacher: empty answer; raise teacher.max_tokens, as thoughts count too, or name "),
        ((200, completion(None, refusal="no")), 'teacher: refused: "no"; name another model (the probe cost $0.0002)'),
        ((200, completion("rea", "length")), "teacher: truncated at max_tokens; raise teacher.max_tokens (the probe"),
        ((200, {"object": "error"}), "teacher: the answer is no chat completion; ask it by hand with the same"),
        ((404, {"error": {"message": "no"}}), "teacher: the service knows no model 'big'; set teacher.model (the"),
        ((400, {"error": {"message": "temperature"}}), "teacher: request refused: Error code: 400"),
        ((429, {"error": {"message": "slow down"}}), "teacher: Error code: 429"),
        (None, "teacher: "),
    ],
)
def test_whatever_is_no_answer_is_a_problem(profile_of: ProfileOf, serve: Serve, reply: Any, message: str):
    service = serve(lambda _: reply)
    assert (asked(profile_of, service)[1].problem or "").startswith(message)
    assert len(service.bodies) == 1


def test_parameters_are_those_of_a_run(profile_of: ProfileOf, serve: Serve):
    service = serve(lambda _: (200, completion('{"ready": true}')))
    settings = {"structured_output": "json_schema", "max_tokens": 99, "extra_body": {"thinking": "off"}}
    assert asked(profile_of, service, "judge", **settings)[1].problem is None
    (body,) = service.bodies
    assert (body["response_format"]["type"], body["max_tokens"], body["thinking"]) == ("json_schema", 99, "off")


def test_a_judge_that_ignores_the_format(profile_of: ProfileOf, serve: Serve):
    service = serve(lambda _: (200, completion("I am ready")))
    problem = asked(profile_of, service, "judge", structured_output="json_object")[1].problem or ""
    assert problem.startswith("judge: asked for JSON, it answers 'I am ready'; set judge.structured_output: off")
    assert asked(profile_of, service, "judge")[1].problem is None  # no format was asked for


def test_what_the_budget_forbids_is_not_asked(profile_of: ProfileOf, serve: Serve):
    service = serve(lambda _: (200, completion("ready")))
    profile = profile_of(teacher={"model": "big", "base_url": service.url}, budget={"per_month_usd": 0.0001})
    assert check_answer(profile, "teacher", profile.teacher).problem is None
    assert "nothing is left to spend" in (check_answer(profile, "teacher", profile.teacher).problem or "")
    assert len(service.bodies) == 1


def test_a_ledger_that_can_not_be_opened(profile_of: ProfileOf, serve: Serve):
    service = serve(lambda _: (200, completion("ready")))
    profile = profile_of(teacher={"model": "big", "base_url": service.url}, ledger={"url_env": "A_LEDGER"})
    assert "needs the environment variable A_LEDGER" in (
        check_answer(profile, "teacher", profile.teacher).problem or ""
    )
    assert service.bodies == []
