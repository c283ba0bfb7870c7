"""The command line: one line and status 2 for a mistake, nothing cut off when it is piped, and a
run and its result."""

import errno
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from doubles import raising
from fake_service import SIMULATED
from fixture_types import ProfileOf, Qinglan
from ledger_calls import call
from run_stages import end_stage

from qinglan import cli
from qinglan.cli import common
from qinglan.clients.roles import site_ledger
from qinglan.config import Profile
from qinglan.errors import StageError
from qinglan.evaluation.models import Report
from qinglan.registry.approval import WAITING_FILE, Waiting
from qinglan.runs.run import Run, finish_run, note, note_end, open_run

FLOW_RUN = "0193-a"


@pytest.fixture
def profile(profile_of: ProfileOf) -> Profile:
    return profile_of(**SIMULATED)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "pipeline", "--profile", "embeded"], "did you mean `embedded`?"),
        (
            ["run", "refresh", "--set", "data.limt=3"],
            "unknown key `data.limt`; did you mean `limit`?",
        ),
        (["run", "refresh", "--from", "latest"], "--from goes with train, evaluate and release"),
        (["run", "refresh", "--continue-anyway"], "--continue-anyway goes with pipeline and train"),
        (["show", "nope", "--set", "paths.runs=/no/runs"], "run `nope`: not found under /no/runs"),
        (
            ["run", "refresh", "--set", "prices.simulated-judge.in=3"],
            "known keys: batch_factor, input_per_million_usd",
        ),
    ],
)
def test_a_mistake_is_one_line_on_stderr(qinglan: Qinglan, words: list[str], message: str):
    status, out, err = qinglan(*words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert message in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["backup", "{file}/kept"], "{file}: File exists; a folder is needed there; move the file"),
        (
            ["up", "--set", "paths.state={file}/state"],
            "{file}/state/prefect_api_url: Not a directory; a folder is needed",
        ),
        (
            ["backup", "/proc/none/kept"],
            "/proc/none: No such file or directory; check the path, and",
        ),
        (["restore", "{binary}"], "{binary}/backup.json: `content`: Invalid JSON"),
    ],
)
def test_what_the_system_refuses_is_one_line(
    qinglan: Qinglan,
    profile: Profile,
    tmp_path: Path,
    no_settings: None,
    words: list[str],
    message: str,
):
    profile.paths.state.mkdir()
    file = tmp_path / "file"
    binary = tmp_path / "binary"
    file.touch()
    binary.mkdir()
    (binary / "backup.json").write_bytes(b"\x8e\xff")
    fill = {"file": file, "binary": binary}
    status, _, err = qinglan(*(word.format(**fill) for word in words), profile=profile)
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith(f"error: {message.format(**fill)}")


def test_a_full_disk_is_one_line(
    qinglan: Qinglan, profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source), None, str(target))

    monkeypatch.setattr(shutil, "copy2", full)
    profile.paths.state.mkdir()
    (profile.paths.state / "a.jsonl").write_text("{}")
    status, _, err = qinglan("backup", str(tmp_path / "kept"), profile=profile)
    assert (status, err.count("\n")) == (2, 1)
    assert re.match(
        rf"error: {tmp_path}/kept\.\w+\.partial/state/a\.jsonl: No space left on device; free", err
    )
    assert not list(tmp_path.glob("kept*"))


@pytest.mark.parametrize(
    "bug",
    [
        OSError(errno.ENOENT, "No such file"),
        OSError(errno.EINVAL, "Invalid argument", "a"),
        TimeoutError("late"),
    ],
)
def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, bug: OSError):
    monkeypatch.setattr("sys.argv", ["qinglan", "up"])
    monkeypatch.setattr(cli, "load_profile", raising(bug))
    with pytest.raises(OSError) as caught:
        cli.main()
    assert caught.value is bug


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The report of a run r1, where a run starts a flow that a test puts in the place of ours."""
    Report(run_id="r1", profile="test", recipe="query_rewrite").write(tmp_path / "report.json")
    monkeypatch.setattr("qinglan.ops.up.site.prefect_for", lambda *_: nullcontext(lambda: None))
    monkeypatch.setattr("qinglan.ops.preflight.require", lambda *_: None)
    return tmp_path / "report.json"


def test_run_starts_a_flow_and_shows(
    qinglan: Qinglan, profile: Profile, report: Path, monkeypatch: pytest.MonkeyPatch
):
    started: list[object] = []
    monkeypatch.setattr(cli, "_start", lambda *words: started.append(words) or report)
    status, out, _ = qinglan(
        "run", "train", "--from", "latest", "--set", "data.limit=3", profile=profile
    )
    assert status == 0
    assert started == [
        ("train", str(report.with_name("test.yaml")), ("data.limit=3",), False, "latest", False)
    ]
    assert f"Report: {profile.paths.runs}/r1/report.html" in out


def test_run_without_a_dataset_shows(
    qinglan: Qinglan, profile: Profile, report: Path, monkeypatch: pytest.MonkeyPatch
):
    error = StageError("no usable rows; run again with --set select.min_top1_score=0.4")
    error.report = report
    monkeypatch.setattr(cli, "_start", raising(error))
    status, out, err = qinglan("run", "refresh", profile=profile)
    assert status == 2
    assert f"Report: {profile.paths.runs}/r1/report.html" in out
    assert err.endswith(f"error: {error}\n")
    status, out, err = qinglan("run", "refresh", "--report-suffices", profile=profile)
    assert (status, err) == (0, "")
    assert out.endswith(f"report.html\nEnded early: {error}\n")


@pytest.mark.usefixtures("report")
def test_an_interrupted_run_says_how_it_goes_on(
    qinglan: Qinglan, profile: Profile, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cli, "_start", raising(KeyboardInterrupt()))
    status, _, err = qinglan("run", "refresh", profile=profile)
    assert status == 130
    assert err.endswith(
        "stopped; give the same command again and it goes on: answers that were paid for are kept\n"
    )
    fails: Any = partial(httpx.HTTPStatusError, request=None, response=None)
    for error in (httpx.ConnectError("refused"), fails("Server error '500 Internal Server Error'")):
        monkeypatch.setattr(cli, "_start", raising(error))
        status, _, err = qinglan("run", "refresh", profile=profile)
        said = (
            f"error: Prefect's server does not answer: {error}; see whether that of `prefect config"
        )
        assert status == 2
        assert err.splitlines()[-1].startswith(said)
        assert "Traceback" not in err


def test_a_pipe_gets_a_wide_table():
    code = "from qinglan.cli import out; print(out.width)"
    env = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")
    }
    process = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert int(process.stdout) >= 100


def test_what_comes_from_outside_gives_the_terminal_no_command(
    qinglan: Qinglan, capsys: pytest.CaptureFixture[str]
):
    common.say("\x1b[2J一 [red]行\x9b\n二行")
    assert capsys.readouterr().out == "[2J一 [red]行\n二行\n"
    assert "\x1b" not in qinglan("show", "\x1b]0;title\x07")[2]


# show


@pytest.fixture
def show(qinglan: Qinglan, profile_of: ProfileOf, tmp_path: Path, no_settings: None) -> Qinglan:
    """Run the command with a profile of this name."""

    def call(*words: str, of: str | None = None, **sections: Any) -> tuple[int, str, str]:
        if of:
            return qinglan("show", *words, profile=profile_of(name=of, **sections))
        return qinglan("show", *words, "--set", f"paths.runs={tmp_path / 'runs'}")

    return call


def ended(profile: Profile, flow: str = "refresh") -> Run:
    with open_run(profile, flow) as run:
        finish_run(run)
    Report(run_id=run.id, profile=profile.name, recipe="query_rewrite").write(
        run.directory / "report.json"
    )
    return run


def shown_of(run: Run) -> str:
    return f"Report: {run.directory / 'report.html'}"


def test_latest_is_the_profiles_own_where_one_is_named_and_the_one_that_was_continued_last(
    profile_of: ProfileOf, show: Qinglan
):
    own_run = ended(profile_of(name="acme"))
    other_run = ended(profile_of(name="beta"))
    status, out, _ = show("latest", of="acme")
    assert status == 0
    assert shown_of(own_run) in out
    assert shown_of(other_run) in show("latest")[1]
    assert shown_of(other_run) in show(other_run.id, of="acme")[1]
    status, out, err = show("latest", of="gamma")
    assert (status, out) == (2, "")
    assert err.startswith("error: run `latest`: profile gamma has no run under ")
    (own_run.directory / "report.json").unlink()
    assert (
        "has ended, but its report.json is missing; restore it from a backup"
        in show("latest", of="acme")[2]
    )
    with open_run(profile_of(name="acme"), "pipeline") as continued:
        continued.directory.joinpath("keep").touch()
    ended(profile_of(name="acme"))
    assert ended(profile_of(name="acme"), "pipeline").id == continued.id
    assert shown_of(continued) in show("latest", of="acme")[1]


def test_a_run_that_failed_shows_what_was_done_its_log_how_it_goes_on_and_its_report_if_any(
    profile_of: ProfileOf, show: Qinglan
):
    earlier = ended(profile_of(name="acme"))
    with open_run(profile_of(name="acme"), "refresh") as opened:
        run = note(opened, flow_run_id=FLOW_RUN)
        counts = {"rows_in": 9, "rows_out": 8, "dropped": {"empty_query": 1}}
        end_stage(run, "ingest", **counts)
        log = run.stage_directory("distill") / "ray.log"
        log.touch()
        (log.parent / "started.json").touch()
        note_end(run, StageError("distill: 9 of 10 calls failed (timeout 9)\nthe end of a log"))
    assert (
        "ended before its report: distill: 9 of 10 calls failed (timeout 9); `qinglan run"
        in show("latest")[2]
    )
    note_end(run, KeyboardInterrupt())
    assert "ended before its report: interrupted; `qinglan run" in show("latest")[2]
    # It goes on.
    note(run, flow_run_id=FLOW_RUN, ended_by="")
    status, out, err = show("latest", of="acme")
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith(
        f"error: run {run.id} (refresh of acme): ended before its report, as no process of this mac"
    )
    assert "`qinglan run refresh --profile acme` with the same --set goes on with it" in err
    assert f"`qinglan show {earlier.id}`" in err
    assert "empty_query 1" in out
    assert f"not done: distill\nLog: flow run {FLOW_RUN} on Prefect's pages" in out
    assert f"Log of distill: {log}\n" in out
    with open_run(profile_of(name="acme"), "refresh"):
        out = show("latest", of="acme")[1]
    assert "Done before the run was continued: ingest\n" in out
    assert "empty_query" not in out
    Report(run_id=run.id, profile="acme", recipe="query_rewrite").write(
        run.directory / "report.json"
    )
    note_end(run, StageError("no row may teach"))
    status, out, err = show("latest")
    assert status == 2
    assert shown_of(run) in out
    assert err == f"error: run {run.id} (refresh of acme): ended early: no row may teach\n"


def test_a_running_run_shows_where_its_log_is(
    profile_of: ProfileOf, show: Qinglan, monkeypatch: pytest.MonkeyPatch
):
    with open_run(profile_of(name="acme"), "refresh") as run:
        note(run, flow_run_id=FLOW_RUN)
        (run.stage_directory("distill") / "started.json").touch()
        (run.stage_directory("distill") / "progress.txt").write_text(
            "627/800 rows, 4.5 s left", encoding="utf-8"
        )
        with site_ledger(run.profile) as ledger:
            ledger.record([call(run_id=run.id, cost_usd=0.25)])
        status, out, err = show("latest", of="acme", notify={"ui_url": "http://prefect.example/"})
        monkeypatch.setenv("PREFECT_API_URL", "http://me:secret@127.0.0.1:4207/api")
        (run.profile.paths.state / "ledger.db").write_text("no database" * 100, encoding="utf-8")
        log = show("latest", of="acme")[1]
    assert "Begun, but not done: distill\n" in show("latest", of="acme")[1], (
        "nobody is at it any more"
    )
    assert f"Log: http://127.0.0.1:4207/runs/flow-run/{FLOW_RUN}\n" in log
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "Begun, but not done: distill (627/800 rows, 4.5 s left)",
        f"Log: http://prefect.example/runs/flow-run/{FLOW_RUN}",
        "Paid so far: $0.250",
        f"run {run.id} (refresh of acme): has not ended, so it has no report yet; look again later",
    ]


def test_a_run_that_waits_for_a_person_says_where(profile_of: ProfileOf, show: Qinglan):
    with open_run(profile_of(name="acme"), "pipeline") as run:
        page = "http://127.0.0.1:4200/runs/flow-run/x"
        waiting = Waiting(
            flow_run_id=uuid4(),
            api_url="http://127.0.0.1:4200/api",
            page=page,
            until="noon",
            workbook=Path("w.xlsx"),
        )
        (run.stage_directory("gate") / WAITING_FILE).write_text(waiting.model_dump_json())
        assert (
            f"waits for a person's approval until noon: {page}; it has no report yet"
            in show("latest", of="acme")[1]
        )
    # Its process was killed.
    err = show("latest", of="acme")[2]
    assert "waits for" not in err
    assert "ended before its report" in err


@pytest.mark.parametrize("recipe", ["query_rewrite", "answer_judge", "medical"])
def test_prompts_show_a_tenants_rules_to_teacher_and_judge_alone(
    qinglan: Qinglan, profile_of: ProfileOf, tmp_path: Path, recipe: str
):
    workbook = tmp_path / "q.csv"
    lines = (
        "问题,标准答案,待评答案,答案",
        "鱼油咋吃,饭后,随餐,饭后吃",
        "钙片{x}咋吃,饭后,随餐,饭后吃",
    )
    workbook.write_text("\n".join(lines), encoding="utf-8")
    tenant = {"teacher_rules": "写明{科目}" * 50, "judge_rules": "看科目\x1b"}
    changed = profile_of(recipe=recipe, tenant=tenant, **SIMULATED)
    changed = changed.model_copy(
        update={"data": changed.data.model_copy(update={"workbook": str(workbook)})}
    )
    status, out, _ = qinglan("prompts", "--row", "2", profile=changed)
    prompts = {part.split(",")[0]: part for part in out.split("\n\n") if "system" in part}
    assert status == 0
    assert "钙片{x}咋吃" in out
    assert "鱼油" not in out
    assert "\x1b" not in out
    assert [role for role, text in prompts.items() if "写明{科目}" * 50 in text] == ["teacher"]
    judges = [role for role in ("judge", "panel") if role in prompts]
    assert [role for role, text in prompts.items() if "看科目" in text] == judges
    read = ("--set", "data.columns.dialogue=标准答案")
    assert ("对话：<" in qinglan("prompts", *read, profile=changed)[1]) is (
        recipe == "query_rewrite"
    )
    assert (
        qinglan("prompts", "--row", "3", profile=changed)[2]
        == "error: --row 3: the workbook has fewer questions\n"
    )
