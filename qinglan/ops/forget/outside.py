"""Places that may have something of the rows, and that `qinglan forget` does not reach."""

from collections.abc import Collection, Iterable
from pathlib import Path

from qinglan.config import EMBEDDED, Profile
from qinglan.errors import QinglanError, first_line
from qinglan.ops.forget.repair import changed_versions
from qinglan.ops.prefect.server import PrefectServer

BACKUPS_FILE = "backups.txt"
"""In the state folder: where backups were put, a line each."""
_ENGINE_CACHES = ("~/.cache/huggingface/datasets", "~/.cache/modelscope/hub/datasets")


def places_outside(
    profile: Profile,
    server: PrefectServer | None,
    changed: Collection[Path],
    review_files: Iterable[str],
) -> list[str]:
    """Name the places, a line each, for the user to look at.

    `changed` are the files that had something of the rows, `review_files` are names of reviewers'
    workbooks.
    """
    source = "data.sql" if profile.data.sql else profile.data.workbook
    lines = [f"where questions come from: {source}"]
    for url in _services(profile):
        lines.append(f"what a service keeps of what it is asked: {url}")
    for name in sorted(review_files):
        lines.append(f"a reviewer's workbook: {name}")
    lines.append(
        "files of `review export`, `review reasons`, `dataset judge-pairs`, wherever they are"
    )
    lines += _trained_weights(profile, changed)
    if profile.tracking_uri.startswith("http"):
        lines.append(f"MLflow: {profile.tracking_uri}")
    if server and not server.is_of_up:
        lines.append(f"Prefect: {server.api_url}")
    lines += _backups(profile.paths.state)
    for cache in _ENGINE_CACHES:
        path = Path(cache).expanduser()
        if path.exists():
            lines.append(f"an engine's cache, to be deleted: {path}")
    return lines


def _services(profile: Profile) -> list[str]:
    """Addresses that a question was sent to."""
    chats = [
        profile.teacher,
        profile.answerer,
        profile.judge,
        *profile.compare.teachers.values(),
    ]
    urls = {chat.base_url for chat in chats if chat}
    urls.add(profile.rag.url)
    urls.discard(EMBEDDED)
    return sorted(urls)


def _trained_weights(profile: Profile, changed: Collection[Path]) -> list[str]:
    """Models that learnt from a version or in a run that had one of the rows."""
    lines: list[str] = []
    versions = {folder.name for folder in changed_versions(changed)}
    if versions:
        # Loading MLflow takes seconds.
        from qinglan.registry import registry_of

        try:
            models = registry_of(profile).versions()
        except QinglanError as error:
            models = []
            lines.append(f"weights: the registry can't be read: {first_line(error)}")
        for model in models:
            if model.dataset_version in versions:
                lines.append(f"weights: {model.name}/{model.version}")
    # Files of a run lie in its stages' folders.
    for run in sorted({path.parents[1] for path in changed}):
        students = run / "sft"
        if students.is_dir():
            lines.append(f"weights: {students}, and what was made of them")
    return lines


def _backups(state: Path) -> list[str]:
    """The backups that are still where they were put."""
    try:
        text = (state / BACKUPS_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    lines: list[str] = []
    for folder in dict.fromkeys(text.splitlines()):
        if Path(folder).exists():
            lines.append(f"a backup, which loses them at its restore: {folder}")
    return lines
