"""Puts right what depends on the files that lost rows: digests, row counts, cards and reports."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qinglan.data.versions import (
    CARD,
    CARD_DATA,
    INDEX,
    PINS,
    VERSION_FILE,
    Version,
    describe_again,
)
from qinglan.evaluation.models import Report
from qinglan.evaluation.report.html import render_html
from qinglan.ops.forget.notes import noting
from qinglan.ops.run_status import REPORT_FILE
from qinglan.runs.artifacts import MANIFEST, REFERENCE, Artifact, sha256_of, write_json


def repair_site(paths: Sequence[Path], lost_rows: Mapping[Path, int], notes: list[str]) -> None:
    """Write down anew what was written down of the files that were changed.

    `paths` are all files of the site, `lost_rows` has the changed ones with the number of rows
    that each has lost. What can't be done is added to `notes`.
    """
    changes = dict(lost_rows)
    # A version's own files are changed by this, and manifests name them too: versions go first.
    for folder in changed_versions(lost_rows):
        with noting(folder, notes):
            _describe_version(folder, lost_rows)
            changes.update({folder / name: 0 for name in (VERSION_FILE, CARD, CARD_DATA)})
    for path in paths:
        with noting(path, notes):
            if _describes_artifacts(path):
                record = json.loads(path.read_bytes())
                renewed = _with_renewed_artifacts(record, changes)
                if renewed != record:
                    write_json(path, renewed)
            if path.name == REPORT_FILE and path in changes:
                render_html(Report.read(path), path.with_suffix(".html"))


def changed_versions(changed: Iterable[Path]) -> set[Path]:
    """Folders of the dataset's versions that lost rows.

    A version that lost no more than a pin has none of the rows in its files.
    """
    folders: set[Path] = set()
    for path in changed:
        is_in_version = (path.parent / INDEX).exists()
        if is_in_version and path.name != PINS:
            folders.add(path.parent)
    return folders


def _describe_version(folder: Path, lost_rows: Mapping[Path, int]) -> None:
    version = Version.read(folder)
    artifacts: dict[str, Artifact] = {}
    for name, artifact in version.artifacts.items():
        rows = (artifact.rows or 0) - lost_rows.get(artifact.path, 0)
        artifacts[name] = Artifact.of(artifact.path, rows)
    forgotten = lost_rows.get(version.artifacts["rows"].path, 0)
    describe_again(version, artifacts, forgotten)


def _describes_artifacts(path: Path) -> bool:
    return path.name in (MANIFEST, REPORT_FILE) or path.name.endswith(REFERENCE)


def _with_renewed_artifacts(value: Any, changes: Mapping[Path, int]) -> Any:
    """The value of JSON with the present digest and row count of each artifact that changed."""
    if isinstance(value, list):
        return [_with_renewed_artifacts(item, changes) for item in value]
    if not isinstance(value, dict):
        return value
    is_artifact = "sha256" in value
    if is_artifact:
        path = Path(str(value.get("path")))
        # An artifact may be a folder, which changes with any file in it.
        losses = [rows for changed, rows in changes.items() if changed.is_relative_to(path)]
        if losses and path.exists():
            rows = value.get("rows")
            if rows:
                rows -= sum(losses)
            return value | {"sha256": sha256_of(path), "rows": rows}
    return {key: _with_renewed_artifacts(item, changes) for key, item in value.items()}
