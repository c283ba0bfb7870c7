"""Files of today's format are read, those of a later one refused in one line.

`golden/v1` holds a file of every kind, most of them from a real run.
"""

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from fixture_types import ProfileOf
from run_stages import end_stage

from qinglan.config import Profile, Tracking, load_profile
from qinglan.data import versions
from qinglan.data.review import load_reviews, read_store, store_path
from qinglan.data.versions.card import Card
from qinglan.data.versions.drift import RowSummary
from qinglan.errors import ArtifactError
from qinglan.evaluation.models import Decision, Evaluation, Report
from qinglan.ops.backup import Backup
from qinglan.ops.cleanup.folders import read_folders
from qinglan.registry.approval import Waiting
from qinglan.registry.versions import Candidate, Released
from qinglan.rows import Row
from qinglan.runs.artifacts import MANIFEST, StageResult, read_jsonl
from qinglan.runs.run import RUN_FILE, find_stage, load_stages, open_run, runs_of
from qinglan.runs.schema_version import KEY, check_version, read_record
from qinglan.runs.tracking import Tracker
from qinglan.serving.canary_observer import read_state, read_verdict
from qinglan.serving.site import open_site, share_of

GOLDEN = Path(__file__).parent / "golden" / "v1"
RUN_FOLDER = GOLDEN / "run"
DATASET = GOLDEN / "dataset"
SITE = GOLDEN / "site"
NEWER = r"written by a newer Qinglan \(format \d+, this one reads up to \d+\); upgrade this one"


def newer(path: Path) -> Path:
    """The file, rewritten with a later number."""
    record = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(record | {KEY: 99}), encoding="utf-8")
    return path


@pytest.mark.parametrize("wrong", [0, "2", None])
def test_a_number_that_is_none_is_refused(wrong: Any):
    with pytest.raises(ArtifactError, match="which is no version; restore it from a backup"):
        check_version({KEY: wrong, "x": 3}, "a.json")


def read_share(path: Path) -> object:
    """The share in the file, where it is the one that it should be."""
    share = share_of(load_profile("embedded"), path.parent, "7")
    return share if share == 0.1 else None


READERS: list[tuple[Path, Callable[[Path], object]]] = [
    (RUN_FOLDER / RUN_FILE, lambda path: runs_of(path.parents[1], "small")),
    (RUN_FOLDER / "dataset" / MANIFEST, StageResult.read),
    (RUN_FOLDER / "evaluate" / MANIFEST, StageResult.read),
    (RUN_FOLDER / "gate" / MANIFEST, StageResult.read),
    (RUN_FOLDER / "report.json", Report.read),
    (DATASET / versions.VERSION_FILE, lambda path: versions.Version.read(path.parent)),
    (SITE / "backup.json", lambda path: Backup.read(path.parent)),
    (SITE / "waiting.json", lambda path: Waiting.read(path.parent)),
    (SITE / "share.json", read_share),
    (SITE / "canary.json", lambda path: read_state(path.parent)),
    (SITE / "verdict.json", lambda path: read_verdict(path.parent)),
    (SITE / "release.json", lambda path: read_record(Candidate, path)),
]


@pytest.mark.parametrize(
    ("golden", "read"), READERS, ids=[str(path.relative_to(GOLDEN)) for path, _ in READERS]
)
def test_each_file_is_read_and_a_newer_one_refused(
    golden: Path, read: Callable[[Path], object], tmp_path: Path
):
    folder = tmp_path / "run"
    folder.mkdir()
    assert read(Path(shutil.copy(golden, folder))) is not None
    with pytest.raises(ArtifactError, match=rf"\A[^\n]*{golden.name}: {NEWER}[^\n]*\Z"):
        read(newer(folder / golden.name))


def test_what_lies_beside_manifests_is_read():
    evaluation = (RUN_FOLDER / "evaluate" / "evaluation.json").read_text("utf-8")
    assert Evaluation.model_validate_json(evaluation).comparisons
    decision = (RUN_FOLDER / "gate" / "decision.json").read_text("utf-8")
    assert Decision.model_validate_json(decision).verdict == "refuse"
    assert len(list(versions.read_index(DATASET / versions.INDEX))) == 20
    assert len(list(read_jsonl(DATASET / "rows.jsonl", Row))) == 3
    assert RowSummary.model_validate_json((DATASET / versions.SUMMARY).read_text("utf-8"))
    card = Card.model_validate_json((DATASET / versions.CARD_DATA).read_text("utf-8"))
    assert card.origin.id == "b438fdf0a5b4"


def test_a_newer_stage_is_made_again_and_a_newer_run_neither_continued_nor_removed(
    profile: Profile,
):
    with open_run(profile, "refresh") as run:
        end_stage(run, "ingest")
        assert find_stage(run, "ingest", "k")
        newer(run.directory / "ingest" / MANIFEST)
        assert find_stage(run, "ingest", "k") is None
        with pytest.raises(ArtifactError, match=NEWER):
            load_stages(run.directory, ["ingest"], "")
        newer(run.directory / RUN_FILE)
    with pytest.raises(ArtifactError, match=NEWER), open_run(profile, "refresh"):
        raise AssertionError
    assert [folder.state for folder in read_folders(run.directory.parent)] == [{}]


def test_a_newer_dataset_version_or_note_of_the_last_training_is_refused_not_passed_over(
    profile: Profile,
):
    folder = versions.tenant_folder(profile) / "b438fdf0a5b4"
    shutil.copytree(DATASET, folder)
    assert len(versions.versions_of(profile)) == 1
    newer(folder / versions.VERSION_FILE)
    with pytest.raises(ArtifactError, match=NEWER):
        versions.versions_of(profile)
    path = Path(shutil.copy(DATASET / "trained.json", versions.tenant_folder(profile)))
    assert versions.last_training(profile).version == "b438fdf0a5b4"
    newer(path)
    with pytest.raises(ArtifactError, match=NEWER):
        versions.last_training(profile)


def test_reviews_are_read_and_newer_ones_refused(profile: Profile):
    path = store_path(profile)
    path.parent.mkdir(parents=True)
    shutil.copy(SITE / "reviews.jsonl", path)
    assert [review.verdict for review in read_store(path)] == ["accept", "correct"]
    path.write_text(path.read_text("utf-8").replace("{", f'{{"{KEY}": 2, ', 1), encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"\.jsonl:1: " + NEWER):
        load_reviews(profile)


def test_a_registered_version_is_read_and_a_newer_one_refused():
    tags = json.loads((SITE / "tags.json").read_text("utf-8"))
    released = Released.of_tags("qinglan.m", "1", datetime.now(UTC), tags)
    assert released.verdict == "refuse"
    assert released.dataset_version == "b438fdf0a5b4"
    assert Released.of_tags("qinglan.m", "1", released.created, tags | {KEY: "1"}) == released
    with pytest.raises(ArtifactError, match=r"release 1 of qinglan\.m: " + NEWER):
        Released.of_tags("qinglan.m", "1", released.created, tags | {KEY: "2"})
    with pytest.raises(ArtifactError, match="which is no version"):
        Released.of_tags("qinglan.m", "1", released.created, tags | {KEY: "two"})


@pytest.mark.parametrize("name", ["canary.json", "verdict.json"])
def test_a_newer_canary_is_refused_before_anything_is_served(
    profile_of: ProfileOf, tmp_path: Path, name: str
):
    newer(Path(shutil.copy(SITE / name, tmp_path)))
    with (
        pytest.raises(ArtifactError, match=NEWER),
        open_site(profile_of(), tmp_path, lambda _: None, port=0, watched=False),
    ):
        raise AssertionError


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # MLflow's
def test_an_earlier_mlflows_database_is_reported_in_one_line(tmp_path: Path):
    file = tmp_path / "mlflow.db"
    Tracker(f"sqlite:///{file}", Tracking(), tmp_path)
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute("UPDATE alembic_version SET version_num = '1b5f0d9ad7c1'")
    code = (
        "import sys; from qinglan.runs.tracking import *; Tracker(sys.argv[1], Tracking(), Path())"
    )
    # In another process, as MLflow checks a database once per process.
    argv = [sys.executable, "-c", code, f"sqlite:///{file}"]
    stderr = subprocess.run(argv, capture_output=True, text=True, check=False).stderr
    assert "ConfigError: tracking.uri: Detected out-of-date database schema" in stderr
    assert "mlflow db upgrade" in stderr
