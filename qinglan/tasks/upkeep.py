"""The tasks that keep a site in order: one checks what is served, one removes what nobody needs any
more."""

from collections.abc import Sequence

from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger

from qinglan.config import load_profile
from qinglan.errors import StageError
from qinglan.ops.cleanup import clean_up
from qinglan.registry import registry_of
from qinglan.serving.checks import check_serving
from qinglan.tasks.stage import stage_task
from qinglan.text import slug


@stage_task("check-canary")
def check_canary(profile_name: str, overrides: Sequence[str], router_url: str) -> None:
    """Report the state of the served models and of the canary as a table.

    Raises:
        StageError: a model that should be served is not, or no router checks the canary.
    """
    profile = load_profile(profile_name, overrides)
    checkup = check_serving(profile, registry_of(profile).aliases(), router_url)
    key = slug(f"serving-{profile.name}")
    create_markdown_artifact(
        checkup.markdown, key=key, description="What is served, and the canary"
    )
    # They are not wrong, but worth knowing.
    for note in checkup.notes:
        get_run_logger().info("%s", note)
    if checkup.problems:
        raise StageError("; ".join(checkup.problems))


@stage_task("clean-up")
def remove_unneeded(profile_name: str, overrides: Sequence[str], *, dry_run: bool) -> None:
    """Clean up by the profile's `retention`.

    Raises:
        StageError: something could not be removed; the rest is done.
    """
    profile = load_profile(profile_name, overrides)
    cleaned = clean_up(profile, dry_run=dry_run, say=get_run_logger().info)
    key = slug(f"clean-up-{profile.name}")
    create_markdown_artifact(cleaned.markdown, key=key, description=cleaned.sentence)
    get_run_logger().info("%s", cleaned.sentence)
    if cleaned.notes:
        raise StageError(f"not all could be cleaned up: {'; '.join(cleaned.notes)}")
