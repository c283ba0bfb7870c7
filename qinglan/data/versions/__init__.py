"""Dataset versions: immutable, and named by their content.

They are kept outside of runs, so that deleting runs loses none.

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
from typing import Literal, NamedTuple, Self

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

VERSION_FILE = "version.json"
INDEX = "index.jsonl"
PINS = "pins.jsonl"
SUMMARY = "summary.json"
CARD = "DATA_CARD.md"
CARD_DATA = "card.json"
LATEST = "latest"
TRAINED = "trained.json"
LOCK = ".lock"
_PARTIAL = ".partial-"
_READ_ONLY = 0o440
_HASH_CHARS = 12
_LINE_ID = re.compile(r'\{"id":"([^"\\]+)"')
Kind = Literal["added", "removed", "changed"]


class Version(Origin):
    """A published version: `version.json`."""

    artifacts: dict[str, Artifact]
    """The dataset stage's files, by its names for them; in the file by name, here by full path."""
    counts: dict[str, int]
    drift: Drift | None = None
    """Drift against the parent; None for a tenant's first."""
    directory: Path = Field(default=Path(), exclude=True)

    @classmethod
    def read(cls, directory: Path) -> "Version":
        """The version of this folder; ArtifactError where its file can't be read."""
        path = directory / VERSION_FILE
        try:
            version = read_record(cls, path)
        except (OSError, ValidationError) as error:
            raise _unreadable(path, error) from error
        return version.located_in(directory.resolve())

    def located_in(self, directory: Path) -> Self:
        """The version with the full paths of its files, which lie in this folder."""
        artifacts = {}
        for name, artifact in self.artifacts.items():
            artifacts[name] = _with_path(artifact, directory / artifact.path.name)
        return self.model_copy(update={"directory": directory, "artifacts": artifacts})


def _with_path(artifact: Artifact, path: Path) -> Artifact:
    return artifact.model_copy(update={"path": path})


def _unreadable(path: Path, error: Exception) -> ArtifactError:
    return ArtifactError(
        f"{path}: not readable ({first_line(error)}); remove {path.parent} and publish again"
    )


class IndexEntry(NamedTuple):
    """A row in a version's index: a JSON array a line, sorted by id."""

    id: str
    split: Split | None
    reason: str | None
    """Reason for which it failed; None while it is ok."""
    content: str
    """Hash of the question as it was written, with its context, inputs, pool and gold document."""
    answer: str
    """Hash of the answer that SFT would learn; empty where there is none."""

    @classmethod
    def of(cls, row: Row) -> "IndexEntry":
        content = hash_of(row.query, row.profile, row.history, row.gold_id, row.inputs, row.pool)
        reason = None if row.status == "ok" else row.reason or "unknown"
        answer = hash_of(row.target)[:_HASH_CHARS] if row.target else ""
        return cls(row.id, row.split, reason, content[:_HASH_CHARS], answer)

    @property
    def teaches(self) -> bool:
        """Is it an SFT training row?"""
        return self.reason is None and self.split == "train" and bool(self.answer)


class RowChange(BaseModel, frozen=True):
    """A row that differs between two versions."""

    row_id: str
    kind: Kind
    what: tuple[str, ...] = ()
    """Changes of a changed row: `answer`, `question`, `split train → test`,
    `ok → below_threshold`."""


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
    """The id of the version that these files make, 12 hex digits.

    A version keeps its id when `qinglan forget` changes its files.
    """
    version_id = _digest_of(artifacts)
    if (tenant_folder(profile) / version_id).exists():
        return version_id
    # The files may be those that it once had.
    for version in versions_of(profile):
        if version.forgotten and _digest_of(version.artifacts) == version_id:
            return version.id
    return version_id


def _digest_of(artifacts: Mapping[str, Artifact]) -> str:
    digests = sorted((name, artifact.sha256) for name, artifact in artifacts.items())
    return hash_of(digests)[:_HASH_CHARS]


def tenant_folder(profile: Profile) -> Path:
    """The folder of all versions of the profile's tenant and recipe."""
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
    """Keep the dataset stage's files as a version.

    Returns the existing version where there is one of the same content. StageError where another
    version was published since the rows were split, and has one of them in another split.

    Args:
        artifacts: `rows` (every `Row`) and the training files.
        inputs: the argument of `pinned_splits`.
        pins: the version that it named.
        augmented: questions with noise, as the dataset stage counts them.
    """
    root = tenant_folder(profile)
    version_id = version_of(profile, artifacts)
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / LOCK):
        # Left behind by publishers that were killed.
        for leftover in root.glob(f"{_PARTIAL}*"):
            shutil.rmtree(leftover)
        parent = latest_version(profile)
        if (root / version_id).exists():
            return _existing_version(root, version_id, parent)
        partial = root / f"{_PARTIAL}{version_id}"
        partial.mkdir()
        created = _creation_time(parent)
        own_artifacts = {}
        for name, artifact in artifacts.items():
            own_artifacts[name] = _keep(artifact, partial / f"{name}{artifact.path.suffix}")
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
        drift_warning = profile.refresh.drift_warning
        _describe(partial, origin, own_artifacts, augmented, parent, drift_warning)
        # A name that can be found stands for a complete version, also after a power loss.
        sync_all(partial)
        partial.rename(root / version_id)
        # The folder must be on the disk before `latest` may name it.
        sync(root)
        point_link(root / LATEST, version_id)
        return Version.read(root / version_id)


def _existing_version(root: Path, version_id: str, parent: Version | None) -> Version:
    """A version that was published before; ArtifactError where its files have changed."""
    version = Version.read(root / version_id)
    for artifact in version.artifacts.values():
        artifact.verify()
    if version == parent:
        # Its publisher may have been killed before it moved the link.
        point_link(root / LATEST, version_id)
    return version


def _creation_time(parent: Version | None) -> datetime:
    """The present time, and later than the parent's, also where a clock was wrong.

    The latest version is the one that was created last.
    """
    now = datetime.now(UTC)
    if parent is None:
        return now
    return max(now, datetime.fromisoformat(parent.created) + timedelta(microseconds=1))


def describe_again(version: Version, artifacts: dict[str, Artifact], forgotten: int) -> None:
    """Bring what a version says of itself in line with its files, from which rows were taken.

    Its drift stays.
    """
    card = Card.model_validate_json((version.directory / CARD_DATA).read_bytes())
    origin = card.origin.with_forgotten(version.forgotten + forgotten)
    _describe(version.directory, origin, artifacts, card.augmented, known_drift=version.drift)


def pinned_splits(profile: Profile, inputs_digest: str) -> tuple[str, dict[str, Split]]:
    """The splits that rows keep, and the version that they are from.

    Both are empty before a tenant's first version. The splits are from the latest version, which
    has those of all. But where a version was made from the same inputs (of the dataset stage,
    except the pins), the one that it names is named again: the stage's result is found.
    """
    versions = versions_of(profile)
    if not versions:
        return "", {}
    latest = versions[0]
    for version in versions:
        if version.inputs == inputs_digest:
            # The latest may be an older Qinglan's, and lack the splits of earlier versions.
            return version.pins, splits_of(version) | splits_of(latest)
    return latest.id, splits_of(latest)


def splits_of(version: Version) -> dict[str, Split]:
    """Splits by row id: those of a version's questions, and of earlier ones that it lacks.

    Of several earlier splits of a question it has the last one.
    """
    splits: dict[str, Split] = {}
    path = version.directory / PINS
    # The first version has none, and neither has one of an older Qinglan.
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines()
        splits.update(map(json.loads, lines))
    for entry in read_index(version.directory / INDEX):
        if entry.split and entry.reason not in INPUT_REASONS:
            splits[entry.id] = entry.split
    return splits


def versions_of(profile: Profile) -> list[Version]:
    """A tenant's versions, the newest first."""
    files = tenant_folder(profile).glob(f"[0-9a-f]*/{VERSION_FILE}")
    versions = [Version.read(file.parent) for file in files]
    return sorted(versions, key=lambda version: version.created, reverse=True)


def latest_version(profile: Profile) -> Version | None:
    return next(iter(versions_of(profile)), None)


def find_version(profile: Profile, name: str) -> Version:
    """A version by its id, a unique prefix of it, or `latest`.

    ConfigError where there is none, or several.
    """
    versions = versions_of(profile)
    if name == LATEST:
        matches = versions[:1]
    else:
        matches = [version for version in versions if name and version.id.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    newest_ids = ", ".join(version.id for version in versions[:5])
    listed = newest_ids or "none; run `qinglan run refresh` first"
    problem = f"fits {len(matches)} versions" if matches else "not found"
    raise ConfigError(
        f"dataset version `{name}`: {problem} for tenant `{profile.tenant.id}`; newest: {listed}"
    )


def diff(a: Version, b: Version, examples: int = 5) -> VersionDiff:
    """Rows added, removed and changed from version `a` to `b`.

    Args:
        examples: most rows of each kind that are listed.
    """
    old_entries = _entries_by_id(a)
    new_entries = _entries_by_id(b)
    removed = [row_id for row_id in old_entries if row_id not in new_entries]
    added: list[str] = []
    changed: dict[str, tuple[str, ...]] = {}
    change_counts: Counter[str] = Counter()
    for row_id, entry in new_entries.items():
        if row_id not in old_entries:
            added.append(row_id)
            continue
        changes = _changes(old_entries[row_id], entry)
        if changes:
            changed[row_id] = changes
            change_counts.update(changes)

    listed = [RowChange(row_id=row_id, kind="added") for row_id in added[:examples]]
    for row_id in removed[:examples]:
        listed.append(RowChange(row_id=row_id, kind="removed"))
    for row_id, changes in islice(changed.items(), examples):
        listed.append(RowChange(row_id=row_id, kind="changed", what=changes))
    return VersionDiff(
        a=a.id,
        b=b.id,
        added=len(added),
        removed=len(removed),
        changed=len(changed),
        unchanged=len(new_entries) - len(added) - len(changed),
        what=dict(change_counts.most_common()),
        examples=listed,
    )


def _entries_by_id(version: Version) -> dict[str, IndexEntry]:
    return {entry.id: entry for entry in read_index(version.directory / INDEX)}


def _changes(old: IndexEntry, new: IndexEntry) -> tuple[str, ...]:
    """The differences of a row between two versions, in words."""
    changes: list[str] = []
    if old.content != new.content:
        changes.append("question")
    if old.answer != new.answer:
        changes.append("answer")
    if old.split != new.split:
        changes.append(f"split {old.split or 'none'} → {new.split or 'none'}")
    if old.reason != new.reason:
        changes.append(f"{old.reason or 'ok'} → {new.reason or 'ok'}")
    return tuple(changes)


def find_rows(version: Version, ids: Collection[str]) -> dict[str, Row]:
    """Rows of a version by their ids, in one pass over the file.

    Those that it lacks are left out.
    """
    rows: dict[str, Row] = {}
    with version.artifacts["rows"].path.open(encoding="utf-8") as stream:
        for line in stream:
            if _row_id_of(line) not in ids:
                continue
            row = Row.model_validate_json(line)
            rows[row.id] = row
            if len(rows) == len(ids):
                break
    return rows


def _row_id_of(line: str) -> str:
    """The id of the row in a line of JSON."""
    # Parsing a whole line takes far longer than looking at its beginning.
    match = _LINE_ID.match(line)
    return match.group(1) if match else str(json.loads(line)["id"])


def read_index(path: Path) -> Iterator[IndexEntry]:
    """Entries in the order of their ids."""
    with path.open(encoding="utf-8") as stream:
        for line in stream:
            yield IndexEntry(*json.loads(line))


def questions_in(index: Path) -> set[str]:
    """Ids of the rows that a version has; those that it left for later are not among them."""
    ids: set[str] = set()
    for entry in read_index(index):
        if entry.reason != LEFT_FOR_LATER:
            ids.add(entry.id)
    return ids


def last_training(profile: Profile) -> LastTraining | None:
    """The last training that was noted; None where there is none, or its note is damaged."""
    try:
        return read_record(LastTraining, tenant_folder(profile) / TRAINED)
    except (FileNotFoundError, ValidationError):
        return None


def note_training(profile: Profile, version_id: str, run_id: str) -> None:
    """Record that a training used this version, or was started for it.

    New rows are counted from it. An older version never replaces a newer one: a long training may
    end after a newer one was started.
    """
    at = datetime.now(UTC).isoformat(timespec="seconds")
    training = LastTraining(version=version_id, run_id=run_id, at=at)
    root = tenant_folder(profile)
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / LOCK):
        noted = last_training(profile)
        if noted is None or not _is_older(root / version_id, root / noted.version):
            write_json(root / TRAINED, dump_record(training))


def _is_older(directory: Path, noted_directory: Path) -> bool:
    """Tell whether a version was created before the noted one."""
    try:
        return Version.read(directory).created < Version.read(noted_directory).created
    except ArtifactError:
        # One of them was removed, or can't be read.
        return False


def training_rows_since(profile: Profile, version: Version) -> int:
    """Usable training rows of a version that the last training lacked, or had with another answer.

    They are all of them where there is no last training, or its version was removed.
    """
    trained = last_training(profile)
    answers: dict[str, str] = {}
    if trained:
        answers = _taught_answers(tenant_folder(profile) / trained.version / INDEX)
    count = 0
    for entry in read_index(version.directory / INDEX):
        if entry.teaches and answers.get(entry.id) != entry.answer:
            count += 1
    return count


def _taught_answers(index: Path) -> dict[str, str]:
    """Hashes of the answers that a version teaches, by row id; none where it was removed."""
    answers: dict[str, str] = {}
    if not index.exists():
        return answers
    for entry in read_index(index):
        if entry.teaches:
            answers[entry.id] = entry.answer
    return answers


class _Parent(NamedTuple):
    """The parts of the version before that a version's description needs."""

    questions: set[str]
    splits: dict[str, Split]
    summary: RowSummary


def _read_parent(parent: Version) -> _Parent:
    path = parent.directory / SUMMARY
    try:
        return _Parent(
            questions=questions_in(parent.directory / INDEX),
            splits=splits_of(parent),
            summary=RowSummary.model_validate_json(path.read_text(encoding="utf-8")),
        )
    except (OSError, TypeError, ValueError) as error:
        raise _unreadable(path, error) from error


def _describe(
    directory: Path,
    origin: Origin,
    artifacts: dict[str, Artifact],
    augmented: Augmented,
    parent: Version | None = None,
    drift_warning: float = 0.0,
    known_drift: Drift | None = None,
) -> None:
    """Write index, pins, summary, card and, last, version.json, after one pass over the rows.

    With a parent, its splits that the version lacks become its pins, and the drift against it is
    measured. Without one the pins stay, and the drift is the one that is known.
    """
    before = _read_parent(parent) if parent else _Parent(set(), {}, RowSummary())
    index_lines: list[str] = []
    card_builder = CardBuilder()
    whole = RowSummaryBuilder()
    arrivals = RowSummaryBuilder()
    moved_rows = 0
    for row in read_jsonl(artifacts["rows"].path, Row):
        index_lines.append(json.dumps(IndexEntry.of(row), ensure_ascii=False))
        card_builder.add(row)
        whole.add(row)
        if parent and row.id not in before.questions:
            arrivals.add(row)
        if row.split and row.was_question:
            earlier_split = before.splits.pop(row.id, row.split)
            if earlier_split != row.split:
                moved_rows += 1
    _write_lines(directory / INDEX, index_lines)
    summary = whole.build()
    write_json(directory / SUMMARY, summary.model_dump())
    version_drift = known_drift
    if parent:
        # Where the pins were the parent's, the workbook itself has moved them.
        if moved_rows and origin.pins != parent.id:
            raise StageError(
                f"version {parent.id} was published meanwhile, and has {moved_rows:,} "
                "of these questions in other splits; run again, and they keep those"
            )
        _write_lines(directory / PINS, map(json.dumps, before.splits.items()))
        version_drift = drift(parent.id, before.summary, arrivals.build(), summary, drift_warning)
    card = card_builder.build(origin, artifacts, version_drift, augmented)
    _write_card(directory, card)
    _write_version(directory, origin, artifacts, card)
    for file in directory.iterdir():
        file.chmod(_READ_ONLY)


def _write_card(directory: Path, card: Card) -> None:
    write_json(directory / CARD_DATA, card.model_dump(mode="json"))
    with written_whole(directory / CARD) as partial:
        partial.write_text(card_markdown(card), encoding="utf-8")


def _write_version(
    directory: Path, origin: Origin, artifacts: Mapping[str, Artifact], card: Card
) -> None:
    counts = {"rows": card.rows, "ok": card.ok}
    for split, split_counts in card.splits.items():
        counts[f"{split}_ok"] = split_counts["ok"]
    # Without folders, as the version's own may be moved.
    files = {}
    for name, artifact in artifacts.items():
        files[name] = _with_path(artifact, Path(artifact.path.name))
    version = Version(**origin.model_dump(), artifacts=files, counts=counts, drift=card.drift)
    write_json(directory / VERSION_FILE, dump_record(version))


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines that begin with a row id, sorted."""
    # Ids are hex digits, all as long, so that the lines' order is the ids'.
    with written_whole(path) as partial, partial.open("w", encoding="utf-8") as stream:
        stream.writelines(f"{line}\n" for line in sorted(lines))


def _keep(artifact: Artifact, target: Path) -> Artifact:
    """Make a hard link to a file, or a copy where links can't be.

    The link is read-only, and so is then the run's file, as it is the same one.
    """
    source = artifact.verify()
    try:
        os.link(source, target)
        target.chmod(_READ_ONLY)
    except OSError:
        # The run is on another file system, or has another owner.
        target.unlink(missing_ok=True)
        shutil.copyfile(source, target)
    return _with_path(artifact, target)
