"""What can be known of the services before anything is spent: key, model, and whether the RAG keeps its contract."""

import difflib
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import httpx2

from qinglan.clients.contract import probe_rag
from qinglan.clients.openai_protocol import capability_of
from qinglan.config import EMBEDDED, Endpoint, Profile, require_secret, uses_proxy
from qinglan.data.workbook import read_rows
from qinglan.errors import ConfigError, QinglanError, WorkbookError
from qinglan.ops.checks import Check, run_check
from qinglan.recipes import get_recipe
from qinglan.simulators.domains import domain_for, domain_of_model
from qinglan.simulators.retriever import load_documents

_PROBED_ROWS = 200
_TIMEOUT_S = 10.0
_SHOWN_MODELS = 8


def check_chat(role: str, endpoint: Endpoint) -> str | None:
    """Ask a chat service for its models, which is free of charge; a note where that shows little."""
    if endpoint.reasoning_effort and capability_of(endpoint.model).reasoning_effort is False:
        raise ConfigError(f"{role}.reasoning_effort: {endpoint.model} takes none and would refuse; remove it")
    if endpoint.base_url == EMBEDDED:
        try:
            domain_of_model(endpoint.model)
        except ConfigError as error:
            raise ConfigError(f"{role}.model: {error}") from error
        return None
    key = require_secret(endpoint.api_key_env, f"{role} {endpoint.model}")
    url = f"{endpoint.base_url.rstrip('/')}/models"
    headers = {"authorization": f"Bearer {key}"}
    response = reach(role, "base_url", endpoint.base_url, lambda http: http.get(url, headers=headers))
    if response.status_code in (401, 403):
        variable = endpoint.api_key_env or f"{role}.api_key_env (not set)"
        refusal = f"refuses the key (HTTP {response.status_code})"
        raise ConfigError(f"{role} {endpoint.base_url}: {refusal}; check {variable}")
    if response.status_code >= 500:
        raise ConfigError(f"{role} {endpoint.base_url}: answers HTTP {response.status_code}; is the service up?")
    if response.status_code != 200:
        return f"the model is not checked: GET /models answers HTTP {response.status_code}"
    # Only a note: aliases and deployments are served by some under names that they don't list.
    try:
        listed = [str(entry["id"]) for entry in json.loads(response.content)["data"]]
    except (ValueError, TypeError, KeyError):
        listed = []
    if not listed:
        return "the model is not checked: the service lists none"
    if endpoint.model in listed:
        return None
    near = difflib.get_close_matches(endpoint.model, listed, n=_SHOWN_MODELS, cutoff=0.4) or listed[:_SHOWN_MODELS]
    return f"the service does not list this model; it has {', '.join(near)}{', …' if len(near) < len(listed) else ''}"


def check_rag(profile: Profile) -> Check:
    """Ask it three or four times, or read the simulator's documents."""
    rag = profile.rag
    if rag.url == EMBEDDED:
        return run_check("rag", rag.url, lambda: _knowledge_base(profile))
    try:
        about_rewrite, *others = findings = probe_rag(rag, profile.tenant.id, _questions(profile))
    except QinglanError as error:
        return Check("rag", rag.url, str(error))
    if about_rewrite.kind == "ignored":  # the run would measure nothing, so it must not start
        return Check("rag", rag.url, f"rag {rag.url}: {about_rewrite.text}")
    if about_rewrite.kind != "honoured":
        return Check("rag", rag.url, note="; ".join(finding.text for finding in findings))
    notes = "; ".join(finding.text for finding in others)
    return Check("rag", f"{rag.url} ({about_rewrite.text})", note=notes or None)


def _knowledge_base(profile: Profile) -> None:
    rag = profile.rag
    if rag.knowledge_base == EMBEDDED:
        domain_for(profile, "rag.knowledge_base")
        return
    if not Path(rag.knowledge_base).is_file():
        raise ConfigError(f"rag.knowledge_base: {rag.knowledge_base}: no such file; give a JSONL file")
    load_documents(Path(rag.knowledge_base))


def _questions(profile: Profile) -> list[str]:
    """Questions to probe the RAG with: none of the built-in sample, a database, or a workbook that can't be read."""
    data = profile.data
    if data.workbook == EMBEDDED or data.sql is not None:
        return []
    try:
        rows = read_rows(Path(data.workbook), data, profile.tenant, inputs=get_recipe(profile.recipe).INPUTS)
        return [row.query for row in islice(rows, _PROBED_ROWS) if row.status == "ok"]
    except WorkbookError:
        return []


def reach(role: str, key: str, url: str, send: Callable[[httpx2.Client], httpx2.Response]) -> httpx2.Response:
    """A service's answer; a ConfigError where it doesn't answer."""
    try:
        with httpx2.Client(timeout=_TIMEOUT_S, trust_env=uses_proxy(url)) as http:
            return send(http)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise ConfigError(
            f"{role}.{key} can't be reached: {str(error) or type(error).__name__}; is it up, is the address right?"
        ) from error
