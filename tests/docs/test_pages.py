"""The documentation: generated pages are new, languages agree, every command and path is there."""

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
    r"`((?:qinglan|tasks|flows|tests|benchmarks|configs|deployments|docker|examples|docs)"
    r"/[\w./-]*(?:\.\w+|/))`"
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def code(page: Path) -> list[str]:
    """The fenced blocks, without comments, which each language has in its own words."""
    return [re.sub(r"\s+#.*", "", text) for _, text in FENCE.findall(read(page))]


def commands(page: Path) -> list[str]:
    """The command lines of a page, without comments; the README's stand in blocks of any kind."""
    lines: list[str] = []
    for kind, text in FENCE.findall(read(page)):
        if kind == "sh" or (page.name == "README.md" and "make" in text):
            lines += text.replace("\\\n", "").splitlines()
    return [re.sub(r"\s+# .*", "", line) for line in lines]


def figures(page: Path) -> list[str]:
    """The numbers in a page's text."""
    return re.findall(r"\d+(?:[.,]\d+)*", FENCE.sub("", read(page)))


GENERATED: dict[str, Any] = runpy.run_path(str(DOCS / "generate.py"))["PAGES"]


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_page_is_up_to_date(name: str) -> None:
    assert read(DOCS / "reference" / name) == GENERATED[name](), "run `python docs/generate.py`"


@pytest.mark.parametrize("chinese", CHINESE, ids=lambda page: page.name)
def test_both_languages_name_the_same_commands_and_figures(chinese: Path) -> None:
    english = chinese.with_name(chinese.name.replace(".zh.md", ".md"))
    assert code(chinese) == code(english)
    assert f"]({english.name})" in read(chinese)
    assert f"]({chinese.name})" in read(english)
    assert figures(chinese) == figures(english)


def test_the_readmes_results_are_among_those_that_were_measured() -> None:
    measured = read(DOCS / "reference" / "benchmarks.md")
    results = re.findall(r"\d\.\d{3}", read(ROOT / "README.md"))
    assert results
    assert [result for result in results if result not in measured] == []


def test_every_start_page_is_there_in_both_languages() -> None:
    assert [page.name for page in START] == [page.name.replace(".zh.md", ".md") for page in CHINESE]


def parse(words: list[str]) -> None:
    """Let the command line read the words, down to the sub-command, without running it."""
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
            is_python = program.startswith(("python", "/opt/trainer/"))
            assert is_python or program in {"export", "mkdir", "read", "ss"}, line


@pytest.mark.parametrize(
    "page", [*sorted(DOCS.rglob("*.md")), *START[:1], *CHINESE[:1]], ids=lambda page: page.name
)
def test_a_page_names_files_that_are_there(page: Path) -> None:
    readers_own = re.compile(r"NAME|topic|acme|team\.yaml|configuration\.md")
    paths = [path for path in PATHS.findall(read(page)) if not readers_own.search(path)]
    # They begin at the repository's root or in the package.
    roots = (ROOT, ROOT / "qinglan")
    assert [path for path in paths if not any((root / path).exists() for root in roots)] == []


def test_the_site_has_every_page_and_asks_no_other_server() -> None:
    site = yaml.load(re.sub(r"!!python\S+", "", read(ROOT / "mkdocs.yml")), yaml.SafeLoader)

    def pages(part: Any) -> Iterator[str]:
        if isinstance(part, str):
            yield part
            return
        for inner in part.values() if isinstance(part, dict) else part:
            yield from pages(inner)

    files = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")]
    assert sorted(pages(site["nav"])) == sorted(files)
    assert site["theme"]["font"] is False
    readme = read(ROOT / "README.md") + "(docs/index.md)"
    assert [page.name for page in DOCS.glob("*.md") if f"(docs/{page.name})" not in readme] == []


class Reader:
    """Follows start pages in a folder; for the teacher stands a service of the test's own."""

    def __init__(self, folder: Path, teacher_url: str, programs: ExitStack) -> None:
        self._folder = folder
        self._teacher_url = teacher_url
        self._programs = programs

    def follow(self, page: str, *, limit: str = "") -> Iterator["subprocess.CompletedProcess[str]"]:
        """Run a page's commands; yields those of Qinglan once they have ended.

        Args:
            limit: a setting of refreshes that have no limit of their own.
        """
        for command in commands(DOCS / "start" / page):
            # A profile that a reader of the page has made in this checkout is theirs.
            line = command.replace("https://api.openai.com/v1", self._teacher_url)
            line = line.replace("acme", "test-acme")
            program, *words = shlex.split(line)
            if program == "python":
                self._run_python(words)
            # `make demo` runs that pipeline.
            elif program == "qinglan" and words != ["run", "pipeline", "--profile", "test-acme"]:
                if limit and "refresh" in words[:2] and "data.limit" not in line:
                    words += ["--set", limit]
                if "pipeline" in words:
                    words.append("--dry-run")
                yield run_qinglan(self._folder, *words)

    def _run_python(self, words: list[str]) -> None:
        """Run a program to its end; the example of a RAG goes on."""
        process = self._programs.enter_context(
            subprocess.Popen(
                [sys.executable, *words],
                cwd=self._folder,
                env=own_environment(PYTHONPATH=str(ROOT)),
            )
        )
        if not words[0].startswith("examples/"):
            assert process.wait() == 0
            return
        self._programs.callback(process.terminate)
        wait_until(
            "the RAG", lambda: "answers" in (health_problem("http://127.0.0.1:7861/search") or "")
        )


def output_of(*runs: "subprocess.CompletedProcess[str]") -> str:
    """The output of commands that ended well."""
    for run in runs:
        assert run.returncode == 0, f"{run.args}: {(run.stdout + run.stderr)[-4000:]}"
    return "".join(run.stdout for run in runs)


@pytest.mark.slow
@pytest.mark.extended
def test_the_start_pages_as_a_reader_follows_them(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All commands are run that need neither GPU nor another's service.

    For the teacher stands a simulated one that takes any key.
    """
    models: list[str] = []

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        # A request without messages asks whether somebody is there.
        if "messages" not in body:
            return 404, {}
        models.append(body["model"])
        return complete(SeededRequest.model_validate(body | {"model": "simulated-rewriter"}))

    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    blocks = FENCE.findall(read(DOCS / "start" / "own-data.md"))
    script = tmp_path / "data/make_sample.py"
    script.parent.mkdir()
    program = next(text for kind, text in blocks if kind == "python")
    script.write_text(program, encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    with ExitStack() as stack:
        reader = Reader(tmp_path, serve(answer).url, stack)
        output = output_of(*reader.follow("own-data.md"))
        assert [text for kind, text in blocks if kind == "text" and text not in output] == []
        table = output_of(*reader.follow("own-rag.md", limit="data.limit=100"))
        assert " Original " in table
        assert " Teacher* " in table
        runs = reader.follow("own-teacher.md", limit="data.limit=100")
        init, probe, dry_run, twenty, rest, spent = runs
        assert "✓ teacher answers" in probe.stdout
        assert "$" in output_of(init, dry_run, rest, spent)
        # So few rows may leave a split or the whole dataset empty.
        too_few = ("error: a split is empty", "no usable rows")
        assert twenty.returncode == 0 or any(text in twenty.stderr for text in too_few)
        # The probe, and each question once.
        assert models == ["gpt-5"] * 101
        if not shutil.which("nvidia-smi"):
            init, doctor, *dry_runs = reader.follow("gpus.md")
            assert "GPU-hours" in output_of(init, *dry_runs)
            assert doctor.returncode == 2
            no_gpu = "trainer.device: asks for GPUs, and this machine has none"
            assert no_gpu in doctor.stdout + doctor.stderr
