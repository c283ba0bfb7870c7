"""The files of a site that are searched, and the store that each of them belongs to."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qinglan.config import Profile
from qinglan.ops.prefect.server import prefect_home

_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".distcp", ".gguf")
_BESIDE_A_DATABASE = ("-wal", "-shm", "-journal")
_EXCELS_LOCK = "~$"
"""Begins the name of the file by which Excel locks an open workbook."""


@dataclass(frozen=True)
class SiteFiles:
    """All files that are searched."""

    stores: Mapping[Path, str]
    """Name of each store by its folder, or by its file where it is a database."""
    paths: Sequence[Path]
    """Files of all stores, those of JSON lines last."""

    def jsonl_lines(self) -> Iterator[str]:
        """Each line of each file of JSON lines."""
        for path in self.paths:
            if is_jsonl(path):
                yield from path.read_text(encoding="utf-8", errors="replace").split("\n")

    def store_of(self, path: Path) -> str:
        """The store of a file, as the user is told of it: parts of the state folder by name."""
        roots = [root for root in self.stores if path.is_relative_to(root)]
        # A store may lie within another one, as MLflow's database does in the state folder.
        innermost = max(roots, key=lambda root: len(root.parts))
        store = self.stores[innermost]
        if store != "state":
            return store
        return f"{store}/{path.relative_to(innermost).parts[0]}"


def site_files(profile: Profile) -> SiteFiles:
    stores = {profile.paths.runs.resolve(): "runs", profile.paths.state.resolve(): "state"}
    request_log = profile.serve.request_log.folder
    if request_log:
        stores[Path(request_log).resolve()] = "request log"
    databases = {"MLflow": profile.tracking_uri.removeprefix("sqlite:///")}
    home = prefect_home()
    if home:
        databases["Prefect"] = f"{home}/prefect.db"
    for name, database in databases.items():
        # A server's address is no file.
        if Path(database).is_file():
            stores[Path(database).resolve()] = name
    # The rows themselves are in JSON lines, so these come last: by them the next process finds
    # what a killed one left elsewhere.
    paths = sorted(_searched_files(stores), key=lambda path: (is_jsonl(path), path))
    return SiteFiles(stores, paths)


def is_jsonl(path: Path) -> bool:
    """Tell whether a file is one of JSON lines, be it whole or still being written."""
    return path.name.removesuffix(".partial").endswith(".jsonl")


def _searched_files(roots: Iterable[Path]) -> set[Path]:
    """All files but weights and what lies beside them, which is no text of ours."""
    paths: set[Path] = set()
    for root in roots:
        if root.is_file():
            paths.add(root)
        for folder, _, names in os.walk(root):
            has_weights = any(name.endswith(_WEIGHTS) for name in names)
            if has_weights:
                continue
            for name in filter(_is_searched, names):
                paths.add(Path(folder, name))
    return {path for path in paths if not path.is_symlink()}


def _is_searched(name: str) -> bool:
    return not name.endswith(_BESIDE_A_DATABASE) and not name.startswith(_EXCELS_LOCK)
