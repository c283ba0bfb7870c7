"""The documentation: what is generated is up to date, both languages say the same, every command and path is there."""

import os
import re
import runpy
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from fixture_types import Qinglan

from qinglan.cli import app
from qinglan.config import load_profile

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CHINESE = [ROOT / "README.zh.md", *sorted((DOCS / "start").glob("*.zh.md"))]
START = [ROOT / "README.md", *sorted(page for page in (DOCS / "start").glob("*.md") if page not in CHINESE)]
OTHER_PROGRAMS = {"export", "read", "ss"}
PATHS = re.compile(
    r"`((?:qinglan|tasks|flows|tests|benchmarks|configs|deployments|docker|examples|docs)/[\w./-]*(?:\.\w+|/))`"
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def code(page: Path) -> list[str]:
    """The fenced blocks, without comments, which each language has in its own words."""
    return [re.sub(r"\s+#.*", "", text) for _, text in FENCE.findall(read(page))]


def commands(page: Path) -> list[str]:
    blocks = [
        text
        for kind, text in FENCE.findall(read(page))
        if kind == "sh" or (page.name == "README.md" and "make" in text)
    ]
    return [re.sub(r"\s+# .*", "", line) for text in blocks for line in text.replace("\\\n", "").splitlines()]


GENERATED: dict[str, Any] = runpy.run_path(str(DOCS / "generate.py"))["PAGES"]


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_page_is_up_to_date(name: str) -> None:
    assert read(DOCS / "reference" / name) == GENERATED[name](), "run `python docs/generate.py`"


@pytest.mark.parametrize("chinese", CHINESE, ids=lambda page: page.name)
def test_both_languages_name_the_same_commands_and_figures(chinese: Path) -> None:
    english = chinese.with_name(chinese.name.replace(".zh.md", ".md"))
    assert code(chinese) == code(english)
    assert f"]({english.name})" in read(chinese) and f"]({chinese.name})" in read(english)
    figures = [set(re.findall(r"\d+(?:[.,]\d+)*", FENCE.sub("", read(page)))) for page in (chinese, english)]
    assert figures[0] == figures[1]


def test_every_start_page_is_there_in_both_languages() -> None:
    assert [page.name for page in START] == [page.name.replace(".zh.md", ".md") for page in CHINESE]


def parse(words: list[str]) -> None:
    """Let the command line read them, down to the sub-command, without running it."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("qinglan", words)
    while hasattr(command, "commands"):
        name, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, words, parent=context)
    load_profile("embedded", context.params.get("set_") or ())


@pytest.mark.parametrize("page", START, ids=lambda page: page.name)
def test_every_command_of_a_start_page_can_be_run(page: Path) -> None:
    assert commands(page)
    for line in commands(page):
        program, *words = shlex.split(line.split(" && ")[0])
        if program == "qinglan":
            parse(words)
        elif program == "make":
            subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, check=True)
        elif program.startswith("python") and words[0] != "-m":
            assert (ROOT / words[0]).is_file() or f"`{words[0]}`" in read(page), line
        else:
            assert program in OTHER_PROGRAMS or program.startswith(("python", "/opt/trainer/")), line


@pytest.mark.parametrize("page", START[1:], ids=lambda page: page.name)
def test_a_start_pages_profile_is_made_by_its_command(
    page: Path, qinglan: Qinglan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("questions.csv").write_text("咨询内容,文档\n鱼油怎么吃,a.txt\n钙片怎么吃,b.txt\n", encoding="utf-8")
    for line in commands(page):
        if line.startswith("qinglan init "):
            _, _, name, *options = shlex.split(line)
            assert qinglan("init", name, *options, "--no-doctor")[0] == 0
            assert load_profile(name).data.columns.query == "咨询内容"


@pytest.mark.parametrize("page", [*sorted(DOCS.rglob("*.md")), *START[:1], *CHINESE[:1]], ids=lambda page: page.name)
def test_a_page_names_files_that_are_there(page: Path) -> None:
    own = re.compile(r"NAME|topic|acme|team\.yaml|configuration\.md")  # what a reader makes
    assert [path for path in PATHS.findall(read(page)) if not own.search(path) and not (ROOT / path).exists()] == []


def test_the_site_has_every_page_and_asks_no_other_server() -> None:
    site = yaml.load(re.sub(r"!!python\S+", "", read(ROOT / "mkdocs.yml")), yaml.SafeLoader)

    def pages(part: Any) -> list[str]:
        if isinstance(part, str):
            return [part]
        return [page for each in (part.values() if isinstance(part, dict) else part) for page in pages(each)]

    assert sorted(pages(site["nav"])) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
    assert site["theme"]["font"] is False


def wait_for(url: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url, timeout=1)
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(url)


@pytest.mark.slow
@pytest.mark.extended
def test_the_tutorial_of_own_data_as_a_reader_follows_it(tmp_path: Path) -> None:
    page = DOCS / "start" / "own-data.md"
    blocks = FENCE.findall(read(page))
    (tmp_path / "make_sample.py").write_text(next(text for kind, text in blocks if kind == "python"), encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    lines = [shlex.split(line) for line in commands(page) if line.startswith(("python ", "qinglan "))]
    server, printed = None, ""
    try:
        for program, *words in lines:
            if "pipeline" in words:  # a whole training, which `make demo` and its tests run
                continue
            argv = [sys.executable, *(["-m", "qinglan.cli"] if program == "qinglan" else []), *words]
            if words[0].startswith("examples/"):
                server = subprocess.Popen(argv, cwd=tmp_path, env=environment)
                wait_for("http://127.0.0.1:7861/search")
                continue
            done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{words}: {(done.stdout + done.stderr)[-4000:]}"
            printed += done.stdout
    finally:
        if server:
            server.terminate()
            server.wait()
    for kind, text in blocks:
        if kind == "text":
            assert text in printed
