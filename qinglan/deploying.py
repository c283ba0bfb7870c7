"""`qinglan deploy`: work pools, deployments and automations on the Prefect server that this site uses."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import yaml

from qinglan.automations import apply_automations, keep_paused, webhook_address
from qinglan.config import Profile
from qinglan.engines.command import Command
from qinglan.engines.launcher import launch
from qinglan.engines.processes import Say
from qinglan.errors import ConfigError
from qinglan.prefect_server import PrefectServer, find_server
from qinglan.up import find_deployments


def deploy_site(profile: Profile, say: Say) -> None:
    """Bring the server up to date; run again, it changes nothing. Paused deployments stay paused.

    Raises:
        ConfigError: no server is known, it can't be reached, or the webhook's variable is not set.
        EngineError: `prefect deploy` failed; with the end of its log.
    """
    server, prefect_file = find_server(profile.paths.state), find_deployments()
    if server is None:
        raise ConfigError("no Prefect server is known here; set PREFECT_API_URL, or start one with `qinglan up`")
    webhook_address(profile)  # a mistake there shows before anything is changed
    log = profile.paths.state.resolve() / "logs" / "deploy.log"
    with server.client() as api, _one_line(server):
        for pool in pools_of(prefect_file):
            if make_pool(api, pool):
                say(f"work pool made: {pool}")
        with keep_paused(api):
            launch(deploy_command(server, prefect_file), name="prefect deploy", log=log)
        say(f"deployed {prefect_file} to {server.api_url}")
        for line in apply_automations(api, profile) or ["automations are up to date"]:
            say(line)


def pools_of(prefect_file: Path) -> list[str]:
    """The work pools that the deployments name."""
    deployments = yaml.safe_load(prefect_file.read_text(encoding="utf-8"))["deployments"]
    return sorted({each["work_pool"]["name"] for each in deployments})


def make_pool(api: httpx.Client, name: str) -> bool:
    """Was it lacking? Its first worker fills in how processes are started."""
    answer = api.post("work_pools/", json={"name": name, "type": "process"})
    if answer.status_code == httpx.codes.CONFLICT:
        return False
    answer.raise_for_status()
    return True


def deploy_command(server: PrefectServer, prefect_file: Path) -> Command:
    """Prefect finds a server of the user's own by itself, with the key that it wants."""
    argv = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", f"--prefect-file={prefect_file}"]
    return Command(argv, {"PREFECT_API_URL": server.api_url} if server.is_of_up else {})


@contextmanager
def _one_line(server: PrefectServer) -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        raise ConfigError(
            f"Prefect's server at {server.api_url} ({server.origin}): {str(error).splitlines()[0]}; is it running, and "
            "does it want PREFECT_API_AUTH_STRING or PREFECT_API_KEY?"
        ) from error
