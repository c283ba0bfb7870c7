"""Work pools, deployments and automations on the Prefect server that this site uses.

`qinglan deploy` and `qinglan up` bring them there.
"""

import sys
from pathlib import Path

import httpx2

import qinglan
from qinglan.config import Profile
from qinglan.errors import ConfigError, first_line
from qinglan.ops.prefect.api import call
from qinglan.ops.prefect.automations import apply_automations, webhook_address
from qinglan.ops.prefect.deployments import read_deployments, with_server_switches
from qinglan.ops.prefect.server import find_server
from qinglan.runs.launcher import Command, launch
from qinglan.runs.processes import Say

DEPLOYMENTS = Path("deployments") / "prefect.yaml"


def deploy_site(profile: Profile, say: Say) -> None:
    """Bring the server up to date; run again, it changes nothing."""
    server = find_server(profile.paths.state)
    prefect_file = find_deployments()
    if server is None:
        hint = "set PREFECT_API_URL, or start one with `qinglan up`"
        raise ConfigError(f"no Prefect server is known here; {hint}")
    # A mistake in the webhook's address shows before anything is changed.
    webhook_address(profile)
    # Prefect finds a server of the user's own by itself, with the key that it wants.
    env = {"PREFECT_API_URL": server.api_url} if server.is_of_up else {}
    try:
        with server.client() as api:
            for pool in _pools_in(prefect_file):
                if make_pool(api, pool):
                    say(f"work pool made: {pool}")
            changes = register(api, env, prefect_file, profile, say)
            for line in changes or ["automations are up to date"]:
                say(line)
    except httpx2.HTTPError as error:
        hint = "is it running, and does it want PREFECT_API_AUTH_STRING or PREFECT_API_KEY?"
        where = f"{server.api_url} ({server.origin})"
        raise ConfigError(f"Prefect's server at {where}: {first_line(error)}; {hint}") from error


def _pools_in(prefect_file: Path) -> list[str]:
    """The work pools that the file's deployments name, sorted."""
    pools = set()
    for deployment in read_deployments(prefect_file)["deployments"]:
        pool = (deployment.get("work_pool") or {}).get("name")
        if pool:
            pools.add(pool)
    return sorted(pools)


def register(
    api: httpx2.Client, env: dict[str, str], prefect_file: Path, profile: Profile, say: Say
) -> list[str]:
    """Deploy, and make the automations; returns what was done to those, by line.

    Paused deployments stay paused, and schedules as users have switched them. `env` names the
    server.
    """
    with with_server_switches(api, prefect_file, say) as switched_file:
        log = profile.paths.state.resolve() / "logs" / "deploy.log"
        launch(deploy_command(switched_file, env), name="prefect deploy", log=log)
    say(f"deployed {DEPLOYMENTS} to {str(api.base_url).rstrip('/')}")
    return apply_automations(api, profile)


def find_deployments() -> Path:
    """The file that `prefect deploy` reads: that of the working folder, else that of the package.

    Raises ConfigError where neither is there.
    """
    for folder in (Path.cwd(), Path(qinglan.__file__).parent):
        candidate = folder / DEPLOYMENTS
        if candidate.is_file():
            return candidate
    raise ConfigError(f"{DEPLOYMENTS}: no such file; run it in Qinglan's folder")


def make_pool(api: httpx2.Client, name: str) -> bool:
    """Make a work pool; False where it was there.

    Its first worker fills in how processes are started.
    """
    if call(api, "GET", f"work_pools/{name}", may_lack=True):
        return False
    call(api, "POST", "work_pools/", {"name": name, "type": "process"})
    return True


def deploy_command(prefect_file: Path, env: dict[str, str]) -> Command:
    """The command that deploys everything in a file to the server that `env` names."""
    prefect = [sys.executable, "-m", "prefect"]
    argv = [*prefect, "--no-prompt", "deploy", "--all", f"--prefect-file={prefect_file}"]
    return Command(argv, env)
