"""Checks which services are asked through a proxy, and that this machine itself is left out."""

from collections.abc import Mapping
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx2

from qinglan.config import uses_proxy
from qinglan.errors import first_line
from qinglan.ops.checks import Check

_LOOPBACK = ("127.0.0.1", "localhost")


def check_proxies(services: Mapping[str, str]) -> Check:
    """Check the proxies that the environment names; `services` are addresses by role."""
    settings = getproxies()
    proxies: dict[str, str] = {}
    for scheme in ("http", "https", "all"):
        if settings.get(scheme):
            proxies[scheme] = settings[scheme]
    if not proxies:
        return Check("proxies", "none")
    detail = ", ".join(f"{scheme} {_host_of(url)}" for scheme, url in proxies.items())
    problem = _problem_of_addresses(proxies) or _problem_of_loopback(settings, proxies)
    if problem:
        return Check("proxies", detail, problem)
    proxied = _proxied_services(services, settings)
    note = None
    if proxied:
        note = (
            f"asked through it: {', '.join(proxied)}; "
            "hosts of your own network belong into NO_PROXY"
        )
    return Check("proxies", detail, note=note)


def _host_of(url: str) -> str:
    """Host and port of a proxy, without a login."""
    _, _, behind_login = url.rpartition("@")
    _, _, behind_scheme = behind_login.rpartition("://")
    host, _, _ = behind_scheme.partition("/")
    return host


def _problem_of_addresses(proxies: Mapping[str, str]) -> str | None:
    """Addresses that no client can use."""
    problems: list[str] = []
    for scheme, url in proxies.items():
        address = url if "://" in url else f"http://{url}"
        try:
            httpx2.Client(proxy=address).close()
        except (httpx2.InvalidURL, ValueError, ImportError) as error:
            hint = "write http://host:port, or unset it"
            problems.append(f"{scheme.upper()}_PROXY: {first_line(error)}; {hint}")
    return "; ".join(problems) or None


def _problem_of_loopback(settings: Mapping[str, str], proxies: Mapping[str, str]) -> str | None:
    """Names of this machine that a proxy would be asked for."""
    caught = [host for host in _LOOPBACK if not proxy_bypass(host)]
    # Servers of this machine are asked without TLS.
    if not caught or not proxies.keys() & {"http", "all"}:
        return None
    problem = (
        f"lacks {' and '.join(caught)}, so Prefect's and MLflow's clients would ask the proxy "
        "for the servers of this machine"
    )
    exceptions = [*filter(None, [settings.get("no")]), *_LOOPBACK]
    return f"NO_PROXY: {problem}; export NO_PROXY={','.join(exceptions)}"


def _proxied_services(services: Mapping[str, str], settings: Mapping[str, str]) -> list[str]:
    """Services that are asked through a proxy, with their hosts."""
    proxied: list[str] = []
    for role, url in services.items():
        parts = urlsplit(url)
        host = parts.hostname or ""
        proxy = settings.get(parts.scheme) or settings.get("all")
        if proxy and uses_proxy(url) and not proxy_bypass(host):
            proxied.append(f"{role} ({host})")
    return proxied
