"""The size and the shape of the code, read off the files themselves."""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median

import grimp

ROOT = Path(__file__).parents[2]
RECIPE_BASE = ROOT / "qinglan" / "recipes" / "base.py"
GRADING = ROOT / "qinglan" / "grading"
"""The one place where a grader's kind may decide."""
GRADERS = frozenset({"RetrievalGrader", "RuleGrader"})
SERVICES = frozenset({"rag", "judge"})

Function = ast.FunctionDef | ast.AsyncFunctionDef


def shape() -> Iterator[tuple[str, str]]:
    """Name and value of each figure."""
    code = sources("qinglan")
    code_functions = list(functions(code))
    lengths = sorted(map(length, code_functions))
    longest = max(code_functions, key=length)
    branching_files = [path for path in code if path_branches_on_grader(path)]
    circles = import_circles("qinglan")
    modules = [path for path in (ROOT / "qinglan").glob("*.py") if path.name != "__init__.py"]
    yield "methods of `Recipe`", str(len(methods(RECIPE_BASE, "Recipe")))
    yield "files with a branch on the kind of grader", str(len(branching_files))
    yield "circles of modules, imports for annotations counted", described(circles)
    yield "longest function, lines", f"{length(longest)} (`{longest.name}`)"
    yield "functions", f"{len(code_functions):,}"
    yield (
        "lines of a function, median / 90th percentile",
        f"{median(lengths):g} / {lengths[len(lengths) * 9 // 10]}",
    )
    yield "lines of code", f"{line_count(code):,}"
    yield "lines of tests", f"{line_count(sources('tests')):,}"
    yield "docs in English, kB", kilobytes(english_pages())
    yield "README.md, lines", f"{line_count([ROOT / 'README.md']):,}"
    yield "CHANGELOG.md, kB", kilobytes([ROOT / "CHANGELOG.md"])
    yield "loose modules / packages in qinglan/", f"{len(modules)} / {len(packages())}"
    yield "public class names that two modules define", ", ".join(repeated_classes(code)) or "none"


def sources(folder: str) -> list[Path]:
    """All Python files of a folder."""
    return sorted((ROOT / folder).rglob("*.py"))


def syntax_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def line_count(paths: Iterable[Path]) -> int:
    """Lines of all files together."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def kilobytes(paths: Iterable[Path]) -> str:
    """Size of all files together, in thousands of bytes."""
    return f"{sum(path.stat().st_size for path in paths) / 1000:,.0f}"


def english_pages() -> list[Path]:
    """All pages of docs/ but the Chinese ones."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    return [page for page in pages if not page.name.endswith(".zh.md")]


def packages() -> list[Path]:
    """Packages directly in qinglan/."""
    return [path.parent for path in (ROOT / "qinglan").glob("*/__init__.py")]


def functions(paths: Iterable[Path]) -> Iterator[Function]:
    """Every function and method, nested ones too."""
    for path in paths:
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, Function):
                yield node


def length(function: Function) -> int:
    """Lines from `def` to the last statement; decorators don't count."""
    assert function.end_lineno is not None, "a function that was parsed ends in a line"
    return function.end_lineno - function.lineno + 1


def methods(path: Path, class_name: str) -> list[str]:
    """Names of the functions in the body of a file's class."""
    for node in syntax_tree(path).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return [member.name for member in node.body if isinstance(member, Function)]
    raise LookupError(f"{path} has no class {class_name}")


def repeated_classes(paths: Sequence[Path]) -> list[str]:
    """Public class names that more than one module defines."""
    names: Counter[str] = Counter()
    for path in paths:
        for node in syntax_tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                names[node.name] += 1
    return sorted(name for name, count in names.items() if count > 1)


def import_circles(package: str) -> list[list[str]]:
    """Sets of modules that import one another, directly or not.

    Imports under TYPE_CHECKING count: who reads a module has to know what they bring.
    """
    graph = grimp.build_graph(package, cache_dir=None)
    circles: set[frozenset[str]] = set()
    for module in graph.modules:
        # Modules on a way from the module back to itself: grimp's words for the two directions are
        # upstream for what it imports, downstream for what imports it.
        upstream = graph.find_upstream_modules(module)
        downstream = graph.find_downstream_modules(module)
        partners = upstream & downstream - {module}
        if partners:
            circles.add(frozenset(partners | {module}))
    return sorted(map(sorted, circles))


def described(circles: Sequence[Sequence[str]]) -> str:
    """The number of circles, and their modules."""
    if not circles:
        return "0"
    return f"{len(circles)} ({'; '.join(', '.join(circle) for circle in circles)})"


def path_branches_on_grader(path: Path) -> bool:
    """Does a file outside of grading decide by the kind of grader?"""
    return not path.is_relative_to(GRADING) and branches_on_grader(syntax_tree(path))


def branches_on_grader(tree: ast.Module) -> bool:
    """Does some code decide by the kind of grader?

    It does where it reads `.retrieves`, compares `.panel` with None, asks whether a thing is an
    instance of one of the `GRADERS`, or whether one of the `SERVICES` is among a grader's.
    """
    services_names = _names_of_services(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "retrieves":
            return True
        if isinstance(node, ast.Compare) and _compares_kind(node, services_names):
            return True
        if isinstance(node, ast.Call) and _asks_for_class(node):
            return True
    return False


def _names_of_services(tree: ast.Module) -> set[str]:
    """Variables that hold a grader's services."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _is_attribute(node.value, "services"):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


def _compares_kind(node: ast.Compare, services_names: set[str]) -> bool:
    operator = node.ops[0]
    right = node.comparators[0]
    if isinstance(operator, ast.Is | ast.IsNot):
        return _is_attribute(node.left, "panel") and _is_constant(right, {None})
    # `for role in grader.services` treats all kinds alike; asking for one of them does not.
    if isinstance(operator, ast.In | ast.NotIn) and _is_constant(node.left, SERVICES):
        is_name_of_services = isinstance(right, ast.Name) and right.id in services_names
        return is_name_of_services or _is_attribute(right, "services")
    return False


def _asks_for_class(node: ast.Call) -> bool:
    if not isinstance(node.func, ast.Name) or node.func.id != "isinstance":
        return False
    names = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
    return bool(names & GRADERS)


def _is_attribute(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name


def _is_constant(node: ast.expr, values: Iterable[object]) -> bool:
    return isinstance(node, ast.Constant) and node.value in values
