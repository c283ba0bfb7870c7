"""Prefect and MLflow, and the keys that a flow needs."""

import json
import os
from collections.abc import Iterator
from http import HTTPStatus

import httpx2
from packaging.version import Version

from qinglan.config import EMBEDDED, FlowName, Profile, uses_proxy
from qinglan.errors import ConfigError
from qinglan.ops.checks import Check
from qinglan.ops.doctor.versions import installed
from qinglan.ops.prefect.automations import webhook_address
from qinglan.ops.prefect.server import find_server
from qinglan.ops.preflight import asked_endpoints, runs_engines
from qinglan.recipes import get_recipe

_TIMEOUT_S = 8.0
_REFUSED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


def needed_keys(profile: Profile, flow: FlowName) -> dict[str, str]:
    """By variable, the setting that names it."""
    return {name: setting for setting, name in _named_keys(profile, flow) if name}


def _named_keys(profile: Profile, flow: FlowName) -> Iterator[tuple[str, str | None]]:
    for role, endpoint in asked_endpoints(profile, flow).items():
        if endpoint.base_url != EMBEDDED:
            yield f"{role}.api_key_env", endpoint.api_key_env
    if profile.rag.url != EMBEDDED and "rag" in get_recipe(profile.recipe).graders:
        yield "rag.api_key_env", profile.rag.api_key_env
    if profile.data.sql and flow in ("pipeline", "refresh", "compare"):
        yield "data.sql.url_env", profile.data.sql.url_env
    yield "ledger.url_env", profile.ledger.url_env
    if profile.trainer.ray_dashboard_url and runs_engines(flow):
        yield "trainer.ray_token_env", profile.trainer.ray_token_env


def check_keys(profile: Profile, flow: FlowName, *, deploys: bool = False) -> Check:
    """Are they set? Whether they are right, the services say; of the webhook's address only its form is looked at.

    Args:
        deploys: without the webhook it is a problem, else only worth a word: no flow reads it.
    """
    needed = needed_keys(profile, flow)
    missing = [name for name in needed if not os.environ.get(name, "").strip()]
    known = [name for name in needed if name not in missing]
    webhook = _flaw_of_webhook(profile)
    if profile.notify.webhook_url_env and not webhook:
        known.append(profile.notify.webhook_url_env)
    problems = []
    if missing:
        named = ", ".join(f"{name} ({needed[name]})" for name in missing)
        problems.append(f"keys: not set: {named}; export them here, and for the worker that runs the flows")
    if webhook and deploys:
        problems.append(webhook)
    detail = f"{', '.join(known) or 'none'} set" if known or missing else "none needed"
    note = f"`qinglan up` and `qinglan deploy` will refuse: {webhook}" if webhook and not deploys else None
    return Check("keys", detail, "; ".join(problems) or None, note)


def _flaw_of_webhook(profile: Profile) -> str | None:
    try:
        webhook_address(profile)
    except ConfigError as error:
        return str(error)
    return None


def check_prefect(profile: Profile) -> Check:
    """Is the server there, and of the client's version?"""
    try:
        server = find_server(profile.paths.state)
        if server is None:
            return Check("prefect", "no server configured: `qinglan run` starts one for the time of the run")
        where = f"{server.shown_url} ({server.origin})"
        with server.client(timeout_s=_TIMEOUT_S) as http:
            answer = http.get("/admin/version")
    except ConfigError as error:
        return Check("prefect", "", str(error))
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        problem = f"prefect {where}: can't be reached: {_said(error)}; start it, or unset what names it"
        return Check("prefect", where, problem)
    if answer.status_code in _REFUSED:
        return Check(
            "prefect",
            where,
            f"prefect {where}: refuses us (HTTP {answer.status_code}); set PREFECT_API_AUTH_STRING, or "
            "PREFECT_API_KEY for Prefect Cloud",
        )
    if answer.status_code == HTTPStatus.NOT_FOUND and server.key:
        return Check("prefect", f"{where}, Prefect Cloud")
    return _compare("prefect", where, _version_in(answer), "PREFECT_API_URL")


def check_mlflow(profile: Profile) -> Check:
    """Is the server there, and of the client's version?"""
    uri = profile.tracking_uri
    if not uri.startswith(("http://", "https://")):
        return Check("mlflow", f"no server configured: runs are kept in {uri}" if profile.tracking.uri is None else uri)
    user, password = (os.environ.get(f"MLFLOW_TRACKING_{name}", "") for name in ("USERNAME", "PASSWORD"))
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    headers = {"authorization": f"Bearer {token}"} if token and not user else {}
    try:
        with httpx2.Client(timeout=_TIMEOUT_S, trust_env=uses_proxy(uri), headers=headers) as http:
            answer = http.get(f"{uri.rstrip('/')}/version", auth=(user, password) if user else None)
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        return Check(
            "mlflow",
            uri,
            f"tracking.uri: {uri} can't be reached: {_said(error)}; start the server, or remove the setting",
        )
    if answer.status_code in _REFUSED:
        return Check(
            "mlflow",
            uri,
            f"tracking.uri: {uri} refuses us (HTTP {answer.status_code}); set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
        )
    return _compare("mlflow", uri, _version_in(answer), "tracking.uri")


def _compare(name: str, where: str, theirs: Version | str, setting: str) -> Check:
    ours = installed(name)
    if isinstance(theirs, str):
        return Check(name, where, f"{setting}: {where} {theirs}; is the address that of a {name} server?")
    detail = f"{where}, version {theirs}"
    if ours is None or ours.release[:2] == theirs.release[:2]:
        return Check(name, detail)
    return Check(
        name,
        detail,
        f"{name} {where}: the server is {theirs}, the client here {ours}; bring both to one version: "
        f"`pip install {name}=={ours}` on the server, or that of the server here",
    )


def _version_in(answer: httpx2.Response) -> Version | str:
    """The version, else what came instead."""
    if answer.status_code != HTTPStatus.OK:
        return f"answers HTTP {answer.status_code}"
    try:
        text = json.loads(answer.content) if answer.content.startswith(b'"') else answer.text
        return Version(str(text).strip())
    except ValueError:  # InvalidVersion is one
        return "names no version"


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
