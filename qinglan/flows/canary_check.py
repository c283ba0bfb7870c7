"""Checks that the champion is served and its canary watched.

It fails where they are not, so that the failure notification is sent.
"""

from prefect import flow

from qinglan.tasks.forms import Override, ProfileName
from qinglan.tasks.upkeep import check_canary


@flow(name="canary-check", flow_run_name="canary-check {profile}", log_prints=True)
def canary_check(
    profile: ProfileName = "embedded", overrides: tuple[Override, ...] = (), router_url: str = ""
) -> None:
    """Look at the registry, the router and the canary of a profile.

    Args:
        profile: Name of a file in configs/, or a path.
        overrides: Settings as `dotted.key=value`; docs/reference/configuration.md lists them.
        router_url: Where `qinglan serve` listens, such as http://127.0.0.1:8000; as `serve.host`
            and `serve.port` say if empty.
    """
    check_canary(profile, overrides, router_url)
