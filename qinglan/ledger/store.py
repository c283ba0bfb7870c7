"""The ledger itself: a store of calls, claims and retrievals over SQLAlchemy; each method is in one
transaction."""

import logging
import os
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from datetime import UTC, datetime
from typing import Any, Literal
from weakref import WeakSet

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from qinglan.errors import LedgerError
from qinglan.ledger.database import (
    BATCHES,
    CALLS,
    CLAIMS,
    FAILURES,
    HOLDERS,
    RETRIEVALS,
    SPENT,
    is_unreachable,
    make_engine,
    prepare,
    shown,
)
from qinglan.ledger.holders import Holders, describe
from qinglan.ledger.records import (
    Attempt,
    BatchJob,
    Call,
    Delivery,
    Failure,
    Order,
    Retrieval,
    Spending,
    Usage,
)
from qinglan.rows import Retrieved

BATCH = "batch:"
"""Claims of the batch API begin with it: they last until the batch is merged, whatever becomes of
the process."""
SIMULATED = "simulated-"
"""The simulators' models begin with it. Their prices are illustrations: no month's budget counts
them."""
_PARAMETERS_PER_STATEMENT = 500
_SAY_EVERY_S = 60.0
_ANSWER_WITHIN_S = 330.0
"""A server ends a statement after five minutes. One that is silent for longer has stopped, or has
lost us."""
_LOG = logging.getLogger(__name__)


class Ledger:
    """Calls by request hash. Safe for threads, processes and, on a server, machines; opened per
    process."""

    def __init__(self, url: str | sa.URL) -> None:
        """Open, and make the tables of an empty one; LedgerError where it is not reachable, or of
        another version."""
        self._engine = make_engine(url)
        self.url = self._engine.url
        self._connections = WeakSet[Any]()
        is_postgresql = self._engine.dialect.name == "postgresql"
        self._insert = postgresql.insert if is_postgresql else sqlite.insert
        if is_postgresql:
            sa.event.listen(
                self._engine, "connect", lambda connection, _: self._connections.add(connection)
            )
        self._holders = Holders()
        self.holder = self._holders.new_name()
        try:
            with self._transaction() as db:
                prepare(db, shown(self.url))
        except LedgerError:
            self._engine.dispose()
            raise

    def exchange(self, order: Order) -> Delivery:
        """Record, release, look up and claim, all or nothing; what is sent again is not recorded
        twice."""
        with self._transaction() as db:
            calls = order.calls
            failures = order.failures
            if order.is_resent:
                calls = self._unrecorded_calls(db, calls)
                failures = _unrecorded_failures(db, failures)
            self._record(db, calls, failures)
            self.release([*order.released, *_hashes_of(order.calls)], self.holder, db)
            answers = self.get_many(order.wanted, db)
            unanswered = [
                request_hash for request_hash in order.wanted if request_hash not in answers
            ]
            claimed, late = self._claim(db, unanswered, self.holder)
            if claimed:
                self.heartbeat(db)
            if order.retrievals:
                self._keep_retrievals(db, order.retrievals)
            retrieved = _retrievals(db, order.sought)
            spent_usd = self.spent_usd(order.run_id, db)
        return Delivery(answers | late, claimed, spent_usd, retrieved)

    def get(self, request_hash: str) -> Call | None:
        return self.get_many([request_hash]).get(request_hash)

    def get_many(
        self, hashes: Collection[str], within: sa.Connection | None = None
    ) -> dict[str, Call]:
        """The answers to these requests by hash; of several to one request the first, and nothing
        where there is none."""
        columns = [CALLS.c[name] for name in Call.model_fields]
        calls: dict[str, Call] = {}
        with self._transaction(within) as db:
            for portion in _portions(hashes):
                query = (
                    sa.select(*columns)
                    .where(CALLS.c.request_hash.in_(portion))
                    .order_by(CALLS.c.id.desc())
                )
                # The first answer comes last, and takes the place of the others.
                for row in db.execute(query):
                    # Ours: validated when it was recorded.
                    calls[row[0]] = Call.model_construct(**row._mapping)
        return calls

    def record(self, calls: Sequence[Call], failures: Sequence[Failure] = ()) -> None:
        """Keep answers and failures; the answers' claims end, of any holder."""
        with self._transaction() as db:
            self._record(db, calls, failures)
            self.release(_hashes_of(calls), within=db)

    def claim(self, hashes: Collection[str], holder: str) -> set[str]:
        """Take what no living process holds and what has no answer; `holder` begins with `BATCH`
        for a batch."""
        with self._transaction() as db:
            claimed, _ = self._claim(db, hashes, holder)
        return claimed

    def release(
        self,
        hashes: Collection[str],
        holder: str | None = None,
        within: sa.Connection | None = None,
    ) -> None:
        """End claims of one holder, or of any."""
        with self._transaction(within) as db:
            for portion in _portions(hashes):
                statement = sa.delete(CLAIMS).where(CLAIMS.c.request_hash.in_(portion))
                if holder:
                    statement = statement.where(CLAIMS.c.holder == holder)
                db.execute(statement)

    def claimed_by(self, request_hash: str) -> tuple[str, str]:
        """The process or batch that has the claim on a request, and what to do where no answer
        comes."""
        claims = CLAIMS.c
        batches = BATCHES.c
        with self._transaction() as db:
            claim = sa.select(claims.holder).where(claims.request_hash == request_hash)
            holder: str = db.scalar(claim) or ""
            digest = holder.removeprefix(BATCH)
            batch = sa.select(batches.batch_id).where(batches.digest == digest)
            batch_id = db.scalar(batch) or digest
        if holder.startswith(BATCH):
            advice = (
                "run once with --set distill.mode=batch_api, which waits for the batch and merges "
                "its answers"
            )
            return f"batch {batch_id}", advice
        return describe(holder), "wait until that run has ended, or end it, and run again"

    def heartbeat(self, within: sa.Connection | None = None) -> None:
        """Tell other machines that this one's claims are alive."""
        now_s = time.time()
        statement = self._insert(HOLDERS).values(holder=self.holder, seen_s=now_s)
        with self._transaction(within) as db:
            db.execute(
                statement.on_conflict_do_update(index_elements=["holder"], set_={"seen_s": now_s})
            )

    def retrieval_keys(self, scope: str) -> set[str]:
        with self._transaction() as db:
            return set(db.scalars(sa.select(RETRIEVALS.c.key).where(RETRIEVALS.c.scope == scope)))

    # Batch API

    def save_batch(self, job: BatchJob) -> None:
        values = job.model_dump()
        statement = self._insert(BATCHES).values(values)
        with self._transaction() as db:
            db.execute(statement.on_conflict_do_update(index_elements=["digest"], set_=values))

    def open_batches(self, **only: str) -> list[BatchJob]:
        """Batches that are not merged yet, the oldest first; those with these values in columns,
        such as `role`."""
        conditions = [BATCHES.c[column] == value for column, value in only.items()]
        query = (
            sa.select(BATCHES)
            .where(BATCHES.c.status != "merged", *conditions)
            .order_by(BATCHES.c.created_s)
        )
        with self._transaction() as db:
            return [BatchJob(**row) for row in db.execute(query).mappings()]

    def end_batch(self, job: BatchJob) -> None:
        """Close a batch: its requests are free again."""
        self.release(job.request_hashes, BATCH + job.digest)
        self.save_batch(job.merged())

    def drop_batch(self, batch_id: str) -> BatchJob | None:
        """Forget an open batch: its requests may be asked again; None where there is none of this
        id."""
        # A batch whose id is not known yet has an empty one.
        if not batch_id:
            return None
        job = next(iter(self.open_batches(batch_id=batch_id)), None)
        if job:
            self.end_batch(job)
        return job

    # Questions

    def usage(self, run_id: str, role: str) -> Usage:
        """Calls, tokens and dollars of one run; `cached` is not the ledger's to know."""
        for line in self.spending("role", run_id=run_id, role=role):
            return Usage(
                **line.model_dump(exclude={"key", "calls"}), calls=line.calls + line.failed
            )
        return Usage()

    def spent_usd(self, run_id: str, within: sa.Connection | None = None) -> tuple[float, float]:
        """Dollars spent by the run, and by all runs this month, where simulated models don't
        count."""
        run = f"run:{run_id}"
        month = _month(time.time())
        query = sa.select(SPENT.c.period, SPENT.c.usd).where(SPENT.c.period.in_([run, month]))
        with self._transaction(within) as db:
            usd_by_period: dict[str, float] = {row.period: row.usd for row in db.execute(query)}
        return usd_by_period.get(run, 0.0), usd_by_period.get(month, 0.0)

    def spending(
        self,
        by: Literal["model", "run", "tenant", "role", "month"],
        since_s: float = 0.0,
        **only: str,
    ) -> list[Spending]:
        """Calls, tokens, dollars and failures by a key, the most expensive first; `only` with these
        columns' values."""
        with self._transaction() as db:
            calls = _grouped(db, CALLS, by, since_s, only)
            failures = _grouped(db, FAILURES, by, since_s, only)
        lines: list[Spending] = []
        for key in calls.keys() | failures.keys():
            failed_count, lost_usd = failures.get(key, (0, 0.0))
            count, prompt_tokens, completion_tokens, usd = calls.get(key, (0, 0, 0, 0.0))
            line = Spending(
                key=key,
                calls=count,
                failed=failed_count,
                prompt_tokens=prompt_tokens,
                completion_tokens=completion_tokens,
                cost_usd=usd + lost_usd,
            )
            lines.append(line)
        return sorted(lines, key=lambda line: (-line.cost_usd, line.key))

    def attempts(self, column: Literal["request_hash", "run_id"], value: str) -> list[Attempt]:
        """Every try at one request, or all that a run sent, in their order."""
        own_columns: dict[sa.Table, list[sa.ColumnElement[Any]]] = {
            CALLS: [CALLS.c.finish_reason.label("outcome"), sa.false().label("estimated")],
            FAILURES: [FAILURES.c.reason.label("outcome"), FAILURES.c.estimated],
        }
        common_names = [
            name for name in Attempt.model_fields if name not in ("outcome", "estimated")
        ]
        attempts: list[Attempt] = []
        with self._transaction() as db:
            for table, columns in own_columns.items():
                common_columns = [table.c[name] for name in common_names]
                query = sa.select(*common_columns, *columns).where(table.c[column] == value)
                attempts += [Attempt(**row) for row in db.execute(query).mappings()]
        return sorted(attempts, key=lambda attempt: attempt.created_s)

    def drop(self, prefix: str) -> list[Call]:
        """Forget the answers to the one request whose hash begins so; what they cost stays, as
        failures `dropped`."""
        with self._transaction() as db:
            begins = CALLS.c.request_hash.startswith(prefix, autoescape=True)
            query = sa.select(CALLS.c.request_hash).where(begins).distinct().limit(2)
            hashes = list(db.scalars(query))
            if len(hashes) != 1 or not prefix:
                problem = "several requests begin" if hashes else "no answered request begins"
                raise LedgerError(
                    f"ledger: {problem} with {prefix!r}; a row's `answer_request` names its own"
                )
            return self.drop_all(hashes, db)

    def drop_all(self, hashes: Collection[str], within: sa.Connection | None = None) -> list[Call]:
        """The same for all of these requests that have answers."""
        dropped: list[Call] = []
        with self._transaction(within) as db:
            for portion in _portions(hashes):
                deletion = sa.delete(CALLS).where(CALLS.c.request_hash.in_(portion))
                rows = db.execute(deletion.returning(CALLS)).mappings().all()
                failures = [Failure(**row, reason="dropped").model_dump() for row in rows]
                if failures:
                    db.execute(sa.insert(FAILURES), failures)
                dropped += [Call(**row) for row in rows]
        return dropped

    def requests_quoting(self, texts: Collection[str]) -> set[str]:
        """Hashes of the requests whose answer or reasoning has one of these texts in it."""
        columns = (CALLS.c.text, CALLS.c.reasoning, CALLS.c.refusal)
        hashes: set[str] = set()
        with self._transaction() as db:
            for text in texts:
                quotes = sa.or_(*(column.contains(text, autoescape=True) for column in columns))
                hashes.update(db.scalars(sa.select(CALLS.c.request_hash).where(quotes)))
        return hashes

    def mean_tokens(self, model: str, role: str) -> tuple[float, float, int] | None:
        """Prompt and completion tokens of an answered call, and how many calls that is known
        from."""
        calls = CALLS.c
        query = sa.select(
            sa.func.avg(calls.prompt_tokens),
            sa.func.avg(calls.completion_tokens),
            sa.func.count(),
        ).where(calls.model == model, calls.role == role)
        with self._transaction() as db:
            prompt_tokens, completion_tokens, count = db.execute(query).one()
        if not count:
            return None
        return float(prompt_tokens), float(completion_tokens), count

    def close(self) -> None:
        """End this client's claims and its connections."""
        with self._transaction() as db:
            db.execute(sa.delete(CLAIMS).where(CLAIMS.c.holder == self.holder))
            db.execute(sa.delete(HOLDERS).where(HOLDERS.c.holder == self.holder))
        self._engine.dispose()

    # Within a transaction

    @contextmanager
    def _transaction(self, within: sa.Connection | None = None) -> Iterator[sa.Connection]:
        """A new one, or a part of the one that the caller has begun."""
        if within is not None:
            yield within
            return
        ended = threading.Event()
        # In this context, or the run's log would not get what it says.
        threading.Thread(target=copy_context().run, args=(self._watch, ended), daemon=True).start()
        try:
            with self._engine.begin() as db:
                yield db
        except sa.exc.DBAPIError as error:
            # SQLAlchemy's own text carries the statement with its values.
            message = f"ledger {shown(self.url)}: {' '.join(str(error.orig).split())[:200]}"
            raise LedgerError(message, unreachable=is_unreachable(error)) from None
        finally:
            ended.set()

    def _watch(self, ended: threading.Event) -> None:
        """Name a silent database in the log, and break the connections to a server, so that who
        waits gets an error."""
        start_s = time.monotonic()
        while not ended.wait(_SAY_EVERY_S):
            waited_s = time.monotonic() - start_s
            _LOG.warning(
                "ledger: its database has not answered for %.0f s; still waiting", waited_s
            )
            if waited_s > _ANSWER_WITHIN_S:
                self._break_connections()

    def _break_connections(self) -> None:
        open_connections = [connection for connection in self._connections if not connection.closed]
        for connection in open_connections:
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as line:
                line.shutdown(socket.SHUT_RDWR)

    def _record(
        self, db: sa.Connection, calls: Sequence[Call], failures: Sequence[Failure]
    ) -> None:
        now_s = time.time()
        # A failure has a time of its own, which is kept.
        for table, entries in ((FAILURES, failures), (CALLS, calls)):
            if entries:
                rows = [{"created_s": now_s} | entry.model_dump() for entry in entries]
                db.execute(sa.insert(table), rows)
        spent_usd = _spent_by_period(calls, failures, now_s)
        if not spent_usd:
            return
        statement = self._insert(SPENT)
        total = {"usd": SPENT.c.usd + statement.excluded.usd}
        statement = statement.on_conflict_do_update(index_elements=["period"], set_=total)
        # Always in the same order, so that two transactions can't wait for each other.
        rows = [{"period": period, "usd": usd} for period, usd in sorted(spent_usd.items())]
        db.execute(statement, rows)

    def _unrecorded_calls(self, db: sa.Connection, calls: Sequence[Call]) -> list[Call]:
        # No other client can have bought these: this one has the claims.
        recorded = self.get_many(_hashes_of(calls), db)
        return [call for call in calls if call.request_hash not in recorded]

    def _claim(
        self, db: sa.Connection, hashes: Collection[str], holder: str
    ) -> tuple[set[str], dict[str, Call]]:
        """The requests that `holder` has now, and the answers to others that came meanwhile."""
        claimed: set[str] = set()
        for portion in _portions(sorted(set(hashes))):
            claimed |= self._claim_portion(db, portion, holder)
        # The previous holder of a claim may have answered between two statements.
        late = self.get_many(claimed, db)
        self.release(late, holder, db)
        return claimed - late.keys(), late

    def _claim_portion(self, db: sa.Connection, hashes: Sequence[str], holder: str) -> set[str]:
        # One prepared statement for any number: with RETURNING it would be another one for each
        # number.
        statement = self._insert(CLAIMS).on_conflict_do_nothing()
        db.execute(
            statement,
            [{"request_hash": request_hash, "holder": holder} for request_hash in hashes],
        )
        in_portion = CLAIMS.c.request_hash.in_(hashes)
        query = sa.select(CLAIMS).where(in_portion)
        holders = {row.request_hash: row.holder for row in db.execute(query)}
        # Also those of an order that is sent again.
        claimed = {
            request_hash for request_hash, its_holder in holders.items() if its_holder == holder
        }
        dead = [its_holder for its_holder in set(holders.values()) if self._is_dead(db, its_holder)]
        if dead:
            taking = (
                sa.update(CLAIMS)
                .where(in_portion, CLAIMS.c.holder.in_(dead))
                .values(holder=holder)
                .returning(CLAIMS.c.request_hash)
            )
            claimed.update(db.scalars(taking))
        return claimed

    def _is_dead(self, db: sa.Connection, holder: str) -> bool:
        if holder == self.holder or holder.startswith(BATCH):
            return False
        return self._holders.is_dead(db, holder)

    def _keep_retrievals(self, db: sa.Connection, retrievals: Sequence[Retrieval]) -> None:
        now_s = time.time()
        rows = [
            retrieval.model_dump(mode="json") | {"created_s": now_s} for retrieval in retrievals
        ]
        db.execute(self._insert(RETRIEVALS).on_conflict_do_nothing(), rows)


def _hashes_of(entries: Sequence[Call | Failure]) -> list[str]:
    return [entry.request_hash for entry in entries]


def _unrecorded_failures(db: sa.Connection, failures: Sequence[Failure]) -> list[Failure]:
    recorded: set[tuple[str, float]] = set()
    for portion in _portions(_hashes_of(failures)):
        query = sa.select(FAILURES.c.request_hash, FAILURES.c.created_s).where(
            FAILURES.c.request_hash.in_(portion)
        )
        recorded.update((row.request_hash, row.created_s) for row in db.execute(query))
    return [
        failure for failure in failures if (failure.request_hash, failure.created_s) not in recorded
    ]


def _retrievals(db: sa.Connection, keys: Collection[str]) -> dict[str, Retrieved]:
    retrievals: dict[str, Retrieved] = {}
    for portion in _portions(keys):
        query = sa.select(RETRIEVALS.c.key, RETRIEVALS.c.found).where(RETRIEVALS.c.key.in_(portion))
        for row in db.execute(query):
            retrievals[row.key] = Retrieved.model_validate(row.found)
    return retrievals


def _spent_by_period(
    calls: Sequence[Call], failures: Sequence[Failure], now_s: float
) -> dict[str, float]:
    """Dollars by run and by month; simulated models count for the run alone."""
    spent_usd: dict[str, float] = {}
    costly_failures = [failure for failure in failures if failure.cost_usd]
    for entry in (*calls, *costly_failures):
        periods = [f"run:{entry.run_id}"]
        if not entry.model.startswith(SIMULATED):
            periods.append(_month(now_s))
        for period in periods:
            spent_usd[period] = spent_usd.get(period, 0.0) + entry.cost_usd
    return spent_usd


def _grouped(
    db: sa.Connection, table: sa.Table, by: str, since_s: float, only: Mapping[str, str]
) -> dict[str, tuple[Any, ...]]:
    """Calls, for `calls` tokens, and dollars, by the key."""
    if by == "month":
        group = _month_of(table.c.created_s, db.dialect.name)
    else:
        group = table.c["run_id" if by == "run" else by]
    summed_names = [
        name for name in ("prompt_tokens", "completion_tokens", "cost_usd") if name in table.c
    ]
    sums = [sa.func.sum(table.c[name]) for name in summed_names]
    conditions = [table.c[name] == value for name, value in only.items()]
    query = (
        sa.select(group, sa.func.count(), *sums)
        .where(table.c.created_s >= since_s, *conditions)
        .group_by(group)
    )
    return {row[0]: tuple(row[1:]) for row in db.execute(query)}


def _month_of(created_s: sa.ColumnElement[float], dialect: str) -> sa.ColumnElement[str]:
    """The month of a time in seconds, such as `2026-11`, in UTC."""
    if dialect == "postgresql":
        time_in_utc = sa.func.timezone("UTC", sa.func.to_timestamp(created_s))
        return sa.func.to_char(time_in_utc, "YYYY-MM")
    return sa.func.strftime("%Y-%m", created_s, "unixepoch")


def _portions(hashes: Collection[str]) -> Iterator[list[str]]:
    """The hashes in lists that one statement takes."""
    items = list(hashes)
    for start in range(0, len(items), _PARAMETERS_PER_STATEMENT):
        yield items[start : start + _PARAMETERS_PER_STATEMENT]


def _month(created_s: float) -> str:
    return f"month:{datetime.fromtimestamp(created_s, UTC):%Y-%m}"
