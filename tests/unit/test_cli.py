"""The command line: one line and status 2 for a mistake, and nothing cut off when it is piped."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

from qinglan import cli, preflight
from qinglan.config import Profile
from qinglan.report import Api, Report, Training
from qinglan.runs import open_run

ProfileOf = Callable[..., Profile]
Qinglan = Callable[..., tuple[int, str, str]]


@pytest.fixture
def profile_path(profile_of: ProfileOf, tmp_path: Path) -> str:
    path = tmp_path / "p.yaml"
    models = {"teacher": {"model": "standin-rewriter"}, "judge": {"model": "standin-judge"}}
    price = {"input_per_million_usd": 1, "output_per_million_usd": 1}
    prices = dict.fromkeys(("standin-rewriter", "standin-judge"), price)
    profile = profile_of(rl={"rollout_engine": "cpu"}, prices=prices, **models)
    path.write_text(yaml.safe_dump(profile.model_dump(mode="json")))
    return str(path)


@pytest.fixture
def qinglan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Qinglan:
    """Run the command in this process: status, stdout, stderr."""

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["qinglan", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return call


def report(run_id: str) -> Report:
    empty = {"versions": {}, "arms": {}, "stages": [], "comparisons": []}
    return Report(run_id=run_id, profile="test", recipe="query_rewrite", api=Api(), training=Training(), **empty)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "pipeline", "--profile", "embeded"], "did you mean `embedded`?"),
        (["run", "refresh", "--set", "data.limt=3"], "unknown key `data.limt`; did you mean `limit`?"),
        (["run", "refresh", "--from", "latest"], "--from goes with train, evaluate and release"),
        (["show", "nope", "--set", "paths.runs=/no/runs"], "run `nope`: not found under /no/runs"),
        (["run", "refresh", "--set", "prices.standin-judge.in=3"], "known keys: batch_factor, input_per_million_usd"),
    ],
)
def test_a_mistake_is_one_line_on_stderr(qinglan: Qinglan, words: list[str], message: str):
    status, out, err = qinglan(*words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert message in err


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither the trainer's packages nor a Prefect server of this machine."""
    monkeypatch.setattr(preflight, "_TRAINER_PACKAGES", ("json",))
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    for name in ("PREFECT_API_URL", "PREFECT_PROFILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("bare")
def test_doctor_shows_what_is_wrong_and_goes_on(qinglan: Qinglan, profile_path: str):
    status, out, err = qinglan("doctor", "--profile", profile_path, "--set", "data.workbook=/no/[b].xlsx")
    assert (status, err) == (2, "error: 1 of the checks failed\n")
    assert "✗ workbook: /no/[b].xlsx" in out
    assert "✓ mlflow: " in out


@pytest.mark.usefixtures("bare")
def test_doctor_is_content(qinglan: Qinglan, profile_path: str):
    assert qinglan("doctor", "--profile", profile_path)[0] == 0


def test_run_starts_the_flow_and_prints_its_table(
    qinglan: Qinglan, profile_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    report("r1").write(tmp_path / "report.json")
    started: list[object] = []
    monkeypatch.setattr(cli, "_start", lambda *words: started.append(words) or tmp_path / "report.json")
    monkeypatch.setattr(cli, "prefect_for", lambda *_: nullcontext())
    monkeypatch.setattr(cli, "require", lambda *_: None)
    status, out, _ = qinglan("run", "train", "--profile", profile_path, "--from", "latest", "--set", "data.limit=3")
    assert status == 0
    assert started == [("train", profile_path, ("data.limit=3",), False, "latest")]
    assert f"Report: {tmp_path}/runs/r1/report.html" in out


def test_show(qinglan: Qinglan, profile_of: ProfileOf, profile_path: str):
    with open_run(profile_of(), "pipeline") as run:
        pass
    assert "no such report" in qinglan("show", "latest", "--profile", profile_path)[2]
    report(run.id).write(run.directory / "report.json")
    status, out, _ = qinglan("show", "latest", "--profile", profile_path)
    assert (status, f"Report: {run.directory / 'report.html'}" in out) == (0, True)


def test_a_pipe_gets_a_wide_table():
    code = "from qinglan.cli import out; print(out.width)"
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 100
