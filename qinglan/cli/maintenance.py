"""`qinglan deploy`, `clean-up`, `backup` and `restore`: the maintenance of a site."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qinglan.cli.common import ProfileOption, SetOption, say
from qinglan.config import load_profile
from qinglan.errors import StageError
from qinglan.text import size

if TYPE_CHECKING:  # each costs much of a second to import, which --help and other commands need not wait for
    from qinglan.ops.backup import Backup


def deploy(profile: ProfileOption = "embedded", set_: SetOption = None) -> None:
    """Register work pools, deployments and this profile's automations on Prefect's server."""
    from qinglan.ops.prefect.deploy import deploy_site

    deploy_site(load_profile(profile, set_ or ()), say)


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


def backup(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder, on another disk if possible.")],
    runs: Annotated[bool, typer.Option(help="The runs' folders too: checkpoints and models make them large.")] = True,
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
) -> None:
    """Keep ledger, datasets, verdicts, MLflow's and Prefect's databases and runs, while the site works."""
    from qinglan.ops.backup import make_backup

    made = make_backup(load_profile(profile, set_ or ()), folder, say, runs=runs)
    for reason, count in made.reasons.most_common():
        say(f"left out: {count:,} × {reason}")
    for what in made.elsewhere:
        say(f"not in it: {what}")
    if not runs:
        say("not in it: the runs, as --no-runs says")
    say(f"{folder.expanduser().resolve()}: {_in_words(made)}; keep it as confidential as the site itself")


def restore(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What `qinglan backup` made.")],
    replace: Annotated[bool, typer.Option("--replace", help="Put aside what is there; nothing is deleted.")] = False,
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
) -> None:
    """Bring a backup back to where it was taken, after checking all of it."""
    from qinglan.ops.backup import restore_backup

    restored = restore_backup(load_profile(profile, set_ or ()), folder, say, replace=replace)
    for what in restored.elsewhere:
        say(f"restore it yourself: {what}")
    say(f"restored {_in_words(restored)} of {restored.made_at:%Y-%m-%d %H:%M} UTC, Qinglan {restored.qinglan}")


def _in_words(backup: "Backup") -> str:
    return f"{len(backup.entries):,} files, {size(backup.bytes)}"
