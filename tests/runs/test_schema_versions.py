"""Files of earlier formats are read, those of later ones refused in one line.

`golden/v1` is what the first format of every such file looks like, without numbers; most of it is a real run's. A
change of format adds a migration and a folder `v2`, and leaves `v1` as it is.
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
from pydantic import BaseModel

from qinglan.config import Profile, Tracking
from qinglan.data.review import add_reviews, load_reviews, read_store, store_path
from qinglan.data.versions import (
    CARD_DATA,
    INDEX,
    SKETCH,
    VERSION_FILE,
    Version,
    last_training,
    note_training,
    tenant_folder,
    versions_of,
)
from qinglan.data.versions.card import Card
from qinglan.data.versions.index import read_index
from qinglan.data.versions.sketch import Sketch
from qinglan.errors import ArtifactError
from qinglan.evaluation import Evaluation
from qinglan.evaluation.models import Decision, Report
from qinglan.ledger import SCHEMA_VERSION as LEDGER_VERSION
from qinglan.ledger import Order, open_ledger
from qinglan.ops.cleanup.run_folders import read_folders
from qinglan.rows import Row
from qinglan.runs import schema_versions
from qinglan.runs.artifacts import MANIFEST, StageResult, read_jsonl
from qinglan.runs.run import RUN_FILE, find_stage, finish_run, load_stages, note_source, open_run, runs_of, save_stage
from qinglan.runs.schema_versions import KEY, RELEASE, RUN, FileKind
from qinglan.runs.tracking import Tracker
from qinglan.serving.registry.approval import Waiting
from qinglan.serving.registry.records import Candidate, Released
from qinglan.serving.site import CanaryShare, open_site, share_of
from qinglan.serving.watch import State, Verdict, read_state, read_verdict

ProfileOf = Callable[..., Profile]
GOLDEN = Path(__file__).parent / "golden" / "v1"
RUN_FOLDER, DATASET, SITE = GOLDEN / "run", GOLDEN / "dataset", GOLDEN / "site"
NEWER = r"written by a newer Qinglan \(format \d+, this one reads up to \d+\); upgrade this one"


class Point(BaseModel):
    x: int
    y: int = 0


def number(path: Path, version: object) -> None:
    """Rewrite a file with another number."""
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {KEY: version}), encoding="utf-8")


def newer(path: Path) -> Path:
    number(path, 99)
    return path


def test_a_file_without_a_number_is_of_version_1():
    assert FileKind().parse(Point, '{"x": 3}', "a.json") == Point(x=3)


def test_every_migration_since_the_files_version_is_made():
    kind = FileKind((lambda old: {"x": old["a"]}, lambda old: old | {"y": 2 * old["x"]}))
    assert kind.version == 3
    assert kind.parse(Point, '{"a": 3}', "a.json") == Point(x=3, y=6)
    assert kind.parse(Point, '{"schema_version": 2, "x": 3}', "a.json") == Point(x=3, y=6)
    assert kind.parse(Point, json.dumps(kind.dump(Point(x=3))), "a.json") == Point(x=3)


def test_a_newer_file_is_refused_in_one_line():
    with pytest.raises(ArtifactError, match="^a.json: " + NEWER) as told:
        FileKind().parse(Point, '{"schema_version": 2, "x": 3}', "a.json")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("wrong", [0, -1, "2", 1.5, True, None])
def test_a_number_that_is_none_is_refused(wrong: Any):
    with pytest.raises(ArtifactError, match="which is no version; restore it from a backup"):
        FileKind().current({KEY: wrong, "x": 3}, "a.json")


def test_what_is_no_object_is_the_models_to_refuse():
    for content in ("[1]", "nonsense", ""):
        with pytest.raises(ValueError, match="Point"):
            FileKind().parse(Point, content, "a.json")


def test_all_kinds_are_of_the_version_that_the_golden_files_show():
    kinds = {name: kind for name, kind in vars(schema_versions).items() if isinstance(kind, FileKind)}
    assert {kind.version for kind in kinds.values()} == {1}


def test_a_run_of_version_1_is_read_and_continued(profile_of: ProfileOf):
    profile = profile_of()
    with open_run(profile, "refresh") as run:
        file = run.directory / RUN_FILE
    values = json.loads(file.read_text(encoding="utf-8"))
    golden = json.loads((RUN_FOLDER / RUN_FILE).read_text(encoding="utf-8"))
    assert set(golden) == set(values) - {KEY}
    assert values.pop(KEY) == RUN.version
    file.write_text(json.dumps(values), encoding="utf-8")
    with open_run(profile, "refresh") as again:
        assert again.id == run.id
        note_source(again, Path("/elsewhere"))
        finish_run(again)
    noted = json.loads(file.read_text(encoding="utf-8"))
    assert (noted[KEY], noted["finished"], noted["source"]) == (RUN.version, True, "/elsewhere")


def test_a_newer_run_is_not_mistaken_for_one_of_ours(profile_of: ProfileOf):
    profile = profile_of()
    with open_run(profile, "refresh") as run:
        newer(run.directory / RUN_FILE)
    with pytest.raises(ArtifactError, match=NEWER):
        runs_of(profile.paths.runs, profile.name)
    with pytest.raises(ArtifactError, match=NEWER), open_run(profile, "refresh"):
        raise AssertionError


@pytest.mark.parametrize("stage", ["dataset", "evaluate", "gate"])
def test_manifests_of_version_1_are_read(stage: str):
    result = StageResult.read(RUN_FOLDER / stage / MANIFEST)
    assert (result.stage, len(result.key)) == (stage, 64)
    assert result.artifacts


def test_what_lies_beside_manifests_of_version_1_is_read():
    evaluation = Evaluation.model_validate_json((RUN_FOLDER / "evaluate" / "evaluation.json").read_text("utf-8"))
    assert evaluation.comparisons
    decision = Decision.model_validate_json((RUN_FOLDER / "gate" / "decision.json").read_text("utf-8"))
    assert decision.verdict == "refuse"


def test_a_manifest_keeps_its_key_and_content(tmp_path: Path):
    result = StageResult.read(RUN_FOLDER / "evaluate" / MANIFEST)
    result.write(tmp_path / MANIFEST)
    assert StageResult.read(tmp_path / MANIFEST) == result


def test_a_newer_stage_is_made_again_but_not_built_upon(profile_of: ProfileOf):
    with open_run(profile_of(), "refresh") as run:
        save_stage(run, StageResult(stage="ingest", key="k", run_id=run.id, seconds=1))
        assert find_stage(run, "ingest", "k")
        newer(run.directory / "ingest" / MANIFEST)
        assert find_stage(run, "ingest", "k") is None
        with pytest.raises(ArtifactError, match=NEWER):
            load_stages(run.directory, ["ingest"], "")


def test_a_report_of_version_1_is_read_and_a_newer_one_refused(tmp_path: Path):
    report = Report.read(RUN_FOLDER / "report.json")
    report.write(tmp_path / "report.json")
    assert Report.read(tmp_path / "report.json") == report
    with pytest.raises(ArtifactError, match=NEWER):
        Report.read(newer(tmp_path / "report.json"))


def test_a_dataset_version_of_version_1_is_read():
    version = Version.read(DATASET)
    assert (version.id, version.counts["rows"] > 0) == ("b438fdf0a5b4", True)
    assert len(list(read_index(DATASET / INDEX))) == 20
    assert len(list(read_jsonl(DATASET / "rows.jsonl", Row))) == 3
    assert Sketch.model_validate_json((DATASET / SKETCH).read_text("utf-8"))
    assert Card.model_validate_json((DATASET / CARD_DATA).read_text("utf-8")).origin.id == version.id


def test_a_newer_dataset_version_is_refused_rather_than_passed_over(profile_of: ProfileOf):
    profile = profile_of()
    folder = tenant_folder(profile) / "b438fdf0a5b4"
    shutil.copytree(DATASET, folder)
    assert len(versions_of(profile)) == 1
    newer(folder / VERSION_FILE)
    with pytest.raises(ArtifactError, match=NEWER):
        versions_of(profile)


def test_the_note_of_the_last_training(profile_of: ProfileOf):
    profile = profile_of()
    tenant_folder(profile).mkdir(parents=True)
    path = Path(shutil.copy(DATASET / "trained.json", tenant_folder(profile)))
    assert last_training(profile).version == "b438fdf0a5b4"
    note_training(profile, "other", "run")
    assert last_training(profile).version == "other"
    newer(path)
    with pytest.raises(ArtifactError, match=NEWER):
        last_training(profile)


def test_verdicts_of_version_1_stay_beside_new_ones(profile_of: ProfileOf):
    profile = profile_of()
    path = store_path(profile)
    path.parent.mkdir(parents=True)
    shutil.copy(SITE / "reviews.jsonl", path)
    old = read_store(path)
    assert [review.verdict for review in old] == ["accept", "correct"]
    add_reviews(profile, [old[0].model_copy(update={"row": "r3", "file_sha256": "another"})])
    assert read_store(path)[:2] == old
    assert len(load_reviews(profile).by_row) == 3
    path.write_text(path.read_text("utf-8").replace(f'"{KEY}": 1', f'"{KEY}": 2'), encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"\.jsonl:1: " + NEWER):
        load_reviews(profile)


def test_a_registered_version_of_version_1_is_read_and_a_newer_one_refused():
    tags = json.loads((SITE / "tags.json").read_text("utf-8"))
    assert KEY not in tags
    released = Released.of_tags("qinglan.m", "1", datetime.now(UTC), tags)
    assert (released.verdict, released.dataset_version) == ("refuse", "b438fdf0a5b4")
    assert Released.of_tags("qinglan.m", "1", released.created, tags | {KEY: "1"}) == released
    with pytest.raises(ArtifactError, match=r"release 1 of qinglan\.m: " + NEWER):
        Released.of_tags("qinglan.m", "1", released.created, tags | {KEY: "2"})
    with pytest.raises(ArtifactError, match="which is no version"):
        Released.of_tags("qinglan.m", "1", released.created, tags | {KEY: "two"})
    assert RELEASE.read(Candidate, SITE / "release.json").decision.verdict == "refuse"


def test_what_waits_for_a_person(tmp_path: Path):
    shutil.copy(SITE / "waiting.json", tmp_path)
    waiting = Waiting.read(tmp_path)
    assert waiting
    waiting.write(tmp_path)
    assert Waiting.read(tmp_path) == waiting
    newer(tmp_path / "waiting.json")
    with pytest.raises(ArtifactError, match=NEWER):
        Waiting.read(tmp_path)


def test_a_canary_of_version_1_goes_on(profile_of: ProfileOf, tmp_path: Path):
    for name in ("share.json", "canary.json", "verdict.json"):
        shutil.copy(SITE / name, tmp_path)
    state, verdict = read_state(tmp_path), read_verdict(tmp_path)
    assert isinstance(state, State)
    assert (state.pair, state.counts.challenger.fallbacks.n) == (("6", "7", 0.1), 20)
    assert isinstance(verdict, Verdict)
    assert verdict.judgement.outcome == "roll_back"
    assert share_of(profile_of(), tmp_path, "7") == 0.1
    CanaryShare(version="7", share=0.2).write(tmp_path)
    assert share_of(profile_of(), tmp_path, "7") == 0.2


@pytest.mark.parametrize("name", ["canary.json", "verdict.json"])
def test_a_newer_canary_is_refused_before_anything_is_served(profile_of: ProfileOf, tmp_path: Path, name: str):
    newer(Path(shutil.copy(SITE / name, tmp_path)))
    with (
        pytest.raises(ArtifactError, match=NEWER),
        open_site(profile_of(), tmp_path, lambda _: None, port=0, watched=False),
    ):
        raise AssertionError


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # MLflow's
def test_an_earlier_mlflows_database_is_told_in_one_line(tmp_path: Path):
    file = tmp_path / "mlflow.db"
    Tracker(f"sqlite:///{file}", Tracking(), tmp_path)
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute("UPDATE alembic_version SET version_num = '1b5f0d9ad7c1'")
    code = "import sys; from qinglan.runs.tracking import *; Tracker(sys.argv[1], Tracking(), Path())"
    argv = [sys.executable, "-c", code, f"sqlite:///{file}"]  # MLflow checks a database once per process
    told = subprocess.run(argv, capture_output=True, text=True, check=False).stderr
    assert "ConfigError: tracking.uri: Detected out-of-date database schema" in told
    assert "mlflow db upgrade" in told


def test_a_ledger_of_version_2_is_read(tmp_path: Path):
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as db:
        db.executescript(Path(__file__).with_name("ledger_v2.sql").read_text(encoding="utf-8"))
    with open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        assert ledger.get("d").text == "改写"
        assert (ledger.usage("r", "teacher").failed, ledger.usage("r", "teacher").cost_usd) == (1, 0.75)
        assert set(ledger.exchange(Order(sought=["k"])).retrieved) == {"k"}
    assert LEDGER_VERSION == 2


def test_a_clean_up_keeps_a_run_of_a_newer_qinglan(profile_of: ProfileOf):
    with open_run(profile_of(), "refresh") as run:
        newer(run.directory / RUN_FILE)
    assert [folder.state for folder in read_folders(run.directory.parent)] == [None]
