"""`qinglan clean-up`: remove what the profile's `retention` lets go."""

from typing import Annotated

import typer

from qinglan.cli.common import ProfileOption, SetOption, say
from qinglan.config import load_profile
from qinglan.errors import StageError


def clean_up(
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Remove old runs, checkpoints, flow runs and logs of a profile; what a registered model needs stays."""
    from qinglan.ops import cleanup

    cleaned = cleanup.clean_up(load_profile(profile, set_ or ()), dry_run=dry_run, say=say)
    for kept in cleaned.kept:
        if dry_run:
            say(f"stays: {kept.line}")
    say(cleaned.sentence)
    if cleaned.notes:
        raise StageError(f"clean-up: {len(cleaned.notes)} not done: {cleaned.notes[0]}")
