"""`make bench NAME=structure`: the size and the shape of the code, and how long commands take to
start.

Times are the shortest of several runs, and only a quiet machine gives ones that can be compared.
"""

import argparse
import ast
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
SMALL = (
    "embedded.sample_train_rows=12",
    "embedded.sample_dev_rows=4",
    "embedded.sample_test_rows=4",
)
Function = ast.FunctionDef | ast.AsyncFunctionDef
Compound = (
    ast.With | ast.AsyncWith | ast.For | ast.AsyncFor | ast.While | ast.If | ast.Try | ast.Match
)
EMPTY_FLOW = """
import os
os.environ["PREFECT_HOME"] = os.getcwd()
import mlflow
from prefect import flow, task

@task
def nothing():
    return None

@flow
def empty():
    with mlflow.start_run():
        nothing()

mlflow.set_tracking_uri("sqlite:///empty.db")
empty()
"""
"""What Prefect's temporary server and MLflow take by themselves."""


def sources(*folders: str) -> list[Path]:
    """Python files; the links in qinglan/ that lead to flows/ and tasks/ are not followed."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def lines(paths: Sequence[Path]) -> int:
    """Of all files together."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def functions(paths: Sequence[Path]) -> Iterator[Function]:
    """Every function and method."""
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        yield from (node for node in ast.walk(tree) if isinstance(node, Function))


def statements(function: Function) -> int:
    """In its body, the docstring aside."""
    return len(function.body) - (ast.get_docstring(function) is not None)


def repeated_classes(paths: Sequence[Path]) -> list[str]:
    """Public class names that more than one module defines."""
    names = Counter(
        node.name
        for path in paths
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return sorted(name for name, count in names.items() if count > 1)


def shortest_s(argv: Sequence[str], cwd: Path, runs: int) -> float:
    """Wall time of a process, the shortest of so many runs."""
    starts = []
    for _ in range(runs + 1):
        starts.append(time.monotonic())
        if len(starts) <= runs:
            subprocess.run(argv, cwd=cwd, capture_output=True, check=True)
    return min(end - start for start, end in pairwise(starts))


def times(runs: int) -> Iterator[tuple[str, str]]:
    """How long the first command, and a small refresh, take."""
    qinglan = [sys.executable, "-W", "ignore", "-m", "qinglan.cli"]
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder)
        help_s = shortest_s([*qinglan, "--help"], empty, runs)
        prefect_s = shortest_s(
            [sys.executable, "-W", "ignore", "-c", "import prefect"], empty, runs
        )
        yield (
            "`qinglan --help`, of `import prefect`",
            f"{help_s / prefect_s:.2f} × ({help_s:.2f} s of {prefect_s:.2f} s)",
        )
        refresh = [
            *qinglan,
            "run",
            "refresh",
            *(word for setting in SMALL for word in ("--set", setting)),
        ]
        yield "`refresh` of 20 rows", f"{shortest_s(refresh, empty, 1):.1f} s"
        again_s = shortest_s(refresh, empty, runs)
        yield "`refresh` again, nothing changed", f"{again_s:.1f} s"
        shortest_s(
            [sys.executable, "-W", "ignore", "-c", EMPTY_FLOW], empty, 1
        )  # which makes the tables
        empty_s = shortest_s([sys.executable, "-W", "ignore", "-c", EMPTY_FLOW], empty, runs)
        yield (
            "of an empty Prefect flow with an MLflow run",
            f"{again_s / empty_s:.2f} × (of {empty_s:.1f} s)",
        )


def shape() -> Iterator[tuple[str, str]]:
    """What the files themselves tell."""
    code, tests = sources("qinglan", "tasks", "flows"), sources("tests")
    sizes = sorted(node.end_lineno - node.lineno + 1 for node in functions(code) if node.end_lineno)
    loose = [path for path in (ROOT / "qinglan").glob("*.py") if path.name != "__init__.py"]
    packages = [
        path
        for path in (ROOT / "qinglan").iterdir()
        if (path / "__init__.py").exists() and not path.is_symlink()
    ]
    yield "loose modules / packages in qinglan/", f"{len(loose)} / {len(packages)}"
    yield "lines in qinglan, tasks, flows", f"{lines(code):,}"
    yield "functions", f"{len(sizes):,}"
    short_functions = [node for node in functions(code) if statements(node) == 1]
    short = [node.name for node in short_functions]
    words = Counter(
        word for path in code for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))
    )
    yield "functions of one statement", f"{len(short):,}"
    compound = sum(
        any(isinstance(each, Compound) for each in node.body) for node in short_functions
    )
    yield "of these, with other statements inside the one", f"{compound:,}"
    attributes = sum(
        bool(node.decorator_list) or node.name.startswith("__") for node in short_functions
    )
    yield "of these, properties, commands and special methods", f"{attributes:,}"
    yield "of these, named in one other place", f"{sum(words[name] == 2 for name in short):,}"
    yield (
        "lines of a function, median / 90th percentile",
        f"{median(sizes):g} / {sizes[len(sizes) * 9 // 10]}",
    )
    yield "lines in tests", f"{lines(tests):,}"
    yield "public class names that two modules define", ", ".join(repeated_classes(code)) or "none"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="of each timed command; 0: no times")
    options = parser.parse_args()
    print("| | |\n| --- | ---: |")
    for name, value in shape():
        print(f"| {name} | {value} |")
    for name, value in times(options.runs) if options.runs else ():
        print(f"| {name} | {value} |", flush=True)
