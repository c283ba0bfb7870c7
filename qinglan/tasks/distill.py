"""The distill stage: asks the teacher, row by row or by its batch API."""

from functools import partial
from itertools import islice

from qinglan.clients.completions import Account
from qinglan.clients.openai_protocol import Message
from qinglan.clients.roles import Clients, Services, key_salt, site_ledger
from qinglan.clients.row_batches import Work
from qinglan.errors import StageError
from qinglan.ledger.queue import affordable_usd
from qinglan.recipes import get_recipe
from qinglan.recipes.keys import answers_key
from qinglan.recipes.prompts import prompts_about
from qinglan.recipes.requests import require_teacher_alone, teacher_requests
from qinglan.rows import Row
from qinglan.runs.artifacts import StageResult, read_jsonl
from qinglan.runs.processes import in_event_loop
from qinglan.runs.run import Run
from qinglan.tasks.batches import ask_services
from qinglan.tasks.stage import Outcome, Stage, perform, stage_task

# Among the first rows there is one of every kind, such as one without an answer of its own.
_ROWS_FOR_PROMPTS = 1000


@stage_task("distill", run_name="{name}")
def distill_rows(
    run: Run, services: Services, ingested: StageResult, name: str = "distill"
) -> StageResult:
    """Ask the teacher, in batches; a retried batch asks only for what is missing."""
    profile = run.profile
    require_teacher_alone(profile)
    recipe = get_recipe(profile.recipe)

    def make_work(clients: Clients) -> Work:
        return partial(recipe.distill, clients=clients, tenant=profile.tenant)

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
            make_work=make_work,
        )

    depends_on = {
        "rows_sha256": ingested.artifacts["rows"].sha256,
        **answers_key(profile, recipe.DISTILL_ROLES),
    }
    return perform(run, name, depends_on, work)


def register_prompts(stage: Stage, rows: StageResult) -> None:
    """Keep each role's instructions in MLflow's registry.

    They are those of the first rows about which the role is asked; no question is kept.
    """
    profile = stage.run.profile
    recipe = get_recipe(profile.recipe)
    roles = {"student", *recipe.DISTILL_ROLES}
    roles.update(recipe.grader.services)
    roles.discard("rag")
    if stage.name == "extract":
        roles.add("extract")
    prompts: dict[str, list[Message]] = {}
    for row in islice(read_jsonl(rows.path("rows"), Row), _ROWS_FOR_PROMPTS):
        if row.status == "ok":
            prompts = prompts_about(row, recipe, profile) | prompts
        if prompts.keys() >= roles:
            break
    for role, messages in prompts.items():
        instructions = messages[0]
        if instructions["role"] == "system":
            name = f"qinglan.{profile.tenant.file_name}.{recipe.NAME}.{role}"
            tags = {"recipe_version": recipe.VERSION}
            stage.tracker.register_prompt(name, instructions["content"], tags)


@in_event_loop
async def ask_by_batch(stage: Stage, services: Services, ingested: StageResult) -> None:
    """Bring into the ledger what the batch API answers.

    What it doesn't answer is asked row by row afterwards.
    """
    from qinglan.clients.batch_api import distill_by_batch
    from qinglan.clients.transport import openai_client

    run = stage.run
    profile = run.profile
    teacher = profile.teacher
    request_about = teacher_requests(profile)
    requests = []
    for row in read_jsonl(ingested.path("rows"), Row):
        request = request_about(row) if row.status == "ok" else None
        if request:
            requests.append(request)
    price = profile.prices[teacher.model]
    account = Account(run.id, profile.tenant.id, "teacher", teacher.model, price)
    with site_ledger(profile) as ledger:
        client = openai_client(teacher, services().teacher_url, "teacher")
        try:
            outcome = await distill_by_batch(
                requests,
                client=client,
                ledger=ledger,
                account=account,
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
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in outcome.reasons.items())
    to_ask = f"{len(outcome.missing):,} to ask row by row {reasons}".rstrip()
    stage.say(f"{outcome.answered:,} answers in the ledger, {to_ask}")


def require_no_open_batches(stage: Stage, ingested: StageResult) -> None:
    """Raise StageError where a batch of an earlier run still holds these questions.

    The answers are on their way.
    """
    from qinglan.clients.batch_api.store import batch_server

    profile = stage.run.profile
    with site_ledger(profile) as ledger:
        server = batch_server(key_salt(profile, "teacher"), profile.teacher.model)
        jobs = ledger.open_batches(server=server, role="teacher")
    batch_of_request: dict[str, str] = {}
    for job in jobs:
        for request_hash in job.request_hashes:
            batch_of_request[request_hash] = job.batch_id
    if not batch_of_request:
        return
    request_about = teacher_requests(profile)
    for row in read_jsonl(ingested.path("rows"), Row):
        request = request_about(row) if row.status == "ok" else None
        if request is None or request.request_hash not in batch_of_request:
            continue
        batch_id = batch_of_request[request.request_hash]
        raise StageError(
            f"distill: batch {batch_id or '(just submitted)'} of an earlier run still holds "
            "questions of this one; run once with --set distill.mode=batch_api, which waits for it "
            "and merges its answers"
        )
