"""`qinglan release` and `qinglan lineage`, in this process."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from fixture_types import ProfileOf, Qinglan
from lineage_run import evaluated_run
from registered import Models
from run_stages import end_stage

from qinglan.config import Profile
from qinglan.evaluation.models import Decision
from qinglan.ops.prefect import approval
from qinglan.registry import registry_of
from qinglan.registry.approval import WAITING_FILE, Approval, Waiting, decided_by
from qinglan.runs.artifacts import Artifact, write_json
from qinglan.runs.run import Run, open_run

PASSED = Decision(verdict="promote", challenger="rl", rules=[])


@pytest.fixture
def profile(profile_of: ProfileOf, database: str, tmp_path: Path) -> Profile:
    return profile_of(tracking={"uri": database}, release={"name": f"m.{tmp_path.name}"})


@pytest.fixture
def models(profile: Profile, database: str, tmp_path: Path) -> Models:
    return Models(database, registry_of(profile).name, tmp_path)


@pytest.fixture
def qinglan(qinglan: Qinglan, profile: Profile) -> Qinglan:
    return partial(qinglan, profile=profile)


def test_promote_and_roll_back(qinglan: Qinglan, models: Models):
    assert "nothing is registered yet" in qinglan("release", "list")[2]
    models.register("one", "two")
    assert "champion 1" in qinglan("release", "promote", "1")[1]
    assert "champion 2, previous 1" in qinglan("release", "promote", "2")[1]
    lines = qinglan("release", "list")[1].splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [
        ["2", "champion", "promote"],
        ["1", "previous", "promote"],
    ]
    output = qinglan("release", "show")[1]
    for part in (
        "alias",
        "champion",
        "promote: Release the RL student",
        "run-1",
        "with the weights",
        "promoted",
    ):
        assert part in output
    assert "champion 1, previous 2" in qinglan("release", "rollback", "--reason", "slow")[1]
    assert "rolled back to version 1: slow" in qinglan("release", "show", "2")[1]
    status, out, err = qinglan("release", "show", "9")
    assert (status, out, err.count("\n")) == (2, "", 1)


def test_a_refused_model_needs_force_and_a_reason(qinglan: Qinglan, models: Models):
    models.registry.register(models.candidate("one", "refuse"))
    assert "the gate said refuse" in qinglan("release", "promote", "1")[2]
    assert "--force: needs a --reason" in qinglan("release", "promote", "1", "--force")[2]
    assert qinglan("release", "promote", "1", "--force", "--reason", "it is known")[0] == 0
    assert models.client.get_model_version(models.name, "1").tags["forced"] == "it is known"


def save_gate(run: Run, decision: Decision) -> None:
    path = run.stage_directory("gate") / "decision.json"
    write_json(path, decision.model_dump(mode="json"))
    end_stage(run, "gate", artifacts={"decision": Artifact.of(path)})


def undecided(profile: Profile, models: Models) -> str:
    """A run that nobody answered in time, and its version."""
    decision = decided_by(PASSED, None)
    with open_run(profile, "evaluate") as run:
        save_gate(run, decision)
        released = models.registry.register(models.candidate(decision=decision)).model_dump(
            mode="json"
        )
        end_stage(run, "register", details={"released": released})
    return run.id


def test_an_approval_that_comes_late_releases(qinglan: Qinglan, profile: Profile, models: Models):
    run = undecided(profile, models)
    status, out, _ = qinglan("release", "approve", run, "--reviewer", "李雷", "--comment", "看过了")
    assert status == 0, out
    assert "champion 1" in out
    tags = models.client.get_model_version(models.name, "1").tags
    assert (tags["verdict"], tags["approval"]) == ("promote", "approved by 李雷: 看过了")
    _, _, err = qinglan("release", "approve", run, "--reviewer", "韩梅梅")
    assert "version 1 is already decided: Release the RL student: approved by 李雷" in err
    with open_run(profile, "refresh") as refused:
        save_gate(refused, models.candidate(verdict="refuse").decision)
    _, _, err = qinglan("release", "approve", refused.id, "--reviewer", "x")
    assert "waits for no approval; the gate said refuse" in err


def test_a_decision_that_can_t_be_read_is_one_line(qinglan: Qinglan, profile: Profile):
    with open_run(profile, "evaluate") as run:
        save_gate(run, PASSED)
    (run.directory / "gate" / "decision.json").write_text('{"verdict": "perhaps"}')
    status, _, err = qinglan("release", "approve", run.id, "--reviewer", "x")
    assert (status, err.count("\n")) == (2, 1)
    assert (
        "gate/decision.json is damaged or of another version of Qinglan; run its stage again" in err
    )


@pytest.fixture
def answers(
    qinglan: Qinglan, profile: Profile, serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """A person's answer to a run that waits at Prefect's server, which gives this reply."""

    def answer(reply: Any, *, running: bool) -> tuple[tuple[int, str, str], list[Any]]:
        monkeypatch.setattr(approval, "_TRIES", 1)
        service = serve(lambda _: reply)
        waiting = Waiting(
            flow_run_id=uuid4(), api_url=service.url, page="", until="", workbook=Path("w")
        )
        with open_run(profile, "evaluate") as run:
            (run.stage_directory("gate") / WAITING_FILE).write_text(waiting.model_dump_json())
            command = ("release", "approve", run.id, "--reviewer", "李雷")
            if running:
                return qinglan(*command), service.bodies
        # The process that waited has ended.
        return qinglan(*command), service.bodies

    return answer


@pytest.mark.parametrize(
    ("reply", "running", "status", "says"),
    [
        ((200, {"status": "ACCEPT"}), True, 0, "goes on: approved by 李雷"),
        (
            (200, {"status": "ABORT", "details": {"reason": "not paused"}}),
            True,
            2,
            "not take the answer: not paused",
        ),
        (
            (401, {"exception_message": "Unauthorized"}),
            True,
            2,
            "did not accept the login; set PREFECT_API_URL",
        ),
        ((200, {"status": "ACCEPT"}), False, 2, "its process has ended while it waited"),
    ],
)
def test_an_answer_reaches_the_flow_that_waits(
    answers: Any, reply: Any, running: bool, status: int, says: str
):
    (exit_status, out, err), bodies = answers(reply, running=running)
    assert exit_status == status, err
    assert says in (err if status else out)
    assert err.count("\n") == bool(status), err
    assert bodies == [{"run_input": {"approve": True, "reviewer": "李雷", "comment": ""}}] * running


def test_only_its_own_tenant_can_refuse_a_run(qinglan: Qinglan, profile: Profile, models: Models):
    run = undecided(profile, models)
    status, out, err = qinglan(
        "release", "approve", run, "--reviewer", "x", "--set", "release.name=other"
    )
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f"its model is {models.name}, and this profile's is other" in err
    assert models.registry.version("1").verdict == "undecided"
    assert qinglan("release", "approve", run, "--reviewer", "李雷", "--refuse")[0] == 0
    assert (models.registry.version("1").verdict, models.registry.aliases()) == ("refuse", {})


def test_an_approval_that_was_interrupted_is_completed(
    qinglan: Qinglan, profile: Profile, models: Models
):
    run = undecided(profile, models)
    models.registry.redecide("1", decided_by(PASSED, Approval(approve=True, reviewer="李雷")))
    assert (
        "is already decided" in qinglan("release", "approve", run, "--reviewer", "x", "--refuse")[2]
    )
    status, out, _ = qinglan("release", "approve", run, "--reviewer", "韩梅梅")
    assert status == 0, out
    assert "champion 1" in out
    assert "approved by 李雷" in models.registry.version("1").sentence


def test_lineage_prints_both_figures_and_the_way_to_a_cell(
    qinglan: Qinglan, profile: Profile, models: Models
):
    run = evaluated_run(profile).run.name
    models.registry.register(models.candidate(run_id=run))
    models.registry.promote("1")
    status, out, _ = qinglan("lineage", "champion", "--metric", "top1", "--worst", "1")
    assert status == 0
    for part in (
        "1 (champion)",
        "rl/top1 = 0.500000",
        "mean over 2 of 3 rows: the same",
        "q.xlsx!问题!A3",
        "乙",
    ):
        assert part in out
    out = qinglan("lineage", run, "--row", "c")[1]
    assert "failed: rag_unavailable" in out
    assert "q.xlsx!问题!A4" in out
