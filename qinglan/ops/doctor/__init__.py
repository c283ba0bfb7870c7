"""`qinglan doctor`: what can be known before money or time is spent, in under half a minute.

It makes the checks that every flow makes when it starts (`ops/preflight`), and slower or stricter
ones.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from urllib.parse import unquote, urlsplit

from qinglan.config import EMBEDDED, ENGINE_FLOWS, FlowName, Profile, secret_names
from qinglan.ops.checks import Check, PlannedCheck, start_check
from qinglan.ops.doctor import cluster, machine, services
from qinglan.ops.doctor.paid_answers import check_answer
from qinglan.ops.doctor.proxies import check_proxies
from qinglan.ops.preflight import plan_profile_checks
from qinglan.ops.preflight.asked_services import asked_endpoints

MACHINE = "This machine"
SERVERS = "Servers"
CLUSTER = "The cluster"
PAID = "Paid answers"
_HIDDEN = "•••"
_SHORTEST_SECRET = 4
"""Characters; shorter values stand in other words by chance."""
_CREDENTIALS = re.compile(r"(?<=://)[^\s/@]+@")


def examine(
    profile: Profile, flow: FlowName = "pipeline", *, may_pay: bool = False, deploys: bool = False
) -> Iterator[tuple[str, Check, float]]:
    """Make all checks side by side: group, result without any secret, and seconds, in a fixed
    order.

    With `may_pay`, one short call to each paid chat service, too; with `deploys`, what only
    `qinglan up` needs, too.
    """
    secrets = _secret_values(profile)
    planned_checks = list(plan_checks(profile, flow, may_pay=may_pay, deploys=deploys))
    # All of them are started before the first one is waited for.
    waits = [start_check(planned) for planned in planned_checks]
    for planned, wait in zip(planned_checks, waits, strict=True):
        checks, seconds = wait()
        for check in checks:
            yield planned.group, _without_secrets(check.with_hint(), secrets), seconds


def plan_checks(
    profile: Profile, flow: FlowName, *, may_pay: bool, deploys: bool = False
) -> Iterator[PlannedCheck]:
    """All checks, in the order in which their results are printed."""
    recipe_check, *profile_checks = plan_profile_checks(profile, flow)
    # The recipe says which services are asked.
    has_recipe = recipe_check.run()[0].problem is None
    yield from _machine_checks(profile, flow, has_recipe=has_recipe)
    yield recipe_check
    if has_recipe:
        check_keys = partial(services.check_keys, profile, flow, deploys=deploys)
        yield PlannedCheck(recipe_check.group, "keys", "in the environment", check_keys)
    yield from profile_checks
    check_prefect = partial(services.check_prefect, profile)
    yield PlannedCheck(SERVERS, "prefect", "its server", check_prefect)
    check_mlflow = partial(services.check_mlflow, profile)
    yield PlannedCheck(SERVERS, "mlflow", profile.tracking_uri, check_mlflow)
    if not has_recipe:
        return
    dashboard = profile.trainer.ray_dashboard_url
    if dashboard and flow in ENGINE_FLOWS:
        check_cluster = partial(cluster.check_cluster, profile)
        yield PlannedCheck(CLUSTER, "mount", dashboard, check_cluster, "longest")
    if may_pay:
        yield from _paid_checks(profile, flow)


def _machine_checks(
    profile: Profile, flow: FlowName, *, has_recipe: bool
) -> Iterator[PlannedCheck]:
    planned = partial(PlannedCheck, MACHINE, detail="of this machine")
    addresses = services.addresses(profile, flow)
    yield planned("python", make=machine.check_python)
    yield planned("packages", make=partial(machine.check_packages, profile, flow))
    yield planned("text", make=machine.check_text)
    yield planned("folders", make=partial(machine.check_folders, profile))
    yield planned("disk", make=partial(machine.check_disk, profile, flow))
    yield planned("memory", make=partial(machine.check_memory, profile, flow))
    yield planned("file locks", make=partial(machine.check_locks, profile))
    yield planned("proxies", make=partial(check_proxies, addresses))
    if has_recipe:
        yield planned("open files", make=partial(machine.check_open_files, profile, flow))


def _paid_checks(profile: Profile, flow: FlowName) -> Iterator[PlannedCheck]:
    """One call to each chat service that takes money."""
    # Simulators cost nothing, and only run while a flow does.
    endpoints = asked_endpoints(profile, flow)
    paid_roles = [role for role, endpoint in endpoints.items() if endpoint.base_url != EMBEDDED]
    for role in paid_roles:
        endpoint = endpoints[role]
        ask = partial(check_answer, profile, role, endpoint)
        yield PlannedCheck(PAID, f"{role} answers", endpoint.model, ask, "slow")
    if not paid_roles:
        nothing = Check("answers", "no service of this flow takes money")
        yield PlannedCheck(PAID, nothing.name, nothing.detail, lambda: nothing)


def _secret_values(profile: Profile) -> list[str]:
    """Values of the variables that the profile names, and the passwords in addresses among them.

    The longest come first, as one may be a part of another.
    """
    values: set[str] = set()
    for name in secret_names(profile):
        value = os.environ.get(name, "").strip()
        values.add(value)
        # A value may look like an address and be none.
        with suppress(ValueError):
            if "://" in value:
                password = urlsplit(value).password or ""
            else:
                _, _, password = value.partition(":")
            values.update((password, unquote(password)))
    long_values = [value for value in values if len(value) >= _SHORTEST_SECRET]
    return sorted(long_values, key=len, reverse=True)


def _without_secrets(check: Check, secrets: Sequence[str]) -> Check:
    """The check without the secrets, and without the login of any address."""

    def cleaned(text: str) -> str:
        for value in secrets:
            text = text.replace(value, _HIDDEN)
        return _CREDENTIALS.sub(f"{_HIDDEN}@", text)

    return replace(
        check,
        detail=cleaned(check.detail),
        problem=check.problem and cleaned(check.problem),
        note=check.note and cleaned(check.note),
    )
