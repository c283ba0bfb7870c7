"""The way to the services: who is asked through a proxy."""

from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx2

from qinglan.config import FlowName, Profile, uses_proxy
from qinglan.errors import ConfigError, first_line
from qinglan.ops.checks import Check
from qinglan.ops.prefect.server import find_server
from qinglan.ops.preflight import further_teachers

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
