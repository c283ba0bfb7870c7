"""Dataset versions: named by content, kept apart from runs, compared, and pinned from."""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from disk import disk_events
from doubles import raising
from question_rows import taught

from qinglan.config import Dataset, Profile
from qinglan.data import versions
from qinglan.data.dataset.splits import place_rows
from qinglan.data.versions import (
    Version,
    diff,
    find_rows,
    find_version,
    pinned_splits,
    publish,
    versions_of,
)
from qinglan.errors import ArtifactError, StageError
from qinglan.rows import Retrieved, Row
from qinglan.runs.artifacts import Artifact, write_jsonl

Publish = Callable[..., Version]
NUMBERS = iter(range(10_000))


ROWS = [
    taught("鱼油"),
    taught("钙片"),
    taught("蛋白粉", split="dev"),
    taught("益生菌", split="test"),
    taught("硒").failed("rag_unavailable"),
]


@pytest.fixture
def published(profile: Profile, tmp_path: Path) -> Publish:
    """Publish rows as a run's dataset."""

    def publish_rows(rows: list[Row], **origin: str) -> Version:
        artifacts = dataset(tmp_path / f"run-{next(NUMBERS)}", rows)
        return publish(profile, "run-1", artifacts, **origin)

    return publish_rows


def dataset(folder: Path, rows: list[Row]) -> dict[str, Artifact]:
    teaching = [{"text": r.target} for r in rows if r.status == "ok" and r.split == "train"]
    return {
        "rows": write_jsonl(folder / "rows.jsonl", rows),
        "sft_train": write_jsonl(folder / "sft_train.jsonl", teaching),
    }


def test_a_version_outlives_its_run(published: Publish, tmp_path: Path):
    version = published(ROWS, inputs="in")
    for run in tmp_path.glob("run-*"):
        shutil.rmtree(run)
    again = Version.read(version.directory)
    assert again == version
    assert [artifact.verify().name for artifact in again.artifacts.values()] == [
        "rows.jsonl",
        "sft_train.jsonl",
    ]
    assert (again.parent, again.pins, again.inputs) == ("", "", "in")
    assert (again.run_id, again.teacher) == ("run-1", "big")
    assert again.counts == {"rows": 5, "ok": 4, "dev_ok": 1, "test_ok": 1, "train_ok": 2}
    # There is a folder for each of a tenant's recipes.
    assert version.directory.parent.name.endswith(".query_rewrite")
    moved = version.directory.rename(tmp_path / "elsewhere")
    assert Version.read(moved).artifacts["rows"].verify() == moved / "rows.jsonl"
    assert {oct(file.stat().st_mode & 0o777) for file in moved.iterdir()} == {"0o440"}


def test_a_version_is_on_the_disk_before_it_gets_its_name(
    published: Publish, monkeypatch: pytest.MonkeyPatch
):
    events = disk_events(monkeypatch)
    version = published(ROWS)
    folder = f".partial-{version.id}"
    naming = events.index(("name", folder))
    files = {("sync", file.name) for file in version.directory.iterdir()}
    assert files | {("sync", folder)} <= {*events[:naming]}
    assert events[naming + 1 :] == [
        ("sync", version.directory.parent.name),
        ("name", f".latest-{version.id}"),
    ]


def test_the_files_are_links_where_they_can_be_and_copies_elsewhere(
    published: Publish, monkeypatch: pytest.MonkeyPatch
):
    assert published(ROWS).artifacts["rows"].path.stat().st_nlink == 2
    monkeypatch.setattr(os, "link", raising(OSError(18, "Invalid cross-device link")))
    copied = published(ROWS[:-1]).artifacts["rows"]
    assert copied.verify().stat().st_nlink == 1


def test_the_same_content_is_one_version_also_at_once(published: Publish, profile: Profile):
    first = published(ROWS)
    second = published([*ROWS, taught("叶黄素")])
    assert second.parent == first.id
    assert published(ROWS, inputs="others") == first
    assert find_version(profile, "latest") == second
    assert versions_of(profile) == [second, first]
    with ThreadPoolExecutor(4) as pool:
        at_once = list(pool.map(published, [ROWS[:-1]] * 4))
    third = at_once[0]
    assert at_once == [third] * 4
    assert versions_of(profile) == [third, second, first]


@pytest.mark.parametrize("moment", ["_describe", "point_link"])
def test_a_kill_leaves_no_half_version(
    published: Publish, profile: Profile, monkeypatch: pytest.MonkeyPatch, moment: str
):
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        # As of a kill, nothing after it is run.
        patch.setattr(versions, moment, raising(SystemExit()))
        published(ROWS)
    version = published(ROWS)
    assert find_version(profile, "latest") == version
    names = {path.name for path in version.directory.parent.iterdir()}
    assert names == {version.id, "latest", ".lock"}


def test_a_changed_file_is_not_published(profile: Profile, tmp_path: Path):
    artifacts = dataset(tmp_path / "run", ROWS)
    artifacts["sft_train"].path.write_text("x")
    with pytest.raises(ArtifactError, match="was changed after it was written"):
        publish(profile, "run-1", artifacts)
    assert versions_of(profile) == []


@pytest.mark.parametrize(
    ("file", "content"), [("version.json", '{"id": "x"}'), ("index.jsonl", None)]
)
def test_a_damaged_version_is_one_line(published: Publish, file: str, content: str | None):
    folder = published(ROWS).directory
    (folder / file).unlink()
    if content:
        (folder / file).write_text(content)
    message = rf"not readable \(.*\); remove {folder.parent}/{folder.name} and publish again"
    with pytest.raises(ArtifactError, match=message) as caught:
        published(ROWS[:-1])
    assert "\n" not in str(caught.value)


def test_pins_are_of_the_latest_version_and_a_rerun_names_the_same_one_as_its_first_run(
    published: Publish, profile: Profile
):
    assert pinned_splits(profile, "in-1") == ("", {})
    first = published(ROWS, inputs="in-1")
    assert pinned_splits(profile, "in-2") == (first.id, {r.id: r.split for r in ROWS if r.split})
    more = [*ROWS, taught("叶黄素", split="test")]
    second = published(more, inputs="in-2", pins=first.id)
    splits = {r.id: r.split for r in more if r.split}
    assert pinned_splits(profile, "in-1") == ("", splits)
    assert pinned_splits(profile, "in-2") == (first.id, splits)
    assert pinned_splits(profile, "in-3") == (second.id, splits)
    # The workbook itself has moved a row.
    published([*ROWS[:3], more[-1], taught("益生菌")], inputs="in-3", pins=second.id)
    assert pinned_splits(profile, "in-1") == ("", splits | {taught("益生菌").id: "train"})


def test_a_question_keeps_its_split_through_versions_that_lack_it(
    published: Publish, profile: Profile
):
    first = published(ROWS, inputs="in-1")
    limited = published([ROWS[0], taught("褪黑素", split="dev")], inputs="in-2", pins=first.id)
    no_question = taught("", id="f" * 16).failed("empty_query")
    third = published(
        [ROWS[0].failed("left_for_later"), no_question], inputs="in-3", pins=limited.id
    )
    pins, splits = pinned_splits(profile, "in-4")
    assert (pins, splits) == (
        third.id,
        {r.id: r.split for r in [*ROWS, taught("褪黑素", split="dev")]},
    )
    every_new_one_is_train = Dataset(train_share=0.98, dev_share=0.01)
    again = [r.model_copy(update={"split": None}) for r in ROWS]
    placed = place_rows(again, every_new_one_is_train, splits).apply(again)
    assert [r.split for r in placed] == ["train", "train", "dev", "test", "train"]
    # The workbook itself has moved a row.
    moved_rows = [*ROWS[:3], ROWS[3].with_split("dev")]
    moved = published(moved_rows, inputs="in-4", pins=third.id)
    assert pinned_splits(profile, "in-5")[1][ROWS[3].id] == "dev"
    shutil.rmtree(moved.directory)
    assert pinned_splits(profile, "in-5") == (third.id, splits)


def test_two_publishers_at_once_keep_each_others_splits(published: Publish, profile: Profile):
    first = published(ROWS)
    new = taught("叶黄素", split="test")
    second = published([*ROWS, new], pins=first.id)
    third = published([*ROWS, taught("褪黑素")], pins=first.id)
    assert pinned_splits(profile, "")[1][new.id] == "test"
    with pytest.raises(
        StageError, match=f"^version {third.id} was published meanwhile, .* 1 of these questions"
    ):
        published([*ROWS, taught("叶黄素")], pins=first.id)
    with pytest.raises(StageError):
        published([*ROWS, taught("叶黄素")], pins=second.id)
    # With the latest version's pins, another split is what the workbook says.
    assert published([*ROWS, taught("叶黄素")], pins=third.id).parent == third.id


def test_a_version_that_was_not_yet_the_latest_when_its_publisher_was_killed_counts(
    published: Publish, profile: Profile, monkeypatch: pytest.MonkeyPatch
):
    published(ROWS)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(versions, "point_link", raising(SystemExit()))
        published([*ROWS, taught("叶黄素", split="test")])
    killed = versions_of(profile)[0]
    assert find_version(profile, "latest") == killed
    assert published(ROWS[:1], pins=killed.id).parent == killed.id
    assert pinned_splits(profile, "")[1][taught("叶黄素").id] == "test"


def test_what_changed_between_two_versions(published: Publish):
    fish, calcium, protein, probiotic, selenium = ROWS
    a = published(ROWS)
    later = [
        fish.with_answer("鱼油 功效"),
        calcium.failed("below_threshold"),
        protein.with_split("test"),
        # A score alone changes no row.
        probiotic.with_retrieved(probiotic.original_retrieved, Retrieved()),
    ]
    b = published([*later, taught("叶黄素"), taught("褪黑素")], pins=a.id)
    difference = diff(a, b)
    assert (difference.added, difference.removed) == (2, 1)
    assert (difference.changed, difference.unchanged) == (3, 1)
    assert difference.what == {"answer": 1, "ok → below_threshold": 1, "split dev → test": 1}
    assert [change.kind for change in difference.examples].count("added") == 2
    assert [c.row_id for c in difference.examples if c.kind == "removed"] == [selenium.id]
    assert len(diff(a, b, examples=1).examples) == 3
    assert diff(a, a).unchanged == len(ROWS)
    assert find_rows(a, {fish.id, probiotic.id, "unknown"}) == {
        fish.id: fish,
        probiotic.id: probiotic,
    }


def test_new_training_rows_count_from_the_last_training(published: Publish, profile: Profile):
    first = published(ROWS)
    assert versions.training_rows_since(profile, first) == 2, "nothing was trained yet"
    versions.note_training(profile, "0123456789ab", "run-0")
    assert versions.training_rows_since(profile, first) == 2, "nor on a version that is known"
    versions.note_training(profile, first.id, "run-1")
    assert versions.training_rows_since(profile, first) == 0
    rewritten = ROWS[0].model_copy(update={"answer": "鱼油 功效"})
    second = published(
        [
            rewritten,
            *ROWS[1:],
            taught("叶黄素"),
            taught("硒片", split="test"),
            taught("锌").failed("rag_unavailable"),
        ]
    )
    assert versions.training_rows_since(profile, second) == 2
    versions.note_training(profile, second.id, "run-2")
    # A long training ends, and takes nothing back.
    versions.note_training(profile, first.id, "run-1")
    training = versions.last_training(profile)
    assert training is not None
    assert (training.version, training.run_id) == (second.id, "run-2")
