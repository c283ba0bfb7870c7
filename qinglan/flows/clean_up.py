"""Removes old runs and dataset versions, as the profile's `retention` says."""

from prefect import flow

from qinglan.tasks.forms import Override, ProfileName
from qinglan.tasks.upkeep import remove_unneeded


@flow(name="clean-up", flow_run_name="clean-up {profile}", log_prints=True)
def clean_up(
    profile: ProfileName = "embedded", overrides: tuple[Override, ...] = (), dry_run: bool = True
) -> None:
    """Remove a profile's old runs, checkpoints, datasets and logs; never what a registered model
    needs.

    Args:
        profile: Name of a file in configs/, or a path.
        overrides: Settings as `dotted.key=value`, such as `retention.run_days=30`.
        dry_run: Only tell what would be removed; the schedule removes it.
    """
    remove_unneeded(profile, overrides, dry_run=dry_run)
