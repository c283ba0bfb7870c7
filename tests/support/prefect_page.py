"""Prefect's page in the hands of a user, who fills in forms, presses buttons and reads."""

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright
from waiting import wait_until

from qinglan.ops.prefect.api import RetryingClient

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
NEEDS_CHROMIUM = pytest.mark.skipif(
    CHROMIUM is None, reason="needs chromium (apt install chromium)"
)
_LOUD = ("gpu", "quic", "background-networking", "component-update", "sync")
_MOUSE = (
    "--blink-settings=primaryHoverType=2,availableHoverTypes=2,"
    "primaryPointerType=4,availablePointerTypes=4"
)
"""Playwright's pretence of a mouse that hovers. Without one, Prefect's page has plain lists to
choose from."""
_TIMEOUT_MS = 60_000
_CLICKS = 4
_LONGEST_S = 300.0
"""Bound for things that take a moment, on a machine that has others to serve."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with a new, empty profile that asks nobody for anything by itself."""
    expect.set_options(timeout=_TIMEOUT_MS)
    quiet = ["--no-first-run", *(f"--disable-{feature}" for feature in _LOUD)]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=quiet, ignore_default_args=[_MOUSE]
        )
        yield browser
        browser.close()


class PrefectPage:
    """One tab. Remembers which hosts it asked."""

    def __init__(self, browser: Browser, url: str, shots: Path) -> None:
        self.url = url
        self._shots = shots
        self.page: Page = browser.new_page(viewport={"width": 1280, "height": 800})
        self.page.set_default_timeout(_TIMEOUT_MS)
        self.hosts: set[str] = set()
        self.page.on("request", lambda request: self.hosts.add(httpx2.URL(request.url).host))
        self.api = RetryingClient(base_url=f"{url}/api", trust_env=False, timeout=60)

    def close(self) -> None:
        self.page.close()
        self.api.close()

    def shot(self, name: str) -> None:
        """Keep a picture of the page, once it stands still."""
        self.page.mouse.move(640, 799)
        self.page.wait_for_timeout(1000)
        self.page.screenshot(path=self._shots / f"ui_{name}.png")

    def open(self, path: str) -> None:
        self.page.goto(f"{self.url}/{path}")

    def leave(self) -> None:
        """Show an empty page."""
        # The graph of a run, drawn without a GPU, costs half a core for as long as it is shown.
        self.page.goto("about:blank")

    def open_form(self, deployment: str) -> None:
        """Go from the list of deployments to the run form of one."""
        self.open_deployment(deployment)
        self.button("Run").click()
        self.page.get_by_text("Custom run", exact=True).click()
        expect(self.button("Submit")).to_be_visible()

    def open_deployment(self, name: str) -> None:
        self.open("deployments")
        self.page.locator("a[href*='/deployments/deployment/']").get_by_text(
            name, exact=True
        ).first.click()
        self.page.wait_for_url("**/deployments/deployment/**")

    def field(self, label: str) -> Locator:
        """A parameter of the form, with its label, explanation and input."""
        title = self.page.get_by_text(re.compile(rf"^{re.escape(label)}( \(Optional\))?$"))
        return self.page.locator(".schema-form-property").filter(has=title).last

    def fill_in(self, changes: dict[str, str], overrides: Sequence[str]) -> None:
        self.field("profile").locator("select").first.select_option("small")
        for label, value in changes.items():
            self.field(label).locator("input").fill(value)
        list_of_overrides = self.field("overrides")
        for number, override in enumerate(overrides):
            list_of_overrides.get_by_role("button", name="Add item").click()
            list_of_overrides.locator("textarea").nth(number).fill(override)

    def start(
        self, deployment: str, changes: dict[str, str], *overrides: str, shot: str = ""
    ) -> str:
        """Fill in the form and submit it; the flow run's id, its page open.

        Args:
            shot: name for a picture of the form as it is submitted.
        """
        ids_before = {run["id"] for run in self.runs()}
        new_ids: list[str] = []
        for _ in range(_CLICKS):
            self.open_form(deployment)
            self.fill_in(changes, overrides)
            if shot:
                self.page.evaluate(
                    "document.querySelectorAll('*').forEach(each => each.scrollTo(0, 0))"
                )
                self.shot(shot)
            self.button("Submit").click()
            # A click that was refused made no run, one that was heard late has made it.
            with suppress(AssertionError):
                expect(self.page.get_by_text("scheduled to start").first).to_be_visible(
                    timeout=1.5 * _TIMEOUT_MS
                )
            new_ids = [run["id"] for run in self.runs() if run["id"] not in ids_before]
            if new_ids:
                break
        (run,) = new_ids
        self.open_run(run)
        return run

    def edit_schedule(self, deployment: str, cron: str) -> None:
        """Change the schedule of the open deployment, which has one."""

        def edit() -> None:
            self.page.locator(".deployment-schedule__menu").get_by_role("button").click()
            self.page.get_by_text("Edit", exact=True).last.click()
            dialog = self.page.locator(".p-modal")
            dialog.locator("input[type=text]").nth(1).fill(cron)
            dialog.get_by_role("button", name="Save", exact=True).click()

        self._until(lambda: self.schedule(deployment)["schedule"]["cron"] == cron, edit)

    def switch_schedule(self, deployment: str) -> None:
        switch = self.page.locator(".deployment-schedule-card").get_by_role("switch")
        self._until(lambda: self.schedule(deployment)["active"], switch.click)

    def schedule(self, deployment: str) -> dict[str, Any]:
        schedule: dict[str, Any] = self.deployment(deployment)["schedules"][0]
        return schedule

    def _until(self, is_done: Callable[[], bool], act: Callable[[], object]) -> None:
        """Act until it is done, as people do.

        On SQLite a server that is busy with a run refuses a click now and then, and a dialog that
        is filled in before the page has read the schedule saves the old one.
        """
        for _ in range(_CLICKS):
            # No click is made before the last one was answered: what was asked first may be written
            # last.
            with self.page.expect_response(
                lambda response: response.request.method == "PATCH", timeout=_LONGEST_S * 1000
            ):
                act()
            if is_done():
                return
            self.page.reload()
        raise AssertionError("the page was clicked in vain")

    def open_run(self, run: str) -> None:
        self.open(f"runs/flow-run/{run}")
        expect(self.page.get_by_role("link", name="Runs", exact=True)).to_be_visible()

    def expect_state(self, state: str) -> None:
        """Wait for a state: the page renews by itself the one that it shows."""
        badge = self.page.locator(".page-heading .state-badge").filter(has_text=state)
        expect(badge).to_be_visible(timeout=_LONGEST_S * 1000)

    def press(self, button: str, confirm: str) -> None:
        """Press a button that asks back, and goes once it was heard."""
        for attempt in range(_CLICKS):
            # The click before may have been heard late.
            if attempt and not self.button(button).is_visible():
                return
            self.button(button).click()
            self.page.locator(".p-modal").get_by_role("button", name=confirm, exact=True).click()
            with suppress(AssertionError):
                expect(self.button(button)).to_be_hidden(timeout=_TIMEOUT_MS / 2)
                return
            self.page.reload()
        raise AssertionError(f"the page's {button} was pressed and refused")

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True).first

    def tab(self, name: str) -> None:
        """Open a tab.

        It is opened again where the page went back to its first tab, as it does once it has read
        the run.
        """
        for _ in range(_CLICKS):
            self.page.locator(".p-tab").get_by_text(name, exact=True).click()
            self.page.wait_for_timeout(1000)
            if self.page.get_by_role("tabpanel", name=name, exact=True).is_visible():
                return
        raise AssertionError(f"the page did not stay on {name}")

    def artifact(self, key: str) -> Locator:
        """An artifact of the open run.

        The list has no more than what is on the screen: it is scrolled to where the artifact is.
        """
        card = self.page.locator("a[href*='/artifacts/artifact/']").filter(
            has=self.page.get_by_text(key, exact=True)
        )
        self.page.mouse.move(760, 700)
        for _ in range(40):
            if card.count():
                break
            self.page.mouse.wheel(0, 400)
            self.page.wait_for_timeout(200)
        return card.first

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self.api.post(path, json=body).raise_for_status().json()

    def runs(self) -> list[dict[str, Any]]:
        """All flow runs but those that a schedule will start one day."""
        runs = []
        for run in self.post("flow_runs/filter", {"sort": "EXPECTED_START_TIME_DESC"}):
            is_for_later = run["auto_scheduled"] and run["state"]["name"] == "Scheduled"
            if not is_for_later:
                runs.append(run)
        return runs

    def get(self, path: str) -> dict[str, Any]:
        answer: dict[str, Any] = self.api.get(path).raise_for_status().json()
        return answer

    def run(self, run: str) -> dict[str, Any]:
        return self.get(f"flow_runs/{run}")

    def wait_for(self, run: str, state: str, within_s: float = _LONGEST_S) -> None:
        """Wait until the server says that the run is in this state."""
        wait_until(
            state,
            lambda: self.run(run)["state"]["name"] == state,
            within_s,
            explain=lambda: self.run(run)["state"],
        )

    def deployment(self, name: str) -> dict[str, Any]:
        return self.get(f"deployments/name/{name}")
