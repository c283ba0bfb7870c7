"""Checks of the services that answer: chat services, the ledger, and MLflow's registry."""

import json
from collections.abc import Mapping

import httpx2

from qinglan.clients.openai_protocol import capability_of
from qinglan.clients.roles import site_ledger
from qinglan.config import EMBEDDED, Endpoint, Profile, require_secret, uses_proxy
from qinglan.errors import ConfigError, first_line
from qinglan.simulators.domains import domain_of_model
from qinglan.text import nearest_names

_TIMEOUT_S = 10.0
_SHOWN_MODELS = 8


def check_chat(role: str, endpoint: Endpoint) -> str | None:
    """Ask a chat service for its models, which is free of charge.

    Returns a note where that shows little.
    """
    if endpoint.reasoning_effort and capability_of(endpoint.model).reasoning_effort is False:
        raise ConfigError(
            f"{role}.reasoning_effort: {endpoint.model} takes none and would refuse; remove it"
        )
    if endpoint.base_url == EMBEDDED:
        _require_simulated_model(role, endpoint.model)
        return None
    secret = require_secret(endpoint.api_key_env, f"{role} {endpoint.model}")
    headers = {"authorization": f"Bearer {secret}"}
    response = _get(f"{role}.base_url", endpoint.base_url, "/models", headers)
    status = response.status_code
    if status in (401, 403):
        variable = endpoint.api_key_env or f"{role}.api_key_env (not set)"
        raise ConfigError(
            f"{role} {endpoint.base_url}: refuses the key (HTTP {status}); check {variable}"
        )
    if status >= 500:
        raise ConfigError(f"{role} {endpoint.base_url}: answers HTTP {status}; is the service up?")
    if status != 200:
        return f"the model is not checked: GET /models answers HTTP {status}"
    return _note_on_model(endpoint.model, response)


def check_ledger(profile: Profile, *, trains: bool) -> None:
    """Open the ledger; where nodes of a cluster train, it must be on a server."""
    cluster = profile.trainer.ray_dashboard_url
    if trains and profile.trainer.is_elsewhere and profile.ledger.url_env is None:
        problem = (
            f"is not given, and the nodes of {cluster} can't share a SQLite file with this machine"
        )
        hint = "name the variable that holds a PostgreSQL database's address"
        raise ConfigError(f"ledger.url_env: {problem}; {hint}")
    try:
        with site_ledger(profile):
            return
    except OSError as error:
        hint = "give this user write access, or name another folder"
        raise ConfigError(
            f"paths.state: the ledger can't be kept there: {error}; {hint}"
        ) from error


def check_champion(profile: Profile) -> None:
    """Require the weights of the champion: it is evaluated too, after hours of training."""
    if profile.tracking_uri.startswith("http"):
        # MLflow's client would retry for minutes.
        _get("tracking.uri", profile.tracking_uri, "/health")
    # Loading MLflow takes a second.
    from qinglan.registry import registry_of

    registry_of(profile).read_champion()


def check_local_judge(profile: Profile) -> str | None:
    """Require the local judge that was released, if any; the note names its version."""
    # Loading MLflow takes a second.
    from qinglan.serving.local_judge import released_judge

    judge = released_judge(profile)
    return f"version {judge.released.version}" if judge else None


def _require_simulated_model(role: str, model: str) -> None:
    try:
        domain_of_model(model)
    except ConfigError as error:
        raise ConfigError(f"{role}.model: {error}") from error


def _note_on_model(model: str, response: httpx2.Response) -> str | None:
    """A note where a chat service does not list the model among its own.

    It is only a note: some services have aliases and deployments under names that they don't list.
    """
    try:
        listed = [str(entry["id"]) for entry in json.loads(response.content)["data"]]
    except (ValueError, TypeError, KeyError):
        listed = []
    if not listed:
        return "the model is not checked: the service lists none"
    if model in listed:
        return None
    near = nearest_names(model, listed, most=_SHOWN_MODELS, cutoff=0.4)
    names = near or listed[:_SHOWN_MODELS]
    more = ", …" if len(names) < len(listed) else ""
    return f"the service does not list this model; it has {', '.join(names)}{more}"


def _get(
    setting: str, url: str, path: str, headers: Mapping[str, str] | None = None
) -> httpx2.Response:
    """Answer of an address below a service's; ConfigError where the service can't be reached."""
    address = f"{url.rstrip('/')}{path}"
    try:
        return httpx2.get(address, headers=headers, timeout=_TIMEOUT_S, trust_env=uses_proxy(url))
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        problem = first_line(error)
        raise ConfigError(
            f"{setting} can't be reached: {problem}; is it up, is the address right?"
        ) from error
