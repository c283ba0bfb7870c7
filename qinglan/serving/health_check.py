"""Is the champion being served? For a flow that checks it regularly and fails where it is not.

The registry says what should be served, the router's `/health` what is, and its last check how a canary goes.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2

from qinglan.config import Profile, uses_proxy
from qinglan.serving.canary_observer import CanaryState, read_state, read_verdict
from qinglan.serving.registry import Alias
from qinglan.serving.site import serving_folder
from qinglan.text import duration

ANSWERS_WITHIN_S = 10.0
CHECKS_MISSED, STALE_AFTER_S = 12, 120.0
"""A canary is stale when the router has missed so many of its checks, but not before so many seconds."""


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
            arms = canary.counts
            summary = (
                f"version {canary.challenger} gets {canary.share:.0%}: {canary.judgement.outcome}, "
                f"{canary.judgement.reason}; {arms.challenger.fallbacks.n:,} requests to it, "
                f"{arms.champion.fallbacks.n:,} to version {canary.champion}"
            )
            checked = datetime.fromtimestamp(canary.looked, UTC).isoformat(timespec="seconds")
            rows += [("Canary", summary), ("Last check", checked)]
        table = ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows), ""]
        lines = [*(f"**{problem}**" for problem in self.problems), *self.notes] or ["All is as it should be."]
        return "\n".join([*table, *(f"- {line}" for line in lines)]) + "\n"


def check_serving(
    profile: Profile, aliases: Mapping[Alias, str], url: str = "", clock: Callable[[], float] = time.time
) -> ServingHealth:
    """Check the router, at `url` where it is not what the profile's `serve` says, and the canary."""
    url = url.rstrip("/")
    if not url:
        host = "127.0.0.1" if profile.serve.host in ("0.0.0.0", "::") else profile.serve.host  # noqa: S104 (not bound)
        url = f"http://{host}:{profile.serve.port}"
    found = ServingHealth(url, aliases.get("champion"), aliases.get("challenger"))
    health = _health(url)
    if found.champion is None:
        found.notes.append("no champion yet, so nothing has to be served")
    elif health is None:
        found.problems.append(
            f"version {found.champion} is the champion, but no router answers at {url}; start "
            f"`qinglan serve --profile {profile.name}`"
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
        found.problems.append(
            f"the router at {found.url} answers without a model: version {found.champion}, the champion, does not "
            "come up; see its log under paths.state/logs"
        )
    elif found.serving != found.champion:
        found.notes.append(f"version {found.serving} answers until version {found.champion} has come up")
    if health.get("request_log") == "failing":
        found.problems.append(f"the router at {found.url} can't write its request log; is the disk full?")


def _check_canary(found: ServingHealth, folder: Path, check_every_s: float, now: float) -> None:
    state = read_state(folder)
    if state is None or state.challenger != found.challenger:
        found.notes.append(f"version {found.challenger} is the challenger, but gets no requests yet")
        return
    found.canary = state
    allowed_s = max(STALE_AFTER_S, CHECKS_MISSED * check_every_s)
    since_s = now - (state.looked or state.started)
    if since_s > allowed_s:
        found.problems.append(
            f"the canary of version {state.challenger} was last checked {duration(since_s)} ago, so nothing would "
            "end it; start `qinglan serve` again, or end it with `qinglan canary stop`"
        )
    elif verdict := read_verdict(folder):
        found.notes.append(f"the canary has ended: {verdict.judgement.outcome}, {verdict.judgement.reason}")
