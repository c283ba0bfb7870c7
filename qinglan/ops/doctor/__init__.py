"""`qinglan doctor`: what can be known before money or time is spent, in under half a minute.

It makes the checks that every flow makes when it starts (`ops/preflight`), and slower or stricter
ones.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from urllib.parse import unquote, urlsplit

from qinglan.config import EMBEDDED, FlowName, Profile, secret_names
from qinglan.ops.checks import Check, PlannedCheck, start_check
from qinglan.ops.doctor import cluster, machine, services
from qinglan.ops.preflight import plan_profile_checks
from qinglan.ops.preflight.asked_services import ENGINE_FLOWS, asked_endpoints

MACHINE, SERVERS, CLUSTER, PAID = "This machine", "Servers", "The cluster", "Paid answers"
_HIDDEN = "•••"
_SHORTEST = 4
_CREDENTIALS = re.compile(r"(?<=://)[^\s/@]+@")


def examine(
    profile: Profile, flow: FlowName = "pipeline", *, may_pay: bool = False, deploys: bool = False
) -> Iterator[tuple[str, Check, float]]:
    """Make all checks side by side: group, result without any secret, and seconds, in a fixed
    order.

    With `may_pay`, one short call to each paid chat service, too; with `deploys`, what only
    `qinglan up` needs, too.
    """
    values = _secret_values(profile)
    planned_checks = plan_checks(profile, flow, may_pay=may_pay, deploys=deploys)
    for planned, wait in [(each, start_check(each)) for each in planned_checks]:
        checks, seconds = wait()
        for check in checks:
            yield planned.group, _hide(check.with_hint(), values), seconds


def plan_checks(
    profile: Profile, flow: FlowName, *, may_pay: bool, deploys: bool = False
) -> Iterator[PlannedCheck]:
    """All checks, in the order in which their results are printed."""
    recipe, *others = plan_profile_checks(profile, flow)
    has_recipe = recipe.run()[0].problem is None  # the recipe says which services are asked
    addresses = services.addresses(profile, flow)
    machine_checks: dict[str, Callable[[], Check]] = {
        "python": machine.check_python,
        "packages": lambda: machine.check_packages(profile, flow),
        "text": machine.check_text,
        "folders": lambda: machine.check_folders(profile),
        "disk": lambda: machine.check_disk(profile, flow),
        "memory": lambda: machine.check_memory(profile, flow),
        "file locks": lambda: machine.check_locks(profile),
        "proxies": lambda: services.check_proxies(addresses),
    }
    if has_recipe:
        machine_checks["open files"] = lambda: machine.check_open_files(profile, flow)
    for name, make in machine_checks.items():
        yield PlannedCheck(MACHINE, name, "of this machine", make)
    yield recipe
    if has_recipe:
        check_keys = partial(services.check_keys, profile, flow, deploys=deploys)
        yield PlannedCheck(recipe.group, "keys", "in the environment", check_keys)
    yield from others
    yield PlannedCheck(SERVERS, "prefect", "its server", lambda: services.check_prefect(profile))
    yield PlannedCheck(
        SERVERS, "mlflow", profile.tracking_uri, lambda: services.check_mlflow(profile)
    )
    if not has_recipe:
        return
    if (url := profile.trainer.ray_dashboard_url) and flow in ENGINE_FLOWS:
        yield PlannedCheck(
            CLUSTER, "mount", url, partial(cluster.check_cluster, profile), "longest"
        )
    if not may_pay:
        return
    # Simulators cost nothing, and only run while a flow does.
    paid_ones = {
        role: each
        for role, each in asked_endpoints(profile, flow).items()
        if each.base_url != EMBEDDED
    }
    for role, endpoint in paid_ones.items():
        ask = partial(services.check_answer, profile, role, endpoint)
        yield PlannedCheck(PAID, f"{role} answers", endpoint.model, ask, "slow")
    if not paid_ones:
        nothing = Check("answers", "no service of this flow takes money")
        yield PlannedCheck(PAID, nothing.name, nothing.detail, lambda: nothing)


def _secret_values(profile: Profile) -> list[str]:
    """What the variables hold that the profile names, the longest first; of an address its password
    too."""
    values: set[str] = set()
    for name in secret_names(profile):
        value = os.environ.get(name, "").strip()
        values.add(value)
        with suppress(ValueError):
            password = urlsplit(value).password if "://" in value else value.partition(":")[2]
            values |= {password or "", unquote(password or "")}
    return sorted((value for value in values if len(value) >= _SHORTEST), key=len, reverse=True)


def _hide(check: Check, values: list[str]) -> Check:
    """The same check without the values, and without the login of any address."""

    def cleaned(text: str) -> str:
        for value in values:
            text = text.replace(value, _HIDDEN)
        return _CREDENTIALS.sub(f"{_HIDDEN}@", text)

    problem, note = (text and cleaned(text) for text in (check.problem, check.note))
    return replace(check, detail=cleaned(check.detail), problem=problem, note=note)
