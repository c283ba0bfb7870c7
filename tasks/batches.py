"""Asking services in Prefect tasks that repeat what failed: batches of rows in distill and
validate, else all rows."""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.runtime import task_run

from qinglan.clients import row_batches
from qinglan.clients.chat import ChatClient
from qinglan.clients.rag import RagClient
from qinglan.clients.roles import Clients, Role, Services, endpoint_of, open_clients
from qinglan.config import Distill, Extract, Validate
from qinglan.errors import StageError
from qinglan.rows import Row, RowCounts
from qinglan.runs.artifacts import Artifact, StageResult, jsonl_writer, read_jsonl
from qinglan.runs.processes import in_event_loop
from qinglan.tasks.stage import Outcome, Stage, hiding_row_text, retried

T = TypeVar("T")
AskedAgain = Clients | ChatClient | RagClient
_KEPT_BUSY = 12
"""Rows begun for each request that may be under way: those that wait for a retry must not leave the
service idle."""


async def _is_incomplete(_task: Any, _run: Any, state: State) -> bool:
    """Another try helps rows that met a transient failure; it does not help a refused key."""
    return isinstance(await state.aresult(raise_on_failure=False), row_batches.BatchIncompleteError)


@task(
    name="batch",
    cache_policy=NO_CACHE,
    task_run_name="{kind}-{batch.index}",
    retry_condition_fn=_is_incomplete,
)
async def run_batch(
    kind: str,  # noqa: ARG001 (names the run)
    batch: row_batches.RowBatch,
    work: row_batches.Work,
    retries: int,
) -> list[Row]:
    """One batch; Prefect retries it while rows are missing."""
    with hiding_row_text():
        return await batch.run(work, last_attempt=(task_run.run_count or 1) > retries)


@task(name="ask", cache_policy=NO_CACHE, task_run_name="{what}", retry_condition_fn=_is_incomplete)
async def _ask(
    what: str, ask: Callable[[], Awaitable[T]], asked: tuple[AskedAgain, ...], retries: int
) -> T:
    def failed_calls() -> int:
        return sum(client.transient_failures for client in asked)

    before, last_attempt = failed_calls(), (task_run.run_count or 1) > retries
    try:
        with hiding_row_text():
            found = await ask()
    except StageError as error:
        if last_attempt or failed_calls() == before:
            raise
        raise row_batches.BatchIncompleteError(str(error)) from error
    if lost := 0 if last_attempt else failed_calls() - before:
        raise row_batches.BatchIncompleteError(
            f"{what}: {lost:,} calls failed; another try may succeed"
        )
    return found


async def ask_again(
    what: str, ask: Callable[[], Awaitable[T]], *asked: AskedAgain, retries: int
) -> T:
    """What `ask` gives. As a Prefect task `what`, it repeats those calls of `asked` that failed and
    may yet succeed."""
    for client in asked:
        client.keep_answers()
    return await _ask.with_options(**retried(retries))(what, ask, asked, retries)


def _paced(work: row_batches.Work, at_once: int, report: Callable[[int], None]) -> row_batches.Work:
    """The same work on so many rows at once; each finished row is reported, as a batch may take
    minutes."""
    done, places = 0, asyncio.Semaphore(at_once)

    async def counted(row: Row) -> Row:
        nonlocal done
        async with places:
            finished = await work(row)
        done += 1
        report(done)
        return finished

    return counted


def note_failures(path: Path, batch: row_batches.RowBatch) -> None:
    """Append the failure of each row that is lost, with what was said."""
    if batch.failures:
        with path.open("a", encoding="utf-8") as stream:
            for row_id, error in batch.failures.items():
                line = {
                    "row_id": row_id,
                    "reason": error.reason,
                    "error": str(error),
                    "said": error.said,
                }
                stream.write(json.dumps(line, ensure_ascii=False) + "\n")


@in_event_loop
async def ask_services(
    stage: Stage,
    services: Services,
    given: StageResult,
    *,
    kind: str,
    section: Literal["extract", "distill", "validation"],
    roles: tuple[Role, ...],
    make_work: Callable[[Clients], row_batches.Work],
    watch: Callable[[Row], None] = lambda _row: None,
    finish: Callable[[Row], Row] = lambda row: row,
) -> Outcome:
    """Work on every row of the stage before; only the rows of the running batches are in memory.

    Args:
        kind: names the task runs of the batches.
        section: the stage's in the profile.
        roles: whom the work asks; none where it is done by rules alone.
        watch: called with every finished row, in order.
        finish: makes of a row, also of a failed one, the row that is written.
    """
    profile, source = stage.run.profile, given.artifacts["rows"]
    settings: Extract | Distill | Validate = getattr(profile, section)
    asked = (profile.rag if role == "rag" else endpoint_of(profile, role) for role in roles)
    rows_at_once = _KEPT_BUSY * max((service.concurrency for service in asked), default=1)
    total = source.rows or 0
    failures = stage.directory / row_batches.FAILURES_FILE
    failures.unlink(missing_ok=True)  # of an earlier attempt
    losses = row_batches.Losses(section, given.rows_out, settings.max_failed_share)
    before, after = RowCounts(), RowCounts()
    configured = run_batch.with_options(**retried(settings.retries))
    async with open_clients(stage.run, services, roles, stage.traced) as clients:
        work = _paced(
            make_work(clients),
            rows_at_once,
            lambda done: stage.progress(done, max(total, done), "rows"),
        )
        with jsonl_writer(path := stage.directory / "rows.jsonl") as write:
            batches = row_batches.cut(
                before.pass_through(read_jsonl(source.path, Row)), settings.batch_rows
            )
            at_once = 2 + math.ceil(rows_at_once / settings.batch_rows)
            done = row_batches.in_order(
                batches,
                lambda batch: configured(kind, batch, work, settings.retries),
                at_once=at_once,
            )
            async with aclosing(
                done
            ):  # after an error nothing may go on asking: the clients are about to be closed
                async for batch, rows in done:
                    note_failures(failures, batch)
                    losses.add(batch, rows)
                    for row in after.pass_through(map(finish, rows)):
                        watch(row)
                        write(row)
        stage.progress(after.total, max(total, after.total), "rows")
        calls = clients.call_counts()
    dropped, artifacts = after.dropped_since(before), {"rows": Artifact.of(path, after.total)}
    try_again = clients.unjudged + sum(
        dropped.get(why, 0) for why in row_batches.RETRYABLE_OR_BLANK_REASONS
    )
    return Outcome(
        before.ok, after.ok, dropped, artifacts, details={"api": calls}, try_again=try_again
    )
