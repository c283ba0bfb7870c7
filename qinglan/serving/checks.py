"""Is the champion being served? Checked regularly by a flow, and by `qinglan serve --check`, which
starts a whole site.

The registry says what should be served, the router's `/health` what is, and its last check how a
canary goes.
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
CHECKS_MISSED, STALE_AFTER_S = 12, 120.0
"""A canary is stale when the router has missed so many of its checks, but not before so many
seconds."""
_SITE_WITHIN_S, _REGISTRY_WITHIN_S = 1800.0, 30.0


@dataclass
class ServingHealth:
    """What was found; each of `problems` needs somebody to act."""

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
        if canary := self.canary:
            to_it, to_champion = (
                canary.counts.challenger.latency.n,
                canary.counts.champion.latency.n,
            )
            requests = f"{to_it:,} requests to it, {to_champion:,} to version {canary.champion}"
            judged = f"{canary.judgement.outcome}, {canary.judgement.reason}"
            summary = f"version {canary.challenger} gets {canary.share:.0%}: {judged}; {requests}"
            checked = datetime.fromtimestamp(canary.looked, UTC).isoformat(timespec="seconds")
            rows += [("Canary", summary), ("Last check", checked)]
        lines = [*(f"**{problem}**" for problem in self.problems), *self.notes] or [
            "All is as it should be."
        ]
        return (
            "\n".join([markdown_table(("", ""), rows), "", *(f"- {line}" for line in lines)]) + "\n"
        )


def check_serving(
    profile: Profile,
    aliases: Mapping[Alias, str],
    url: str = "",
    clock: Callable[[], float] = time.time,
) -> ServingHealth:
    """Check the router, at `url` where it is not what the profile's `serve` says, and the
    canary."""
    url = url.rstrip("/")
    if not url:
        host = "127.0.0.1" if profile.serve.host in ("0.0.0.0", "::") else profile.serve.host  # noqa: S104 (not bound)
        url = router_url(host, profile.serve.port)
    found = ServingHealth(url, aliases.get("champion"), aliases.get("challenger"))
    health = _health(url)
    if found.champion is None:
        found.notes.append("no champion yet, so nothing has to be served")
    elif health is None:
        hint = f"start `qinglan serve --profile {profile.name}`"
        found.problems.append(
            f"version {found.champion} is the champion, but no router answers at {url}; {hint}"
        )
    else:
        _check_champion(found, health)
    if health is not None and found.challenger:
        _check_canary(found, serving_folder(profile), profile.serve.canary.check_every_s, clock())
    return found


def _health(url: str) -> Mapping[str, Any] | None:
    try:
        with httpx2.Client(timeout=ANSWERS_WITHIN_S, trust_env=uses_proxy(url)) as http:
            health = http.get(f"{url}/health").raise_for_status().json()
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError):
        return None
    return health if isinstance(health, dict) and "champion" in health else None


def _check_champion(found: ServingHealth, health: Mapping[str, Any]) -> None:
    serving = health["champion"]
    found.serving = str(serving["version"]) if serving else None
    if found.serving is None or health.get("status") != "ok":
        problem = f"version {found.champion}, the champion, does not come up; see its log under paths.state/logs"
        found.problems.append(f"the router at {found.url} answers without a model: {problem}")
    elif found.serving != found.champion:
        found.notes.append(
            f"version {found.serving} answers until version {found.champion} has come up"
        )
    if health.get("request_log") == "failing":
        found.problems.append(
            f"the router at {found.url} can't write its request log; is the disk full?"
        )


def _check_canary(found: ServingHealth, folder: Path, check_every_s: float, now: float) -> None:
    state = read_state(folder)
    if state is None or state.challenger != found.challenger:
        found.notes.append(
            f"version {found.challenger} is the challenger, but gets no requests yet"
        )
        return
    found.canary = state
    allowed_s = max(STALE_AFTER_S, CHECKS_MISSED * check_every_s)
    since_s = now - (state.looked or state.started)
    if since_s > allowed_s:
        hint = "start `qinglan serve` again, or end it with `qinglan canary stop`"
        late = f"was last checked {duration(since_s)} ago, so nothing would end it"
        found.problems.append(f"the canary of version {state.challenger} {late}; {hint}")
    elif verdict := read_verdict(folder):
        found.notes.append(
            f"the canary has ended: {verdict.judgement.outcome}, {verdict.judgement.reason}"
        )


def run_smoke_test(
    profile_name: str, overrides: Sequence[str], question: str | None, say: Say
) -> str:
    """Ask a site of its own one question, the sample's first test question if none is given; a line
    with the answer."""
    overrides = (*overrides, "serve.request_log.folder=null")  # a made-up question is no user's
    profile = load_profile(profile_name, overrides)
    asked, folder = _row_of(question, profile), serving_folder(profile)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        stop_signals(),
        TemporaryDirectory(prefix="check-", dir=folder) as own,
        open_site(profile, Path(own), say, port=0, watched=False) as site,
    ):
        return _ask(profile, _wait(site), asked)


def _wait(site: ServingSite) -> str:
    start = time.monotonic()
    url = f"{site.router.url}/health"
    while not (
        site.routes.champion and httpx2.get(url, trust_env=False, timeout=5).json()["champion"]
    ):
        site.step()
        waited_s = time.monotonic() - start
        if (problem := site.watcher.problem) and waited_s > _REGISTRY_WITHIN_S:
            raise ConfigError(f"the registry can't be read: {problem}")
        named = site.watcher.latest
        if named and "champion" not in named.aliases:
            shown = f"`qinglan release list --profile {site.profile.name}` shows the versions, if any, and why"
            make = f"`qinglan run pipeline --profile {site.profile.name}` makes one"
            raise ConfigError(f"there is no champion to serve: {shown} none was released; {make}")
        if waited_s > _SITE_WITHIN_S:
            raise EngineError(f"the champion does not answer within {_SITE_WITHIN_S:.0f} s")
        time.sleep(STEP_S)
    return site.router.url


def _row_of(question: str | None, profile: Profile) -> Row:
    inputs = get_recipe(profile.recipe).INPUTS
    if not question:
        sample = sample_of(profile, "`serve --check` without --question")
        # In the sample's own columns, whatever the profile calls those of its workbook.
        rows = read_rows(sample.workbook, Data(), profile.tenant, inputs=inputs)
        return next(row for row in rows if row.split == "test" and row.status == "ok")
    if needed := placeholders(inputs, ""):
        needs = f"needs {', '.join(needed)} beside the question; leave --question out, and one of the sample is asked"
        raise ConfigError(f"recipe `{profile.recipe_name}` {needs}")
    return Row(id="", tenant=profile.tenant.id, query=question, source="check")


def _ask(profile: Profile, url: str, question: Row) -> str:
    body = {
        "model": profile.model_name,
        "messages": [{"role": "user", "content": question.query}],
        "profile": question.profile,
        "history": question.history,
        "inputs": identifying(question.inputs, get_recipe(profile.recipe).INPUTS),
    }
    key = next(iter(profile.serve.clients.values()), None)
    headers = {"authorization": f"Bearer {require_secret(key.key_env, 'serve')}"} if key else {}
    with httpx2.Client(trust_env=False, timeout=60, headers=headers) as client:
        start = time.perf_counter()
        answer = client.post(f"{url}/v1/chat/completions", json=body)
        took_ms = 1000 * (time.perf_counter() - start)
    version = answer.headers.get("x-qinglan-version", "?")
    if answer.headers.get("x-qinglan-source") != "model":
        reason = answer.headers.get("x-qinglan-reason", f"HTTP {answer.status_code}")
        raise EngineError(
            f"version {version} gave no usable answer to {question.query!r}: {reason}"
        )
    text = answer.json()["choices"][0]["message"]["content"]
    context = " / ".join(
        text for text in (question.profile, question.history, *question.inputs.values()) if text
    )
    asked = f"{question.query}{f' ({context})' if context else ''}"
    return f"{asked} → {text}  (version {version}, {took_ms:.0f} ms)"
