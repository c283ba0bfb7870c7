"""The distill stage: asks the teacher, row by row or by its batch API."""

from functools import partial
from itertools import islice

from qinglan.clients.chat import Account, Message
from qinglan.clients.roles import Services, key_salt, site_ledger
from qinglan.errors import StageError
from qinglan.ledger.queue import affordable_usd
from qinglan.recipes import get_recipe
from qinglan.recipes.kinds.distillation import require_teacher_alone, teacher_requests
from qinglan.recipes.scoring.keys import answers_key
from qinglan.rows import Row
from qinglan.runs.artifacts import StageResult, read_jsonl
from qinglan.runs.processes import in_event_loop
from qinglan.runs.run import Run
from qinglan.tasks.batches import ask_services
from qinglan.tasks.stage import Outcome, Stage, perform, stage_task

CODE = (
    __name__, "recipe", "qinglan.clients", "qinglan.recipes.kinds.distillation", "qinglan.rows",
    "qinglan.tasks.batches",
)  # fmt: skip


@stage_task("distill", run_name="{name}")
def distill_rows(
    run: Run, services: Services, ingested: StageResult, name: str = "distill"
) -> StageResult:
    """Ask the teacher, in batches; a retried batch asks only for what is missing."""
    profile = run.profile
    require_teacher_alone(profile)
    recipe = get_recipe(profile.recipe)

    def work(stage: Stage) -> Outcome:
        register_prompts(stage, ingested)
        if profile.distill.mode == "live" and "teacher" in recipe.DISTILL_ROLES:
            require_no_open_batches(stage, ingested)
        if profile.distill.mode == "batch_api":
            ask_by_batch(stage, services, ingested)
        return ask_services(
            stage,
            services,
            ingested,
            kind="distill",
            section="distill",
            roles=recipe.DISTILL_ROLES,
            make_work=lambda clients: partial(
                recipe.distill, clients=clients, tenant=profile.tenant
            ),
        )

    depends_on = {
        "rows_sha256": ingested.artifacts["rows"].sha256,
        **answers_key(profile, recipe.DISTILL_ROLES),
    }
    return perform(run, name, depends_on, work, code=CODE)


def register_prompts(stage: Stage, given: StageResult) -> None:
    """The instructions of each role that is asked about one of the first rows go to MLflow's
    registry; no question."""
    profile, asked = stage.run.profile, dict[str, list[Message]]()
    recipe = get_recipe(profile.recipe)
    roles = {"student", *recipe.DISTILL_ROLES, *(["judge"] if "judge" in recipe.graders else [])}
    if stage.name == "extract":
        roles.add("extract")
    for row in islice(read_jsonl(given.path("rows"), Row), 1000):
        if row.status == "ok":
            asked = recipe.prompts(row, profile) | asked
        if asked.keys() >= roles:
            break
    for role, messages in asked.items():
        if messages[0]["role"] == "system":
            name = f"qinglan.{profile.tenant.file_name}.{recipe.NAME}.{role}"
            stage.tracker.register_prompt(
                name, messages[0]["content"], {"recipe_version": recipe.VERSION}
            )


@in_event_loop
async def ask_by_batch(stage: Stage, services: Services, given: StageResult) -> None:
    """Bring into the ledger what the batch API answers; what it doesn't is asked row by row
    afterwards."""
    from qinglan.clients.batch_api import distill_by_batch
    from qinglan.clients.transport import openai_client

    run, profile = stage.run, stage.run.profile
    teacher, asked_of = profile.teacher, teacher_requests(profile)
    usable = (row for row in read_jsonl(given.path("rows"), Row) if row.status == "ok")
    requests = [request for row in usable if (request := asked_of(row))]

    with site_ledger(profile) as ledger:
        client = openai_client(teacher, services().teacher_url, "teacher")
        try:
            outcome = await distill_by_batch(
                requests,
                client=client,
                ledger=ledger,
                account=Account(
                    run.id,
                    profile.tenant.id,
                    "teacher",
                    teacher.model,
                    profile.prices[teacher.model],
                ),
                server=key_salt(profile, "teacher"),
                settings=profile.distill.batch_api,
                retries=teacher.max_retries,
                affordable_usd=lambda: affordable_usd(profile.budget, ledger.spent_usd(run.id)),
                on_progress=lambda now: stage.progress(
                    now.completed, now.total, f"answers of {now.batches} batches"
                ),
            )
        finally:
            await client.close()
    reasons = ", ".join(f"{reason} {n:,}" for reason, n in outcome.reasons.items())
    missing = f"{len(outcome.missing):,} to ask row by row {reasons}".rstrip()
    stage.say(f"{outcome.answered:,} answers in the ledger, {missing}")


def require_no_open_batches(stage: Stage, given: StageResult) -> None:
    """StageError where a batch of an earlier run still holds these questions: the answers are on
    their way."""
    from qinglan.clients.batch_api.jobs import batch_server

    profile = stage.run.profile
    with site_ledger(profile) as ledger:
        server = batch_server(key_salt(profile, "teacher"), profile.teacher.model)
        jobs = ledger.open_batches(server=server, role="teacher")
    held = {request_hash: job.batch_id for job in jobs for request_hash in job.request_hashes}
    if not held:
        return
    asked_of = teacher_requests(profile)
    for row in read_jsonl(given.path("rows"), Row):
        request = asked_of(row) if row.status == "ok" else None
        if request and (batch := held.get(request.request_hash)) is not None:
            holder = f"batch {batch or '(just submitted)'} of an earlier run"
            hint = "run once with --set distill.mode=batch_api, which waits for it and merges its answers"
            raise StageError(f"distill: {holder} still holds questions of this one; {hint}")
