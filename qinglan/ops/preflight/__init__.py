"""Everything that can be known before money or time is spent: files, secrets, services, devices.

`plan_profile_checks` is the list of the checks, for `qinglan doctor` too; each is a function in the
module of its subject, which raises an error of ours for a problem and may return a note. `require`
raises the first problem before a run.
"""

from collections.abc import Callable, Iterator
from functools import partial

from qinglan.clients.roles import endpoint_of
from qinglan.config import ENGINE_FLOWS, TRAINING_FLOWS, FlowName, Profile
from qinglan.errors import ConfigError
from qinglan.evaluation.red_team import cases_of
from qinglan.ledger import LEDGER_FILE
from qinglan.ops.checks import Check, PlannedCheck, TimeLimit, run_check
from qinglan.ops.preflight.asked_services import (
    TEACHER_FLOWS,
    asked_endpoints,
    asked_roles,
    asks_rag,
)
from qinglan.ops.preflight.models import check_base_model, check_model
from qinglan.ops.preflight.questions import (
    check_compared_teachers,
    check_recipe,
    check_schedule,
    check_workbook,
)
from qinglan.ops.preflight.rag import check_rag
from qinglan.ops.preflight.services import (
    check_champion,
    check_chat,
    check_ledger,
    check_local_judge,
)
from qinglan.ops.preflight.trainer import (
    check_cluster,
    check_device,
    check_packages,
    trainer_packages,
)
from qinglan.recipes import Recipe, get_recipe

PROFILE = "The profile"
TRAINER_CHECKS = ("device", "ray", "trainer packages", "critic model")
_SCHEDULE = "schedule"


def require(
    profile: Profile,
    flow: FlowName,
    warn: Callable[[str], object] | None = None,
    *,
    leave_out: tuple[str, ...] = (),
) -> None:
    """Raise the first problem, as a ConfigError.

    `warn` is told what in the training's schedule can't work as it is; without it the schedule is
    not checked, as that takes reading every question. `leave_out` names checks not to make.
    """
    if not warn:
        leave_out = (*leave_out, _SCHEDULE)
    for check in inspect_profile(profile, flow, leave_out=leave_out):
        if check.problem:
            raise ConfigError(check.problem)
        if check.note and check.name == _SCHEDULE and warn:
            warn(check.note)


def inspect_profile(
    profile: Profile, flow: FlowName = "pipeline", *, leave_out: tuple[str, ...] = ()
) -> Iterator[Check]:
    """Make check after check, but not those that `leave_out` names.

    Each result is given at once, so that a slow check does not hide the others.
    """
    for planned in plan_profile_checks(profile, flow):
        if planned.name in leave_out:
            continue
        for check in planned.run():
            yield check.with_hint()


def plan_profile_checks(profile: Profile, flow: FlowName = "pipeline") -> Iterator[PlannedCheck]:
    """The checks of a flow's profile and services.

    The recipe's is made at once, as it decides about all others; of these none depends on another.
    """
    recipe_check = run_check("recipe", profile.recipe, partial(check_recipe, profile))
    yield PlannedCheck(PROFILE, recipe_check.name, recipe_check.detail, lambda: recipe_check)
    if recipe_check.problem:
        return
    recipe = get_recipe(profile.recipe)
    if flow in TEACHER_FLOWS:
        sql = profile.data.sql
        where = f"the database that {sql.url_env} names" if sql else profile.data.workbook
        yield _planned("workbook", where, partial(check_workbook, profile, recipe), "slow")
    yield from _checks_of_models_asked(profile, flow, recipe)
    if asks_rag(profile, flow):
        yield PlannedCheck(PROFILE, "rag", profile.rag.url, partial(check_rag, profile), "slow")
    yield _check_of_ledger(profile, flow)
    if flow in TRAINING_FLOWS:
        yield from _checks_of_training(profile)
    if flow in ENGINE_FLOWS:
        yield from _checks_of_engines(profile)


def _checks_of_models_asked(
    profile: Profile, flow: FlowName, recipe: Recipe
) -> Iterator[PlannedCheck]:
    """The models that answer: chat services, the judge's own model, and the champion."""
    if "answerer" in asked_roles(profile, flow) and not profile.answerer:
        yield _planned("answerer", "none", partial(_require_answerer, profile))
    for role, endpoint in asked_endpoints(profile, flow).items():
        where = f"{endpoint.model} at {endpoint.base_url}"
        yield _planned(role, where, partial(check_chat, role, endpoint))
    local_judge = profile.judge.local
    if flow in TRAINING_FLOWS and local_judge:
        yield _planned(
            "local judge", local_judge.model, partial(check_local_judge, profile), "slow"
        )
    if flow == "compare":
        teachers = profile.compare.teachers
        names = ", ".join(teachers) or "no teacher"
        yield _planned("compare", names, partial(check_compared_teachers, recipe, teachers))
    if flow in ENGINE_FLOWS:
        file = profile.evaluate.red_team or "built-in cases"
        yield _planned("red team", file, partial(_check_red_team, profile))
        yield _planned("champion", profile.model_name, partial(check_champion, profile), "slow")


def _check_of_ledger(profile: Profile, flow: FlowName) -> PlannedCheck:
    variable = profile.ledger.url_env
    where = str(profile.paths.state / LEDGER_FILE)
    if variable:
        where = f"the database that {variable} names"
    trains = flow in TRAINING_FLOWS
    return _planned("ledger", where, partial(check_ledger, profile, trains=trains))


def _checks_of_training(profile: Profile) -> Iterator[PlannedCheck]:
    """The models that training starts from, and its schedule."""
    yield _planned("base model", profile.student.base_model, partial(check_base_model, profile))
    where = f"{profile.data.workbook}: SFT, RL and test split"
    yield _planned(_SCHEDULE, where, partial(check_schedule, profile), "slow")
    critic = profile.rl.critic_model
    if critic:
        # The cache of a cluster's nodes is not this machine's.
        is_here = not profile.trainer.is_elsewhere
        check = partial(
            check_model,
            "rl.critic_model",
            critic,
            "rl.critic_revision",
            profile.rl.critic_revision,
            cached=is_here,
        )
        yield _planned("critic model", critic, check)


def _checks_of_engines(profile: Profile) -> Iterator[PlannedCheck]:
    """The machine or cluster that trains and generates, and the packages there."""
    trainer = profile.trainer
    yield _planned("device", trainer.device, partial(check_device, trainer))
    if trainer.ray_dashboard_url:
        yield _planned("ray", trainer.ray_dashboard_url, partial(check_cluster, profile), "slow")
        return
    where = trainer.python or "this environment"
    packages = trainer_packages(profile)
    yield _planned("trainer packages", where, partial(check_packages, trainer, packages), "slow")


def _require_answerer(profile: Profile) -> None:
    endpoint_of(profile, "answerer")


def _check_red_team(profile: Profile) -> None:
    cases_of(profile)


def _planned(
    name: str,
    detail: str,
    find_problem: Callable[[], str | None],
    time_limit: TimeLimit = "quick",
) -> PlannedCheck:
    make = partial(run_check, name, detail, find_problem)
    return PlannedCheck(PROFILE, name, detail, make, time_limit)
