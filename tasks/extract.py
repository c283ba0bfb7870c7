"""The extract stage: asks the teacher for the profile and history in a row's dialogue, where the
workbook has none."""

from functools import partial

from qinglan.clients.roles import Services
from qinglan.recipes import get_recipe
from qinglan.recipes.kinds.extraction import without_dialogue
from qinglan.recipes.scoring.keys import answers_key
from qinglan.runs.artifacts import StageResult
from qinglan.runs.run import Run
from qinglan.tasks.batches import ask_services
from qinglan.tasks.distill import register_prompts
from qinglan.tasks.stage import Outcome, Stage, perform, stage_task

CODE = (
    __name__, "recipe.extraction", "qinglan.clients", "qinglan.recipes.kinds.extraction", "qinglan.rows",
    "qinglan.tasks.batches",
)  # fmt: skip


def with_extracted(run: Run, services: Services, ingested: StageResult) -> list[StageResult]:
    """The stages that give `distill` its rows: extract is one of them where the profile names a
    column of dialogues."""
    return [
        ingested,
        *([extract_context(run, services, ingested)] if run.profile.data.columns.dialogue else []),
    ]


@stage_task("extract")
def extract_context(run: Run, services: Services, ingested: StageResult) -> StageResult:
    """Ask the teacher about the dialogues, in batches; a retried batch asks only for what is
    missing."""
    profile, limits = run.profile, run.profile.extract
    recipe = get_recipe(profile.recipe)

    def work(stage: Stage) -> Outcome:
        register_prompts(stage, ingested)
        return ask_services(
            stage,
            services,
            ingested,
            kind="extract",
            section="extract",
            roles=("teacher",),
            make_work=lambda clients: partial(
                recipe.extract, clients=clients, tenant=profile.tenant, limits=limits
            ),
            finish=without_dialogue,
        )

    depends_on = {
        "rows_sha256": ingested.artifacts["rows"].sha256,
        "extract": limits.model_dump(
            mode="json", exclude={"batch_rows", "retries", "max_failed_share"}
        ),
        **answers_key(profile, ("teacher",)),
    }
    return perform(run, "extract", depends_on, work, code=CODE)
