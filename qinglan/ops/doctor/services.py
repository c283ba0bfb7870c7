"""Proxies, Prefect and MLflow, the keys that a flow needs, and one short call to each paid chat
service.

The call has the parameters that a run sends: only an answer shows that a service answers. It goes
through the ledger, so that it counts towards the month's budget, under a role of its own, so that
estimates don't learn from it.
"""

import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx2
from packaging.version import Version

from qinglan.clients.chat import Account, ChatClient
from qinglan.clients.openai_protocol import JsonSchema, request_parameters
from qinglan.clients.roles import site_ledger
from qinglan.config import EMBEDDED, Endpoint, FlowName, Profile, uses_proxy
from qinglan.errors import ConfigError, QinglanError, TeacherError, first_line
from qinglan.grading.judge_answers import object_schema
from qinglan.ledger import Ledger
from qinglan.ledger.queue import LedgerQueue
from qinglan.ops.checks import Check
from qinglan.ops.doctor.machine import installed
from qinglan.ops.prefect.automations import webhook_address
from qinglan.ops.prefect.server import find_server
from qinglan.ops.preflight.asked_services import (
    ENGINE_FLOWS,
    TEACHER_FLOWS,
    asked_endpoints,
    further_teachers,
)
from qinglan.recipes import get_recipe
from qinglan.runs.processes import in_event_loop
from qinglan.text import usd

_TIMEOUT_S = 8.0
_LOOPBACK = ("127.0.0.1", "localhost")
_LOGINS = {
    "prefect": "PREFECT_API_AUTH_STRING, or PREFECT_API_KEY for Prefect Cloud",
    "mlflow": "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
}
ANSWER_WITHIN_S = 18.0
_PROBE = "-probe"
_WORD = "Answer with one word: ready"
_JSON = 'Answer with this JSON and nothing else: {"ready": true}'
_BY_HAND = "ask it by hand with the same model and parameters"
_HINTS = {
    "empty_answer": "raise {role}.max_tokens, as thoughts count too, or name another model",
    "teacher_refused": "name another model",
    "teacher_timeout": "it is slow or away; try again later, or raise {role}.timeout_s for the run",
    "teacher_rate_limited": "lower {role}.concurrency, set {role}.requests_per_minute, or raise the account's limits",
    "teacher_bad_request": "correct what it names: {role}.temperature, reasoning_effort, structured_output, extra_body",
}
_SCHEMA: JsonSchema = object_schema(ready={"type": "boolean"})


def addresses(profile: Profile, flow: FlowName) -> dict[str, str]:
    """By what they are for, the services that this profile names."""
    endpoints = {"teacher": profile.teacher, "judge": profile.judge, "answerer": profile.answerer}
    endpoints |= further_teachers(profile, flow)
    named = {role: endpoint.base_url for role, endpoint in endpoints.items() if endpoint}
    named |= {
        "rag": profile.rag.url,
        "tracking": profile.tracking_uri,
        "ray": profile.trainer.ray_dashboard_url or "",
    }
    with suppress(ConfigError):  # said by Prefect's own check
        if server := find_server(profile.paths.state):
            named["prefect"] = server.api_url
    return {role: url for role, url in named.items() if url.startswith(("http://", "https://"))}


def check_proxies(services: Mapping[str, str]) -> Check:
    """Who is asked through a proxy, and is this machine itself left out?"""
    found = getproxies()
    if not (
        proxies := {
            scheme: url for scheme in ("http", "https", "all") if (url := found.get(scheme))
        }
    ):
        return Check("proxies", "none")
    # Without a login in the address.
    hosts = {
        scheme: url.rpartition("@")[2].rpartition("://")[2].partition("/")[0]
        for scheme, url in proxies.items()
    }
    shown = ", ".join(f"{scheme} {host}" for scheme, host in hosts.items())
    wrong = []
    for scheme, url in proxies.items():
        try:
            httpx2.Client(proxy=url if "://" in url else f"http://{url}").close()
        except (httpx2.InvalidURL, ValueError, ImportError) as error:
            wrong.append(
                f"{scheme.upper()}_PROXY: {first_line(error)}; write http://host:port, or unset it"
            )
    if wrong:
        return Check("proxies", shown, "; ".join(wrong))
    caught = [host for host in _LOOPBACK if not proxy_bypass(host)]
    if caught and proxies.keys() & {"http", "all"}:
        lacks = f"lacks {' and '.join(caught)}, so Prefect's and MLflow's clients would ask the proxy for the servers"
        export = f"export NO_PROXY={','.join([*filter(None, [found.get('no')]), *_LOOPBACK])}"
        return Check("proxies", shown, f"NO_PROXY: {lacks} of this machine; {export}")
    through = []
    for role, url in services.items():
        parts = urlsplit(url)
        host, proxy = parts.hostname or "", found.get(parts.scheme) or found.get("all")
        if proxy and uses_proxy(url) and not proxy_bypass(host):
            through.append(f"{role} ({host})")
    note = f"asked through it: {', '.join(through)}; hosts of your own network belong into NO_PROXY"
    return Check("proxies", shown, note=note if through else None)


def needed_keys(profile: Profile, flow: FlowName) -> dict[str, str]:
    """By variable, the setting that names it."""
    endpoints = asked_endpoints(profile, flow)
    named = {
        f"{role}.api_key_env": each.api_key_env
        for role, each in endpoints.items()
        if each.base_url != EMBEDDED
    }
    if (
        flow != "release"
        and profile.rag.url != EMBEDDED
        and "rag" in get_recipe(profile.recipe).grader.services
    ):
        named["rag.api_key_env"] = profile.rag.api_key_env
    if profile.data.sql and flow in TEACHER_FLOWS:
        named["data.sql.url_env"] = profile.data.sql.url_env
    named["ledger.url_env"] = profile.ledger.url_env
    if profile.trainer.ray_dashboard_url and flow in ENGINE_FLOWS:
        named["trainer.ray_token_env"] = profile.trainer.ray_token_env
    return {name: setting for setting, name in named.items() if name}


def check_keys(profile: Profile, flow: FlowName, *, deploys: bool = False) -> Check:
    """Are they set? Whether they are right, the services say.

    Without its webhook a profile can't be deployed, but can run: a problem if it `deploys`, else a
    note.
    """
    needed, webhook = needed_keys(profile, flow), None
    missing = [name for name in needed if not os.environ.get(name, "").strip()]
    known = [name for name in needed if name not in missing]
    try:
        if webhook_address(profile):
            known.append(str(profile.notify.webhook_url_env))
    except ConfigError as error:
        webhook = str(error)
    problems = []
    if missing:
        named = ", ".join(f"{name} ({needed[name]})" for name in missing)
        problems.append(
            f"keys: not set: {named}; export them here, and for the worker that runs the flows"
        )
    if webhook and deploys:
        problems.append(webhook)
    detail = f"{', '.join(known) or 'none'} set" if known or missing else "none needed"
    note = (
        f"`qinglan up` and `qinglan deploy` will refuse: {webhook}"
        if webhook and not deploys
        else None
    )
    return Check("keys", detail, "; ".join(problems) or None, note)


def check_prefect(profile: Profile) -> Check:
    try:
        if (server := find_server(profile.paths.state)) is None:
            return Check(
                "prefect", "no server configured: `qinglan run` starts one for the time of the run"
            )
        where = f"{server.api_url} ({server.origin})"
        with server.client(timeout_s=_TIMEOUT_S) as http:
            answer = http.get("/admin/version")
    except ConfigError as error:
        return Check("prefect", "", str(error))
    except httpx2.HTTPError as error:
        hint = "start it, or unset what names it"
        return Check(
            "prefect", where, f"prefect {where}: can't be reached: {first_line(error)}; {hint}"
        )
    if answer.status_code == httpx2.codes.NOT_FOUND and server.key:
        return Check("prefect", f"{where}, Prefect Cloud")
    return _compare_versions("prefect", where, answer, "PREFECT_API_URL")


def check_mlflow(profile: Profile) -> Check:
    uri = profile.tracking_uri
    if not uri.startswith(("http://", "https://")):
        return Check(
            "mlflow",
            f"no server configured: runs are kept in {uri}"
            if profile.tracking.uri is None
            else uri,
        )
    user, password = (
        os.environ.get(f"MLFLOW_TRACKING_{name}", "") for name in ("USERNAME", "PASSWORD")
    )
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    headers = {"authorization": f"Bearer {token}"} if token and not user else {}
    try:
        with httpx2.Client(timeout=_TIMEOUT_S, trust_env=uses_proxy(uri), headers=headers) as http:
            answer = http.get(f"{uri.rstrip('/')}/version", auth=(user, password) if user else None)
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        hint = "start the server, or remove the setting"
        return Check(
            "mlflow", uri, f"tracking.uri: {uri} can't be reached: {first_line(error)}; {hint}"
        )
    return _compare_versions("mlflow", uri, answer, "tracking.uri")


def _compare_versions(name: str, where: str, answer: httpx2.Response, setting: str) -> Check:
    theirs, wrong = None, f"answers HTTP {answer.status_code}"
    if answer.status_code in (httpx2.codes.UNAUTHORIZED, httpx2.codes.FORBIDDEN):
        refused = f"{setting}: {where} refuses us (HTTP {answer.status_code})"
        return Check(name, where, f"{refused}; set {_LOGINS[name]}")
    if answer.status_code == httpx2.codes.OK:
        wrong = "names no version"
        with suppress(ValueError):  # InvalidVersion is one
            text = json.loads(answer.content) if answer.content.startswith(b'"') else answer.text
            theirs = Version(str(text).strip())
    if theirs is None:
        return Check(
            name, where, f"{setting}: {where} {wrong}; is the address that of a {name} server?"
        )
    ours, detail = installed(name), f"{where}, version {theirs}"
    if ours is None or ours.release[:2] == theirs.release[:2]:
        return Check(name, detail)
    hint = f"bring both to one version: `pip install {name}=={ours}` on the server, or that of the server here"
    return Check(
        name, detail, f"{name} {where}: the server is {theirs}, the client here {ours}; {hint}"
    )


def check_answer(profile: Profile, role: str, endpoint: Endpoint) -> Check:
    name, detail, problem = f"{role} answers", f"{endpoint.model} at {endpoint.base_url}", None
    run_id, price = f"doctor-{secrets.token_hex(4)}", profile.prices[endpoint.model]
    account = Account(run_id, profile.tenant.id, role + _PROBE, endpoint.model, price)
    try:
        with site_ledger(profile) as ledger:
            try:
                detail += f", after {_ask(profile, endpoint, account, ledger) / 1000:.1f} s"
            except QinglanError as error:
                said = getattr(error, "said", "")  # of our own question
                problem = (
                    (f"{error}: {said}" if said else str(error)).replace(_PROBE, "").rstrip(".")
                )
                if ";" not in problem and isinstance(error, TeacherError):
                    problem += f"; {_HINTS.get(error.reason, _BY_HAND).format(role=role)}"
            cost = usd(ledger.spent_usd(account.run_id)[0])
    except QinglanError as error:
        return Check(name, detail, str(error))
    if problem:
        return Check(name, detail, f"{problem} (the probe cost {cost})")
    return Check(name, f"{detail}, for {cost}")


@in_event_loop
async def _ask(profile: Profile, endpoint: Endpoint, account: Account, ledger: Ledger) -> float:
    timeout_s = min(endpoint.timeout_s, ANSWER_WITHIN_S)
    once = endpoint.model_copy(update={"max_retries": 0, "timeout_s": timeout_s, "concurrency": 1})
    schema = (
        _SCHEMA if account.role == f"judge{_PROBE}" else None
    )  # the judge alone is asked for JSON
    must_be_json = "response_format" in request_parameters(endpoint, schema)

    def parse(text: str) -> str:
        try:
            return str(json.loads(text)) if must_be_json else text
        except ValueError as error:
            message = f"asked for JSON, it answers {text[:60]!r}; set {account.role}.structured_output: off"
            raise TeacherError(f"{account.role}: {message}", "bad_json") from error

    queue = LedgerQueue(ledger, account.run_id, profile.budget)
    client = ChatClient(once, endpoint.base_url, account, queue, key_salt=account.run_id)
    try:
        answer = await client.ask(
            [{"role": "user", "content": _JSON if schema else _WORD}], parse, schema
        )
        return answer.latency_ms or 0.0
    finally:
        await client.close()
        await queue.close()
