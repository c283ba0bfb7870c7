"""Checks of the servers of Prefect and MLflow, and of the keys that a flow needs."""

import json
import os
from contextlib import suppress

import httpx2
from packaging.version import Version

from qinglan.config import EMBEDDED, ENGINE_FLOWS, FlowName, Profile, uses_proxy
from qinglan.errors import ConfigError, first_line
from qinglan.ops.checks import Check
from qinglan.ops.doctor.machine import installed
from qinglan.ops.prefect.automations import webhook_address
from qinglan.ops.prefect.server import find_server
from qinglan.ops.preflight.asked_services import (
    TEACHER_FLOWS,
    asked_endpoints,
    asks_rag,
    further_teachers,
)

_TIMEOUT_S = 8.0
_HTTP = ("http://", "https://")
_LOGINS = {
    "prefect": "PREFECT_API_AUTH_STRING, or PREFECT_API_KEY for Prefect Cloud",
    "mlflow": "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
}
"""Variables that hold a server's login."""


def addresses(profile: Profile, flow: FlowName) -> dict[str, str]:
    """Addresses of the services that this profile names, by their role."""
    endpoints = {"teacher": profile.teacher, "judge": profile.judge, "answerer": profile.answerer}
    endpoints |= further_teachers(profile, flow)
    urls = {role: endpoint.base_url for role, endpoint in endpoints.items() if endpoint}
    urls["rag"] = profile.rag.url
    urls["tracking"] = profile.tracking_uri
    urls["ray"] = profile.trainer.ray_dashboard_url or ""
    # Settings of Prefect that can't be read are the problem of its own check.
    with suppress(ConfigError):
        server = find_server(profile.paths.state)
        if server:
            urls["prefect"] = server.api_url
    return {role: url for role, url in urls.items() if url.startswith(_HTTP)}


def needed_keys(profile: Profile, flow: FlowName) -> dict[str, str]:
    """The variables that a flow needs, each with the setting that names it."""
    variables: dict[str, str | None] = {}
    for role, endpoint in asked_endpoints(profile, flow).items():
        if endpoint.base_url != EMBEDDED:
            variables[f"{role}.api_key_env"] = endpoint.api_key_env
    if asks_rag(profile, flow) and profile.rag.url != EMBEDDED:
        variables["rag.api_key_env"] = profile.rag.api_key_env
    if profile.data.sql and flow in TEACHER_FLOWS:
        variables["data.sql.url_env"] = profile.data.sql.url_env
    variables["ledger.url_env"] = profile.ledger.url_env
    if profile.trainer.ray_dashboard_url and flow in ENGINE_FLOWS:
        variables["trainer.ray_token_env"] = profile.trainer.ray_token_env
    return {variable: setting for setting, variable in variables.items() if variable}


def check_keys(profile: Profile, flow: FlowName, *, deploys: bool = False) -> Check:
    """Tell whether the keys are set; whether they are right, the services say.

    Without its webhook a profile can't be deployed, but can run: a problem if it `deploys`, else a
    note.
    """
    settings = needed_keys(profile, flow)
    set_names: list[str] = []
    missing_names: list[str] = []
    for name in settings:
        if os.environ.get(name, "").strip():
            set_names.append(name)
        else:
            missing_names.append(name)
    webhook_problem = None
    try:
        if webhook_address(profile):
            set_names.append(str(profile.notify.webhook_url_env))
    except ConfigError as error:
        webhook_problem = str(error)
    detail = "none needed"
    if set_names or missing_names:
        detail = f"{', '.join(set_names) or 'none'} set"
    problems: list[str] = []
    if missing_names:
        names = ", ".join(f"{name} ({settings[name]})" for name in missing_names)
        hint = "export them here, and for the worker that runs the flows"
        problems.append(f"keys: not set: {names}; {hint}")
    note = None
    if webhook_problem and deploys:
        problems.append(webhook_problem)
    elif webhook_problem:
        note = f"`qinglan up` and `qinglan deploy` will refuse: {webhook_problem}"
    return Check("keys", detail, "; ".join(problems) or None, note)


def check_prefect(profile: Profile) -> Check:
    """Ask the site's Prefect server for its version."""
    try:
        server = find_server(profile.paths.state)
        if server is None:
            return Check(
                "prefect", "no server configured: `qinglan run` starts one for the time of the run"
            )
        where = f"{server.api_url} ({server.origin})"
        with server.client(timeout_s=_TIMEOUT_S) as http:
            response = http.get("/admin/version")
    except ConfigError as error:
        return Check("prefect", "", str(error))
    except httpx2.HTTPError as error:
        problem = f"can't be reached: {first_line(error)}"
        hint = "start it, or unset what names it"
        return Check("prefect", where, f"prefect {where}: {problem}; {hint}")
    # Prefect Cloud tells nobody its version.
    if response.status_code == httpx2.codes.NOT_FOUND and server.key:
        return Check("prefect", f"{where}, Prefect Cloud")
    return _compare_versions("prefect", where, response, "PREFECT_API_URL")


def check_mlflow(profile: Profile) -> Check:
    """Ask MLflow's server, where the profile names one, for its version."""
    uri = profile.tracking_uri
    if not uri.startswith(_HTTP):
        if profile.tracking.uri is None:
            return Check("mlflow", f"no server configured: runs are kept in {uri}")
        return Check("mlflow", uri)
    # As MLflow's own client does: a token counts only without a user.
    user = os.environ.get("MLFLOW_TRACKING_USERNAME", "")
    password = os.environ.get("MLFLOW_TRACKING_PASSWORD", "")
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    auth = (user, password) if user else None
    headers: dict[str, str] = {}
    if token and not user:
        headers["authorization"] = f"Bearer {token}"
    try:
        with httpx2.Client(timeout=_TIMEOUT_S, trust_env=uses_proxy(uri), headers=headers) as http:
            response = http.get(f"{uri.rstrip('/')}/version", auth=auth)
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        problem = f"{uri} can't be reached: {first_line(error)}"
        hint = "start the server, or remove the setting"
        return Check("mlflow", uri, f"tracking.uri: {problem}; {hint}")
    return _compare_versions("mlflow", uri, response, "tracking.uri")


def _compare_versions(name: str, where: str, response: httpx2.Response, setting: str) -> Check:
    """The check of a server by its version, which must be that of the client here."""
    status = response.status_code
    if status in (httpx2.codes.UNAUTHORIZED, httpx2.codes.FORBIDDEN):
        problem = f"{where} refuses us (HTTP {status})"
        return Check(name, where, f"{setting}: {problem}; set {_LOGINS[name]}")
    version_there = _version_in(response)
    if version_there is None:
        is_answer = status == httpx2.codes.OK
        problem = "names no version" if is_answer else f"answers HTTP {status}"
        hint = f"is the address that of a {name} server?"
        return Check(name, where, f"{setting}: {where} {problem}; {hint}")
    version_here = installed(name)
    detail = f"{where}, version {version_there}"
    # Patch releases understand each other.
    if version_here is None or version_here.release[:2] == version_there.release[:2]:
        return Check(name, detail)
    problem = f"the server is {version_there}, the client here {version_here}"
    hint = (
        f"bring both to one version: `pip install {name}=={version_here}` on the server, "
        "or that of the server here"
    )
    return Check(name, detail, f"{name} {where}: {problem}; {hint}")


def _version_in(response: httpx2.Response) -> Version | None:
    """The version that a server answers, in JSON or as text."""
    if response.status_code != httpx2.codes.OK:
        return None
    # What `packaging` raises for a text that is no version is a ValueError, too.
    with suppress(ValueError):
        is_json = response.content.startswith(b'"')
        text = json.loads(response.content) if is_json else response.text
        return Version(str(text).strip())
    return None
