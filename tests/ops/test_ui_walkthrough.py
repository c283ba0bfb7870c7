"""`qinglan up` as a new user has it before them: everything in a real browser, in the order of a
first day.

Each test goes on where the one before it left the site. Pictures go to the folder that
`QINGLAN_SHOTS` names.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from playwright.sync_api import Browser, expect
from prefect_page import NEEDS_CHROMIUM, PrefectPage, chromium
from qinglan_process import RunningQinglan, own_environment
from waiting import wait_until

from qinglan.runs.processes import free_port

pytestmark = [pytest.mark.slow, pytest.mark.extended, NEEDS_CHROMIUM]

SMALL = Path(__file__).parents[2] / "docker" / "try.profile.yaml"
MARK = "QINGLAN_WALKTHROUGH"
"""Every process of the site has it in its environment."""


class Site(RunningQinglan):
    """A user's working directory, with a profile of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "configs").mkdir()
        (folder / "configs" / "small.yaml").write_bytes(SMALL.read_bytes())
        self.prefect_port, self.mlflow_port = free_port(), free_port()
        self.prefect_url = f"http://127.0.0.1:{self.prefect_port}"
        self.mlflow_url = f"http://127.0.0.1:{self.mlflow_port}"
        words = ["up", f"--prefect-port={self.prefect_port}", f"--mlflow-port={self.mlflow_port}"]
        super().__init__(
            folder / "up.log", *words, cwd=folder, env=own_environment(**{MARK: str(folder)})
        )

    def end(self, number: int) -> int | None:
        """By this signal, and wait until no process of the site is left."""
        self.process.send_signal(number)
        status = self.process.wait(timeout=300)
        wait_until(
            "the end of every process", lambda: not self.processes(), 300, explain=self.processes
        )
        return int(status)

    def processes(self, **environ: str) -> list[str]:
        """Command lines of those that live, or of those of them that have this in their
        environment."""
        wanted = environ | {MARK: str(self.folder)}
        found = []
        for process in psutil.process_iter(["environ", "status"]):
            if (
                wanted.items() <= (process.info["environ"] or {}).items()
                and process.info["status"] != "zombie"
            ):
                with suppress(psutil.NoSuchProcess):
                    found.append(" ".join(process.cmdline()))
        return found

    def terminal(self, *words: str) -> "subprocess.CompletedProcess[str]":
        env = own_environment(
            PREFECT_API_URL=f"{self.prefect_url}/api", PREFECT_HOME=str(self.folder / "client")
        )
        argv = [sys.executable, "-m", *words]
        return subprocess.run(
            argv, cwd=self.folder, env=env, capture_output=True, text=True, timeout=600, check=False
        )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("walk"))
    try:
        site.wait_for("Ctrl-C stops")
        yield site
    finally:
        if site.process.poll() is None:
            site.end(signal.SIGKILL)  # whatever it is at, its start included


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the pictures go."""
    folder = Path(os.environ.get("QINGLAN_SHOTS") or tmp_path_factory.mktemp("shots")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def page(site: Site, browser: Browser, shots: Path) -> Iterator[PrefectPage]:
    page = PrefectPage(browser, site.prefect_url, shots)
    yield page
    page.close()


@pytest.fixture(scope="module")
def ids() -> dict[str, str]:
    """Flow runs that later tests come back to."""
    return {}


def test_the_form_refuses_what_is_wrong(page: PrefectPage) -> None:
    page.open_form("pipeline")
    page.fill_in({}, ["rl.total_steps"])
    page.button("Submit").click()
    expect(page.page.get_by_text("'rl.total_steps' does not match")).to_be_visible()
    page.shot("refused")
    page.fill_in({"RL: steps": "0"}, [])
    page.field("overrides").locator("textarea").fill("rl.seed=2")
    page.button("Submit").click()
    expect(page.page.get_by_text("0 is less than the minimum of 1").first).to_be_visible()
    assert page.runs() == []


def test_a_run_with_changed_parameters_starts_at_once(
    page: PrefectPage, ids: dict[str, str]
) -> None:
    changes = {"Budget of this run, US dollars": "5", "RL: steps": "2"}
    ids["pipeline"] = run = page.start("pipeline", changes, "rl.seed=2", shot="form")
    page.expect_state("Running")
    assert page.run(run)["parameters"]["changes"] == {"run_budget_usd": 5, "rl_steps": 2}
    assert page.run(run)["parameters"]["overrides"] == ["rl.seed=2"]


def test_a_schedule_is_set_and_switched_on(page: PrefectPage) -> None:
    refresh = page.deployment("refresh/refresh")
    patch = {"parameters": {"profile": "small"}}
    page.api.patch(f"deployments/{refresh['id']}", json=patch).raise_for_status()
    page.open_deployment("refresh")
    # Not one time a day: where the clicks take longer than until then, it would fire tomorrow.
    page.edit_schedule("refresh/refresh", "*/2 * * * *")
    page.switch_schedule("refresh/refresh")
    page.shot("schedule")
    schedule = page.schedule("refresh/refresh")["schedule"]
    assert (schedule["cron"], schedule["timezone"]) == ("*/2 * * * *", "Asia/Shanghai")


def test_progress_is_to_be_seen(page: PrefectPage, ids: dict[str, str]) -> None:
    artifacts = {
        "artifacts": {"flow_run_id": {"any_": [ids["pipeline"]]}, "type": {"any_": ["progress"]}}
    }
    page.leave()
    wait_until("two stages' progress", lambda: len(page.post("artifacts/filter", artifacts)) >= 2)
    page.open_run(ids["pipeline"])
    expect(page.page.get_by_text("180 of 180 rows of questions.xlsx are usable")).to_be_visible()
    page.expect_state("Running")
    page.shot("running")
    artifacts["artifacts"]["key"] = {"any_": ["base-model-progress"]}

    def is_pretrained() -> bool:
        return any(each["data"] == 100 for each in page.post("artifacts/filter", artifacts))

    page.leave()
    wait_until("the base model's progress", is_pretrained)
    page.open_run(ids["pipeline"])
    page.tab("Artifacts")
    expect(page.artifact("base-model-progress")).to_be_visible()
    expect(page.artifact("base-model-progress")).to_contain_text("30/30 steps")


def test_the_schedule_fires_by_itself(site: Site, page: PrefectPage) -> None:
    def fired() -> list[dict[str, Any]]:
        return [run for run in page.runs() if run["auto_scheduled"]]

    page.leave()
    log = site.folder / ".qinglan" / "logs" / "prefect_server.log"
    wait_until("the schedule's run", fired, explain=log.read_text)
    schedule = page.schedule("refresh/refresh")
    path = f"deployments/{schedule['deployment_id']}/schedules/{schedule['id']}"
    page.api.patch(path, json={"active": False}).raise_for_status()
    run = fired()[-1]
    page.open_run(run["id"])
    page.expect_state("Completed")
    assert run["parameters"] == {"profile": "small"}


def test_a_run_can_be_cancelled(site: Site, page: PrefectPage) -> None:
    overrides = [
        "embedded.teacher_latency_ms=3000",
        "teacher.max_tokens=100",
        "teacher.concurrency=4",
    ]
    run = page.start("refresh", {}, *overrides)
    page.expect_state("Running")
    wait_until(
        "the engine and its simulators", lambda: len(site.processes(PREFECT__FLOW_RUN_ID=run)) > 2
    )
    page.press("Cancel", confirm="Confirm")
    page.expect_state("Cancelled")
    page.shot("cancelled")
    wait_until(
        "their end", lambda: not site.processes(PREFECT__FLOW_RUN_ID=run), explain=site.processes
    )


def test_a_failed_run_is_retried_once_the_cause_is_gone(site: Site, page: PrefectPage) -> None:
    run = page.start("refresh", {}, "data.workbook=questions.xlsx")
    page.expect_state("Failed")
    expect(
        page.page.get_by_text("questions.xlsx: no such file; correct data.workbook").first
    ).to_be_visible()
    page.shot("failed")
    sample = next((site.folder / ".qinglan" / "sample").glob("query_rewrite-*/questions.xlsx"))
    (site.folder / "questions.xlsx").write_bytes(sample.read_bytes())
    page.press("Retry", confirm="Retry")
    page.expect_state("Completed")
    assert page.run(run)["run_count"] == 2


def test_a_run_from_the_terminal(site: Site, page: PrefectPage) -> None:
    page.leave()
    watched = ("prefect", "deployment", "run", "refresh/refresh", "--watch")
    done = site.terminal(*watched, "-p", "profile=small")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prefect.flow-run.Running" in done.stdout
    assert "'Completed'" in done.stdout
    failed = site.terminal(*watched, "-p", 'overrides=["data.workbook=missing.xlsx"]')
    assert failed.returncode != 0
    assert "'Failed'" in failed.stdout + failed.stderr


def test_the_pipeline_completes_and_its_artifacts_can_be_opened(
    page: PrefectPage, ids: dict[str, str]
) -> None:
    page.wait_for(ids["pipeline"], "Completed", within_s=1200)
    page.open_run(ids["pipeline"])
    page.expect_state("Completed")
    page.page.wait_for_timeout(2000)  # the stages are drawn
    page.shot("run")
    page.tab("Artifacts")
    expect(page.artifact("data-card")).to_be_visible()
    page.shot("artifacts")
    page.artifact("data-card").click()
    expect(page.page.get_by_role("heading", name="Splits")).to_be_visible()
    page.shot("data_card")
    page.open_run(ids["pipeline"])
    page.tab("Artifacts")
    page.artifact("result").click()
    expect(page.page.get_by_text("mean top-1 score")).to_be_visible()
    report = page.page.locator("code").filter(has_text="report.html").inner_text()
    assert Path(report).read_text(encoding="utf-8").lower().lstrip().startswith("<!doctype html>")
    assert (
        json.loads(Path(report).with_suffix(".json").read_text(encoding="utf-8"))["training"]["rl"][
            "steps"
        ]
        == 2
    )
    page.shot("result")


def test_mlflow_shows_the_run_and_its_metrics(
    site: Site, page: PrefectPage, browser: Browser, shots: Path
) -> None:
    tab = browser.new_page(viewport={"width": 1280, "height": 800})
    tab.set_default_timeout(120_000)
    asked: set[str] = set()
    tab.on("request", lambda request: asked.add(request.url))
    tab.goto(site.mlflow_url)
    tab.get_by_role(
        "button", name="Close", exact=True
    ).click()  # of its assistant, which knows no model here
    tab.get_by_text("Model training", exact=True).click()
    tab.get_by_role("link", name="qinglan", exact=True).first.click()
    tab.get_by_role("link", name=re.compile("pipeline small$")).click()
    tab.get_by_role("tab", name="Model metrics").click()
    tab.get_by_placeholder("Search metric charts").fill("top1")
    expect(tab.get_by_text(re.compile("top1")).first).to_be_visible()
    tab.wait_for_timeout(2000)  # the charts are drawn
    tab.screenshot(path=shots / "ui_mlflow.png")
    tab.close()
    assert [url for url in asked if not url.startswith((site.mlflow_url, "data:", "blob:"))] == []


def test_ctrl_c_leaves_no_process_and_no_page_asked_anyone_outside(
    site: Site, page: PrefectPage
) -> None:
    """Last: it ends the site."""
    assert page.hosts <= {"127.0.0.1", ""}
    assert site.end(signal.SIGINT) == 0
