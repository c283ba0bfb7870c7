"""The validate stage: grades what the teacher answered."""

from functools import partial
from typing import Any

from qinglan.clients.roles import Services
from qinglan.recipes import get_recipe
from qinglan.recipes.scoring.keys import scoring_key
from qinglan.runs.artifacts import StageResult
from qinglan.runs.run import Run
from qinglan.tasks.batches import ask_services
from qinglan.tasks.stage import Outcome, Stage, perform, stage_task

CODE = (__name__, "recipe.validation", "qinglan.clients", "qinglan.rows", "qinglan.tasks.batches")


@stage_task("validate", run_name="{name}")
def validate_rows(
    run: Run, services: Services, distilled: StageResult, name: str = "validate"
) -> StageResult:
    """Grade what the teacher answered, by the services and rules that the recipe names."""
    profile = run.profile
    recipe, judges = get_recipe(profile.recipe), profile.validation.judge_baseline
    roles = recipe.validation_roles(profile)

    def work(stage: Stage) -> Outcome:
        found = recipe.validation_statistics()
        outcome = ask_services(
            stage,
            services,
            distilled,
            kind="validate",
            section="validation",
            roles=roles,
            make_work=lambda clients: partial(
                recipe.validate, clients=clients, tenant=profile.tenant, judge="judge" in roles
            ),
            watch=found.add,
        )
        found.check()
        outcome.metrics = found.metrics()
        outcome.details["histograms"] = found.histograms()
        logged = found.LOGGED or tuple(outcome.metrics)
        stage.say(
            ", ".join(
                f"{name} {outcome.metrics[name]:.3f}" for name in logged if name in outcome.metrics
            )
        )
        return outcome

    depends_on: dict[str, Any] = {
        "rows_sha256": distilled.artifacts["rows"].sha256,
        **scoring_key(profile),
        "judge_baseline": judges,
    }
    if (
        "rag" in roles
    ):  # a live service's knowledge base changes unseen, so its answers are reused within one run only
        depends_on["knowledge_base"] = run.knowledge_base_sha256 or run.id
    return perform(run, name, depends_on, work, code=CODE)
