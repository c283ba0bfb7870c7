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

from filelock import AcquireReturnProxy, FileLock, Timeout
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
LOCK_FILE = ".lock"
_LATEST = "latest"
_DAMAGED = "damaged, as after a power loss"
_WAIT_FOR_EVER_S = -1
"""In the words of `filelock`."""
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
    """The orchestrator's id of the attempt that is running or ran last."""
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
        """The scope in which the RAG's answers hold: this run, or the embedded RAG's content."""
        if self.profile.rag.url == EMBEDDED:
            return f"kb:{self.knowledge_base_sha256}"
        return self.id

    def stage_directory(self, stage: str) -> Path:
        directory = self.directory / stage
        directory.mkdir(parents=True, exist_ok=True)
        return directory


# ---- opening a run ----


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
    """Continue the unfinished run of this flow with these settings, or start a new one.

    The block holds the run's lock. Settings that are `CHANGEABLE` may differ.

    Args:
        profile: the run's settings.
        flow: the flow's name.
        fresh: continue only a run that was itself started fresh.
        continue_anyway: continue an interrupted training although its code changed.
        source: the earlier run to take stages from, as the user named it; another name is another
            run.
        flow_run_id: the orchestrator's. Where it believed the caller dead and started it again, the
            second waits for the first, and then opens what that one left, instead of doing all of
            it again.
    """
    profile = _with_absolute_paths(profile)
    root = profile.paths.runs
    root.mkdir(parents=True, exist_ok=True)
    settings = profile.model_dump(mode="json", exclude={**CHANGEABLE})
    identity = hash_of(flow, settings, source)
    for directory in run_folders(root):
        if not _is_open(directory, identity, fresh=fresh):
            continue
        lock = _lock_unfinished(directory, flow_run_id)
        if lock is None:
            continue
        with lock:
            # The process that held the lock may have just finished the run. The same flow run
            # continues it, with all its stages to reuse; to another one it is an earlier run.
            is_still_open = _is_open(directory, identity, fresh=fresh)
            if is_still_open or _is_work_of(directory, flow_run_id):
                point_link(root / _LATEST, directory.name)
                run = _resume(directory, profile, continue_anyway=continue_anyway)
                yield note(run, attempt=run.attempt + 1)
                return
    with ExitStack() as stack:
        # Clean-up must not remove the source before the new run's file names it, nor the new run
        # before its lock is held.
        with removal_lock(root):
            # Looked up first, as `latest` is about to be this run.
            source_directory = find_run(root, source) if source else None
            directory = _new_folder(root)
            stack.enter_context(FileLock(directory / LOCK_FILE))
            run = Run(
                id=directory.name,
                flow=flow,
                profile=profile,
                directory=directory,
                fresh=fresh,
                continue_anyway=continue_anyway,
                source=source_directory,
            )
            _write_new(run, identity)
            sync(root)
        point_link(root / _LATEST, run.id)
        yield run


def _with_absolute_paths(profile: Profile) -> Profile:
    paths = profile.paths
    absolute = {"runs": paths.runs.resolve(), "state": paths.state.resolve()}
    return profile.model_copy(update={"paths": paths.model_copy(update=absolute)})


def _lock_unfinished(directory: Path, flow_run_id: str) -> AcquireReturnProxy[FileLock] | None:
    """The run's lock, taken; None where another process is running it."""
    timeout_s = _WAIT_FOR_EVER_S if _is_work_of(directory, flow_run_id) else PROBED_FOR_S
    try:
        return FileLock(directory / LOCK_FILE).acquire(timeout=timeout_s)
    except Timeout:
        return None


def _resume(directory: Path, profile: Profile, *, continue_anyway: bool) -> Run:
    """The run with this profile in place of its own, which may differ in `CHANGEABLE` settings."""
    new_values = {"profile": profile, "continue_anyway": continue_anyway}
    return Run.model_validate(_values_of(directory) | new_values)


def _values_of(directory: Path) -> dict[str, Any]:
    """The values of a run from its file.

    The folder may have been moved, and which knowledge base is served is asked anew.
    """
    state = _read(directory)
    assert state is not None
    return state | {"id": directory.name, "directory": directory, "knowledge_base_sha256": ""}


def _new_folder(root: Path) -> Path:
    """A folder that is named by the time, so that names sort by age.

    Four hexadecimal digits count 16 µs within the second.
    """
    while True:
        now = datetime.now(UTC)
        directory = root / f"{now:%Y%m%d-%H%M%S}-{now.microsecond // 16:04x}"
        with suppress(FileExistsError):
            directory.mkdir()
            return directory


# ---- a run's file ----


def _write_new(run: Run, identity: str) -> None:
    state = {"identity": identity, "finished": False, "profile_name": run.profile.name}
    write_json(run.directory / RUN_FILE, with_version(state | run.model_dump(mode="json")))


def note(run: Run, **values: Any) -> Run:
    """The run with these values, which its file has now too."""
    state = _read(run.directory)
    if state is None:
        raise ArtifactError(
            f"{run.directory / RUN_FILE}: removed or damaged while the run was running; run again"
        )
    write_json(run.directory / RUN_FILE, with_version(state | values))
    # The file also holds values that a run has not, such as `finished`.
    own_values = {name: value for name, value in values.items() if name in Run.model_fields}
    return run.model_copy(update=own_values)


def note_end(run: Run, error: BaseException) -> None:
    """Remember what ended it early, unless the disk is full or missing."""
    ended_by = first_line(error) if isinstance(error, Exception) else "interrupted"
    # The caller is about to report the error itself.
    with suppress(OSError, ArtifactError):
        note(run, ended_by=ended_by)


def finish_run(run: Run) -> None:
    """Mark the run complete, so that the next call starts a new one."""
    note(run, finished=True)


def _is_open(directory: Path, identity: str, *, fresh: bool) -> bool:
    """Whether a run is unfinished and of this identity; with `fresh` only one that began fresh."""
    state = _read(directory)
    if state is None or state["identity"] != identity or state["finished"]:
        return False
    return bool(state["fresh"]) or not fresh


def _is_work_of(directory: Path, flow_run_id: str) -> bool:
    if not flow_run_id:
        return False
    state = _read(directory) or {}
    return state.get("flow_run_id") == flow_run_id


def _read(directory: Path) -> dict[str, Any] | None:
    """The content of a run's file; None where there is none, or it is damaged.

    A damaged run is left out, and no other one.
    """
    path = directory / RUN_FILE
    try:
        state = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        state = None
    if isinstance(state, dict):
        return check_version(state, path)
    _warn_once(
        f"{path}: {_DAMAGED}; this run is left out, and its finished stages are still reused; "
        f"remove {directory} once nothing in it is needed"
    )
    return None


@cache
def _warn_once(line: str) -> None:
    _log.warning(line)


# ---- finding runs ----


def run_folders(root: Path) -> list[Path]:
    """The folders of all runs, the newest first."""
    folders = (file.parent for file in root.glob(f"*/{RUN_FILE}"))
    return sorted(filter(_is_run_folder, folders), reverse=True)


def _is_run_folder(folder: Path) -> bool:
    # `latest` is a link. A folder with a dot in front is about to be removed.
    return not folder.is_symlink() and not folder.name.startswith(".")


def is_running(directory: Path) -> bool:
    """Does a process on this machine hold the run's lock?

    Another user's lock, which is not ours to take, counts as held.
    """
    return is_held(directory / LOCK_FILE, shared=True)


def find_run(runs: Path, name: str) -> Path:
    """A run's directory by id, unique prefix, path or `latest`.

    Raises `ConfigError` where there is none.
    """
    for candidate in (runs / name, Path(name)):
        if (candidate / RUN_FILE).exists():
            return candidate.resolve()
    names = [directory.name for directory in run_folders(runs)]
    matches = [run_name for run_name in names if run_name.startswith(name)]
    if not matches:
        newest = ", ".join(names[:5]) or "none"
        raise ConfigError(f"run `{name}`: not found under {runs}; newest runs: {newest}")
    if len(matches) > 1:
        raise ConfigError(f"run `{name}`: fits {len(matches)} runs: {', '.join(matches[:5])}")
    return runs / matches[0]


def runs_of(runs: Path, profile_name: str, flows: Collection[str] | None = None) -> list[Path]:
    """All runs of a profile, or those of some flows, the newest first."""
    directories = []
    for directory in run_folders(runs):
        state = _read(directory)
        if not state or state["profile_name"] != profile_name:
            continue
        if flows is None or state["flow"] in flows:
            directories.append(directory)
    return directories


def runs_by(runs: Path, flow_run_id: str) -> list[Run]:
    """The runs that one of the orchestrator's flow runs works or worked on.

    They have the settings that they began with.
    """
    directories = run_folders(runs)
    return [read_run(folder) for folder in directories if _is_work_of(folder, flow_run_id)]


def read_run(directory: Path) -> Run:
    """A run with the settings that it began with.

    Raises ArtifactError where this version can't read them.
    """
    try:
        return Run.model_validate(_values_of(directory))
    except ValidationError as error:
        raise ArtifactError(
            f"{directory / RUN_FILE}: its settings are not of this version of Qinglan"
        ) from error


# ---- finished stages ----


def save_stage(run: Run, result: StageResult) -> StageResult:
    """Write the manifest.

    It comes last: from now on the stage is complete, and a power loss takes nothing of it.
    """
    for artifact in result.artifacts.values():
        sync_all(artifact.path)
    result = result.with_attempt(run.attempt)
    write_json(run.stage_directory(result.stage) / MANIFEST, dump_record(result))
    return result


def stage_of(directory: Path, name: str) -> StageResult:
    """A finished stage of a run.

    Raises `ConfigError` where there is none that this version can read.
    """
    path = directory / name / MANIFEST
    advice = "run `qinglan run refresh` or `qinglan run pipeline` first"
    try:
        return StageResult.read(path)
    except FileNotFoundError as error:
        raise ConfigError(f"run {directory.name}: has no finished {name}; {advice}") from error
    except ValidationError as error:
        raise ConfigError(
            f"{path} is not of this version of Qinglan ({first_flaw(error)}); {advice}"
        ) from error


def load_stages(directory: Path, names: Sequence[str], scored_with: str) -> list[StageResult]:
    """Finished stages of an earlier run, their files verified.

    Raises ConfigError where they do not belong together, or where the dataset's rows were scored
    otherwise than with `scored_with`.
    """
    results = [stage_of(directory, name) for name in names]
    newest_attempt = max((result.attempt for result in results), default=0)
    outdated = [result.stage for result in results if result.attempt < newest_attempt]
    if outdated:
        raise ConfigError(
            f"run {directory.name}: its {' and '.join(outdated)} may be of other rows or models, "
            "as it was continued and stopped before that; give its command again"
        )
    for result in results:
        if result.stage == "dataset" and result.details.get("scored_with") != scored_with:
            raise ConfigError(
                f"run {directory.name}: its dataset was scored with another tenant, RAG, "
                "knowledge base or judge than this profile's, so the teacher's scores in it "
                "can't be compared; run `qinglan run refresh` first"
            )
        for artifact in result.artifacts.values():
            artifact.verify()
    return results


def find_stage(run: Run, stage: str, key: str) -> StageResult | None:
    """A finished stage with this key, in this run or an earlier one.

    All its files are still as they were, and another run could not improve it.
    """
    directories = [run.directory]
    if not run.fresh:
        earlier_runs = run_folders(run.directory.parent)
        directories += [directory for directory in earlier_runs if directory != run.directory]
    for directory in directories:
        result = _finished_stage(directory, stage)
        if result is None or result.key != key:
            continue
        # Rows that failed for a cause that may pass are worth another try, but not in the same run.
        could_be_better = result.try_again > 0 and directory != run.directory
        if not could_be_better and _is_intact(result):
            return result
    return None


def _finished_stage(directory: Path, stage: str) -> StageResult | None:
    """A finished stage of a run; None where there is none that this version can read."""
    manifest = directory / stage / MANIFEST
    try:
        return StageResult.read(manifest)
    except (FileNotFoundError, ArtifactError):
        # It is not finished, or of a newer Qinglan.
        return None
    except ValidationError as error:
        # Other flaws are those of another version.
        if error.errors()[0]["type"] == "json_invalid":
            _warn_once(f"{manifest}: {_DAMAGED}; its stage is computed anew where needed")
        return None


def _is_intact(result: StageResult) -> bool:
    """Whether all files of a stage are still as they were."""
    try:
        for artifact in result.artifacts.values():
            artifact.verify()
    except (FileNotFoundError, ArtifactError):
        return False
    return True
