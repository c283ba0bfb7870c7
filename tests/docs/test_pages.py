"""The documentation: what is generated is up to date, both languages say the same, every command
and path is there."""

import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from fixture_types import Serve
from qinglan_process import own_environment, run_qinglan
from waiting import wait_until

from qinglan.cli import app
from qinglan.config import load_profile
from qinglan.runs.processes import health_problem
from qinglan.simulators.chat_server import SeededRequest, complete

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CHINESE = [ROOT / "README.zh.md", *sorted((DOCS / "start").glob("*.zh.md"))]
START = [
    ROOT / "README.md",
    *sorted(page for page in (DOCS / "start").glob("*.md") if page not in CHINESE),
]
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
    return [
        re.sub(r"\s+# .*", "", line)
        for text in blocks
        for line in text.replace("\\\n", "").splitlines()
    ]


GENERATED: dict[str, Any] = runpy.run_path(str(DOCS / "generate.py"))["PAGES"]


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_page_is_up_to_date(name: str) -> None:
    assert read(DOCS / "reference" / name) == GENERATED[name](), "run `python docs/generate.py`"


@pytest.mark.parametrize("chinese", CHINESE, ids=lambda page: page.name)
def test_both_languages_name_the_same_commands_and_figures(chinese: Path) -> None:
    english = chinese.with_name(chinese.name.replace(".zh.md", ".md"))
    assert code(chinese) == code(english)
    assert f"]({english.name})" in read(chinese) and f"]({chinese.name})" in read(english)
    figures = [
        re.findall(r"\d+(?:[.,]\d+)*", FENCE.sub("", read(page))) for page in (chinese, english)
    ]
    assert figures[0] == figures[1]


def test_the_readmes_results_are_among_those_that_were_measured() -> None:
    measured = read(DOCS / "reference" / "benchmarks.md")
    results = re.findall(r"\d\.\d{3}", read(ROOT / "README.md"))
    assert results
    assert [result for result in results if result not in measured] == []


def test_every_start_page_is_there_in_both_languages() -> None:
    assert [page.name for page in START] == [page.name.replace(".zh.md", ".md") for page in CHINESE]


def parse(words: list[str]) -> None:
    """Let the command line read them, down to the sub-command, without running it."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("qinglan", words)
    while hasattr(command, "commands"):
        name, command, words = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
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
            assert program in {"export", "mkdir", "read", "ss"} or program.startswith(
                ("python", "/opt/trainer/")
            ), line


@pytest.mark.parametrize(
    "page", [*sorted(DOCS.rglob("*.md")), *START[:1], *CHINESE[:1]], ids=lambda page: page.name
)
def test_a_page_names_files_that_are_there(page: Path) -> None:
    own = re.compile(r"NAME|topic|acme|team\.yaml|configuration\.md")  # what a reader makes
    assert [
        path
        for path in PATHS.findall(read(page))
        if not own.search(path) and not (ROOT / path).exists()
    ] == []


def test_the_site_has_every_page_and_asks_no_other_server() -> None:
    site = yaml.load(re.sub(r"!!python\S+", "", read(ROOT / "mkdocs.yml")), yaml.SafeLoader)

    def pages(part: Any) -> list[str]:
        if isinstance(part, str):
            return [part]
        return [
            page
            for each in (part.values() if isinstance(part, dict) else part)
            for page in pages(each)
        ]

    assert sorted(pages(site["nav"])) == sorted(
        str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")
    )
    assert site["theme"]["font"] is False
    readme = read(ROOT / "README.md") + "(docs/index.md)"
    assert [page.name for page in DOCS.glob("*.md") if f"(docs/{page.name})" not in readme] == []


@pytest.mark.slow
@pytest.mark.extended
def test_the_start_pages_as_a_reader_follows_them(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that needs neither GPU nor another's service; for the teacher stands a simulated one that
    takes any key."""
    asked: list[str] = []

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        if "messages" not in body:  # is there somebody?
            return 404, {}
        asked.append(body["model"])
        return complete(SeededRequest.model_validate(body | {"model": "simulated-rewriter"}))

    url = serve(answer).url
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    blocks = FENCE.findall(read(DOCS / "start" / "own-data.md"))
    script, text = (
        tmp_path / "data/make_sample.py",
        next(text for kind, text in blocks if kind == "python"),
    )
    script.parent.mkdir()
    script.write_text(text, encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    def follow(page: str, *, limit: str = "") -> Iterator["subprocess.CompletedProcess[str]"]:
        for line in commands(DOCS / "start" / page):
            # A profile that a reader of the page has made in this checkout is theirs.
            line = line.replace("https://api.openai.com/v1", url).replace("acme", "test-acme")
            program, *words = shlex.split(line)
            if program == "python":
                argv, environment = [sys.executable, *words], own_environment(PYTHONPATH=str(ROOT))
                started = stack.enter_context(subprocess.Popen(argv, cwd=tmp_path, env=environment))
                if words[0].startswith("examples/"):
                    stack.callback(started.terminate)
                    wait_until(
                        "the RAG",
                        lambda: "answers" in (health_problem("http://127.0.0.1:7861/search") or ""),
                    )
                else:
                    assert started.wait() == 0
            elif program == "qinglan" and words != [
                "run",
                "pipeline",
                "--profile",
                "test-acme",
            ]:  # `make demo` does
                words += (
                    ["--set", limit]
                    if limit and "refresh" in words[:2] and "data.limit" not in line
                    else []
                )
                words += ["--dry-run"] if "pipeline" in words else []
                yield run_qinglan(tmp_path, *words)

    def passed(*runs: "subprocess.CompletedProcess[str]") -> str:
        for done in runs:
            assert done.returncode == 0, f"{done.args}: {(done.stdout + done.stderr)[-4000:]}"
        return "".join(done.stdout for done in runs)

    with ExitStack() as stack:
        printed = passed(*follow("own-data.md"))
        assert [text for kind, text in blocks if kind == "text" and text not in printed] == []
        table = passed(*follow("own-rag.md", limit="data.limit=100"))
        assert " Original " in table and " Teacher* " in table
        init, probe, dry_run, twenty, rest, spent = follow("own-teacher.md", limit="data.limit=100")
        assert "✓ teacher answers" in probe.stdout
        assert "$" in passed(init, dry_run, rest, spent)
        assert (
            twenty.returncode == 0
            or "error: a split is empty" in twenty.stderr
            or "no usable rows" in twenty.stderr
        )
        assert asked == ["gpt-5"] * 101  # the probe, and each question once
        if not shutil.which("nvidia-smi"):
            init, doctor, *dry_runs = follow("gpus.md")
            assert "GPU-hours" in passed(init, *dry_runs)
            assert doctor.returncode == 2
            assert (
                "trainer.device: asks for GPUs, and this machine has none"
                in doctor.stdout + doctor.stderr
            )
