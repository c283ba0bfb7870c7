"""Digests of our own code: a result is reused only where the code that made it is the same.

The code of a stage is its module with everything that this imports, directly or not, from the
packages that make results. The other packages carry, keep and show results; what a stage takes from
them stands in its key as an input.
"""

import ast
import re
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from qinglan.runs.artifacts import hash_of, sha256_of

CARRIERS = frozenset(
    f"qinglan.{package}"
    for package in (
        "cli",
        "config",
        "errors",
        "flows",
        "ledger",
        "ops",
        "registry",
        "runs",
        "serving",
        "simulators",
        "tasks",
        "text",
    )
)
"""Packages that make no result: settings, messages and words; the ledger, which holds what was
paid; files, processes and tracking; stages but the one whose key is made; services whose answers
and models are in the key by their versions."""
_OUR_NAME = re.compile(r"qinglan(?:\.[A-Za-z_]\w*)+")


@cache
def code_of(module: str) -> dict[str, str]:
    """The digests of a module and of the modules that its results depend on, by module.

    Comments, docstrings, layout and imports for annotations don't count.
    """
    return digests_of_modules(import_closure([module], _makes_results))


def code_imported_by(file: Path) -> dict[str, str]:
    """The digests of our modules that a file outside of the package depends on, by module."""
    imported = _read(file.read_bytes()).imported
    roots = [module for module in imported if _makes_results(module)]
    return digests_of_modules(import_closure(roots, _makes_results))


def digests_of_modules(modules: Iterable[str]) -> dict[str, str]:
    """The digest of each module, with the .yaml files that it reads, by module."""
    digests: dict[str, str] = {}
    for module in sorted(modules):
        path = module_path(module)
        assert path, f"there is no module {module}"
        digests[module] = hash_of(_read(path.read_bytes()).digest, _data_digests(path))
    return digests


def import_closure(modules: Iterable[str], counts: Callable[[str], bool]) -> set[str]:
    """The modules with all of ours that they import, directly or not, as far as `counts` says.

    A package's own file counts where it is imported itself, not with a module in the package.
    """
    closure: set[str] = set()
    pending = list(modules)
    while pending:
        module = pending.pop()
        path = module_path(module)
        if module in closure or path is None:
            continue
        closure.add(module)
        imported = _read(path.read_bytes()).imported
        pending.extend(name for name in imported if counts(name))
    return closure


def modules_in(package: str) -> list[str]:
    """The names of all modules of a package."""
    path = module_path(package)
    assert path, f"there is no package {package}"
    names = []
    for file in sorted(path.parent.rglob("*.py")):
        parts = file.relative_to(path.parent).with_suffix("").parts
        names.append(".".join((package, *parts)).removesuffix(".__init__"))
    return names


def module_path(module: str) -> Path | None:
    """The file of a module or package; None where the name is another thing, such as a function.

    It is looked up without importing a package, as some of ours load a training engine.
    """
    top, *parts = module.split(".")
    spec = find_spec(top)
    # A built-in module has no file.
    if spec is None or not spec.has_location or spec.origin is None:
        return None
    path = Path(spec.origin).parent.joinpath(*parts)
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def imported_modules(tree: ast.Module) -> frozenset[str]:
    """The names that a file imports, anywhere in it: modules, and what may be one in a package.

    A string with the dotted name of one of our modules counts too: engines start their processes
    and load their parts by name.
    """
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for name in _OUR_NAME.findall(node.value):
                # The name may go on with a class or function of the module.
                names.update((name, name.rpartition(".")[0]))
    return frozenset(names)


def _makes_results(module: str) -> bool:
    package = ".".join(module.split(".")[:2])
    return module.startswith("qinglan.") and package not in CARRIERS


def _data_digests(path: Path) -> dict[str, str]:
    """The digests of the .yaml files that count with a module.

    They are the one of its name, and those beside it that it opens by `with_name("facts.yaml")`.
    """
    source = path.read_text(encoding="utf-8")
    digests: dict[str, str] = {}
    for data_file in sorted(path.parent.glob("*.yaml")):
        is_opened = f'with_name("{data_file.name}")' in source
        if data_file.stem == path.stem or is_opened:
            digests[data_file.name] = sha256_of(data_file)
    return digests


class _Source(NamedTuple):
    digest: str
    imported: frozenset[str]


@cache
def _read(source: bytes) -> _Source:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [statement for statement in node.body if not _is_prose(statement)]
    return _Source(hash_of(ast.dump(tree)), imported_modules(tree))


def _is_prose(node: ast.stmt) -> bool:
    """Tell whether the statement is a docstring, or imports for annotations."""
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)
