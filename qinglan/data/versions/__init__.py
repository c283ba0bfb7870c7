"""Dataset versions: immutable, named by their content, and kept outside of runs, so that deleting
runs loses none.

`{paths.state}/datasets/<tenant>.<recipe>/<version>/` holds the dataset stage's files (hard links
where that can be), their index, the data card and `version.json`. A version is written under
another name and renamed when it is complete, so a kill leaves no incomplete version; a file lock
admits one publisher per tenant. A question keeps its split for ever: a version hands on, in
`pins.jsonl`, the splits of earlier versions' questions that it lacks.
"""

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from filelock import FileLock
from pydantic import BaseModel, Field, ValidationError

from qinglan.config import Profile
from qinglan.data.versions.card import Augmented, Card, CardBuilder, Origin
from qinglan.data.versions.card_markdown import card_markdown
from qinglan.data.versions.drift import Drift, RowSummary, RowSummaryBuilder, drift
from qinglan.errors import ArtifactError, ConfigError, StageError, first_line
from qinglan.recipes import recipe_key
from qinglan.rows import INPUT_REASONS, LEFT_FOR_LATER, Row, Split
from qinglan.runs.artifacts import (
    Artifact,
    hash_of,
    point_link,
    read_jsonl,
    sync,
    sync_all,
    write_json,
    written_whole,
)
from qinglan.runs.schema_version import dump_record, read_record

VERSION_FILE, INDEX, PINS, SUMMARY = "version.json", "index.jsonl", "pins.jsonl", "summary.json"
CARD, CARD_DATA = "DATA_CARD.md", "card.json"
LATEST, TRAINED, LOCK, _PARTIAL = "latest", "trained.json", ".lock", ".partial-"
_LINE_ID = re.compile(r'\{"id":"([^"\\]+)"')
Kind = Literal["added", "removed", "changed"]


class Version(Origin):
    """A published version: `version.json`."""

    artifacts: dict[str, Artifact]
    """The dataset stage's files, by its names for them; in the file by name, here by full path."""
    counts: dict[str, int]
    drift: Drift | None = None
    """Against the parent; None for a tenant's first."""
    directory: Path = Field(default=Path(), exclude=True)

    @classmethod
    def read(cls, directory: Path) -> "Version":
        path = directory / VERSION_FILE
        try:
            version = read_record(cls, path)
        except (OSError, ValidationError) as error:
            raise _unreadable(path, error) from error
        directory = directory.resolve()
        artifacts = {
            n: a.model_copy(update={"path": directory / a.path.name})
            for n, a in version.artifacts.items()
        }
        return version.model_copy(update={"directory": directory, "artifacts": artifacts})


def _unreadable(path: Path, error: Exception) -> ArtifactError:
    return ArtifactError(
        f"{path}: not readable ({first_line(error)}); remove {path.parent} and publish again"
    )


class IndexEntry(NamedTuple):
    """A row in a version's index: a JSON array a line, sorted by id."""

    id: str
    split: Split | None
    reason: str | None
    """Why it failed; None while it is ok."""
    content: str
    """Hash of the question as it was written, with its context, inputs, pool and gold document."""
    answer: str
    """Hash of the answer that SFT would learn; empty where there is none."""

    @classmethod
    def of(cls, row: Row) -> "IndexEntry":
        content = hash_of(row.query, row.profile, row.history, row.gold_id, row.inputs, row.pool)[
            :12
        ]
        reason = None if row.status == "ok" else row.reason or "unknown"
        return cls(
            row.id, row.split, reason, content, hash_of(row.target)[:12] if row.target else ""
        )

    @property
    def teaches(self) -> bool:
        """Is it an SFT training row?"""
        return self.reason is None and self.split == "train" and bool(self.answer)


class RowChange(BaseModel, frozen=True):
    row_id: str
    kind: Kind
    what: tuple[str, ...] = ()
    """Of a changed row: `answer`, `question`, `split train → test`, `ok → below_threshold`."""


class VersionDiff(BaseModel, frozen=True):
    """Version `b` against `a`."""

    a: str
    b: str
    added: int
    removed: int
    changed: int
    unchanged: int
    what: dict[str, int]
    """Changed rows by what changed; one row may count more than once."""
    examples: list[RowChange]
    """The first of each kind, by row id."""


class LastTraining(BaseModel):
    """`trained.json`: the version that the last training used or was started for."""

    version: str
    run_id: str
    at: str


def version_of(profile: Profile, artifacts: Mapping[str, Artifact]) -> str:
    """The id of the version that these files make, 12 hex digits; it keeps it when `qinglan forget`
    changes them."""
    made = _digest_of(artifacts)
    if (tenant_folder(profile) / made).exists():
        return made
    changed = (version for version in versions_of(profile) if version.forgotten)
    return next((version.id for version in changed if _digest_of(version.artifacts) == made), made)


def _digest_of(artifacts: Mapping[str, Artifact]) -> str:
    return hash_of(sorted((name, artifact.sha256) for name, artifact in artifacts.items()))[:12]


def tenant_folder(profile: Profile) -> Path:
    return profile.paths.state / "datasets" / f"{profile.tenant.file_name}.{profile.recipe_name}"


def publish(
    profile: Profile,
    run_id: str,
    artifacts: Mapping[str, Artifact],
    *,
    inputs: str = "",
    pins: str = "",
    augmented: Augmented = MappingProxyType({}),
) -> Version:
    """Keep the dataset stage's files as a version, or return the existing version of the same
    content.

    Args:
        artifacts: `rows` (every `Row`) and the training files. inputs, pins: the argument of
            `pinned_splits` and the version that it named; StageError where another version was
            published since and has one of these questions in another split.
        augmented: questions with noise, as the dataset stage counts them.
    """
    root, version_id = tenant_folder(profile), version_of(profile, artifacts)
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / LOCK):
        for left in root.glob(f"{_PARTIAL}*"):  # of a publisher that was killed
            shutil.rmtree(left)
        parent = latest_version(profile)
        if (root / version_id).exists():
            version = Version.read(root / version_id)
            for artifact in version.artifacts.values():
                artifact.verify()
            if version == parent:  # killed before the link was moved
                point_link(root / LATEST, version_id)
            return version
        partial = root / f"{_PARTIAL}{version_id}"
        partial.mkdir()
        created = datetime.now(UTC)
        if parent:  # the latest is the one that was created last, also where a clock was wrong
            created = max(
                created, datetime.fromisoformat(parent.created) + timedelta(microseconds=1)
            )
        kept = {
            name: _keep(each, partial / f"{name}{each.path.suffix}")
            for name, each in artifacts.items()
        }
        origin = Origin(
            id=version_id,
            tenant=profile.tenant.id,
            profile=profile.name,
            run_id=run_id,
            created=created.isoformat(timespec="microseconds"),
            parent=parent.id if parent else "",
            pins=pins,
            inputs=inputs,
            recipe=profile.recipe_name,
            recipe_version=recipe_key(profile.recipe)["version"],
            teacher=profile.teacher.model,
            judge=profile.judge.model,
        )
        _describe(partial, origin, kept, parent, profile.refresh.drift_warning, augmented)
        sync_all(partial)
        partial.rename(root / version_id)
        sync(root)  # before `latest` may name it
        point_link(root / LATEST, version_id)
        return Version.read(root / version_id)


def describe_again(version: Version, artifacts: dict[str, Artifact], forgotten: int) -> None:
    """Bring what a version says of itself in line with its files, from which rows were taken; its
    drift stays."""
    card = Card.model_validate_json((version.directory / CARD_DATA).read_bytes())
    origin = card.origin.model_copy(update={"forgotten": version.forgotten + forgotten})
    _describe(version.directory, origin, artifacts, None, 0.0, card.augmented, version.drift)


def pinned_splits(profile: Profile, inputs_digest: str) -> tuple[str, dict[str, Split]]:
    """The splits that rows keep, and the version that they are from; empty before a tenant's first
    version.

    They are from the latest version, which has those of all. But where a version was made from the
    same inputs (of the dataset stage, except the pins), the one that it names is named again: the
    stage's result is found.
    """
    versions = versions_of(profile)
    if not versions:
        return "", {}
    same = next((version for version in versions if version.inputs == inputs_digest), None)
    earlier = splits_of(same) if same else {}  # the latest may be an older Qinglan's, and lack them
    return same.pins if same else versions[0].id, earlier | splits_of(versions[0])


def splits_of(version: Version) -> dict[str, Split]:
    """By row id, the splits of a version's questions, and the last ones of earlier versions' that
    it lacks."""
    path = version.directory / PINS  # which the first version lacks, and those of an older Qinglan
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else ()
    own = (
        entry
        for entry in read_index(version.directory / INDEX)
        if entry.reason not in INPUT_REASONS
    )
    return dict(map(json.loads, lines)) | {entry.id: entry.split for entry in own if entry.split}


def versions_of(profile: Profile) -> list[Version]:
    """A tenant's versions, the newest first."""
    found = tenant_folder(profile).glob(f"[0-9a-f]*/{VERSION_FILE}")
    return sorted(
        (Version.read(path.parent) for path in found),
        key=lambda version: version.created,
        reverse=True,
    )


def latest_version(profile: Profile) -> Version | None:
    return next(iter(versions_of(profile)), None)


def find_version(profile: Profile, name: str) -> Version:
    """A version by its id, a unique prefix of it, or `latest`; ConfigError where there is none, or
    several."""
    versions = versions_of(profile)
    matches = (
        versions[:1]
        if name == LATEST
        else [each for each in versions if name and each.id.startswith(name)]
    )
    if len(matches) == 1:
        return matches[0]
    known = (
        ", ".join(version.id for version in versions[:5]) or "none; run `qinglan run refresh` first"
    )
    what = f"fits {len(matches)} versions" if matches else "not found"
    raise ConfigError(
        f"dataset version `{name}`: {what} for tenant `{profile.tenant.id}`; newest: {known}"
    )


def diff(a: Version, b: Version, examples: int = 5) -> VersionDiff:
    """Rows added, removed and changed from version `a` to `b`."""
    old, new = (
        {entry.id: entry for entry in read_index(each.directory / INDEX)} for each in (a, b)
    )
    changed = {
        row_id: _changes(old[row_id], entry) for row_id, entry in new.items() if row_id in old
    }
    found: dict[Kind, dict[str, tuple[str, ...]]] = {
        "added": {row_id: () for row_id in new if row_id not in old},
        "removed": {row_id: () for row_id in old if row_id not in new},
        "changed": {row_id: what for row_id, what in changed.items() if what},
    }
    return VersionDiff(
        a=a.id,
        b=b.id,
        unchanged=len(changed) - len(found["changed"]),
        what=dict(Counter(each for what in changed.values() for each in what).most_common()),
        examples=[
            RowChange(row_id=row_id, kind=kind, what=what)
            for kind, rows in found.items()
            for row_id, what in islice(rows.items(), examples)
        ],
        **{kind: len(rows) for kind, rows in found.items()},
    )


def _changes(old: IndexEntry, new: IndexEntry) -> tuple[str, ...]:
    names = {"question": old.content != new.content, "answer": old.answer != new.answer}
    names[f"split {old.split or 'none'} → {new.split or 'none'}"] = old.split != new.split
    names[f"{old.reason or 'ok'} → {new.reason or 'ok'}"] = old.reason != new.reason
    return tuple(name for name, is_so in names.items() if is_so)


def find_rows(version: Version, ids: Collection[str]) -> dict[str, Row]:
    """Rows of a version by their ids; those that it lacks are left out. One pass over the file."""
    found: dict[str, Row] = {}
    with version.artifacts["rows"].path.open(encoding="utf-8") as stream:
        for line in stream:
            match = _LINE_ID.match(line)
            if (match.group(1) if match else json.loads(line)["id"]) in ids:
                row = Row.model_validate_json(line)
                found[row.id] = row
                if len(found) == len(ids):
                    break
    return found


def read_index(path: Path) -> Iterator[IndexEntry]:
    """Entries in the order of their ids."""
    with path.open(encoding="utf-8") as stream:
        for line in stream:
            yield IndexEntry(*json.loads(line))


def questions_in(index: Path) -> set[str]:
    """Ids of the rows that a version has; those that it left for later are not among them."""
    return {entry.id for entry in read_index(index) if entry.reason != LEFT_FOR_LATER}


def last_training(profile: Profile) -> LastTraining | None:
    try:
        return read_record(LastTraining, tenant_folder(profile) / TRAINED)
    except (FileNotFoundError, ValidationError):
        return None


def note_training(profile: Profile, version_id: str, run_id: str) -> None:
    """Record that a training used this version, or was started for it; new rows are counted from
    it.

    An older version never replaces a newer one: a long training may end after a newer one was
    started.
    """
    at = datetime.now(UTC).isoformat(timespec="seconds")
    training, root = LastTraining(version=version_id, run_id=run_id, at=at), tenant_folder(profile)
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / LOCK):
        noted = last_training(profile)
        try:
            is_older = (
                noted
                and Version.read(root / version_id).created
                < Version.read(root / noted.version).created
            )
        except ArtifactError:  # one of them was removed, or can't be read
            is_older = False
        if not is_older:
            write_json(root / TRAINED, dump_record(training))


def training_rows_since(profile: Profile, version: Version) -> int:
    """Usable training rows of a version that the last training lacked, or had with another answer;
    all of them where there is no last training, or its version was removed."""
    trained = last_training(profile)
    old_index = tenant_folder(profile) / trained.version / INDEX if trained else None
    old = read_index(old_index) if old_index and old_index.exists() else ()
    answers = {entry.id: entry.answer for entry in old if entry.teaches}
    new = read_index(version.directory / INDEX)
    return sum(entry.teaches and answers.get(entry.id) != entry.answer for entry in new)


def _describe(
    directory: Path,
    origin: Origin,
    kept: dict[str, Artifact],
    parent: Version | None,
    drift_warning: float,
    augmented: Augmented,
    moved: Drift | None = None,
) -> None:
    """Index, pins, summary, card and, last, version.json: one pass over the rows.

    `moved` is what is known of drift; without it the parent is compared with. Without a parent the
    pins stay.
    """
    known, before, pins, moved_away = set[str](), RowSummary(), dict[str, Split](), 0
    if parent:
        path = parent.directory / SUMMARY
        try:
            known, pins = questions_in(parent.directory / INDEX), splits_of(parent)
            before = RowSummary.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, TypeError, ValueError) as error:
            raise _unreadable(path, error) from error
    index: list[str] = []
    card, whole, arrivals = CardBuilder(), RowSummaryBuilder(), RowSummaryBuilder()
    for row in read_jsonl(kept["rows"].path, Row):
        index.append(json.dumps(IndexEntry.of(row), ensure_ascii=False))
        card.add(row)
        whole.add(row)
        if parent and row.id not in known:
            arrivals.add(row)
        if row.split and row.reason not in INPUT_REASONS:
            moved_away += pins.pop(row.id, row.split) != row.split
    _write_lines(directory / INDEX, index)
    summary = whole.build()
    write_json(directory / SUMMARY, summary.model_dump())
    if parent:
        if moved_away and origin.pins != parent.id:  # else the workbook has moved them
            found = f"version {parent.id} was published meanwhile, and has {moved_away:,} of these questions in other"
            raise StageError(f"{found} splits; run again, and they keep those")
        _write_lines(directory / PINS, map(json.dumps, pins.items()))
        moved = drift(parent.id, before, arrivals.build(), summary, drift_warning)
    made = card.build(origin, kept, moved, augmented)
    write_json(directory / CARD_DATA, made.model_dump(mode="json"))
    with written_whole(directory / CARD) as partial:
        partial.write_text(card_markdown(made), encoding="utf-8")
    counts = {"rows": made.rows, "ok": made.ok} | {
        f"{split}_ok": n["ok"] for split, n in made.splits.items()
    }
    files = {
        n: a.model_copy(update={"path": Path(a.path.name)}) for n, a in kept.items()
    }  # the folder may be moved
    version = Version(**origin.model_dump(), artifacts=files, counts=counts, drift=moved)
    write_json(directory / VERSION_FILE, dump_record(version))
    for file in directory.iterdir():
        file.chmod(0o440)


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    """Sorted: row ids come first and are hex digits, all as long, so that the lines' order is
    theirs."""
    with written_whole(path) as partial, partial.open("w", encoding="utf-8") as stream:
        stream.writelines(f"{line}\n" for line in sorted(lines))


def _keep(artifact: Artifact, target: Path) -> Artifact:
    """A hard link, or a copy where links can't be; read-only, and so is the run's file where it is
    the same one."""
    source = artifact.verify()
    try:
        os.link(source, target)
        target.chmod(0o440)
    except OSError:  # another file system, or another owner
        target.unlink(missing_ok=True)
        shutil.copyfile(source, target)
    return artifact.model_copy(update={"path": target})
