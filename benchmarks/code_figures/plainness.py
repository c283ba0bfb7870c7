"""The plainness of Python code, counted over its syntax trees.

The figures measure, they do not judge: a walrus can be right, and a name can be vague for a reason.
"""

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import starmap
from operator import add
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_COLUMNS = 100
NOT_THE_PRODUCT = frozenset({"test", "tests", "docs", "benchmarks", "examples"})
"""Folders that are measured only by request: the anchors were measured without theirs."""

VAGUE_NAME = re.compile(
    r"_*(each|found|known|asked|wanted|what|mine|theirs|given|made|kept|named|told|seen|taken|one"
    r"|other|others|some|missing|left|needed|used|done|shown|held|begun)_*"
)
"""A variable's name that says nothing of the thing that it holds."""
FRAGMENT = re.compile(
    r"^(Of|As|What|Where|Whether|With|Without|How|Who|Whom|Whose|Which|When|If|In|On|For|By|From"
    r"|To|At|Beside|Besides|Else|Only|Not)\b"
)
"""The beginning of a docstring that is neither a sentence nor a noun phrase."""

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
DENSE = (*COMPREHENSIONS, ast.IfExp, ast.Lambda)
"""Expressions that are hard to read inside of one another."""
DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)

HEADINGS = (
    "lines",
    f"over {MAX_COLUMNS} columns, %",
    "walrus",
    "`a, b = x, y`",
    "ternary",
    "comprehensions",
    "nested",
    "vague names",
    "docstring fragments, %",
    "comment lines, %",
)
ANCHORS: Mapping[str, tuple[float, ...]] = {
    "httpx": (0.0, 0.0, 0.5, 9, 6, 0.8, 0.1, 1.3, 4.0),
    "verifiers": (0.4, 1.6, 0.6, 11, 11, 1.3, 0.7, 2.2, 3.5),
    "prime-rl": (3.6, 0.2, 0.8, 9, 13, 1.1, 0.4, 2.1, 4.5),
    "tinker-cookbook": (0.5, 0.2, 0.3, 4, 10, 0.4, 0.2, 2.5, 5.1),
}
"""Public code that reads plainly, by the same definitions over snapshots of 2026: the columns of
`HEADINGS` after the lines."""


@dataclass(frozen=True)
class Plainness:
    """Counts over some files; they can be added."""

    lines: int = 0
    long_lines: int = 0
    comment_lines: int = 0
    """Lines that hold nothing but a comment."""
    walruses: int = 0
    tuple_assignments: int = 0
    """Assignments of several values to several names on one line."""
    ternaries: int = 0
    comprehensions: int = 0
    nested: int = 0
    """Comprehensions, ternaries and lambdas that hold a further one."""
    vague_names: int = 0
    """Assignments to a `VAGUE_NAME`."""
    docstrings: int = 0
    fragments: int = 0
    """Docstrings that begin as a `FRAGMENT` does."""

    def __add__(self, summand: "Plainness") -> "Plainness":
        return Plainness(*starmap(add, zip(astuple(self), astuple(summand), strict=True)))

    def figures(self) -> tuple[float, ...]:
        """The columns of `HEADINGS` after the lines: shares in percent, else per 1,000 lines."""
        thousands = max(1, self.lines) / 1000
        return (
            self.long_lines / thousands / 10,
            self.walruses / thousands,
            self.tuple_assignments / thousands,
            self.ternaries / thousands,
            self.comprehensions / thousands,
            self.nested / thousands,
            self.vague_names / thousands,
            100 * self.fragments / max(1, self.docstrings),
            self.comment_lines / thousands / 10,
        )


def plainness_of(source: str) -> Plainness:
    """The counts of one file's text."""
    lines = source.splitlines()
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = [docstring for docstring in map(_docstring, nodes) if docstring]
    return Plainness(
        lines=len(lines),
        long_lines=sum(len(line) > MAX_COLUMNS for line in lines),
        comment_lines=sum(line.strip().startswith("#") for line in lines),
        walruses=sum(isinstance(node, ast.NamedExpr) for node in nodes),
        tuple_assignments=sum(map(_assigns_a_tuple, nodes)),
        ternaries=sum(isinstance(node, ast.IfExp) for node in nodes),
        comprehensions=sum(isinstance(node, COMPREHENSIONS) for node in nodes),
        nested=sum(map(_holds_a_dense_one, nodes)),
        vague_names=sum(map(_stores_a_vague_name, nodes)),
        docstrings=len(docstrings),
        fragments=sum(bool(FRAGMENT.match(docstring)) for docstring in docstrings),
    )


def plainness_by_package(folders: Sequence[str]) -> dict[str, Plainness]:
    """The counts of each package's tracked files, and of all of them under `in all`.

    Args:
        folders: beginnings of paths below the repository's root; the product's own code if empty.
    """
    counts: dict[str, Plainness] = {}
    total = Plainness()
    for path in _python_files(folders):
        file_counts = plainness_of((ROOT / path).read_text(encoding="utf-8"))
        package = "/".join(path.parts[:2]) if len(path.parts) > 2 else path.parts[0]
        counts[package] = counts.get(package, Plainness()) + file_counts
        total += file_counts
    return dict(sorted(counts.items())) | {"in all": total}


def plainness_table(counts: Mapping[str, Plainness]) -> Iterator[str]:
    """The lines of a Markdown table: a package a line, then the anchors."""
    yield f"| per 1,000 lines | {' | '.join(HEADINGS)} |"
    yield "| --- |" + " ---: |" * len(HEADINGS)
    for package, package_counts in counts.items():
        yield _table_line(package, f"{package_counts.lines:,}", package_counts.figures())
    for anchor, figures in ANCHORS.items():
        yield _table_line(f"*{anchor}*", "", figures)


def _table_line(name: str, lines: str, figures: Iterable[float]) -> str:
    cells = [name, lines, *(f"{figure:.1f}" for figure in figures)]
    return f"| {' | '.join(cells)} |"


def _python_files(folders: Sequence[str]) -> Iterator[Path]:
    """Paths of tracked files, relative to the root; deleted files are left out."""
    listing = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True)
    for name in listing.splitlines():
        path = Path(name)
        if not (ROOT / path).is_file():
            continue
        if folders:
            is_wanted = name.startswith(tuple(folders))
        else:
            is_wanted = path.parts[0] not in NOT_THE_PRODUCT
        if is_wanted:
            yield path


def _docstring(node: ast.AST) -> str | None:
    return ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None


def _assigns_a_tuple(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign):
        return False
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def _holds_a_dense_one(node: ast.AST) -> bool:
    if not isinstance(node, DENSE):
        return False
    inner_nodes = (inner for inner in ast.walk(node) if inner is not node)
    return any(isinstance(inner, DENSE) for inner in inner_nodes)


def _stores_a_vague_name(node: ast.AST) -> bool:
    if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Store):
        return False
    return VAGUE_NAME.fullmatch(node.id) is not None
