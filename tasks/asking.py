"""The data stages that ask services, batch by batch: distill and validate."""

import asyncio
import gc
import math
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.runtime import task_run

from qinglan.clients.roles import ANSWER_FIELDS, Clients, Role, Services, endpoint_of, key_salt, open_clients
from qinglan.clients.row_batches import Batch, BatchIncompleteError, Losses, Work, cut, in_order
from qinglan.config import Distill, Validate
from qinglan.recipes import get_recipe, identity
from qinglan.recipes.kinds.distillation import distiller, require_teacher_alone
from qinglan.recipes.kinds.grading import grading_of
from qinglan.recipes.scoring.identity import scoring_identity
from qinglan.rows import Row, RowCounts
from qinglan.runs.artifacts import JsonlWriter, StageResult, read_jsonl, sha256_of
from qinglan.runs.run import Run
from qinglan.tasks.bulk import RETRY_DELAYS_S, ask_by_batch, asked, distill_on_ray, require_no_open_batches
from qinglan.tasks.stage import Outcome, Stage, perform

_KEPT_BUSY = 12
"""Rows begun for each request that may be under way: those that wait for a retry must not leave the service idle."""


@dataclass(frozen=True)
class _Asking:
    """What tells the stages that ask apart."""

    kind: str
    section: str
    """Its name in the profile."""
    settings: Distill | Validate
    roles: tuple[Role, ...]
    concurrency: int
    make: Callable[[Clients], Work]


@task(name="distill", task_run_name="{name}", cache_policy=NO_CACHE)
def distill_rows(run: Run, services: Services, ingested: StageResult, name: str = "distill") -> StageResult:
    """Ask the teacher, in batches; a retried batch asks only for what is missing."""
    profile = run.profile
    require_teacher_alone(profile)
    recipe = get_recipe(profile.recipe)
    endpoints = {role: endpoint_of(profile, role) for role in recipe.DISTILL_ROLES}
    asking = _Asking(
        kind="distill",
        section="distill",
        settings=profile.distill,
        roles=recipe.DISTILL_ROLES,
        concurrency=max((endpoint.concurrency for endpoint in endpoints.values()), default=1),
        make=lambda clients: distiller(recipe, clients, profile.tenant),
    )

    def work(stage: Stage) -> Outcome:
        if profile.distill.mode == "live" and "teacher" in endpoints:
            require_no_open_batches(stage, ingested)
        if profile.distill.engine == "ray":
            return distill_on_ray(stage, services, ingested)
        if profile.distill.mode == "batch_api":
            asyncio.run(ask_by_batch(stage, services, ingested))
        return asyncio.run(_ask(stage, services, ingested, asking, lambda _row: None))

    depends_on: dict[str, Any] = {
        "rows_sha256": ingested.artifacts["rows"].sha256,
        "recipe": identity(profile.recipe),
        "tenant": profile.tenant.model_dump(mode="json"),
        **{role: endpoint.model_dump(mode="json", include=set(ANSWER_FIELDS)) for role, endpoint in endpoints.items()},
        "servers": [key_salt(profile, role) for role in endpoints],
    }
    return perform(run, name, depends_on, work)


@task(name="validate", task_run_name="{name}", cache_policy=NO_CACHE)
def validate_rows(
    run: Run, services: Services, distilled: StageResult, knowledge_base: Path | None, name: str = "validate"
) -> StageResult:
    """Grade what the teacher answered, as the recipe's kind does: by RAG, rules and judge."""
    profile = run.profile
    grading, judges = grading_of(get_recipe(profile.recipe)), profile.validation.judge_baseline
    roles = grading.validation_roles(profile)
    asking = _Asking(
        kind="validate",
        section="validation",
        settings=profile.validation,
        roles=roles,
        concurrency=max(
            (profile.rag.concurrency if role == "rag" else endpoint_of(profile, role).concurrency for role in roles),
            default=1,
        ),
        make=lambda clients: grading.validator(clients, profile.tenant, judge="judge" in roles),
    )

    def work(stage: Stage) -> Outcome:
        findings = grading.findings()
        outcome = asyncio.run(_ask(stage, services, distilled, asking, findings.add))
        findings.check()
        outcome.metrics = findings.metrics()
        outcome.details["histograms"] = findings.histograms()
        stage.say(", ".join(f"{name} {value:.3f}" for name, value in findings.shown().items()))
        return outcome

    depends_on: dict[str, Any] = {
        "rows_sha256": distilled.artifacts["rows"].sha256,
        **scoring_identity(profile),
        "judge_baseline": judges,
    }
    if "rag" in roles:  # a live service's knowledge base changes unseen, so its answers are reused within one run only
        depends_on["knowledge_base"] = sha256_of(knowledge_base) if knowledge_base else run.id
    return perform(run, name, depends_on, work)


async def _is_incomplete(_task: Any, _run: Any, state: State) -> bool:
    """Another try helps rows that met a transient failure; it does not help a refused key."""
    return isinstance(await state.aresult(raise_on_failure=False), BatchIncompleteError)


@task(name="batch", cache_policy=NO_CACHE, task_run_name="{kind}-{batch.index}", retry_condition_fn=_is_incomplete)
async def run_batch(kind: str, batch: Batch, work: Work, retries: int) -> list[Row]:  # noqa: ARG001 (names the run)
    """One batch; Prefect retries it while rows are missing."""
    attempt = task_run.run_count or 1
    return await batch.run(work, last_attempt=attempt > retries)


@contextmanager
def _unlooked_at() -> Iterator[None]:
    """What Prefect and MLflow have loaded is here to stay: garbage collections need not look at it every second."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _paced(work: Work, at_once: int, tell: Callable[[int], None]) -> Work:
    """The same work on so many rows at once; every finished row is told of, as a batch may take minutes."""
    done, places = 0, asyncio.Semaphore(at_once)

    async def counted(row: Row) -> Row:
        nonlocal done
        async with places:
            finished = await work(row)
        done += 1
        tell(done)
        return finished

    return counted


async def _ask(
    stage: Stage, services: Services, given: StageResult, asking: _Asking, watch: Callable[[Row], None]
) -> Outcome:
    """Work on every row of the stage before; only the rows of the batches at work are in memory."""
    settings, source = asking.settings, given.artifacts["rows"]
    total = source.rows or 0
    losses = Losses(asking.section, given.rows_out, settings.max_failed_share)
    before, after = RowCounts(), RowCounts()
    configured = run_batch.with_options(
        retries=settings.retries, retry_delay_seconds=RETRY_DELAYS_S[: max(1, settings.retries)]
    )
    async with open_clients(stage.run, services, asking.roles) as clients:
        work = _paced(
            asking.make(clients),
            _KEPT_BUSY * asking.concurrency,
            lambda done: stage.progress(done, max(total, done), "rows"),
        )
        with _unlooked_at(), JsonlWriter(stage.directory / "rows.jsonl") as writer:
            batches = cut(before.pass_through(read_jsonl(source.path, Row)), settings.batch_rows)
            at_once = 2 + math.ceil(_KEPT_BUSY * asking.concurrency / settings.batch_rows)
            done = in_order(
                batches, lambda batch: configured(asking.kind, batch, work, settings.retries), at_once=at_once
            )
            async with aclosing(done):  # after an error nothing may go on asking: the clients are about to be closed
                async for batch, rows in done:
                    losses.add(batch.rows, rows, batch.first_failure())
                    for row in after.pass_through(rows):
                        watch(row)
                        writer.write(row)
        stage.progress(after.total, max(total, after.total), "rows")
        calls = clients.call_counts()
    return asked(before, after, writer.artifact(), calls)
