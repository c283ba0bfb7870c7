"""Runs: a directory per run, stage by stage; unfinished ones are continued, finished stages reused.

`open_run` continues the newest unfinished run of the same flow and settings unless another process
is running it (each run is guarded by a file lock, which a killed process loses). `find_stage` looks
for a finished stage with the same key in this run and then in all earlier ones, so what has not
changed is not computed again.
"""

import json
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import BaseModel, Field, ValidationError

from qinglan.config import CHANGEABLE, EMBEDDED, Profile
from qinglan.errors import ArtifactError, ConfigError, first_line
from qinglan.runs.artifacts import (
    MANIFEST,
    StageResult,
    hash_of,
    point_link,
    sync,
    sync_all,
    write_json,
)
from qinglan.runs.locks import PROBED_FOR_S, is_held, removal_lock
from qinglan.runs.schema_version import check_version, dump_record, first_flaw, with_version

RUN_FILE = "run.json"
_DAMAGED = "damaged, as after a power loss"
_log = logging.getLogger(__name__)


class Run(BaseModel, frozen=True):
    """One run of a flow; small enough to pass to every task."""

    id: str
    flow: str
    profile: Profile
    directory: Path
    fresh: bool = False
    """Compute every stage anew instead of reusing earlier runs' stages."""
    continue_anyway: bool = Field(default=False, exclude=True)
    """Continue an interrupted training although its code changed; said anew by each call, so not
    kept in run.json."""
    attempt: int = 0
    """How often it was continued."""
    mlflow_run_id: str = ""
    flow_run_id: str = ""
    """Of the orchestrator, for the attempt that is running or ran last."""
    source: Path | None = None
    """The run whose stages a `train` or `evaluate` uses; the same one when it is continued."""
    knowledge_base_sha256: str = ""
    """Digest of what the embedded RAG serves; empty for a live service, whose content is not
    known."""

    @property
    def knowledge_base_key(self) -> str:
        """The state of the knowledge base, as a part of the keys of what it answers.

        A live service's knowledge base changes unseen, so its answers are reused within one run
        only.
        """
        is_embedded = self.profile.rag.url == EMBEDDED
        return self.knowledge_base_sha256 if is_embedded else self.id

    @property
    def retrieval_scope(self) -> str:
        """The scope within which the RAG's answers hold: this run, or the embedded RAG's content."""
        if self.profile.rag.url == EMBEDDED:
            return f"kb:{self.knowledge_base_sha256}"
        return self.id

    def stage_directory(self, stage: str) -> Path:
        directory = self.directory / stage
        directory.mkdir(parents=True, exist_ok=True)
        return directory


@contextmanager
def open_run(
    profile: Profile,
    flow: str,
    *,
    fresh: bool = False,
    continue_anyway: bool = False,
    source: str | None = None,
    flow_run_id: str = "",
) -> Iterator[Run]:
    """Continue the unfinished run of this flow with these settings, or start a new one; hold its
    lock meanwhile.

    Settings that are `CHANGEABLE` may differ.

    Args:
        fresh: continue only a run that was itself started fresh.
        continue_anyway: continue an interrupted training although its code changed.
        source: the earlier run to take stages from, as the user named it; another name is another
            run.
        flow_run_id: of the orchestrator. Where it believed the caller dead and started it again,
            the second waits for the first, and then opens what that one left, instead of doing all
            of it again.
    """
    paths = profile.paths
    absolute = {"runs": paths.runs.resolve(), "state": paths.state.resolve()}
    profile = profile.model_copy(update={"paths": paths.model_copy(update=absolute)})
    root = profile.paths.runs
    root.mkdir(parents=True, exist_ok=True)
    identity = hash_of(flow, profile.model_dump(mode="json", exclude={**CHANGEABLE}), source)
    for directory in (each for each in run_folders(root) if _is_open(each, identity, fresh=fresh)):
        try:
            timeout_s = -1 if _is_work_of(directory, flow_run_id) else PROBED_FOR_S
            held = FileLock(directory / ".lock").acquire(timeout=timeout_s)
        except Timeout:
            continue
        with held:
            # The process that held the lock may have just finished the run. The same flow run
            # continues it, with all its stages to reuse; to another one it is an earlier run.
            if not (
                _is_open(directory, identity, fresh=fresh) or _is_work_of(directory, flow_run_id)
            ):
                continue
            point_link(root / "latest", directory.name)
            run = _resume(directory, profile)
            yield note(run, attempt=run.attempt + 1).model_copy(
                update={"continue_anyway": continue_anyway}
            )
            return
    with ExitStack() as stack:
        with removal_lock(root):
            named = find_run(root, source) if source else None  # before this run becomes `latest`
            directory = _new_folder(root)
            stack.enter_context(FileLock(directory / ".lock"))
            run = Run(
                id=directory.name,
                flow=flow,
                profile=profile,
                directory=directory,
                fresh=fresh,
                source=named,
            )
            run = run.model_copy(update={"continue_anyway": continue_anyway})
            state = {"identity": identity, "finished": False, "profile_name": profile.name}
            write_json(directory / RUN_FILE, with_version(state | run.model_dump(mode="json")))
            sync(root)
        point_link(root / "latest", run.id)
        yield run


def _new_folder(root: Path) -> Path:
    """Named by the time, so that names sort by age; four hexadecimal digits count 16 µs within the
    second."""
    while True:
        now = datetime.now(UTC)
        directory = root / f"{now:%Y%m%d-%H%M%S}-{now.microsecond // 16:04x}"
        with suppress(FileExistsError):
            directory.mkdir()
            return directory


def note_end(run: Run, error: BaseException) -> None:
    """Remember what ended it early, unless the disk is full or missing."""
    with suppress(OSError, ArtifactError):  # the caller is about to report the error itself
        note(run, ended_by=first_line(error) if isinstance(error, Exception) else "interrupted")


def finish_run(run: Run) -> None:
    """Mark the run complete, so that the next call starts a new one."""
    note(run, finished=True)


def note(run: Run, **what: Any) -> Run:
    """The run with these values, which its file has now too."""
    if (state := _read(run.directory)) is None:
        raise ArtifactError(
            f"{run.directory / RUN_FILE}: removed or damaged while the run was running; run again"
        )
    write_json(run.directory / RUN_FILE, with_version(state | what))
    return run.model_copy(
        update={name: value for name, value in what.items() if name in Run.model_fields}
    )


def is_running(directory: Path) -> bool:
    """Does a process on this machine hold the run's lock? Another user's, which is not ours to
    take, counts as held."""
    return is_held(directory / ".lock", shared=True)


def find_run(runs: Path, name: str) -> Path:
    """A run's directory by id, unique prefix, path or `latest`; raises `ConfigError` where there is
    none."""
    for candidate in (runs / name, Path(name)):
        if (candidate / RUN_FILE).exists():
            return candidate.resolve()
    names = [directory.name for directory in run_folders(runs)]
    if matches := [each for each in names if each.startswith(name)]:
        if len(matches) == 1:
            return runs / matches[0]
        raise ConfigError(f"run `{name}`: fits {len(matches)} runs: {', '.join(matches[:5])}")
    raise ConfigError(
        f"run `{name}`: not found under {runs}; newest runs: {', '.join(names[:5]) or 'none'}"
    )


def runs_of(runs: Path, profile_name: str, flows: Collection[str] | None = None) -> list[Path]:
    """All runs of a profile, or those of some flows, the newest first."""
    states = ((directory, _read(directory)) for directory in run_folders(runs))
    mine = [
        (directory, state)
        for directory, state in states
        if state and state["profile_name"] == profile_name
    ]
    return [directory for directory, state in mine if flows is None or state["flow"] in flows]


def runs_by(runs: Path, flow_run_id: str) -> list[Run]:
    """The runs that one of the orchestrator's flow runs works or worked on, with the settings that
    it began with."""
    return [read_run(each) for each in run_folders(runs) if _is_work_of(each, flow_run_id)]


def read_run(directory: Path) -> Run:
    """A run with the settings that it began with; ArtifactError where this version can't read
    them."""
    try:
        return _resume(directory, None)
    except ValidationError as error:
        raise ArtifactError(
            f"{directory / RUN_FILE}: its settings are not of this version of Qinglan"
        ) from error


def save_stage(run: Run, result: StageResult) -> StageResult:
    """Write the manifest, last: from now on the stage is complete, and a power loss takes nothing
    of it."""
    for artifact in result.artifacts.values():
        sync_all(artifact.path)
    result = result.model_copy(update={"attempt": run.attempt})
    write_json(run.stage_directory(result.stage) / MANIFEST, dump_record(result))
    return result


def stage_of(directory: Path, name: str) -> StageResult:
    """A finished stage of a run; raises `ConfigError` where there is none that this version can
    read."""
    path, advice = (
        directory / name / MANIFEST,
        "run `qinglan run refresh` or `qinglan run pipeline` first",
    )
    try:
        return StageResult.read(path)
    except FileNotFoundError as error:
        raise ConfigError(f"run {directory.name}: has no finished {name}; {advice}") from error
    except ValidationError as error:
        raise ConfigError(
            f"{path} is not of this version of Qinglan ({first_flaw(error)}); {advice}"
        ) from error


def load_stages(directory: Path, names: Sequence[str], scored_with: str) -> list[StageResult]:
    """Finished stages of an earlier run, their files verified, for a run whose rows are scored with
    `scored_with`."""
    results = [stage_of(directory, name) for name in names]
    if old := [
        each.stage for each in results if each.attempt < max(result.attempt for result in results)
    ]:
        problem = f"its {' and '.join(old)} may be of other rows or models, as it was continued and stopped before that"
        raise ConfigError(f"run {directory.name}: {problem}; give its command again")
    for result in results:
        if result.stage == "dataset" and result.details.get("scored_with") != scored_with:
            problem = "its dataset was scored with another tenant, RAG, knowledge base or judge than this profile's"
            hint = (
                "so the teacher's scores in it can't be compared; run `qinglan run refresh` first"
            )
            raise ConfigError(f"run {directory.name}: {problem}, {hint}")
        for artifact in result.artifacts.values():
            artifact.verify()
    return results


def find_stage(run: Run, stage: str, key: str) -> StageResult | None:
    """A finished stage with this key whose files are all still as they were, and that another run
    could not improve."""
    elsewhere = (
        [] if run.fresh else [d for d in run_folders(run.directory.parent) if d != run.directory]
    )
    for directory in [run.directory, *elsewhere]:
        manifest = directory / stage / MANIFEST
        try:
            result = StageResult.read(manifest)
            if result.key == key and not (result.try_again and directory != run.directory):
                for artifact in result.artifacts.values():
                    artifact.verify()
                return result
        except (FileNotFoundError, ArtifactError):  # of a newer Qinglan, or its files are damaged
            continue
        except ValidationError as error:
            if error.errors()[0]["type"] == "json_invalid":  # else it is of another version
                _warn_once(f"{manifest}: {_DAMAGED}; its stage is computed anew where needed")
    return None


def _is_open(directory: Path, identity: str, *, fresh: bool) -> bool:
    state = _read(directory)
    if state is None or state["identity"] != identity or state["finished"]:
        return False
    return bool(state["fresh"]) or not fresh


def _is_work_of(directory: Path, flow_run_id: str) -> bool:
    return bool(flow_run_id) and (_read(directory) or {}).get("flow_run_id") == flow_run_id


def _resume(directory: Path, profile: Profile | None) -> Run:
    """The run with this profile, else with its own; which knowledge base it serves is asked
    anew."""
    state = _read(directory)
    assert state is not None
    here = {"id": directory.name, "directory": directory, "knowledge_base_sha256": ""}
    return Run.model_validate(state | here | ({"profile": profile} if profile else {}))


def run_folders(root: Path) -> list[Path]:
    found = (path.parent for path in root.glob(f"*/{RUN_FILE}"))
    # One with a dot in front is about to be removed.
    return sorted(
        (each for each in found if not each.is_symlink() and not each.name.startswith(".")),
        reverse=True,
    )


def _read(directory: Path) -> dict[str, Any] | None:
    """What a run's file holds; None where there is none, or it is damaged: that run is left out,
    and no other one."""
    path = directory / RUN_FILE
    try:
        state = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        state = None
    if isinstance(state, dict):
        return check_version(state, path)
    hint = f"remove {directory} once nothing in it is needed"
    _warn_once(
        f"{path}: {_DAMAGED}; this run is left out, and its finished stages are still reused; {hint}"
    )
    return None


@cache
def _warn_once(line: str) -> None:
    _log.warning(line)
