"""Asking services in Prefect tasks that repeat what failed.

Distill, extract and validate ask about batches of rows; other stages ask about all rows at once.
"""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
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
from qinglan.clients.row_batches import BatchIncompleteError, RowBatch, Work
from qinglan.config import Distill, Extract, Profile, Validate
from qinglan.errors import StageError
from qinglan.rows import Row, RowCounts
from qinglan.runs.artifacts import Artifact, StageResult, jsonl_writer, read_jsonl
from qinglan.runs.processes import in_event_loop
from qinglan.tasks.stage import Outcome, Stage, hiding_row_text, retried

T = TypeVar("T")
AskedAgain = Clients | ChatClient | RagClient
_ROWS_PER_REQUEST = 12
"""Rows begun for each request that may be under way.

There are more than one, as rows that wait for a retry must not leave the service idle.
"""
_SPARE_BATCHES = 2
"""Batches begun beyond those that hold the rows worked on: the last rows of a batch may be slow."""


async def _is_incomplete(_task: Any, _run: Any, state: State) -> bool:
    """Tell whether another try may help.

    It helps rows that met a transient failure; it does not help a refused key.
    """
    error = await state.aresult(raise_on_failure=False)
    return isinstance(error, BatchIncompleteError)


@task(
    name="batch",
    cache_policy=NO_CACHE,
    task_run_name="{kind}-{batch.index}",
    retry_condition_fn=_is_incomplete,
)
async def run_batch(
    kind: str,  # noqa: ARG001 (names the run)
    batch: RowBatch,
    work: Work,
    retries: int,
) -> list[Row]:
    """One batch; Prefect retries it while rows are missing."""
    with hiding_row_text():
        return await batch.run(work, last_attempt=_is_last_attempt(retries))


@task(name="ask", cache_policy=NO_CACHE, task_run_name="{what}", retry_condition_fn=_is_incomplete)
async def _ask(
    what: str, ask: Callable[[], Awaitable[T]], asked: tuple[AskedAgain, ...], retries: int
) -> T:
    """One attempt at all calls; Prefect retries it while some met a transient failure."""

    def count_failures() -> int:
        return sum(client.transient_failures for client in asked)

    is_last_attempt = _is_last_attempt(retries)
    failures_before = count_failures()
    try:
        with hiding_row_text():
            answer = await ask()
    except StageError as error:
        if is_last_attempt or count_failures() == failures_before:
            raise
        raise BatchIncompleteError(str(error)) from error
    failures = count_failures() - failures_before
    if failures and not is_last_attempt:
        raise BatchIncompleteError(f"{what}: {failures:,} calls failed; another try may succeed")
    return answer


def _is_last_attempt(retries: int) -> bool:
    return (task_run.run_count or 1) > retries


async def ask_again(
    what: str, ask: Callable[[], Awaitable[T]], *asked: AskedAgain, retries: int
) -> T:
    """Call `ask` in a Prefect task, and return its result.

    The task repeats those calls that failed and may yet succeed.

    Args:
        what: names the task's run.
        asked: the clients that `ask` uses.
    """
    # Another attempt then asks for what is missing alone, and not for a blank once more.
    for client in asked:
        client.keep_answers()
    return await _ask.with_options(**retried(retries))(what, ask, asked, retries)


@in_event_loop
async def ask_services(
    stage: Stage,
    services: Services,
    previous: StageResult,
    *,
    kind: str,
    section: Literal["extract", "distill", "validation"],
    roles: tuple[Role, ...],
    make_work: Callable[[Clients], Work],
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
    profile = stage.run.profile
    settings: Extract | Distill | Validate = getattr(profile, section)
    source = previous.artifacts["rows"]
    total = source.rows or 0
    rows_at_once = _rows_at_once(profile, roles)
    failures_file = stage.directory / row_batches.FAILURES_FILE
    # They are of an earlier attempt, whose failed rows are asked about again.
    failures_file.unlink(missing_ok=True)
    losses = row_batches.Losses(section, previous.rows_out, settings.max_failed_share)
    before = RowCounts()
    after = RowCounts()

    def report(row_count: int) -> None:
        stage.progress(row_count, max(total, row_count), "rows")

    async with open_clients(stage.run, services, roles, stage.traced) as clients:
        work = _paced(make_work(clients), rows_at_once, report)
        rows = before.pass_through(read_jsonl(source.path, Row))
        finished = _in_batches(kind, rows, work, settings, rows_at_once)
        rows_file = stage.directory / "rows.jsonl"
        # After an error nothing may go on asking: the clients are about to be closed.
        with jsonl_writer(rows_file) as write:
            async with aclosing(finished):
                async for batch, batch_rows in finished:
                    _note_failures(failures_file, batch)
                    losses.add(batch, batch_rows)
                    for row in after.pass_through(map(finish, batch_rows)):
                        watch(row)
                        write(row)
        report(after.total)
        call_counts = clients.call_counts()
    dropped = after.dropped_since(before)
    retryable = sum(dropped.get(reason, 0) for reason in row_batches.RETRYABLE_OR_BLANK_REASONS)
    return Outcome(
        rows_in=before.ok,
        rows_out=after.ok,
        dropped=dropped,
        artifacts={"rows": Artifact.of(rows_file, after.total)},
        details={"api": call_counts},
        try_again=clients.unjudged + retryable,
    )


def _rows_at_once(profile: Profile, roles: tuple[Role, ...]) -> int:
    """Number of rows that are worked on at once, enough to keep the fastest service busy."""
    # Rules alone ask no service.
    requests_at_once = 1
    for role in roles:
        service = profile.rag if role == "rag" else endpoint_of(profile, role)
        requests_at_once = max(requests_at_once, service.concurrency)
    return _ROWS_PER_REQUEST * requests_at_once


def _in_batches(
    kind: str,
    rows: Iterable[Row],
    work: Work,
    settings: Extract | Distill | Validate,
    rows_at_once: int,
) -> AsyncGenerator[tuple[RowBatch, list[Row]], None]:
    """Work on the rows in batches, each a Prefect task; yields finished batches in their order."""
    configured = run_batch.with_options(**retried(settings.retries))

    def run(batch: RowBatch) -> Awaitable[list[Row]]:
        return configured(kind, batch, work, settings.retries)

    # Enough batches that places do not stand empty while a batch waits for its last rows.
    batches = row_batches.cut(rows, settings.batch_rows)
    batches_at_once = _SPARE_BATCHES + math.ceil(rows_at_once / settings.batch_rows)
    return row_batches.in_order(batches, run, at_once=batches_at_once)


def _paced(work: Work, rows_at_once: int, report: Callable[[int], None]) -> Work:
    """The same work on so many rows at once.

    The number of finished rows is reported after each, as a batch may take minutes.
    """
    finished_count = 0
    places = asyncio.Semaphore(rows_at_once)

    async def paced(row: Row) -> Row:
        nonlocal finished_count
        async with places:
            finished = await work(row)
        finished_count += 1
        report(finished_count)
        return finished

    return paced


def _note_failures(path: Path, batch: RowBatch) -> None:
    """Append the failure of each row that is lost, with what was said."""
    if not batch.failures:
        return
    with path.open("a", encoding="utf-8") as stream:
        for row_id, error in batch.failures.items():
            failure = {
                "row_id": row_id,
                "reason": error.reason,
                "error": str(error),
                "said": error.said,
            }
            stream.write(json.dumps(failure, ensure_ascii=False) + "\n")
