"""`qinglan doctor`: what can be known before money or time is spent, in under half a minute.

All looks go side by side, each with a time limit of its own (`probe.py`); what they find comes in a fixed order, each
as soon as it and those before it are known. Beside what every flow looks at when it starts (`ops.preflight`),
doctor looks at the machine, the way to the services, Prefect, MLflow and the cluster's nodes: that may take longer, and
may be stricter, than a flow's start should.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from qinglan.config import FlowName, Profile
from qinglan.ops.checks import Check, Planned
from qinglan.ops.doctor import cluster, machine, network, paid, services, versions
from qinglan.ops.doctor.asked import asked_endpoints
from qinglan.ops.doctor.probe import LONGEST_S, QUICK_S, SLOW_S, Probe, Running
from qinglan.ops.doctor.secret_values import hide, secret_values
from qinglan.ops.preflight import plan, runs_engines
from qinglan.ops.preflight.hints import with_hint

__all__ = ["Finding", "examine"]

MACHINE, PROFILE, SERVERS, CLUSTER, PAID = "This machine", "The profile", "Servers", "The cluster", "Paid answers"
_SLOW = ("champion", "local judge", "rag", "ray", "trainer packages", "workbook")


@dataclass(frozen=True)
class Finding:
    """What one look showed. Holds no secret."""

    group: str
    check: Check
    seconds: float


def examine(
    profile: Profile, flow: FlowName = "pipeline", *, may_pay: bool = False, deploys: bool = False
) -> Iterator[Finding]:
    """Look at everything that a flow needs.

    Args:
        may_pay: one short call to each paid chat service, too.
        deploys: what only `qinglan up` and `qinglan deploy` need must be there, too.
    """
    values = secret_values(profile)
    running = [(probe, Running(probe)) for probe in _probes(profile, flow, may_pay=may_pay, deploys=deploys)]
    for probe, each in running:
        found = each.result()
        for check in found.checks:
            yield Finding(probe.group, hide(with_hint(check), values), found.seconds)


def _probes(profile: Profile, flow: FlowName, *, may_pay: bool, deploys: bool = False) -> Iterator[Probe]:
    recipe, *others = plan(profile, flow)
    knows_recipe = recipe.make().problem is None  # whom to ask, and what for, goes by it
    yield from _of_machine(profile, flow)
    if knows_recipe:
        yield Probe.of(
            MACHINE, Planned("open files", "of this machine", lambda: machine.check_open_files(profile, flow))
        )
    yield Probe.of(PROFILE, recipe)
    if knows_recipe:
        keys = partial(services.check_keys, profile, flow, deploys=deploys)
        yield Probe(PROFILE, "keys", "in the environment", lambda: [keys()])
    for planned in others:
        yield Probe.of(PROFILE, planned, SLOW_S if planned.name in _SLOW else QUICK_S)
    yield Probe(SERVERS, "prefect", "its server", lambda: [services.check_prefect(profile)])
    yield Probe(SERVERS, "mlflow", profile.tracking_uri, lambda: [services.check_mlflow(profile)])
    if knows_recipe and (url := profile.trainer.ray_dashboard_url) and runs_engines(flow):
        look = partial(cluster.check_cluster, profile)
        yield Probe(CLUSTER, "mount", url, look, LONGEST_S)
    if knows_recipe and may_pay:
        yield from _paid(profile, flow)


def _of_machine(profile: Profile, flow: FlowName) -> Iterator[Probe]:
    addresses = network.addresses(profile, flow)
    looks: dict[str, Callable[[], Check]] = {
        "python": versions.check_python,
        "packages": lambda: versions.check_packages(profile, flow),
        "text": machine.check_text,
        "folders": lambda: machine.check_folders(profile),
        "disk": lambda: machine.check_disk(profile, flow),
        "memory": lambda: machine.check_memory(profile, flow),
        "file locks": lambda: machine.check_locks(profile),
        "proxies": lambda: network.check_proxies(addresses),
        "clock": lambda: network.check_clock(addresses),
    }
    for name, look in looks.items():
        yield Probe.of(MACHINE, Planned(name, "of this machine", look))


def _paid(profile: Profile, flow: FlowName) -> Iterator[Probe]:
    endpoints = asked_endpoints(profile, flow)
    paid_ones = {role: endpoint for role, endpoint in endpoints.items() if paid.is_paid(endpoint)}
    for role, endpoint in paid_ones.items():
        ask = partial(paid.check_answer, profile, role, endpoint)
        yield Probe.of(PAID, Planned(f"{role} answers", endpoint.model, ask), SLOW_S)
    if not paid_ones:
        nothing = Check("answers", "no service of this flow takes money")
        yield Probe.of(PAID, Planned(nothing.name, nothing.detail, lambda: nothing))
