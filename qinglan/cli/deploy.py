"""`qinglan deploy`."""

from qinglan.cli.common import ProfileOption, SetOption, say
from qinglan.config import load_profile


def deploy(profile: ProfileOption = "embedded", set_: SetOption = None) -> None:
    """Register work pools, deployments and this profile's automations on Prefect's server."""
    from qinglan.ops.prefect.deploy import deploy_site

    deploy_site(load_profile(profile, set_ or ()), say)
