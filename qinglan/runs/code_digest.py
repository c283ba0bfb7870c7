"""Digests of our own code: a result is reused only where the code that made it is the same."""

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from qinglan.runs.artifacts import hash_of


@cache
def code_digest(*modules: str, within: str | None = None) -> str:
    """Changes with the code of these modules and packages, but not with their comments, docstrings or layout.

    Args:
        modules: dotted names; every module below a package counts.
        within: a package whose modules count as well where the others import them, directly or not.
    """
    files = {name: path for module in modules for name, path in _files(module)}
    pending = list(files.values()) if within else []
    while pending:
        for name in _imported(pending.pop()):
            if name.startswith(f"{within}.") and name not in files and (path := _path(name)):
                files[name] = path
                pending.append(path)
    return hash_of({name: _code(path) for name, path in sorted(files.items())})


def _files(module: str) -> Iterator[tuple[str, Path]]:
    path = _path(module)
    assert path, f"there is no module {module}"
    if path.name != "__init__.py":
        yield module, path
        return
    for each in path.parent.rglob("*.py"):
        yield ".".join((module, *each.relative_to(path.parent).with_suffix("").parts)), each


def _path(module: str) -> Path | None:
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # the parent is a module, so the name is one of its attributes
        return None
    return Path(spec.origin) if spec and spec.origin else None


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _code(path: Path) -> str:
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [each for each in node.body if not _is_docstring(each)]
    return ast.dump(tree)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
