"""The way to the services: proxies, and whether their clocks agree with this machine's."""

import time
from collections.abc import Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import partial
from statistics import median
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx2

from qinglan.config import FlowName, Profile, uses_proxy
from qinglan.errors import ConfigError, first_line
from qinglan.ops.checks import Check, run_in_thread
from qinglan.ops.prefect.server import find_server
from qinglan.ops.preflight import further_teachers

MAX_DRIFT_S, NOTED_DRIFT_S = 60.0, 5.0
_TIMEOUT_S = 5.0
_ALL_WITHIN_S = 8.0
_LOOPBACK = ("127.0.0.1", "localhost")


def addresses(profile: Profile, flow: FlowName) -> dict[str, str]:
    """By what they are for, the services that this profile names."""
    endpoints = {"teacher": profile.teacher, "judge": profile.judge} | further_teachers(profile, flow)
    if profile.answerer:
        endpoints["answerer"] = profile.answerer
    named = {role: endpoint.base_url for role, endpoint in endpoints.items()}
    named |= {"rag": profile.rag.url, "tracking": profile.tracking_uri, "ray": profile.trainer.ray_dashboard_url or ""}
    with suppress(ConfigError):  # said by Prefect's own check
        if server := find_server(profile.paths.state):
            named["prefect"] = server.shown_url
    return {role: url for role, url in named.items() if url.startswith(("http://", "https://"))}


def check_proxies(services: Mapping[str, str]) -> Check:
    """Who is asked through a proxy, and is this machine itself left out?"""
    found = getproxies()
    if not (proxies := {scheme: url for scheme in ("http", "https", "all") if (url := found.get(scheme))}):
        return Check("proxies", "none")
    # Without a login in the address.
    hosts = {scheme: url.rpartition("@")[2].rpartition("://")[2].partition("/")[0] for scheme, url in proxies.items()}
    shown = ", ".join(f"{scheme} {host}" for scheme, host in hosts.items())
    wrong = []
    for scheme, url in proxies.items():
        try:
            httpx2.Client(proxy=url if "://" in url else f"http://{url}").close()
        except (httpx2.InvalidURL, ValueError, ImportError) as error:
            wrong.append(f"{scheme.upper()}_PROXY: {first_line(error)}; write http://host:port, or unset it")
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


def check_clock(services: Mapping[str, str]) -> Check:
    """This machine's clock beside those of the services, by the Date of any answer of theirs."""
    deadline, asked, ahead = time.monotonic() + _ALL_WITHIN_S, {}, {}
    for url in services.values():
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]  # without a login, and below without a path, which may hold a secret
        asked[host] = run_in_thread(partial(_seconds_ahead, f"{parts.scheme}://{host}"))
    for host, future in asked.items():
        # That a service can't be reached its own check says; the last two are a proxy that httpx2 can't use.
        with suppress(TimeoutError, httpx2.HTTPError, httpx2.InvalidURL, ValueError, ImportError):
            if (seconds := future.result(max(0.0, deadline - time.monotonic()))) is not None:
                ahead[host] = seconds
    if not ahead:
        return Check("clock", "no service to compare it with")
    detail = f"{abs(median(ahead.values())):.0f} s from that of {', '.join(ahead)}"
    by_ntp = "(timedatectl set-ntp true)"
    if off := {host: seconds for host, seconds in ahead.items() if abs(seconds) > MAX_DRIFT_S}:
        found = ", ".join(f"{abs(s):,.0f} s {'ahead of' if s > 0 else 'behind'} {host}" for host, s in off.items())
        whose = "this machine's" if len(off) == len(ahead) else "that service's, as the others agree with this machine"
        wrong = f"clock: is {found}, which TLS, tokens and the ledger's claims suffer from; set {whose} {by_ntp}"
        return Check("clock", detail, wrong)
    drifts = any(abs(seconds) > NOTED_DRIFT_S for seconds in ahead.values())
    return Check("clock", detail, note=f"set the clock by NTP {by_ntp}" if drifts else None)


def _seconds_ahead(origin: str) -> float | None:
    with httpx2.Client(timeout=_TIMEOUT_S, trust_env=uses_proxy(origin)) as http:
        asked = time.time()
        response = http.head(origin)
        answered = time.time()
    try:
        theirs = parsedate_to_datetime(response.headers["date"]).timestamp()
    except (KeyError, ValueError):
        return None
    earliest, latest = asked - 1, answered  # it counts whole seconds
    return 0.0 if earliest <= theirs <= latest else (earliest if theirs < earliest else latest) - theirs
