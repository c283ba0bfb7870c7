"""The validate stage: grades what the teacher answered."""

from functools import partial
from typing import Any

from qinglan.clients.roles import Clients, Role, Services
from qinglan.clients.row_batches import Work
from qinglan.config import Profile
from qinglan.grading.grader import Grader
from qinglan.grading.validation import validate
from qinglan.recipes import get_recipe
from qinglan.recipes.keys import grading_key
from qinglan.runs.artifacts import StageResult
from qinglan.runs.run import Run
from qinglan.tasks.batches import ask_services
from qinglan.tasks.stage import Outcome, Stage, perform, stage_task


@stage_task("validate", run_name="{name}")
def validate_rows(
    run: Run, services: Services, distilled: StageResult, name: str = "validate"
) -> StageResult:
    """Grade what the teacher answered, by the services and rules that the recipe names."""
    profile = run.profile
    grader = get_recipe(profile.recipe).grader
    roles = roles_of(grader, profile)

    def make_work(clients: Clients) -> Work:
        return partial(
            validate,
            grader=grader,
            clients=clients,
            tenant=profile.tenant,
            judge="judge" in roles,
        )

    def work(stage: Stage) -> Outcome:
        statistics = grader.validation_statistics()
        outcome = ask_services(
            stage,
            services,
            distilled,
            kind="validate",
            section="validation",
            roles=roles,
            make_work=make_work,
            watch=statistics.add,
        )
        statistics.check()
        outcome.metrics = statistics.metrics()
        outcome.details["histograms"] = statistics.histograms()
        logged_names = statistics.LOGGED or tuple(outcome.metrics)
        figures = [
            f"{figure} {outcome.metrics[figure]:.3f}"
            for figure in logged_names
            if figure in outcome.metrics
        ]
        if figures:
            stage.say(", ".join(figures))
        return outcome

    depends_on: dict[str, Any] = {
        "rows_sha256": distilled.artifacts["rows"].sha256,
        **grading_key(run),
        "judge_baseline": profile.validation.judge_baseline,
    }
    return perform(run, name, depends_on, work)


def roles_of(grader: Grader, profile: Profile) -> tuple[Role, ...]:
    """The services that validation asks."""
    if profile.validation.judge_baseline:
        return grader.services
    return tuple(role for role in grader.services if role != "judge")
