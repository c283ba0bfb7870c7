"""`qinglan deploy`."""

from qinglan.cli.common import ProfileOption, SetOption, say
from qinglan.config import load_profile
from qinglan.ops.deploying import deploy_site


def deploy(profile: ProfileOption = "embedded", set_: SetOption = None) -> None:
    """Register work pools, deployments and this profile's automations on Prefect's server."""
    deploy_site(load_profile(profile, set_ or ()), say)
