"""The extract stage: asks the teacher for the profile and history in a row's dialogue, where the
workbook has none."""

from functools import partial

from qinglan.clients.roles import Clients, Services
from qinglan.clients.row_batches import Work
from qinglan.recipes import get_recipe
from qinglan.recipes.extraction import extract, without_dialogue
from qinglan.recipes.keys import answers_key
from qinglan.runs.artifacts import StageResult
from qinglan.runs.run import Run
from qinglan.tasks.batches import ask_services
from qinglan.tasks.distill import register_prompts
from qinglan.tasks.stage import Outcome, Stage, perform, stage_task

_HOW_TO_ASK = {"batch_rows", "retries", "max_failed_share"}


def with_extracted(run: Run, services: Services, ingested: StageResult) -> list[StageResult]:
    """The stages that give `distill` its rows.

    Extract is one of them where the profile names a column of dialogues.
    """
    if not run.profile.data.columns.dialogue:
        return [ingested]
    return [ingested, extract_context(run, services, ingested)]


@stage_task("extract")
def extract_context(run: Run, services: Services, ingested: StageResult) -> StageResult:
    """Ask the teacher about the dialogues, in batches.

    A retried batch asks only for what is missing.
    """
    profile = run.profile
    recipe = get_recipe(profile.recipe)

    def make_work(clients: Clients) -> Work:
        return partial(
            extract,
            recipe=recipe,
            clients=clients,
            tenant=profile.tenant,
            limits=profile.extract,
        )

    def work(stage: Stage) -> Outcome:
        register_prompts(stage, ingested)
        return ask_services(
            stage,
            services,
            ingested,
            kind="extract",
            section="extract",
            roles=("teacher",),
            make_work=make_work,
            finish=without_dialogue,
        )

    depends_on = {
        "rows_sha256": ingested.artifacts["rows"].sha256,
        "extract": profile.extract.model_dump(mode="json", exclude=_HOW_TO_ASK),
        **answers_key(profile, ("teacher",)),
    }
    return perform(run, "extract", depends_on, work)
