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

Made = Callable[..., Version]
NUMBERS = iter(range(10_000))


ROWS = [
    taught("鱼油"),
    taught("钙片"),
    taught("蛋白粉", split="dev"),
    taught("益生菌", split="test"),
    taught("硒").failed("rag_unavailable"),
]


@pytest.fixture
def made(profile: Profile, tmp_path: Path) -> Made:
    """Publish rows as a run's dataset."""

    def make(rows: list[Row], **what: str) -> Version:
        return publish(profile, "run-1", dataset(tmp_path / f"run-{next(NUMBERS)}", rows), **what)

    return make


def dataset(folder: Path, rows: list[Row]) -> dict[str, Artifact]:
    teaching = [{"text": r.target} for r in rows if r.status == "ok" and r.split == "train"]
    return {
        "rows": write_jsonl(folder / "rows.jsonl", rows),
        "sft_train": write_jsonl(folder / "sft_train.jsonl", teaching),
    }


def test_a_version_outlives_its_run(made: Made, tmp_path: Path):
    version = made(ROWS, inputs="in")
    for run in tmp_path.glob("run-*"):
        shutil.rmtree(run)
    again = Version.read(version.directory)
    assert again == version
    assert [artifact.verify().name for artifact in again.artifacts.values()] == [
        "rows.jsonl",
        "sft_train.jsonl",
    ]
    assert (again.parent, again.pins, again.inputs, again.run_id, again.teacher) == (
        "",
        "",
        "in",
        "run-1",
        "big",
    )
    assert again.counts == {"rows": 5, "ok": 4, "dev_ok": 1, "test_ok": 1, "train_ok": 2}
    assert version.directory.parent.name.endswith(
        ".query_rewrite"
    )  # a folder for each of a tenant's recipes
    moved = version.directory.rename(tmp_path / "elsewhere")
    assert Version.read(moved).artifacts["rows"].verify() == moved / "rows.jsonl"
    assert {oct(file.stat().st_mode & 0o777) for file in moved.iterdir()} == {"0o440"}


def test_a_version_is_on_the_disk_before_it_gets_its_name(
    made: Made, monkeypatch: pytest.MonkeyPatch
):
    events = disk_events(monkeypatch)
    version = made(ROWS)
    folder = f".partial-{version.id}"
    named = events.index(("name", folder))
    files = {("sync", file.name) for file in version.directory.iterdir()}
    assert files | {("sync", folder)} <= {*events[:named]}
    assert events[named + 1 :] == [
        ("sync", version.directory.parent.name),
        ("name", f".latest-{version.id}"),
    ]


def test_the_files_are_links_where_they_can_be_and_copies_elsewhere(
    made: Made, monkeypatch: pytest.MonkeyPatch
):
    assert made(ROWS).artifacts["rows"].path.stat().st_nlink == 2
    monkeypatch.setattr(os, "link", raising(OSError(18, "Invalid cross-device link")))
    copied = made(ROWS[:-1]).artifacts["rows"]
    assert copied.verify().stat().st_nlink == 1


def test_the_same_content_is_one_version_also_at_once(made: Made, profile: Profile):
    first = made(ROWS)
    second = made([*ROWS, taught("叶黄素")])
    assert second.parent == first.id
    assert made(ROWS, inputs="others") == first
    assert find_version(profile, "latest") == second
    assert versions_of(profile) == [second, first]
    with ThreadPoolExecutor(4) as pool:
        third, *others = pool.map(made, [ROWS[:-1]] * 4)
    assert others == [third] * 3
    assert versions_of(profile) == [third, second, first]


@pytest.mark.parametrize("moment", ["_describe", "point_link"])
def test_a_kill_leaves_no_half_version(
    made: Made, profile: Profile, monkeypatch: pytest.MonkeyPatch, moment: str
):
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(
            versions, moment, raising(SystemExit())
        )  # as of a kill, nothing after it is run
        made(ROWS)
    version = made(ROWS)
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
def test_a_damaged_version_is_one_line(made: Made, file: str, content: str | None):
    folder = made(ROWS).directory
    (folder / file).unlink()
    if content:
        (folder / file).write_text(content)
    message = rf"not readable \(.*\); remove {folder.parent}/{folder.name} and publish again"
    with pytest.raises(ArtifactError, match=message) as caught:
        made(ROWS[:-1])
    assert "\n" not in str(caught.value)


def test_pins_are_of_the_latest_version_and_a_rerun_names_the_same_one_as_its_first_run(
    made: Made, profile: Profile
):
    assert pinned_splits(profile, "in-1") == ("", {})
    first = made(ROWS, inputs="in-1")
    assert pinned_splits(profile, "in-2") == (first.id, {r.id: r.split for r in ROWS if r.split})
    more = [*ROWS, taught("叶黄素", split="test")]
    second = made(more, inputs="in-2", pins=first.id)
    splits = {r.id: r.split for r in more if r.split}
    assert pinned_splits(profile, "in-1") == ("", splits)
    assert pinned_splits(profile, "in-2") == (first.id, splits)
    assert pinned_splits(profile, "in-3") == (second.id, splits)
    made(
        [*ROWS[:3], more[-1], taught("益生菌")], inputs="in-3", pins=second.id
    )  # as the workbook has said
    assert pinned_splits(profile, "in-1") == ("", splits | {taught("益生菌").id: "train"})


def test_a_question_keeps_its_split_through_versions_that_lack_it(made: Made, profile: Profile):
    first = made(ROWS, inputs="in-1")
    limited = made([ROWS[0], taught("褪黑素", split="dev")], inputs="in-2", pins=first.id)
    no_question = taught("", id="f" * 16).failed("empty_query")
    third = made([ROWS[0].failed("left_for_later"), no_question], inputs="in-3", pins=limited.id)
    pins, splits = pinned_splits(profile, "in-4")
    assert (pins, splits) == (
        third.id,
        {r.id: r.split for r in [*ROWS, taught("褪黑素", split="dev")]},
    )
    every_new_one_is_train = Dataset(train_share=0.98, dev_share=0.01)
    again = [r.model_copy(update={"split": None}) for r in ROWS]
    placed = place_rows(again, every_new_one_is_train, splits).apply(again)
    assert [r.split for r in placed] == ["train", "train", "dev", "test", "train"]
    moved = made(
        [*ROWS[:3], ROWS[3].model_copy(update={"split": "dev"})], inputs="in-4", pins=third.id
    )
    assert pinned_splits(profile, "in-5")[1][ROWS[3].id] == "dev"  # as the workbook has said
    shutil.rmtree(moved.directory)
    assert pinned_splits(profile, "in-5") == (third.id, splits)


def test_two_publishers_at_once_keep_each_others_splits(made: Made, profile: Profile):
    first, new = made(ROWS), taught("叶黄素", split="test")
    second = made([*ROWS, new], pins=first.id)
    third = made([*ROWS, taught("褪黑素")], pins=first.id)
    assert pinned_splits(profile, "")[1][new.id] == "test"
    with pytest.raises(
        StageError, match=f"^version {third.id} was published meanwhile, .* 1 of these questions"
    ):
        made([*ROWS, taught("叶黄素")], pins=first.id)
    with pytest.raises(StageError):
        made([*ROWS, taught("叶黄素")], pins=second.id)
    assert (
        made([*ROWS, taught("叶黄素")], pins=third.id).parent == third.id
    )  # what the workbook says


def test_a_version_that_was_not_yet_the_latest_when_its_publisher_was_killed_counts(
    made: Made, profile: Profile, monkeypatch: pytest.MonkeyPatch
):
    made(ROWS)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(versions, "point_link", raising(SystemExit()))
        made([*ROWS, taught("叶黄素", split="test")])
    killed = versions_of(profile)[0]
    assert find_version(profile, "latest") == killed
    assert made(ROWS[:1], pins=killed.id).parent == killed.id
    assert pinned_splits(profile, "")[1][taught("叶黄素").id] == "test"


def test_what_changed_between_two_versions(made: Made):
    fish, calcium, protein, probiotic, selenium = ROWS
    a = made(ROWS)
    later = [
        fish.model_copy(update={"answer": "鱼油 功效"}),
        calcium.failed("below_threshold"),
        protein.model_copy(update={"split": "test"}),
        probiotic.model_copy(
            update={"answer_retrieved": Retrieved()}
        ),  # a score alone changes no row
    ]
    b = made([*later, taught("叶黄素"), taught("褪黑素")], pins=a.id)
    found = diff(a, b)
    assert (found.added, found.removed, found.changed, found.unchanged) == (2, 1, 3, 1)
    assert found.what == {"answer": 1, "ok → below_threshold": 1, "split dev → test": 1}
    assert [change.kind for change in found.examples].count("added") == 2
    assert [c.row_id for c in found.examples if c.kind == "removed"] == [selenium.id]
    assert len(diff(a, b, examples=1).examples) == 3
    assert diff(a, a).unchanged == len(ROWS)
    assert find_rows(a, {fish.id, probiotic.id, "unknown"}) == {
        fish.id: fish,
        probiotic.id: probiotic,
    }


def test_new_training_rows_count_from_the_last_training(made: Made, profile: Profile):
    first = made(ROWS)
    assert versions.training_rows_since(profile, first) == 2  # nothing was trained yet
    versions.note_training(profile, "0123456789ab", "run-0")
    assert versions.training_rows_since(profile, first) == 2  # nor on a version that is known
    versions.note_training(profile, first.id, "run-1")
    assert versions.training_rows_since(profile, first) == 0
    rewritten = ROWS[0].model_copy(update={"answer": "鱼油 功效"})
    second = made(
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
    versions.note_training(
        profile, first.id, "run-1"
    )  # a long training ends, and takes nothing back
    training = versions.last_training(profile)
    assert training and (training.version, training.run_id) == (second.id, "run-2")
