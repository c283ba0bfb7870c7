"""Checks whether the champion is being served.

A flow does it regularly, and `qinglan serve --check`, which starts a whole site. The registry says
what should be served, the router's `/health` what is, and its last check how a canary goes.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2

from qinglan.config import Data, Profile, load_profile, require_secret, uses_proxy
from qinglan.data.workbook import read_rows
from qinglan.errors import ConfigError, EngineError
from qinglan.recipes import get_recipe, identifying, placeholders
from qinglan.registry import Alias
from qinglan.rows import Row
from qinglan.runs.processes import Say, stop_signals
from qinglan.serving.canary_observer import CanaryState, read_state, read_verdict
from qinglan.serving.routes import router_url
from qinglan.serving.site import STEP_S, ServingSite, open_site, serving_folder
from qinglan.simulators.domains import sample_of
from qinglan.text import duration, markdown_table

ANSWERS_WITHIN_S = 10.0
CHECKS_MISSED = 12
STALE_AFTER_S = 120.0
"""A canary is stale when the router has missed so many of its checks, but not before so many
seconds."""
_SITE_WITHIN_S = 1800.0
_REGISTRY_WITHIN_S = 30.0
_ANY_HOST = ("0.0.0.0", "::")  # noqa: S104 (not bound)


@dataclass
class ServingHealth:
    """The findings of a check; each of `problems` needs somebody to act."""

    url: str
    champion: str | None
    challenger: str | None
    serving: str | None = None
    canary: CanaryState | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def markdown(self) -> str:
        rows = [
            ("Router", f"`{self.url}`"),
            ("Champion", self.champion or "none"),
            ("Answers", self.serving or "none"),
            ("Challenger", self.challenger or "none"),
        ]
        if self.canary:
            checked = datetime.fromtimestamp(self.canary.looked, UTC)
            rows.append(("Canary", _canary_summary(self.canary)))
            rows.append(("Last check", checked.isoformat(timespec="seconds")))
        findings = [f"**{problem}**" for problem in self.problems]
        findings += self.notes
        if not findings:
            findings.append("All is as it should be.")
        lines = [markdown_table(("", ""), rows), ""]
        lines += [f"- {finding}" for finding in findings]
        return "\n".join(lines) + "\n"


def _canary_summary(canary: CanaryState) -> str:
    to_challenger = canary.counts.challenger.latency.n
    to_champion = canary.counts.champion.latency.n
    judgement = f"{canary.judgement.outcome}, {canary.judgement.reason}"
    requests = f"{to_challenger:,} requests to it, {to_champion:,} to version {canary.champion}"
    return f"version {canary.challenger} gets {canary.share:.0%}: {judgement}; {requests}"


def check_serving(
    profile: Profile,
    aliases: Mapping[Alias, str],
    url: str = "",
    clock: Callable[[], float] = time.time,
) -> ServingHealth:
    """Check the router and the canary.

    Args:
        url: the router's address, where it is not what the profile's `serve` says.
    """
    url = url.rstrip("/") or _own_url(profile)
    health = ServingHealth(url, aliases.get("champion"), aliases.get("challenger"))
    state = _router_state(url)
    if health.champion is None:
        health.notes.append("no champion yet, so nothing has to be served")
    elif state is None:
        hint = f"start `qinglan serve --profile {profile.name}`"
        health.problems.append(
            f"version {health.champion} is the champion, but no router answers at {url}; {hint}"
        )
    else:
        _check_champion(health, state)
    if state is not None and health.challenger:
        _check_canary(health, serving_folder(profile), profile.serve.canary.check_every_s, clock())
    return health


def _own_url(profile: Profile) -> str:
    """The router's address as it is asked from this machine."""
    host = profile.serve.host
    if host in _ANY_HOST:
        host = "127.0.0.1"
    return router_url(host, profile.serve.port)


def _router_state(url: str) -> Mapping[str, Any] | None:
    """The router's `/health`; None where no router answers."""
    try:
        with httpx2.Client(timeout=ANSWERS_WITHIN_S, trust_env=uses_proxy(url)) as client:
            state = client.get(f"{url}/health").raise_for_status().json()
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError):
        return None
    # Another service may have the port.
    is_router = isinstance(state, dict) and "champion" in state
    return state if is_router else None


def _check_champion(health: ServingHealth, state: Mapping[str, Any]) -> None:
    serving = state["champion"]
    health.serving = str(serving["version"]) if serving else None
    if health.serving is None or state.get("status") != "ok":
        health.problems.append(
            f"the router at {health.url} answers without a model: version {health.champion}, "
            "the champion, does not come up; see its log under paths.state/logs"
        )
    elif health.serving != health.champion:
        health.notes.append(
            f"version {health.serving} answers until version {health.champion} has come up"
        )
    if state.get("request_log") == "failing":
        health.problems.append(
            f"the router at {health.url} can't write its request log; is the disk full?"
        )


def _check_canary(health: ServingHealth, folder: Path, check_every_s: float, now_s: float) -> None:
    state = read_state(folder)
    if state is None or state.challenger != health.challenger:
        health.notes.append(
            f"version {health.challenger} is the challenger, but gets no requests yet"
        )
        return
    health.canary = state
    allowed_s = max(STALE_AFTER_S, CHECKS_MISSED * check_every_s)
    since_check_s = now_s - (state.looked or state.started)
    if since_check_s > allowed_s:
        problem = f"was last checked {duration(since_check_s)} ago, so nothing would end it"
        hint = "start `qinglan serve` again, or end it with `qinglan canary stop`"
        health.problems.append(f"the canary of version {state.challenger} {problem}; {hint}")
        return
    verdict = read_verdict(folder)
    if verdict:
        judgement = verdict.judgement
        health.notes.append(f"the canary has ended: {judgement.outcome}, {judgement.reason}")


def run_smoke_test(
    profile_name: str, overrides: Sequence[str], question: str | None, say: Say
) -> str:
    """Ask a site of its own one question; returns a line with the answer.

    Args:
        question: the sample's first test question if none is given.
    """
    # A made-up question is no user's, so it is not logged.
    overrides = (*overrides, "serve.request_log.folder=null")
    profile = load_profile(profile_name, overrides)
    row = _row_of(question, profile)
    folder = serving_folder(profile)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        stop_signals(),
        TemporaryDirectory(prefix="check-", dir=folder) as own_folder,
        open_site(profile, Path(own_folder), say, port=0, watched=False) as site,
    ):
        return _ask(profile, _wait(site), row)


def _wait(site: ServingSite) -> str:
    """Wait until the champion answers; returns the router's address."""
    start_s = time.monotonic()
    while not _knows_champion(site):
        site.step()
        waited_s = time.monotonic() - start_s
        if site.watcher.problem and waited_s > _REGISTRY_WITHIN_S:
            raise ConfigError(f"the registry can't be read: {site.watcher.problem}")
        snapshot = site.watcher.latest
        if snapshot and "champion" not in snapshot.aliases:
            profile_name = site.profile.name
            raise ConfigError(
                "there is no champion to serve: "
                f"`qinglan release list --profile {profile_name}` shows the versions, if any, "
                f"and why none was released; `qinglan run pipeline --profile {profile_name}` "
                "makes one"
            )
        if waited_s > _SITE_WITHIN_S:
            raise EngineError(f"the champion does not answer within {_SITE_WITHIN_S:.0f} s")
        time.sleep(STEP_S)
    return site.router.url


def _knows_champion(site: ServingSite) -> bool:
    """Tell whether the site routes a champion and its router has read that."""
    if not site.routes.champion:
        return False
    answer = httpx2.get(f"{site.router.url}/health", trust_env=False, timeout=5)
    return bool(answer.json()["champion"])


def _row_of(question: str | None, profile: Profile) -> Row:
    inputs = get_recipe(profile.recipe).INPUTS
    if not question:
        sample = sample_of(profile, "`serve --check` without --question")
        # The sample has its own columns, whatever the profile calls those of its workbook.
        rows = read_rows(sample.workbook, Data(), profile.tenant, inputs=inputs)
        return next(row for row in rows if row.split == "test" and row.status == "ok")
    needed_inputs = placeholders(inputs, "")
    if needed_inputs:
        raise ConfigError(
            f"recipe `{profile.recipe_name}` needs {', '.join(needed_inputs)} beside the question; "
            "leave --question out, and one of the sample is asked"
        )
    return Row(id="", tenant=profile.tenant.id, query=question, source="check")


def _ask(profile: Profile, url: str, question: Row) -> str:
    body = {
        "model": profile.model_name,
        "messages": [{"role": "user", "content": question.query}],
        "profile": question.profile,
        "history": question.history,
        "inputs": identifying(question.inputs, get_recipe(profile.recipe).INPUTS),
    }
    headers: dict[str, str] = {}
    clients = list(profile.serve.clients.values())
    if clients:
        secret = require_secret(clients[0].key_env, "serve")
        headers["authorization"] = f"Bearer {secret}"
    with httpx2.Client(trust_env=False, timeout=60, headers=headers) as client:
        start_s = time.perf_counter()
        answer = client.post(f"{url}/v1/chat/completions", json=body)
        took_ms = 1000 * (time.perf_counter() - start_s)
    version = answer.headers.get("x-qinglan-version", "?")
    if answer.headers.get("x-qinglan-source") != "model":
        reason = answer.headers.get("x-qinglan-reason", f"HTTP {answer.status_code}")
        raise EngineError(
            f"version {version} gave no usable answer to {question.query!r}: {reason}"
        )
    text = answer.json()["choices"][0]["message"]["content"]
    context = (question.profile, question.history, *question.inputs.values())
    context_shown = " / ".join(part for part in context if part)
    question_shown = question.query
    if context_shown:
        question_shown += f" ({context_shown})"
    return f"{question_shown} → {text}  (version {version}, {took_ms:.0f} ms)"
