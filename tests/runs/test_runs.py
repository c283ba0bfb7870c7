"""Runs: continued after a kill, never shared by two; stages reused while their files are intact."""

import fcntl
import threading
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from another_process import another_process
from fixture_types import ProfileOf
from run_stages import end_stage_with

from qinglan.config import Profile
from qinglan.errors import ArtifactError, ConfigError, StageError
from qinglan.ops.run_status import status_of
from qinglan.runs.artifacts import MANIFEST, StageResult
from qinglan.runs.locks import PROBED_FOR_S
from qinglan.runs.run import (
    Run,
    find_run,
    find_stage,
    finish_run,
    load_stages,
    note,
    note_end,
    open_run,
    runs_by,
    runs_of,
)


def new_run(
    profile: Profile, flow: str = "pipeline", *, fresh: bool = False, finish: bool = False
) -> Run:
    with open_run(profile, flow, fresh=fresh) as run:
        if finish:
            finish_run(run)
        return run


def stage(run: Run) -> StageResult:
    return end_stage_with(run, "ingest", [{"a": 1}])


def test_an_unfinished_run_is_continued(profile_of: ProfileOf):
    teacher = {"model": "big", "api_key_env": "A_KEY"}
    with open_run(profile_of(teacher=teacher), "pipeline") as first:
        note(first, mlflow_run_id="abc")
    assert "A_KEY" in (first.directory / "run.json").read_text()
    changes_no_result = {
        "reward": {"max_outage_s": 900},
        "budget": {"per_run_usd": 9},
        "rl": {"keep_checkpoints": 1},
        "evaluate": {"retries": 5},
    }
    with open_run(profile_of(teacher=teacher, **changes_no_result), "pipeline") as again:
        assert again.id == first.id
        assert again.mlflow_run_id == "abc"
        assert again.profile.reward.max_outage_s == 900


def test_latest_points_at_the_run_that_began_or_went_on_last(profile_of: ProfileOf):
    first = new_run(profile_of())
    newer = new_run(profile_of(), finish=True, fresh=True)
    latest = first.directory.parent / "latest"
    assert latest.resolve() == newer.directory
    with open_run(profile_of(), "pipeline"):
        assert latest.resolve() == first.directory
    assert list(latest.parent.glob(".latest*")) == []


@pytest.mark.parametrize("change", ["settings", "flow", "fresh", "none, but it is finished"])
def test_another_run_for_other_settings_flow_or_fresh(profile_of: ProfileOf, change: str):
    first = new_run(profile_of(), finish="finished" in change)
    profile = profile_of(data={"limit": 5}) if change == "settings" else profile_of()
    flow = "refresh" if change == "flow" else "pipeline"
    second = new_run(profile, flow, fresh=change == "fresh")
    assert second.id != first.id


def test_fresh_continues_an_unfinished_fresh_run(profile_of: ProfileOf):
    fresh = new_run(profile_of(), fresh=True)
    assert fresh.fresh
    assert new_run(profile_of()) == fresh.model_copy(update={"attempt": 1}), "it stays fresh"
    assert new_run(profile_of(), fresh=True, finish=True).id == fresh.id
    assert new_run(profile_of(), fresh=True).id != fresh.id


def test_another_source_is_another_run(profile_of: ProfileOf):
    with (
        pytest.raises(ConfigError, match="run `nope`: not found"),
        open_run(profile_of(), "train", source="nope"),
    ):
        pass
    assert list(profile_of().paths.runs.glob("2*")) == [], "no run is left"
    source = new_run(profile_of(), finish=True)
    with open_run(profile_of(), "train", source=source.id) as first:
        assert first.source == source.directory
    with open_run(profile_of(), "train", source=str(source.directory)) as second:
        assert second.id != first.id
    with open_run(profile_of(), "train", source=source.id) as again:
        assert again.id == first.id
        assert again.source == first.source


def test_runs_of_one_second_sort_by_age_and_those_of_one_moment_get_two_folders(
    profile_of: ProfileOf, monkeypatch: pytest.MonkeyPatch
):
    microseconds = (0, 0, 16, 5000, 999_999)
    times = (datetime(2026, 1, 1, microsecond=number) for number in microseconds)
    monkeypatch.setattr("qinglan.runs.run.datetime", SimpleNamespace(now=lambda _: next(times)))
    folders = [new_run(profile_of(), finish=True).directory for _ in range(4)]
    assert runs_of(profile_of().paths.runs, profile_of().name) == folders[::-1]


def test_a_flow_run_that_was_started_twice_waits_for_itself(profile_of: ProfileOf):
    """The work that the first one finished is not done again.

    Its server took it for dead, and put it back into its queue.
    """
    opened: list[str] = []

    def second() -> None:
        with open_run(profile_of(), "pipeline", fresh=True, flow_run_id="f1") as run:
            opened.append(run.id)

    waiting = threading.Thread(target=second)
    with open_run(profile_of(), "pipeline", fresh=True, flow_run_id="f1") as first:
        note(first, flow_run_id="f1")
        waiting.start()
        waiting.join(0.5)
        assert opened == []
        finish_run(first)
    waiting.join(60)
    assert opened == [first.id]
    # A person asks for it once more.
    second()
    assert len(opened) == 2
    assert opened[1] != first.id


def test_who_only_looks_at_a_run_does_not_keep_it_from_going_on(profile_of: ProfileOf):
    interrupted = new_run(profile_of())
    # `is_held` does the same, though not for so long.
    with (interrupted.directory / ".lock").open("r+b") as looked_at:
        fcntl.flock(looked_at, fcntl.LOCK_EX)
        over = threading.Timer(PROBED_FOR_S / 5, fcntl.flock, (looked_at, fcntl.LOCK_UN))
        over.start()
        assert new_run(profile_of()).id == interrupted.id
        over.join()


def test_the_lock_goes_with_the_block_even_while_an_error_is_kept(profile_of: ProfileOf):
    with pytest.raises(RuntimeError) as kept_error, open_run(profile_of(), "pipeline") as first:
        raise RuntimeError("boom")
    for _ in range(2):
        with pytest.raises(RuntimeError) as again, open_run(profile_of(), "pipeline") as second:
            raise RuntimeError("boom")
        assert second.id == first.id
    assert kept_error.value is not again.value


def test_a_process_holds_its_run_until_kill_9(profile_of: ProfileOf):
    with another_process("pipeline", profile_of()) as (_, run_of_other):
        our_run = new_run(profile_of(), finish=True)
    assert our_run.id != run_of_other
    assert new_run(profile_of()).id == run_of_other


def test_find_run(profile_of: ProfileOf):
    run = new_run(profile_of(), finish=True)
    runs = run.directory.parent
    for name in (run.id, run.id[:-1], "latest", str(run.directory)):
        assert find_run(runs, name) == run.directory
    with pytest.raises(ConfigError, match=f"run `nope`: not found .* newest runs: {run.id}"):
        find_run(runs, "nope")
    with pytest.raises(ConfigError, match="newest runs: none"):
        find_run(runs / "nowhere", "latest")
    new_run(profile_of(), finish=True)
    with pytest.raises(ConfigError, match="fits 2 runs"):
        find_run(runs, run.id[:2])


def tear(file: Path, remains: str) -> None:
    """Leave of a file what a power loss may leave, be it half a character."""
    content = file.read_bytes()
    contents = {
        "nothing": b"",
        "half": content[: len(content) // 2],
        "half a character": '{"finished": true, "name": "青'.encode()[:-1],
        "zeros": bytes(len(content)),
    }
    file.write_bytes(contents[remains])


TORN = pytest.mark.parametrize("remains", ["nothing", "half", "half a character", "zeros"])


@TORN
def test_a_torn_run_file_costs_no_other_run(
    profile_of: ProfileOf, caplog: pytest.LogCaptureFixture, remains: str
):
    result = stage(new_run(profile_of()))
    intact = new_run(profile_of(name="other"))
    runs = intact.directory.parent
    lost = runs / result.run_id
    tear(lost / "run.json", remains)
    assert runs_of(runs, "other") == [intact.directory]
    assert runs_of(runs, "test") == []
    assert runs_by(runs, "f1") == []
    assert new_run(profile_of(name="other")).id == intact.id
    new = new_run(profile_of())
    assert new.id != lost.name
    assert find_stage(new, "ingest", "k") == result
    assert find_run(runs, lost.name) == lost
    with pytest.raises(ArtifactError, match=r"run\.json: not readable; run it anew"):
        status_of(lost, profile_of())
    (line,) = caplog.messages
    assert line.startswith(f"{lost / 'run.json'}: damaged, as after a power loss")
    assert line.endswith(f"remove {lost} once nothing in it is needed")


@TORN
def test_a_stage_with_a_torn_manifest_is_made_anew(
    profile_of: ProfileOf, caplog: pytest.LogCaptureFixture, remains: str
):
    run = new_run(profile_of())
    stage(run)
    manifest = run.directory / "ingest" / MANIFEST
    tear(manifest, remains)
    # Twice, as it is said once.
    for _ in range(2):
        assert find_stage(run, "ingest", "k") is None
    with pytest.raises(ConfigError, match=r"manifest\.json is not of this version of Qinglan"):
        load_stages(run.directory, ["ingest"], "")
    assert caplog.messages == [
        f"{manifest}: damaged, as after a power loss; its stage is computed anew where needed"
    ]


def test_a_run_whose_folder_is_gone_ends_with_what_ended_it(profile_of: ProfileOf):
    with open_run(profile_of(), "refresh") as run:
        (run.directory / "run.json").unlink()
        note_end(run, StageError("the RAG is down"))
        problem = r"run\.json: removed or damaged while the run was running"
        with pytest.raises(ArtifactError, match=problem):
            finish_run(run)


def test_stages_are_found_here_then_in_earlier_runs_unless_it_is_fresh(profile_of: ProfileOf):
    result = stage(new_run(profile_of(), finish=True))
    new = new_run(profile_of(), finish=True)
    assert find_stage(new, "ingest", "k") == result
    assert find_stage(new, "ingest", "other key") is None
    assert find_stage(new, "distill", "k") is None
    fresh = new_run(profile_of(), fresh=True)
    assert find_stage(fresh, "ingest", "k") is None
    assert find_stage(fresh, "ingest", stage(fresh).key) is not None


@pytest.mark.parametrize(
    ("file", "content"), [("rows.jsonl", "{}\n"), ("rows.jsonl", None), (MANIFEST, None)]
)
def test_a_damaged_stage_is_not_reused(profile_of: ProfileOf, file: str, content: str | None):
    run = new_run(profile_of())
    stage(run)
    damaged = run.directory / "ingest" / file
    if content is None:
        damaged.unlink()
    else:
        damaged.write_text(content)
    assert find_stage(run, "ingest", "k") is None
