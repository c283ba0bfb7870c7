"""Is what should be served being served? For a flow that looks at it now and then and fails where it is not.

The registry says what should be, the router's `/health` what is, and the watch's last look how a canary stands.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import httpx2

from qinglan.config import Profile, uses_proxy
from qinglan.serving.canary_observer import CanaryState, read_state, read_verdict
from qinglan.serving.registry import Alias
from qinglan.serving.site import serving_folder
from qinglan.text import duration

ANSWERS_WITHIN_S = 10.0
LOOKS_MISSED, STALE_AFTER_S = 12, 120.0
"""A canary is stale when the watch has missed so many of its looks, but not before so many seconds."""
_LOOPBACK = "127.0.0.1"


class AliasSource(Protocol):
    """The registry, as far as it is needed here."""

    def aliases(self) -> Mapping[Alias, str]:
        """Alias to version."""


@dataclass
class ServingHealth:
    """What was found: `problems` are what somebody has to see to, each in a line."""

    url: str
    champion: str | None
    """As the registry says."""
    challenger: str | None
    serving: str | None = None
    """The version that answers."""
    canary: CanaryState | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def markdown(self) -> str:
        """For people."""
        rows = [
            ("Router", f"`{self.url}`"),
            ("Champion", self.champion or "none"),
            ("Answers", self.serving or "nobody"),
            ("Challenger", self.challenger or "none"),
        ]
        if self.canary:
            looked = datetime.fromtimestamp(self.canary.looked, UTC).isoformat(timespec="seconds")
            rows += [("Canary", _standing(self.canary)), ("Last look", looked)]
        table = ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows), ""]
        told = [*(f"**{problem}**" for problem in self.problems), *self.notes] or ["All is as it should be."]
        return "\n".join([*table, *(f"- {line}" for line in told)]) + "\n"


def check_serving(
    profile: Profile, registry: AliasSource, url: str = "", clock: Callable[[], float] = time.time
) -> ServingHealth:
    """Look at registry, router and canary.

    Args:
        url: of the router, where it is not what the profile's `serve` says.

    Raises:
        ConfigError: the registry can't be read.
    """
    url, aliases = url.rstrip("/") or url_of(profile), registry.aliases()
    checkup = ServingHealth(url, aliases.get("champion"), aliases.get("challenger"))
    health = _health(url)
    if checkup.champion is None:
        checkup.notes.append("no champion yet, so nothing has to be served")
    elif health is None:
        checkup.problems.append(
            f"version {checkup.champion} is the champion, but no router answers at {url}; start "
            f"`qinglan serve --profile {profile.name}`"
        )
    else:
        _look_at_champion(checkup, health)
    if health is not None and checkup.challenger:
        _look_at_canary(checkup, serving_folder(profile), profile.serve.canary.check_every_s, clock())
    return checkup


def url_of(profile: Profile) -> str:
    """Where a router with this profile is reached from its own machine."""
    host = profile.serve.host
    return f"http://{_LOOPBACK if host in ('0.0.0.0', '::') else host}:{profile.serve.port}"  # noqa: S104 (not bound)


def _health(url: str) -> Mapping[str, Any] | None:
    try:
        with httpx2.Client(timeout=ANSWERS_WITHIN_S, trust_env=uses_proxy(url)) as http:
            told = http.get(f"{url}/health").raise_for_status().json()
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError):
        return None
    return told if isinstance(told, dict) and "champion" in told else None


def _look_at_champion(checkup: ServingHealth, health: Mapping[str, Any]) -> None:
    serving = health["champion"]
    checkup.serving = str(serving["version"]) if serving else None
    if checkup.serving is None or health.get("status") != "ok":
        checkup.problems.append(
            f"the router at {checkup.url} answers without a model: version {checkup.champion}, the champion, does not "
            "come up; see its log under paths.state/logs"
        )
    elif checkup.serving != checkup.champion:
        checkup.notes.append(f"version {checkup.serving} answers until version {checkup.champion} has come up")
    if health.get("request_log") == "failing":
        checkup.problems.append(f"the router at {checkup.url} can't write its request log; is the disk full?")


def _look_at_canary(checkup: ServingHealth, folder: Path, check_every_s: float, now: float) -> None:
    state = read_state(folder)
    if state is None or state.challenger != checkup.challenger:
        checkup.notes.append(f"version {checkup.challenger} is the challenger, but gets no requests yet")
        return
    checkup.canary = state
    allowed_s = max(STALE_AFTER_S, LOOKS_MISSED * check_every_s)
    since_s = now - (state.looked or state.started)
    if since_s > allowed_s:
        checkup.problems.append(
            f"the canary of version {state.challenger} was last looked at {duration(since_s)} ago, so nothing would "
            "end it; start `qinglan serve` again, or end it with `qinglan canary stop`"
        )
    elif verdict := read_verdict(folder):
        checkup.notes.append(f"the canary has ended: {verdict.judgement.outcome}, {verdict.judgement.reason}")


def _standing(state: CanaryState) -> str:
    arms = state.counts
    return (
        f"version {state.challenger} gets {state.share:.0%}: {state.judgement.outcome}, {state.judgement.reason}; "
        f"{arms.challenger.fallbacks.n:,} requests to it, {arms.champion.fallbacks.n:,} to version {state.champion}"
    )
