"""The data stages that ask services, batch by batch: distill and validate."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.runtime import task_run

from qinglan.artifacts import StageResult, read_jsonl, sha256_of, write_jsonl
from qinglan.batches import Batch, BatchIncompleteError, Losses, Work, cut
from qinglan.clients import Clients, Role, key_salt, open_clients, scoring_identity
from qinglan.distillation import distiller
from qinglan.embedded.services import Services
from qinglan.recipes import get_recipe, identity
from qinglan.rows import Row
from qinglan.runs import Run
from qinglan.validation import check_service, summary, validator
from tasks.stage import Outcome, Stage, outcome_of, perform

RETRY_DELAYS_S = [2.0, 10.0, 30.0]


@task(name="distill", task_run_name="distill", cache_policy=NO_CACHE)
def distill_rows(run: Run, services: Services, ingested: StageResult) -> StageResult:
    """Ask the teacher, in batches; a retried batch asks only for what is missing."""
    profile = run.profile

    def work(stage: Stage) -> Outcome:
        rows = list(read_jsonl(ingested.path("rows"), Row))
        losses = Losses("distill", rows, profile.distill.max_failed_share)
        done, calls = asyncio.run(
            _in_batches(stage, services, rows, profile.distill.batch_rows, profile.distill.retries, "distill", losses)
        )
        return _finish_rows(stage, rows, done, calls)

    depends_on = {
        "rows_sha256": ingested.artifacts["rows"].sha256,
        "recipe": identity(profile.recipe),
        "tenant": profile.tenant.model_dump(mode="json"),
        "teacher": profile.teacher.model_dump(
            mode="json", include={"base_url", "model", "temperature", "max_tokens", "extra_body"}
        ),
        "server": key_salt(profile, "teacher"),
    }
    return perform(run, "distill", depends_on, work)


@task(name="validate", task_run_name="validate", cache_policy=NO_CACHE)
def validate_rows(run: Run, services: Services, distilled: StageResult, knowledge_base: Path | None) -> StageResult:
    """Retrieve with question and rewrite; judge the rewrite."""
    profile = run.profile

    def work(stage: Stage) -> Outcome:
        rows = list(read_jsonl(distilled.path("rows"), Row))
        config = profile.validation
        losses = Losses("validation", rows, config.max_failed_share)
        done, calls = asyncio.run(
            _in_batches(stage, services, rows, config.batch_rows, config.retries, "validate", losses)
        )
        check_service(done)
        outcome = _finish_rows(stage, rows, done, calls)
        outcome.metrics = summary(done)
        stage.say(", ".join(f"{name} {value:.3f}" for name, value in outcome.metrics.items()))
        return outcome

    depends_on = {
        "rows_sha256": distilled.artifacts["rows"].sha256,
        **scoring_identity(profile),
        "judge_baseline": profile.validation.judge_baseline,
        # A live service's knowledge base changes unseen, so its answers are reused within one run only.
        "knowledge_base": sha256_of(knowledge_base) if knowledge_base else run.id,
    }
    return perform(run, "validate", depends_on, work)


async def _is_incomplete(_task: Any, _run: Any, state: State) -> bool:
    """Another try helps rows that met a transient failure; it does not help a refused key."""
    return isinstance(await state.aresult(raise_on_failure=False), BatchIncompleteError)


@task(name="batch", cache_policy=NO_CACHE, task_run_name="{kind}-{batch.index}", retry_condition_fn=_is_incomplete)
async def run_batch(kind: str, batch: Batch, work: Work, retries: int) -> list[Row]:  # noqa: ARG001 (names the run)
    """One batch; Prefect retries it while rows are missing."""
    attempt = task_run.run_count or 1
    return await batch.run(work, last_attempt=attempt > retries)


async def _in_batches(
    stage: Stage,
    services: Services,
    rows: Sequence[Row],
    batch_rows: int,
    retries: int,
    kind: str,
    losses: Losses,
) -> tuple[list[Row], dict[str, dict[str, int]]]:
    profile, tenant = stage.run.profile, stage.run.profile.tenant
    recipe = get_recipe(profile.recipe)
    batches, finished = cut(rows, batch_rows), 0
    makers: dict[str, Callable[[Clients], Work]] = {
        "distill": lambda clients: distiller(recipe, clients, tenant),
        "validate": lambda clients: validator(recipe, clients, tenant, judge=profile.validation.judge_baseline),
    }
    ahead = asyncio.Semaphore(4)  # enough to keep the clients busy; thousands of waiting rows would help nobody
    configured = run_batch.with_options(retries=retries, retry_delay_seconds=RETRY_DELAYS_S[: max(1, retries)])

    roles: dict[str, tuple[Role, ...]] = {
        "distill": ("teacher",),
        "validate": ("judge", "rag") if profile.validation.judge_baseline else ("rag",),
    }
    async with open_clients(stage.run, services, roles[kind]) as clients:
        work = makers[kind](clients)

        async def one(batch: Batch) -> list[Row]:
            nonlocal finished
            async with ahead:
                result: list[Row] = await configured(kind, batch, work, retries)
            finished += len(batch.rows)
            stage.progress(finished, len(rows), "rows")
            losses.add(batch, result)
            return result

        running = [asyncio.create_task(one(batch)) for batch in batches]
        try:
            done = [row for result in await asyncio.gather(*running) for row in result]
        finally:  # after an error none may go on: the clients are about to be closed
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        calls = clients.call_counts()
    return done, calls


def _finish_rows(stage: Stage, before: Sequence[Row], done: Sequence[Row], calls: dict[str, dict[str, int]]) -> Outcome:
    outcome = outcome_of(before, done, {"rows": write_jsonl(stage.directory / "rows.jsonl", done)})
    outcome.details = {"api": calls}
    return outcome
