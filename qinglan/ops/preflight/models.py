"""Checks of the models that training starts from: is each a folder, in the cache, or on a hub?"""

from importlib.util import find_spec
from pathlib import Path

from qinglan.config import EMBEDDED, Profile
from qinglan.errors import ConfigError
from qinglan.simulators.domains import domain_for


def check_base_model(profile: Profile) -> str | None:
    """Require the student's base model; a note where the hub may give another one tomorrow."""
    student = profile.student
    key = "student.base_model"
    name = student.base_model
    if name == EMBEDDED:
        domain_for(profile, key)
        return None
    note = check_model(key, name, "student.revision", student.revision)
    if profile.rl.start_from == "base" and not Path(name).is_dir():
        raise ConfigError(
            f"rl.start_from: base needs a local folder, and {key} is {name}; "
            "download it, or set sft"
        )
    return note


def check_model(
    key: str, name: str, revision_key: str, revision: str | None, *, cached: bool = False
) -> str | None:
    """Require a model folder, or accept a hub's model id, noting one without a revision.

    With `cached` a hub's model must be in Hugging Face's cache.
    """
    folder = Path(name)
    # A hub's id has one slash at most, so what has more is a path.
    is_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or folder.is_dir()
    if is_local and revision:
        raise ConfigError(
            f"{key}: {name} is a folder, which has no revisions; leave out {revision_key}"
        )
    if is_local and not (folder / "config.json").is_file():
        raise ConfigError(
            f"{key}: {name} is no model folder (no config.json in it); "
            "name one, or a hub's model id"
        )
    # Without the package, the trainer has an environment of its own, whose cache it knows.
    if cached and not is_local and find_spec("huggingface_hub"):
        _require_cached(key, name, revision)
    if is_local or revision:
        return None
    return (
        f"{key}: {name}: whatever the hub has under that name is taken; "
        f"name a commit in {revision_key}"
    )


def _require_cached(key: str, name: str, revision: str | None) -> None:
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(name, revision=revision, local_files_only=True)
    except (OSError, ValueError) as error:
        command = f"hf download {name}"
        if revision:
            command += f" --revision {revision}"
        raise ConfigError(
            f"{key}: {name} is not in the local cache, and RL is offline; run `{command}`"
        ) from error
