"""The figures of how plainly code reads, on small programs, and the command that prints them."""

import ast
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.code_figures.plainness import HEADINGS, Plainness, plainness_of, plainness_table
from benchmarks.code_figures.shape import branches_on_grader, import_circles

ROOT = Path(__file__).parents[2]
DENSE_CODE = f'''"""Of the rows."""

def failed(rows):
    """Rows that failed."""
    # The teacher's errors come first.
    total, kept = 0, [row for row in rows if row.reason]
    found = [[part for part in row.parts] for row in kept]
    return found if (first := total) else "{"x" * 80}"
'''


def test_each_thing_that_is_hard_to_read_is_counted() -> None:
    assert asdict(plainness_of(DENSE_CODE)) == {
        "lines": 8,
        "long_lines": 1,
        "comment_lines": 1,
        "walruses": 1,
        "tuple_assignments": 1,
        "ternaries": 1,
        "comprehensions": 3,
        "nested": 1,
        "vague_names": 2,
        "docstrings": 2,
        "fragments": 1,
    }


def test_figures_are_per_thousand_lines_or_in_percent() -> None:
    counts = Plainness(lines=400, long_lines=4, walruses=2, docstrings=50, fragments=5)
    assert (counts + counts).figures() == pytest.approx((1.0, 5, 0, 0, 0, 0, 0, 10.0, 0))
    assert Plainness().figures() == (0,) * 9


def test_public_code_stands_beside_ours() -> None:
    table = list(plainness_table({"in all": Plainness(lines=1000, ternaries=12)}))
    assert table[2] == "| in all | 1,000 | 0.0 | 0.0 | 0.0 | 12.0 | 0.0 | 0.0 | 0.0 | 0.0 | 0.0 |"
    assert table[3] == "| *httpx* |  | 0.0 | 0.0 | 0.5 | 9.0 | 6.0 | 0.8 | 0.1 | 1.3 | 4.0 |"
    assert {line.count("|") for line in table} == {len(HEADINGS) + 2}


@pytest.mark.parametrize(
    ("code", "branches"),
    [
        ("if recipe.grader.retrieves: ...", True),
        ("assert grader.panel is not None", True),
        ("if isinstance(recipe.grader, RuleGrader): ...", True),
        ("if isinstance(grader, (RetrievalGrader, Other)): ...", True),
        ("asks_judge = 'judge' in recipe.grader.services", True),
        ("services = grader.services\nif 'rag' not in services: ...", True),
        ("for role in recipe.grader.services: ...", False),
        ("if 'rag' in roles: ...", False),
        ("panel = grader.panel", False),
        ("if isinstance(value, str): ...", False),
    ],
)
def test_a_file_that_decides_by_the_kind_of_grader_is_found(code: str, branches: bool) -> None:
    assert branches_on_grader(ast.parse(code)) is branches


def test_imports_for_annotations_close_a_circle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "three_modules"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "first.py").write_text("from three_modules import second, third")
    (package / "second.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from three_modules import first"
    )
    (package / "third.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert import_circles("three_modules") == [["three_modules.first", "three_modules.second"]]


def test_the_command_prints_every_figure() -> None:
    process = subprocess.run(
        [sys.executable, "benchmarks/structure.py", "--runs", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    rows = [line.split(" | ")[0].removeprefix("| ") for line in process.stdout.splitlines()]
    packages = {"qinglan/recipes", "qinglan/grading", "qinglan/tasks", "qinglan/flows"}
    assert packages | {"*httpx*"} <= set(rows)
    assert rows[rows.index("methods of `Recipe`") :] == [
        "methods of `Recipe`",
        "files with a branch on the kind of grader",
        "circles of modules, imports for annotations counted",
        "longest function, lines",
        "functions",
        "lines of a function, median / 90th percentile",
        "lines of code",
        "lines of tests",
        "docs in English, kB",
        "README.md, lines",
        "CHANGELOG.md, kB",
        "loose modules / packages in qinglan/",
        "public class names that two modules define",
    ]
