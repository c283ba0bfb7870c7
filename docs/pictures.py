"""Makes three of the pictures in docs/images.

    python docs/pictures.py {terminal,report,try_page} FROM TO

`terminal`: from what `make demo` printed, an SVG; `report`: from a run's report.html, a PNG;
`try_page`: from the address of a router with `serve.try_page`, a PNG of the first example's
answers.
"""

import argparse
import re
import shutil
from io import StringIO
from itertools import pairwise
from pathlib import Path

from playwright.sync_api import Page, ViewportSize, expect, sync_playwright
from rich.console import Console
from rich.text import Text

SIZE: ViewportSize = {"width": 1000, "height": 1120}
COLUMNS = 120
# Without Rich's own frame, which loads a font from another server.
FORMAT = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {terminal_width} {terminal_height}">
<style>{styles} text {{ font: {char_height}px ui-monospace, Menlo, Consolas, monospace; }}</style>
<defs>{lines}</defs>
<rect width="100%" height="100%" rx="8" fill="#0c0c0c"/>
<g transform="translate(8, 8)"><g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


def terminal(log: str) -> str:
    """The lines of a log in a terminal; of a stage's progress only the last."""
    lines = [
        re.sub(r"^([\d:]+)\.\d+ \| \w+ +\| (?:Task|Flow) run '[^']*' - ", r"\1  ", line)
        for line in log.splitlines()
    ]
    console = Console(record=True, width=COLUMNS, file=StringIO())
    console.print(Text("$ make demo"))
    for line, next_line in pairwise([*lines, ""]):
        stage = _stage_in_progress(line)
        if stage is None or stage != _stage_in_progress(next_line):
            console.print(Text(line), overflow="crop", no_wrap=True)
    return console.export_svg(code_format=FORMAT)


def _stage_in_progress(line: str) -> str | None:
    """The stage of whose progress the line tells; None for another line."""
    progress = re.search(r"  (\w+): [\d,]+/[\d,]+ ", line)
    return progress[1] if progress else None


def try_page(page: Page, url: str) -> None:
    """Open the page, ask the first example, and wait for every answer."""
    page.goto(url)
    page.locator("#examples button").first.click()
    expect(page.get_by_role("article").last).to_be_visible()
    page.wait_for_load_state("networkidle")


def main() -> None:
    """Make the picture that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", choices=("terminal", "report", "try_page"))
    parser.add_argument(
        "source", metavar="FROM", help="a log, a report.html, or a router's address"
    )
    parser.add_argument("target", metavar="TO", type=Path)
    options = parser.parse_args()
    if options.picture == "terminal":
        log = Path(options.source).read_text(encoding="utf-8")
        options.target.write_text(terminal(log), encoding="utf-8")
        return
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=chromium)
        page = browser.new_page(viewport=SIZE, locale="en")
        if options.picture == "try_page":
            try_page(page, options.source)
        else:
            page.goto(Path(options.source).absolute().as_uri())
        page.screenshot(path=options.target)


if __name__ == "__main__":
    main()
