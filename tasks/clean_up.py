"""Removes what nobody needs any more, and shows what went."""

from collections.abc import Sequence

from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger

from qinglan.config import load_profile
from qinglan.errors import StageError
from qinglan.ops.cleanup import clean_up
from qinglan.tasks.session import tidy_logs
from qinglan.tasks.stage import artifact_key, stage_task


@stage_task("clean-up")
def remove_unneeded(profile_name: str, overrides: Sequence[str], *, dry_run: bool) -> None:
    """Clean up by the profile's `retention`; StageError where something could not go; the rest is done."""
    tidy_logs()
    profile = load_profile(profile_name, overrides)
    cleaned = clean_up(profile, dry_run=dry_run, say=get_run_logger().info)
    key = artifact_key(f"clean-up-{profile.name}")
    create_markdown_artifact(cleaned.markdown, key=key, description=cleaned.sentence)
    get_run_logger().info("%s", cleaned.sentence)
    if cleaned.notes:
        raise StageError(f"not all could be cleaned up: {'; '.join(cleaned.notes)}")
