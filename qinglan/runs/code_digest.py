"""Digests of our own code: a result is reused only where the code that made it is the same."""

import ast
from collections.abc import Collection
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from qinglan.runs.artifacts import hash_of, sha256_of


@cache
def code_digest(*modules: str, within: str | None = None, without: tuple[str, ...] = ()) -> str:
    """Changes with the code of these modules and packages, but not with their comments, docstrings
    or layout.

    A .yaml file counts with the module of its name, and with one beside it that has
    `with_name("facts.yaml")`.

    Args:
        modules: dotted names; every module below a package counts.
        within: a package whose modules count as well where the others import them, directly or not.
        without: functions and methods by these names do not count, nor what only they use.
    """
    files: dict[str, Path] = {}
    for module in modules:
        path = module_path(module)
        assert path, f"there is no module {module}"
        if path.name != "__init__.py":
            files[module] = path
            continue
        for each in path.parent.rglob("*.py"):
            files[".".join((module, *each.relative_to(path.parent).with_suffix("").parts))] = each
    pending = list(files.values()) if within else []
    while pending:
        for name in sorted(_reduced(pending.pop().read_bytes(), without).imported):
            if name.startswith(f"{within}.") and name not in files and (path := module_path(name)):
                files[name] = path
                pending.append(path)
    digests = {
        name: _reduced(path.read_bytes(), without).digest for name, path in sorted(files.items())
    }
    data = {
        f"{name.removesuffix(path.stem)}{each.name}": sha256_of(each)
        for name, path in files.items()
        for each in path.parent.glob("*.yaml")
        if each.stem == path.stem or f'with_name("{each.name}")' in path.read_text(encoding="utf-8")
    }
    return hash_of(digests | data)


def module_path(module: str) -> Path | None:
    """The file of a module or package; None where the name is another thing, such as a function in
    a module.

    It is looked up without importing a package, as some of ours load a training engine.
    """
    top, *parts = module.split(".")
    spec = find_spec(top)
    if (
        spec is None or not spec.has_location or spec.origin is None
    ):  # a built-in module has no file
        return None
    path = Path(spec.origin).parent.joinpath(*parts)
    return next(
        (each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None
    )


def imported_modules(tree: ast.Module) -> frozenset[str]:
    """The names that a file imports, anywhere in it: modules, and what may be a module in a
    package."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return frozenset(names)


class _Reduced(NamedTuple):
    digest: str
    imported: frozenset[str]


@cache
def _reduced(source: bytes, without: tuple[str, ...]) -> _Reduced:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [each for each in node.body if not _is_prose(each)]
    if without:
        _remove(tree, without)
    return _Reduced(hash_of(ast.dump(tree)), imported_modules(tree))


def _remove(tree: ast.Module, names: Collection[str]) -> None:
    """Take out these functions, and then whatever nothing in the file uses any more."""
    used = _used_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef):
            node.body = [each for each in node.body if getattr(each, "name", None) not in names]
    while orphaned := used - _used_names(tree):
        used -= orphaned
        tree.body = [each for each in tree.body if not _defines_only(each, orphaned)]


def _used_names(tree: ast.Module) -> set[str]:
    return {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }


def _defines_only(node: ast.stmt, names: set[str]) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name in names
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Name) and target.id in names for target in node.targets)
    if isinstance(node, ast.Import | ast.ImportFrom):
        return all((alias.asname or alias.name).split(".")[0] in names for alias in node.names)
    return False


def _is_prose(node: ast.stmt) -> bool:
    """A docstring, or imports for annotations."""
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
