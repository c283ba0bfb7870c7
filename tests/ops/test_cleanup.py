"""A clean-up: what it removes and, above all, what it leaves."""

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from fixture_types import ProfileOf
from mlflow.exceptions import MlflowException
from question_rows import row
from registered import Models
from vanishing import vanish

from qinglan.config import Profile
from qinglan.data.versions import find_version, note_training, publish, versions_of
from qinglan.errors import ConfigError
from qinglan.ops import cleanup
from qinglan.ops.cleanup import clean_up
from qinglan.ops.cleanup.records import CleanUp, RetentionDecision
from qinglan.runs.artifacts import MANIFEST, Artifact, StageResult, write_json, write_jsonl
from qinglan.runs.launcher import Command
from qinglan.runs.locks import removal_lock
from qinglan.runs.processes import Processes
from qinglan.runs.run import Run, find_run, runs_of
from qinglan.runs.traces import CallSample

KINDS = ("run", "unfinished", "checkpoint", "superseded", "dataset", "mlflow", "log")
NOW = datetime(2026, 6, 1, tzinfo=UTC)
EVERYTHING: dict[str, Any] = {f"{kind}_days": 0 for kind in KINDS}


class Tree:
    """A profile's `paths.runs`."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.root = profile.paths.runs
        self.made = 0
        self.root.mkdir(parents=True, exist_ok=True)

    def run(
        self, days: float, flow: str = "refresh", *folders: str, finished: bool = True, **state: Any
    ) -> Path:
        """A run last written so many days ago, with these folders; of two as old the later made is
        the newer."""
        self.made += 1
        began = NOW - timedelta(days=days)
        name = f"{began:%Y%m%d-%H%M%S}-{self.made:04x}"
        directory = self.root / name
        record = Run(id=name, flow=flow, profile=self.profile, directory=directory).model_dump(
            mode="json"
        )
        write_json(
            directory / "run.json",
            record | {"finished": finished, "profile_name": self.profile.name} | state,
        )
        for folder in folders:
            (directory / folder).mkdir(parents=True)
            (directory / folder / "weights.bin").write_bytes(b"w" * 10_000)
        age(directory, days)
        return directory

    def stage(self, run: Path, name: str, file: str, by: Path | None = None) -> None:
        """A finished stage with one file, which keeps the run's age; with `by` it is that run's,
        reused here."""
        source = by or run
        path = source / name / file
        written = run.stat().st_mtime
        if not path.exists():
            path.mkdir(parents=True)
            (path / "weights.bin").write_bytes(b"w" * 10_000)
        artifacts = {"file": Artifact.of(path)}
        result = StageResult(
            stage=name, key="k", run_id=source.name, seconds=1, artifacts=artifacts
        )
        write_json(run / name / MANIFEST, result.model_dump(mode="json"))
        age(run, (NOW.timestamp() - written) / 86400)

    @property
    def names(self) -> set[str]:
        return {path.parent.name for path in self.root.glob("*/run.json")}


def age(folder: Path, days: float) -> None:
    """Set the times of files as if nothing had been written there since."""
    then = (NOW - timedelta(days=days)).timestamp()
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (then, then), follow_symlinks=False)


@pytest.fixture(autouse=True)
def no_prefect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleanup, "find_server", lambda _state: None)


@pytest.fixture
def tree(profile: Profile) -> Tree:
    return Tree(profile)


@pytest.fixture
def state(tree: Tree) -> Path:
    tree.profile.paths.state.mkdir(exist_ok=True)
    return tree.profile.paths.state


def sweep(tree: Tree, *, dry_run: bool = False, now: datetime = NOW, **retention: Any) -> CleanUp:
    profile = Profile.model_validate(
        tree.profile.model_dump() | {"retention": {"flow_run_days": None} | retention}
    )
    return clean_up(profile, dry_run=dry_run, say=print, now=now)


def why(cleaned: CleanUp, run: Path) -> str:
    return next(decision.why for decision in cleaned.kept if decision.name == run.name)


def names_of(decisions: list[RetentionDecision]) -> list[str]:
    return [decision.name for decision in decisions]


def set_aside_folders(tree: Tree) -> list[str]:
    return sorted(path.name for path in tree.root.glob(".removing-*"))


def test_runs_go_after_their_days_and_the_newest_of_each_flow_stays(tree: Tree):
    old = tree.run(80, "refresh", "rl")
    young = tree.run(59)
    only = tree.run(300, "compare")
    (old / "rl" / "weights.bin").chmod(0o444)
    (old / "rl").chmod(0o555)
    given_up = tree.run(20, "train", finished=False)
    in_training = tree.run(20, "train", "rl", finished=False)
    yesterday = (NOW - timedelta(days=1)).timestamp()
    os.utime(in_training / "rl" / "weights.bin", times=(yesterday, yesterday))
    empty = tree.root / "20260101-000000-abcd"
    # A folder that is not ours.
    notes = tree.root / "notes"
    for folder in (empty, notes):
        folder.mkdir()
        (folder / ".lock").touch()
        age(folder, 20)
    cleaned = sweep(tree)
    assert {decision.name: decision.why for decision in cleaned.removed} == {
        old.name: "finished 80 days ago",
        given_up.name: "was interrupted 20 days ago",
        empty.name: "never began, 20 days ago",
    }
    assert cleaned.counts == {"run": 3}
    assert cleaned.freed_bytes > 0
    assert why(cleaned, only) == "is the newest compare"
    folders = {path for path in tree.root.iterdir() if path.is_dir()}
    assert folders == {young, only, in_training, notes}


def test_runs_go_by_number_too_and_null_keeps_all(tree: Tree):
    runs = [tree.run(days) for days in (2000, 4, 3, 2, 1)]
    assert not sweep(tree, run_days=None).removed
    sweep(tree, runs_per_flow=2)
    assert tree.names == {run.name for run in runs[-2:]}


def test_a_run_that_ends_while_the_registry_is_read_stays(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
):
    ending = tree.run(300)
    tree.run(1)
    lock = FileLock(ending / ".lock")
    read = cleanup.recorded_runs.registered_versions

    def ends(profile: Profile) -> Any:
        versions = read(profile)
        # The run registered its model a moment ago, which is not among these.
        lock.release()
        return versions

    monkeypatch.setattr(cleanup.recorded_runs, "registered_versions", ends)
    with lock:
        assert why(sweep(tree, **EVERYTHING), ending) == "is running"
    assert ending.is_dir()


def test_what_another_run_uses_stays_through_any_number_of_steps(tree: Tree):
    origin, between, loner, source = (tree.run(days) for days in (300, 290, 280, 270))
    tree.stage(origin, "distill", "rows")
    tree.stage(between, "distill", "rows", by=origin)
    tree.stage(source, "select", "rows", by=between)
    trained = tree.run(1, "train", source=str(source))
    newest = tree.run(2)
    cleaned = sweep(tree)
    assert tree.names == {run.name for run in (origin, between, source, trained, newest)}
    assert not loner.exists()
    assert why(cleaned, source) == f"run {trained.name} uses it"
    assert why(cleaned, origin) == f"run {between.name} uses it"


def test_what_else_stays(tree: Tree, profile_of: ProfileOf):
    elsewhere = profile_of(tracking={"uri": "http://mlflow.example"})
    tracked = tree.run(300, profile=elsewhere.model_dump(mode="json"))
    torn = tree.run(300)
    latest = tree.run(300)
    used_by_other = tree.run(300)
    unused = tree.run(290)
    newest = tree.run(1)
    (torn / "run.json").write_text("{")
    age(torn, 300)
    (tree.root / "latest").symlink_to(latest.name)
    of_other_profile = tree.run(400, profile_name="other")
    tree.stage(of_other_profile, "ingest", "rows", by=used_by_other)
    cleaned = sweep(tree, **EVERYTHING)
    assert {decision.name: decision.why.partition(",")[0] for decision in cleaned.kept} == {
        tracked.name: "was tracked in another MLflow",
        torn.name: "run.json can't be read",
        latest.name: "is the latest",
        used_by_other.name: f"run {of_other_profile.name} uses it",
        newest.name: "is the newest refresh",
    }
    assert unused.name not in tree.names
    assert of_other_profile.name in tree.names
    assert find_run(tree.root, "latest") == latest.resolve()


def test_links_are_neither_followed_nor_counted(tree: Tree, tmp_path: Path):
    outside = tmp_path / "large"
    outside.mkdir()
    (outside / "weights").write_bytes(b"w" * 50_000)
    old = tree.run(300)
    tree.run(1)
    (old / "rl").symlink_to(outside)
    # A hard link frees nothing either.
    os.link(outside / "weights", old / "weights")
    (tree.root / "20200101-000000-aaaa").symlink_to(tree.run(299, "train"))
    age(old, 300)
    cleaned = sweep(tree)
    assert not old.exists()
    assert (outside / "weights").exists()
    assert cleaned.freed_bytes < 50_000
    assert (tree.root / "20200101-000000-aaaa").is_symlink()


def test_checkpoints_of_finished_runs_go_but_not_what_was_handed_on(tree: Tree):
    parts = [
        "sft/checkpoints/checkpoint-10",
        "sft/checkpoints/checkpoint-20",
        "rl/checkpoints/global_step_5",
        "rl/checkpoints/global_step_10",
    ]
    run = tree.run(8, "pipeline", *parts)
    young = tree.run(6, "pipeline", *parts)
    # It may go on from them.
    unfinished = tree.run(10, "train", *parts, finished=False)
    (run / "rl" / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("10")
    age(run, 8)
    tree.stage(run, "sft", "checkpoints/checkpoint-20")
    tree.stage(run, "rl", "model")
    cleaned = sweep(tree)
    folders = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_dir()}
    assert folders == {
        "rl",
        "rl/checkpoints",
        "rl/model",
        "sft",
        "sft/checkpoints",
        "sft/checkpoints/checkpoint-20",
    }
    assert not (run / "rl" / "checkpoints" / "latest_checkpointed_iteration.txt").exists()
    for part in parts:
        assert (young / part).exists(), part
        assert (unfinished / part).exists(), part
    assert cleaned.counts == {"checkpoint": 3}
    assert cleaned.freed_bytes >= 30_000


def test_superseded_stages_go_unless_a_run_names_them(tree: Tree):
    run = tree.run(20, "refresh", "sft.superseded-1", "sft.superseded-2", finished=False)
    user = tree.run(1)
    tree.stage(user, "sft", "x")
    path = f"/mnt/elsewhere/{run.name}/sft.superseded-2/merged"
    manifest = {"layout of another version": path}
    (user / "sft" / "manifest.json").write_text(json.dumps(manifest))
    assert sweep(tree).counts == {"superseded stage": 1}
    assert not (run / "sft.superseded-1").exists()
    assert (run / "sft.superseded-2").exists()


def test_a_dry_run_says_the_same_and_changes_nothing(tree: Tree, state: Path):
    tree.run(80)
    tree.run(1)
    (state / "logs").mkdir()
    (state / "logs" / "worker.log").write_text("x")
    age(state, 31)
    before = {path for path in tree.root.rglob("*") if path.name != ".lock"}
    planned = sweep(tree, dry_run=True)
    after = {path for path in tree.root.rglob("*") if path.name != ".lock"}
    assert after == before | {tree.root / ".removal.lock"}
    assert planned.sentence.startswith("test: would remove 1 run, 1 log; ")
    assert names_of(sweep(tree).removed) == names_of(planned.removed)


def test_what_cannot_be_deleted_is_said_and_deleted_next_time(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
):
    oldest, old, new = (tree.run(days) for days in (80, 70, 1))
    run = tree.run(20, "refresh", "sft.superseded-1", "sft.superseded-2", finished=False)

    def refuse(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(path: Path, *more: Path) -> Any:
            if path.name == name:
                raise PermissionError(13, "Permission denied", str(path))
            return function(path, *more)

        return call

    with monkeypatch.context() as denied:
        denied.setattr(Path, "rename", refuse(Path.rename, "sft.superseded-1"))
        denied.setattr(shutil, "rmtree", refuse(shutil.rmtree, f".removing-{oldest.name}"))
        cleaned = sweep(tree, unfinished_days=None)
    assert names_of(cleaned.removed) == [
        old.name,
        oldest.name,
        f"{run.name}/sft.superseded-2",
    ]
    assert len(cleaned.notes) == 2
    assert set_aside_folders(tree) == [f".removing-{oldest.name}"]
    assert [directory.name for directory in runs_of(tree.root, "test")] == [new.name, run.name]
    with pytest.raises(ConfigError, match="not found"):
        find_run(tree.root, oldest.name)
    sweep(tree, unfinished_days=None)
    assert not set_aside_folders(tree)
    assert not (run / "sft.superseded-1").exists()


@pytest.mark.parametrize(
    "holder", ["a run that searches for a stage to reuse", "another clean-up that deletes"]
)
def test_a_clean_up_waits_for_others(tree: Tree, holder: str):
    old = tree.run(80)
    tree.run(1)
    sweeping = threading.Thread(target=lambda: sweep(tree))
    with removal_lock(tree.root) if "run" in holder else FileLock(tree.root / ".deletion.lock"):
        sweeping.start()
        sweeping.join(0.3)
        assert sweeping.is_alive()
        assert old.exists() or set_aside_folders(tree)
    sweeping.join(60)
    assert not old.exists()
    assert not set_aside_folders(tree)


def test_a_running_run_stays_and_what_it_removes_meanwhile_stops_nothing(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
):
    old = tree.run(80)
    busy = tree.run(300, "train", "rl", "sft", "sft.superseded-1", finished=False)
    tree.run(1)
    for name in ("run.json.partial", "rl/started.json.partial"):
        (busy / name).write_text("{}")
    age(busy, 300)
    vanish(
        monkeypatch, busy / "run.json.partial", busy / "rl" / "started.json.partial", busy / "sft"
    )
    with FileLock(busy / ".lock"):
        cleaned = sweep(tree, **EVERYTHING)
    assert (busy / "sft.superseded-1").is_dir()
    assert why(cleaned, busy) == "is running"
    assert cleaned.notes == []
    assert names_of(cleaned.removed) == [old.name]


# Logs


def test_logs_go_once_nobody_writes_to_them(
    tree: Tree, state: Path, monkeypatch: pytest.MonkeyPatch
):
    logs = state / "logs"
    (logs / "serving").mkdir(parents=True)
    old_logs = ("worker.log", "prefect_server.log.1", "serving/router.log", "vanishes.log")
    for name in (*old_logs, "notes.txt"):
        (logs / name).write_text("x")
    age(logs, 31)
    (logs / "mlflow_server.log").write_text("x")
    vanish(monkeypatch, logs / "vanishes.log")
    cleaned = sweep(tree)
    assert cleaned.counts == {"log": 3}
    assert cleaned.notes == []
    assert sorted(path.name for path in logs.iterdir()) == [
        "mlflow_server.log",
        "notes.txt",
        "serving",
    ]


def test_the_log_of_a_running_process_stays_however_quiet_it_is(tree: Tree, state: Path):
    with Processes(state / "logs", print) as running:
        for name in ("quiet", "over"):
            code = f"import time; {name == 'quiet'} and time.sleep(60)"
            running.start(name, Command([sys.executable, "-c", code]))
        while running["over"].status() is None:
            time.sleep(0.01)
        age(state / "logs", 31)
        assert names_of(sweep(tree).removed) == ["over.log"]
    assert names_of(sweep(tree).removed) == ["quiet.log"]


# With a registry


@pytest.fixture
def models(profile: Profile) -> Models:
    return Models(profile.tracking_uri, profile.model_name, profile.paths.state)


def test_a_registered_version_keeps_its_run_and_what_that_uses_alias_or_not(
    tree: Tree, models: Models
):
    data = tree.run(300)
    trained = tree.run(290, "train")
    unregistered = tree.run(280, "train")
    tree.stage(data, "dataset", "rows")
    tree.stage(trained, "dataset", "rows", by=data)
    tree.stage(trained, "rl", "model")
    tree.run(2)
    tree.run(1, "train")
    models.registry.register(models.candidate("one", verdict="refuse", run_id=trained.name))
    cleaned = sweep(tree, **EVERYTHING)
    assert {data.name, trained.name} <= tree.names
    assert (trained / "rl" / "model" / "weights.bin").exists()
    assert unregistered.name not in tree.names
    assert why(cleaned, trained) == "version 1 of qinglan.default.query_rewrite was made of it"
    assert why(cleaned, data) == f"run {trained.name} uses it"


def test_mlflows_runs_go_with_their_artifacts_but_not_those_of_runs_that_stay(
    tree: Tree, models: Models
):
    client = models.client
    tracker = models.tracker
    tracking = tree.profile.tracking.model_copy(update={"experiment": models.name})
    tree.profile = tree.profile.model_copy(update={"tracking": tracking})
    sample = CallSample(1)
    sample.add("k", "rag", "RETRIEVER", {"query": "q"})
    gone = "20250101-000000-0001"
    of_other_profile = "20250101-000000-0002"
    registered = "20250101-000000-0003"
    stays = tree.run(1)
    ids: dict[str, str] = {}
    for name in (gone, registered, stays.name, of_other_profile):
        profile = "other" if name == of_other_profile else "test"
        tags = {"profile": profile, "qinglan.run_id": name, "run.directory": str(tree.root / name)}
        ids[name] = tracker.start_run(name, tags)
        ids[f"{name} sft"] = tracker.start_run(
            f"{name} sft", {"qinglan.run_id": name}, parent=ids[name]
        )
        client.log_text(ids[f"{name} sft"], "x" * 9000, "model.txt")
        tracker.log_traces(ids[name], sample)
    foreign = tracker.start_run(
        "theirs", {"profile": "test", "qinglan.run_id": gone, "run.directory": "/elsewhere/x"}
    )
    client.delete_run(foreign)
    models.registry.register(models.candidate(mlflow_run_id=ids[f"{registered} sft"]))
    cleaned = sweep(tree, now=NOW.replace(year=2030), **EVERYTHING)
    assert sorted(names_of(cleaned.removed)) == [gone, f"{gone} sft"]
    assert cleaned.freed_bytes >= 9000
    reasons = {decision.why for decision in cleaned.kept if decision.name == registered}
    assert reasons == {"a registered version was made of it"}
    experiment_id = client.get_run(foreign).info.experiment_id
    assert len(client.search_traces(locations=[experiment_id])) == 3
    for name, run_id in ids.items():
        if name.startswith(gone):
            with pytest.raises(MlflowException, match="not found"):
                client.get_run(run_id)
        else:
            assert client.get_run(run_id).info.lifecycle_stage == "active"


def test_where_the_registry_cannot_be_read_nothing_goes_but_what_was_set_aside(
    tree: Tree, state: Path
):
    old = tree.run(300)
    tree.run(1)
    (state / "mlflow.db").write_text("this is no database")
    (tree.root / ".removing-20250101-000000-0001").mkdir()
    cleaned = sweep(tree, **EVERYTHING)
    assert old.exists()
    assert not cleaned.removed
    assert not set_aside_folders(tree)
    assert "MLflow at sqlite:///" in cleaned.notes[0]


def test_where_the_database_that_runs_were_tracked_in_is_missing_nothing_goes(
    tree: Tree, profile_of: ProfileOf
):
    elsewhere = profile_of(tracking={"uri": "http://mlflow.example"}).model_dump(mode="json")
    tree.run(290, profile=elsewhere, mlflow_run_id="a")
    tree.run(280, profile_name="other", mlflow_run_id="b")
    old = tree.run(270)
    tree.run(2)
    assert names_of(sweep(tree, dry_run=True).removed) == [old.name]
    tracked = tree.run(1, mlflow_run_id="c")
    cleaned = sweep(tree, **EVERYTHING)
    assert old.exists()
    assert not cleaned.removed
    problem = f"mlflow.db is not there, though run {tracked.name} was tracked in it"
    assert problem in cleaned.notes[0]


# Datasets


def test_dataset_versions_that_nothing_uses_go(tree: Tree, tmp_path: Path):
    def dataset(text: str) -> dict[str, Artifact]:
        rows = [row(text, answer=text, split="train")]
        return {"rows": write_jsonl(tmp_path / text / "rows.jsonl", rows)}

    ids = [publish(tree.profile, "r", dataset(text)).id for text in "abcdefgh"]
    note_training(tree.profile, ids[1], "t")
    user = tree.run(1, "refresh", "publish")
    manifest = {"path": f"/state/datasets/x/{ids[4]}/version.json"}
    (user / "publish" / "manifest.json").write_text(json.dumps(manifest))
    policy = EVERYTHING | {"dataset_days": 30}
    assert not sweep(tree, now=datetime.now(UTC), **policy).removed
    cleaned = sweep(tree, now=datetime.now(UTC) + timedelta(days=31), **policy)
    assert cleaned.counts == {"dataset version": 2}
    assert cleaned.freed_bytes > 0
    # The newest, the trained one and the one in use stay, and what these came of.
    kept_ids = [version.id for version in versions_of(tree.profile)]
    assert kept_ids == [ids[n] for n in (7, 6, 4, 3, 1, 0)]
    assert not list(tree.profile.paths.state.glob("datasets/*/.removing-*"))
    assert find_version(tree.profile, "latest").id == ids[7]
    publish(tree.profile, "r", dataset("i"))


def test_a_name_in_the_markdown_is_no_markup(profile: Profile):
    clean = CleanUp(profile, dry_run=False, say=print, now=NOW, notes=["[a](b)"])
    clean.note_removed("MLflow run", "`x` | ![b](http://x)", "<img src=x>", 1)
    clean.note_kept("run", "20260101-000000-abcd", "is the newest refresh")
    text = clean.markdown
    assert r"| MLflow run | \`x\` \| \!\[b\](http://x) | \<img src=x> | 1 B |" in text
    assert "| run | 20260101-000000-abcd | is the newest refresh |  |" in text
    assert r"\[a\](b)" in text
