"""The command line: one line and status 2 for a mistake, and nothing cut off when it is piped."""

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from fake_service import SIMULATED

from qinglan import cli
from qinglan.cli import common
from qinglan.config import Profile
from qinglan.evaluation.models import Api, Report, TrainingSummary

Qinglan = Callable[..., tuple[int, str, str]]


@pytest.fixture
def profile(profile_of: Callable[..., Profile]) -> Profile:
    return profile_of(rl={"rollout_engine": "cpu"}, **SIMULATED)


def report(run_id: str) -> Report:
    empty = {"versions": {}, "arms": {}, "stages": [], "comparisons": []}
    return Report(run_id=run_id, profile="test", recipe="query_rewrite", api=Api(), training=TrainingSummary(), **empty)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "pipeline", "--profile", "embeded"], "did you mean `embedded`?"),
        (["run", "refresh", "--set", "data.limt=3"], "unknown key `data.limt`; did you mean `limit`?"),
        (["run", "refresh", "--from", "latest"], "--from goes with train, evaluate and release"),
        (["run", "refresh", "--continue-anyway"], "--continue-anyway goes with pipeline and train"),
        (["show", "nope", "--set", "paths.runs=/no/runs"], "run `nope`: not found under /no/runs"),
        (["run", "refresh", "--set", "prices.simulated-judge.in=3"], "known keys: batch_factor, input_per_million_usd"),
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
        (["backup", "/proc/none/kept"], "/proc/none: No such file or directory; check the path, and"),
        (["restore", "{binary}"], "{binary}/backup.json: is no text ("),
    ],
)
def test_what_the_system_refuses_is_one_line(
    qinglan: Qinglan, profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
):
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    profile.paths.state.mkdir()
    file, binary = tmp_path / "file", tmp_path / "binary"
    file.touch()
    binary.mkdir()
    (binary / "backup.json").write_bytes(b"\x8e\xff")
    fill = {"file": file, "binary": binary}
    status, _, err = qinglan(*(word.format(**fill) for word in words), profile=profile)
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith(f"error: {message.format(**fill)}")


def test_a_full_disk_names_the_file_and_leaves_no_half_backup(
    qinglan: Qinglan, profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source), None, str(target))

    monkeypatch.setattr(shutil, "copy2", full)
    reviews = profile.paths.state / "reviews"
    reviews.mkdir(parents=True)
    (reviews / "a.jsonl").write_text("{}")
    status, _, err = qinglan("backup", str(tmp_path / "kept"), profile=profile)
    assert (status, err.count("\n")) == (2, 1)
    assert re.match(rf"error: {tmp_path}/kept\.\w+\.partial/state/reviews/a\.jsonl: No space left on device; free", err)
    assert not list(tmp_path.glob("kept*"))


@pytest.mark.parametrize(
    "bug",
    [
        OSError(errno.ENOENT, "No such file or directory"),
        OSError(errno.EINVAL, "Invalid argument", "a"),
        TimeoutError("too late"),
    ],
)
def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, bug: OSError):
    def fail(*_: object) -> None:
        raise bug

    monkeypatch.setattr("sys.argv", ["qinglan", "up"])
    monkeypatch.setattr(cli, "load_profile", fail)
    with pytest.raises(OSError) as caught:
        cli.main()
    assert caught.value is bug


def test_run_starts_the_flow_and_prints_its_table(
    qinglan: Qinglan, profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    report("r1").write(tmp_path / "report.json")
    started: list[object] = []
    monkeypatch.setattr(cli, "_start", lambda *words: started.append(words) or tmp_path / "report.json")
    monkeypatch.setattr("qinglan.ops.up.site.prefect_for", lambda *_: nullcontext(lambda: None))
    monkeypatch.setattr("qinglan.ops.preflight.require", lambda *_: None)
    status, out, _ = qinglan("run", "train", "--from", "latest", "--set", "data.limit=3", profile=profile)
    assert status == 0
    assert started == [("train", str(tmp_path / "test.yaml"), ("data.limit=3",), False, "latest", False)]
    assert f"Report: {tmp_path}/runs/r1/report.html" in out


def test_a_pipe_gets_a_wide_table():
    code = "from qinglan.cli import out; print(out.width)"
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 100


def test_what_comes_from_outside_gives_the_terminal_no_command(qinglan: Qinglan, capsys: pytest.CaptureFixture[str]):
    common.say("\x1b[2J一 [red]行\x9b\n二行")
    assert capsys.readouterr().out == "[2J一 [red]行\n二行\n"
    assert "\x1b" not in qinglan("show", "\x1b]0;title\x07")[2]
