"""The report in a real browser: a phone's width, the language switch, and paper."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page
from prefect_page import NEEDS_CHROMIUM, chromium
from question_rows import row
from report_fixture import comparison, example, full, report, slices

from qinglan.config import Select
from qinglan.data.dataset.thresholds import SelectedScores
from qinglan.evaluation.models import Report
from qinglan.evaluation.report.html import render_html
from qinglan.grading.validation_statistics import RetrievalStatistics
from qinglan.recipes import get_recipe
from qinglan.recipes.selection import select
from qinglan.rows import Retrieved

pytestmark = [pytest.mark.slow, pytest.mark.extended, NEEDS_CHROMIUM]

LONG = "请问" + "一" * 300 + "https" + "x" * 300
"""No word of it fits on a phone."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


def opened(browser: Browser, folder: Path, content: Report, width: int = 375) -> Page:
    render_html(content, folder / "report.html")
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.goto((folder / "report.html").as_uri())
    return page


def unwieldy() -> Report:
    """Long names, texts and numbers wherever somebody else gives them."""
    arms = {
        f"a-teacher-with-a-long-name-{i}": full().arms["teacher"].model_dump() for i in range(4)
    }
    cut = slices()
    cut[1] |= {"value": LONG}
    stage = {
        "name": LONG,
        "seconds": 1,
        "rows_in": 2_000_000,
        "rows_out": 1,
        "dropped": {LONG: 1_999_999},
    }
    return full(
        arms=full().arms | arms, slices=cut, examples=[example(LONG)], stages=[stage], command=LONG
    )


def kept_nothing() -> Report:
    """The report of a refresh of which no row may teach."""
    recipe, config, validated = (
        get_recipe("query_rewrite"),
        Select(min_top1_score=0.9),
        RetrievalStatistics(),
    )
    retrieved = {
        f"{name}_retrieved": Retrieved(ids=("d",), scores=(0.7,)) for name in ("original", "answer")
    }
    rows = [row(f"鱼油{n}", answer="鱼油 用量", **retrieved) for n in range(9)]
    for validated_row in rows:
        validated.add(validated_row)
    findings = SelectedScores(select(rows, recipe.grader, config), recipe, config).findings()
    stage = {
        "name": "select",
        "seconds": 1,
        "rows_in": 9,
        "rows_out": 0,
        "dropped": {"below_threshold": 9},
    }
    data: dict[str, Any] = {
        "stages": [stage],
        "findings": findings,
        "distributions": validated.histograms(),
    }
    arms = {name: full().arms[name] for name in ("original", "teacher")}
    gain = comparison("teacher", "original", 0.3, (0.2, 0.4), metric="mean_top1_score")
    return report(arms=arms, comparisons=[gain], training={}, curves={}, **data)


def test_a_phone_never_scrolls_sideways(browser: Browser, tmp_path: Path) -> None:
    for content in (
        full(),
        kept_nothing(),
        unwieldy(),
        Report(run_id="r", profile="p", recipe="query_rewrite"),
    ):
        for width in (320, 375):
            page = opened(browser, tmp_path, content, width)
            for language in ("lang-en", "lang-zh"):
                page.locator(f"label[for={language}]").click()
                page.evaluate(
                    "document.querySelectorAll('details').forEach(each => each.open = true)"
                )
                assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_that_shuts_anyone_out(
    browser: Browser, tmp_path: Path, scheme: Literal["light", "dark"]
):
    for content in (full(), kept_nothing()):
        page = opened(browser, tmp_path, content, 1000)
        page.emulate_media(color_scheme=scheme)
        for language in ("lang-en", "lang-zh"):
            page.locator(f"label[for={language}]").click()
            page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
            results = Axe().run(page, options={"resultTypes": ["violations"]})
            assert not results.violations_count, results.generate_report()


def test_one_click_changes_the_language(browser: Browser, tmp_path: Path) -> None:
    page = opened(browser, tmp_path, full(), 1000)
    assert page.get_by_text("Is it safe to ship?").is_visible()
    assert not page.get_by_text("可以上线吗？").is_visible()
    page.locator("label[for=lang-zh]").click()
    assert page.get_by_text("可以上线吗？").is_visible()
    assert not page.get_by_text("Is it safe to ship?").is_visible()
    page.keyboard.press("ArrowLeft")
    assert page.get_by_text("Is it safe to ship?").is_visible()


def test_paper_is_light_and_shows_what_is_folded(browser: Browser, tmp_path: Path) -> None:
    page = opened(browser, tmp_path, full(), 1000)
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator(".switch").is_visible()
    assert page.get_by_text("All arms by slice").is_visible()
    assert page.pdf(format="A4").count(b"/Type /Page\n") > 3
