"""Doctor as a whole: in time, in order, without any secret, and with a hint for every problem."""

import json
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from doubles import raising
from fake_ray import FakeRay
from fake_service import SIMULATED, completion, recall
from fixture_types import ProfileOf, Qinglan, Serve

from qinglan.config import FlowName, Profile, Trainer
from qinglan.ops.checks import HINTS, TIME_LIMITS_S, Check, PlannedCheck, start_check
from qinglan.ops.doctor import CLUSTER, MACHINE, PAID, SERVERS, machine, plan_checks
from qinglan.ops.doctor.machine import GB
from qinglan.ops.preflight import PROFILE, trainer

KEY = "sk-very-secret-0123456789"


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, no_settings: None) -> None:
    """No server, proxy, package, disk space or limit of the machine that the tests run on."""
    monkeypatch.setattr(trainer, "TRAINER_PACKAGES", ("pytest",))
    monkeypatch.setattr(machine, "memory_bytes", lambda: (64 * GB, 60 * GB))
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: SimpleNamespace(free=500 * GB))
    monkeypatch.setattr(
        machine.os, "statvfs", lambda _: SimpleNamespace(f_files=10**7, f_favail=10**6)
    )
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (65_536, 65_536))


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def live(profile_of: ProfileOf, url: str, **sections: Any) -> Profile:
    """Teacher and judge at one address, which takes the key."""
    chat = {"base_url": url, "api_key_env": "A_KEY"}
    both = {"teacher": {"model": "big", **chat}, "judge": {"model": "small", **chat}}
    return profile_of(**both | sections)


def test_a_check_that_fails_hides_no_other():
    ((check,), _) = start_check(
        PlannedCheck("g", "x", "y", raising(TimeoutError("its own\nmore")))
    )()
    assert (check.problem or "").startswith(
        "x (y): TimeoutError: its own; a setting that a library refuses, or a bug"
    )


def test_every_check_is_in_time_and_has_a_hint_of_its_own(profile_of: ProfileOf, ray: FakeRay):
    chat = {"model": "big", "base_url": "http://127.0.0.1:9/v1"}
    of_profile = {"compare": {"teachers": {"other": chat}}, "evaluate": {"teachers": ["other"]}}
    here = profile_of(teacher=chat, judge=chat, rl={"critic_model": "x"}, **of_profile)
    cluster = here.model_copy(update={"trainer": Trainer(ray_dashboard_url=ray.url)})
    flows: tuple[FlowName, ...] = ("pipeline", "refresh", "compare", "release")
    planned: list[PlannedCheck] = []
    for profile in (cluster, here):
        for flow in flows:
            planned += plan_checks(profile, flow, may_pay=True)
    assert {check.group for check in planned} == {MACHINE, PROFILE, SERVERS, CLUSTER, PAID}
    slowest_s = max(TIME_LIMITS_S[check.time_limit] for check in planned)
    assert slowest_s <= 25, "doctor takes less than half a minute"
    names = {check.name for check in planned if check.group != MACHINE}
    roles = {"teacher", "judge", "compare.teachers.other"}
    assert names >= {
        *roles,
        "teacher answers",
        "rag",
        "ray",
        "mount",
        "trainer packages",
        "prefect",
        "compare",
    }
    without_role = {name for name in names if name.removesuffix(" answers") not in roles}
    say_themselves_what_to_do = {"keys", "answers", "prefect", "mlflow", "nodes"}
    assert without_role - say_themselves_what_to_do <= HINTS.keys()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("rag", "correct the service, or what the rag section names (docs/how-to/rag.md)"),
        ("judge answers", "correct judge in the profile, or ask the service by hand"),
        ("something new", "see docs/how-to/operate.md"),
    ],
)
def test_a_problem_without_a_hint_is_given_one(name: str, hint: str):
    assert Check(name, "x", "it is wrong.").with_hint() == Check(name, "x", f"it is wrong; {hint}")
    for check in (Check(name, "x", note="well"), Check(name, "x", "it is wrong; correct it")):
        assert check.with_hint() == check


def test_a_service_that_hangs_holds_nothing_up(
    profile_of: ProfileOf, qinglan: Qinglan, silent: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("A_KEY", KEY)
    monkeypatch.setitem(TIME_LIMITS_S, "quick", 8.0)
    monkeypatch.setitem(TIME_LIMITS_S, "slow", 9.0)
    start = time.monotonic()
    status, out, err = qinglan(
        "doctor", profile=live(profile_of, f"{silent}/v1", rag={"url": silent})
    )
    assert time.monotonic() - start < 60
    assert (status, err) == (2, "error: 3 of the checks failed\n")
    assert f"✗ teacher (big at {silent}/v1): no result after 8 s; does it hang" in out
    assert "✓ ledger" in out
    assert "✓ mlflow" in out


def test_text_json_and_status_say_the_same(profile_of: ProfileOf, qinglan: Qinglan):
    profile = profile_of(**SIMULATED)
    status, out, _ = qinglan("doctor", profile=profile)
    assert status == 0
    assert [line for line in out.splitlines() if line[0] not in "✓!✗"] == [
        "This machine",
        "The profile",
        "Servers",
    ]
    status, out, _ = qinglan("doctor", "--json", "--flow", "refresh", profile=profile)
    assert (status, json.loads(out)["flow"], json.loads(out)["is_ready"]) == (0, "refresh", True)
    profile = profile_of(data={"workbook": "/no/[b].xlsx"})
    assert "✗ workbook: /no/[b].xlsx" in qinglan("doctor", "--flow", "refresh", profile=profile)[1]
    status, out, err = qinglan("doctor", "--json", "--flow", "refresh", profile=profile)
    by_name = {finding["name"]: finding for finding in json.loads(out)["findings"]}
    assert (status, json.loads(out)["is_ready"], err.count("\n")) == (2, False, 1)
    assert by_name["workbook"]["status"] == "problem"
    assert by_name["workbook"]["problem"].startswith("/no/[b].xlsx")


def test_an_unknown_recipe_ends_what_goes_by_it(profile_of: ProfileOf, qinglan: Qinglan):
    status, out, _ = qinglan("doctor", "--paid-probe", profile=profile_of(recipe="query_rewrit"))
    assert (status, "did you mean `query_rewrite`?" in out) == (2, True)
    assert "keys" not in out
    assert "✓ mlflow" in out


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_no_key_is_shown_even_where_a_service_repeats_it(
    profile_of: ProfileOf,
    qinglan: Qinglan,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
):
    password = "pass-word-of-the-proxy"
    monkeypatch.setenv("A_KEY", KEY)
    monkeypatch.setenv("A_LEDGER", "postgresql://me:p%40ss-of-ledger@127.0.0.1:9/db")
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:{password}@proxy.example:3128")
    service = serve(lambda _: (400, {"error": {"message": f"no good: Bearer {KEY}", "code": KEY}}))
    monkeypatch.setenv(
        "PREFECT_API_URL", service.url.replace("http://", "http://me:prefects-login@")
    )
    rag = {"url": service.url, "api_key_env": "A_KEY"}
    profile = live(profile_of, service.url, rag=rag, ledger={"url_env": "A_LEDGER"})
    status, out, err = qinglan("doctor", "--paid-probe", *words, profile=profile)
    assert status == 2
    assert "proxy.example:3128" in out
    assert f"{service.url} (PREFECT_API_URL)" in out
    for secret in (KEY, password, "p%40ss-of-ledger", "p@ss-of-ledger", "prefects-login"):
        assert secret not in out + err


def test_all_is_well_with_paid_answers(
    profile_of: ProfileOf, qinglan: Qinglan, serve: Serve, monkeypatch: pytest.MonkeyPatch
):
    def answer(body: dict[str, Any]) -> Any:
        if "messages" in body:
            return 200, completion('{"ready": true}')
        if "query" in body:
            return 200, recall(("a", 0.5))
        return 200, {"data": [{"id": "big"}, {"id": "small"}]}

    monkeypatch.setenv("A_KEY", KEY)
    service = serve(answer)
    profile = live(profile_of, service.url, rag={"url": service.url})
    status, out, err = qinglan("doctor", "--paid-probe", profile=profile)
    assert (status, err) == (0, "")
    assert "✓ keys: A_KEY set" in out
    assert "Paid answers\n✓ teacher answers: big at " in out
    assert out.rstrip().endswith("for $0.0002")


def test_the_cluster_is_looked_at_only_by_flows_that_use_it(
    profile_of: ProfileOf, qinglan: Qinglan, ray: FakeRay
):
    ray.refusal = "no job today"
    profile = profile_of(trainer={"ray_dashboard_url": ray.url})
    assert "The cluster\n✗ mount: Ray" in qinglan("doctor", profile=profile)[1]
    assert "The cluster" not in qinglan("doctor", "--flow", "refresh", profile=profile)[1]
