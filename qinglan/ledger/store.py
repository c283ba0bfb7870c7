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
from pathlib import Path
from typing import Any, Literal
from weakref import WeakSet

import psutil
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
from qinglan.ledger.records import (
    Attempt,
    BatchJob,
    Call,
    Delivery,
    Failure,
    Order,
    Spending,
    Usage,
)
from qinglan.rows import Retrieved
from qinglan.runs.supervise import process_status

BATCH = "batch:"
"""Claims of the batch API begin with it: they last until the batch is merged, whatever becomes of
the process."""
SIMULATED = "simulated-"
"""The simulators' models begin with it. Their prices are illustrations: no month's budget counts
them."""
_LONGEST_LEASE_S = 60.0
"""A process of another machine that is not heard of for so long has ended."""
_LONGEST_GAP_S = 20.0
"""After so long without a look nothing is known: the database may have been away, and nobody could
be heard of."""
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
        if self._engine.dialect.name == "postgresql":
            sa.event.listen(
                self._engine, "connect", lambda connection, _: self._connections.add(connection)
            )
        self._insert = (
            postgresql.insert if self._engine.dialect.name == "postgresql" else sqlite.insert
        )
        self._host = _host()
        self._observed: dict[str, tuple[float, float, float]] = {}
        """What another client last wrote of itself; since when, and until when, this one has read
        just that."""
        pid = os.getpid()
        self.holder = f"{self._host}|{pid}|{_start_ticks(pid)}|{os.urandom(4).hex()}"
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
            calls, failures = order.calls, order.failures
            if order.is_resent:  # no other client can have bought these: this one has the claims
                known = self.get_many([call.request_hash for call in calls], db)
                recorded = set[tuple[str, float]]()
                for some in _portions([each.request_hash for each in failures]):
                    query = sa.select(FAILURES.c.request_hash, FAILURES.c.created_s)
                    recorded.update(
                        map(tuple, db.execute(query.where(FAILURES.c.request_hash.in_(some))))
                    )
                calls = [call for call in calls if call.request_hash not in known]
                failures = [
                    each for each in failures if (each.request_hash, each.created_s) not in recorded
                ]
            self._record(db, calls, failures)
            self.release(
                [*order.released, *(call.request_hash for call in order.calls)], self.holder, db
            )
            found = self.get_many(order.wanted, db)
            claimed, late = self._claim(
                db, [wanted for wanted in order.wanted if wanted not in found], self.holder
            )
            if claimed:
                self.heartbeat(db)
            if order.retrievals:
                now = time.time()
                rows = [
                    retrieval.model_dump(mode="json") | {"created_s": now}
                    for retrieval in order.retrievals
                ]
                db.execute(self._insert(RETRIEVALS).on_conflict_do_nothing(), rows)
            retrieved: dict[str, Retrieved] = {}
            for some in _portions(order.sought):
                query = sa.select(RETRIEVALS.c.key, RETRIEVALS.c.found).where(
                    RETRIEVALS.c.key.in_(some)
                )
                retrieved |= {
                    key: Retrieved.model_validate(value) for key, value in db.execute(query)
                }
            spent_usd = self.spent_usd(order.run_id, db)
        return Delivery(found | late, claimed, spent_usd, retrieved)

    def get(self, request_hash: str) -> Call | None:
        return self.get_many([request_hash]).get(request_hash)

    def get_many(
        self, hashes: Collection[str], within: sa.Connection | None = None
    ) -> dict[str, Call]:
        """Those of the answers that there are; of several to one request the first."""
        columns = [CALLS.c[name] for name in Call.model_fields]
        found: dict[str, Call] = {}
        with self._transaction(within) as db:
            for some in _portions(hashes):
                query = (
                    sa.select(*columns)
                    .where(CALLS.c.request_hash.in_(some))
                    .order_by(CALLS.c.id.desc())
                )
                for row in db.execute(query):
                    found[row[0]] = Call.model_construct(
                        **row._mapping
                    )  # ours: validated when it was recorded
        return found

    def record(self, calls: Sequence[Call], failures: Sequence[Failure] = ()) -> None:
        """Keep answers and failures; the answers' claims end, of any holder."""
        with self._transaction() as db:
            self._record(db, calls, failures)
            self.release([call.request_hash for call in calls], within=db)

    def claim(self, hashes: Collection[str], holder: str) -> set[str]:
        """Take what no living process holds and what has no answer; `holder` begins with `BATCH`
        for a batch."""
        with self._transaction() as db:
            return self._claim(db, hashes, holder)[0]

    def release(
        self,
        hashes: Collection[str],
        holder: str | None = None,
        within: sa.Connection | None = None,
    ) -> None:
        """End claims of one holder, or of any."""
        with self._transaction(within) as db:
            for some in _portions(hashes):
                statement = sa.delete(CLAIMS).where(CLAIMS.c.request_hash.in_(some))
                db.execute(statement.where(CLAIMS.c.holder == holder) if holder else statement)

    def claimed_by(self, request_hash: str) -> tuple[str, str]:
        """Who has the claim on a request, and what to do where no answer comes."""
        claims, batches = CLAIMS.c, BATCHES.c
        with self._transaction() as db:
            holder: str = (
                db.scalar(sa.select(claims.holder).where(claims.request_hash == request_hash)) or ""
            )
            digest = holder.removeprefix(BATCH)
            batch = db.scalar(sa.select(batches.batch_id).where(batches.digest == digest)) or digest
        if holder.startswith(BATCH):
            advice = "run once with --set distill.mode=batch_api, which waits for the batch and merges its answers"
            return f"batch {batch}", advice
        host, _, rest = holder.partition("|")
        who = f"process {rest.split('|')[0]} on {host.split(' ')[0]}" if rest else "another process"
        return who, "wait until that run has ended, or end it, and run again"

    def heartbeat(self, within: sa.Connection | None = None) -> None:
        """Tell other machines that this one's claims are alive."""
        now = time.time()
        statement = self._insert(HOLDERS).values(holder=self.holder, seen_s=now)
        with self._transaction(within) as db:
            db.execute(
                statement.on_conflict_do_update(index_elements=["holder"], set_={"seen_s": now})
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
        which = [BATCHES.c[column] == value for column, value in only.items()]
        query = (
            sa.select(BATCHES)
            .where(BATCHES.c.status != "merged", *which)
            .order_by(BATCHES.c.created_s)
        )
        with self._transaction() as db:
            return [BatchJob(**row) for row in db.execute(query).mappings()]

    def end_batch(self, job: BatchJob) -> None:
        """The batch is done with: its requests are free again."""
        self.release(job.request_hashes, BATCH + job.digest)
        self.save_batch(job.merged())

    def drop_batch(self, batch_id: str) -> BatchJob | None:
        """Forget an open batch: its requests may be asked again; None where there is none of this
        id."""
        job = next(iter(self.open_batches(batch_id=batch_id)), None) if batch_id else None
        if job:
            self.end_batch(job)
        return job

    # Questions

    def usage(self, run_id: str, role: str) -> Usage:
        """Calls, tokens and dollars of one run; `cached` is not the ledger's to know."""
        for found in self.spending("role", run_id=run_id, role=role):
            return Usage(
                **found.model_dump(exclude={"key", "calls"}), calls=found.calls + found.failed
            )
        return Usage()

    def spent_usd(self, run_id: str, within: sa.Connection | None = None) -> tuple[float, float]:
        """By the run, and by all runs this month, where simulated models don't count."""
        run, month = f"run:{run_id}", _month(time.time())
        query = sa.select(SPENT.c.period, SPENT.c.usd).where(SPENT.c.period.in_([run, month]))
        with self._transaction(within) as db:
            rows: dict[str, float] = {row.period: row.usd for row in db.execute(query)}
        return rows.get(run, 0.0), rows.get(month, 0.0)

    def spending(
        self,
        by: Literal["model", "run", "tenant", "role", "month"],
        since_s: float = 0.0,
        **only: str,
    ) -> list[Spending]:
        """Calls, tokens, dollars and failures by a key, the most expensive first; `only` with these
        columns' values."""
        with self._transaction() as db:
            calls, failures = (
                self._grouped(db, table, by, since_s, only) for table in (CALLS, FAILURES)
            )
        lines = []
        for key in calls.keys() | failures.keys():
            failed, lost_usd = failures.get(key, (0, 0.0))
            count, prompt, completion, usd = calls.get(key, (0, 0, 0, 0.0))
            tokens = {"prompt_tokens": prompt, "completion_tokens": completion}
            lines.append(
                Spending(key=key, calls=count, failed=failed, cost_usd=usd + lost_usd, **tokens)
            )
        return sorted(lines, key=lambda line: (-line.cost_usd, line.key))

    def attempts(self, column: Literal["request_hash", "run_id"], value: str) -> list[Attempt]:
        """Every try at one request, or all that a run sent, in their order."""
        tried: list[tuple[sa.Table, tuple[sa.ColumnElement[Any], ...]]] = [
            (CALLS, (CALLS.c.finish_reason.label("outcome"), sa.false().label("estimated"))),
            (FAILURES, (FAILURES.c.reason.label("outcome"), FAILURES.c.estimated)),
        ]
        found: list[Attempt] = []
        with self._transaction() as db:
            for table, columns in tried:
                common = (
                    table.c[name]
                    for name in Attempt.model_fields
                    if name not in ("outcome", "estimated")
                )
                query = sa.select(*common, *columns).where(table.c[column] == value)
                found += [Attempt(**row) for row in db.execute(query).mappings()]
        return sorted(found, key=lambda attempt: attempt.created_s)

    def drop(self, prefix: str) -> list[Call]:
        """Forget the answers to the one request whose hash begins so; what they cost stays, as
        failures `dropped`."""
        with self._transaction() as db:
            begins = CALLS.c.request_hash.startswith(prefix, autoescape=True)
            hashes = list(
                db.scalars(sa.select(CALLS.c.request_hash).where(begins).distinct().limit(2))
            )
            if len(hashes) != 1 or not prefix:
                several = "several requests begin" if hashes else "no answered request begins"
                raise LedgerError(
                    f"ledger: {several} with {prefix!r}; a row's `answer_request` names its own"
                )
            return self.drop_all(hashes, db)

    def drop_all(self, hashes: Collection[str], within: sa.Connection | None = None) -> list[Call]:
        """The same for all of these requests that have answers."""
        dropped = list[Call]()
        with self._transaction(within) as db:
            for some in _portions(hashes):
                chosen = sa.delete(CALLS).where(CALLS.c.request_hash.in_(some))
                rows = db.execute(chosen.returning(CALLS)).mappings().all()
                kept = [Failure(**row, reason="dropped").model_dump() for row in rows]
                if kept:
                    db.execute(sa.insert(FAILURES), kept)
                dropped += [Call(**row) for row in rows]
        return dropped

    def requests_quoting(self, texts: Collection[str]) -> set[str]:
        """Hashes of the requests whose answer or reasoning has one of these texts in it."""
        columns = (CALLS.c.text, CALLS.c.reasoning, CALLS.c.refusal)
        found: set[str] = set()
        with self._transaction() as db:
            for text in texts:
                quotes = sa.or_(*(column.contains(text, autoescape=True) for column in columns))
                found.update(db.scalars(sa.select(CALLS.c.request_hash).where(quotes)))
        return found

    def mean_tokens(self, model: str, role: str) -> tuple[float, float, int] | None:
        """Prompt and completion tokens of an answered call, and how many calls that is known
        from."""
        calls = CALLS.c
        means = sa.func.avg(calls.prompt_tokens), sa.func.avg(calls.completion_tokens)
        query = sa.select(*means, sa.func.count()).where(calls.model == model, calls.role == role)
        with self._transaction() as db:
            prompt, completion, count = db.execute(query).one()
        return (float(prompt), float(completion), count) if count else None

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
        begun_s = time.monotonic()
        while not ended.wait(_SAY_EVERY_S):
            waited_s = time.monotonic() - begun_s
            _LOG.warning(
                "ledger: its database has not answered for %.0f s; still waiting", waited_s
            )
            for connection in [
                each
                for each in self._connections
                if waited_s > _ANSWER_WITHIN_S and not each.closed
            ]:
                with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as line:
                    line.shutdown(socket.SHUT_RDWR)

    def _record(
        self, db: sa.Connection, calls: Sequence[Call], failures: Sequence[Failure]
    ) -> None:
        now = time.time()
        for table, entries in ((FAILURES, failures), (CALLS, calls)):
            if entries:
                db.execute(
                    sa.insert(table), [{"created_s": now} | each.model_dump() for each in entries]
                )
        spent: dict[str, float] = {}
        for tried in (*calls, *(failure for failure in failures if failure.cost_usd)):
            months = () if tried.model.startswith(SIMULATED) else (_month(now),)
            for period in (f"run:{tried.run_id}", *months):
                spent[period] = spent.get(period, 0.0) + tried.cost_usd
        if not spent:
            return
        statement = self._insert(SPENT)
        total = {"usd": SPENT.c.usd + statement.excluded.usd}
        statement = statement.on_conflict_do_update(index_elements=["period"], set_=total)
        # Always in the same order, so that two transactions can't wait for each other.
        db.execute(
            statement, [{"period": period, "usd": usd} for period, usd in sorted(spent.items())]
        )

    def _claim(
        self, db: sa.Connection, hashes: Collection[str], holder: str
    ) -> tuple[set[str], dict[str, Call]]:
        """Those that `holder` has now, and the answers to others that came meanwhile."""
        ours: set[str] = set()
        for some in _portions(sorted(set(hashes))):
            # One prepared statement for any number: with RETURNING it would be another one for each
            # number.
            statement = self._insert(CLAIMS).on_conflict_do_nothing()
            db.execute(statement, [{"request_hash": each, "holder": holder} for each in some])
            chosen = CLAIMS.c.request_hash.in_(some)
            held = {
                row.request_hash: row.holder for row in db.execute(sa.select(CLAIMS).where(chosen))
            }
            ours.update(
                each for each, who in held.items() if who == holder
            )  # also those of an order sent again
            if dead := [who for who in set(held.values()) if self._is_dead(db, who)]:
                taking = (
                    sa.update(CLAIMS).where(chosen, CLAIMS.c.holder.in_(dead)).values(holder=holder)
                )
                ours.update(db.scalars(taking.returning(CLAIMS.c.request_hash)))
        # The previous holder of a claim may have answered between two statements.
        late = self.get_many(ours, db)
        self.release(late, holder, db)
        return ours - late.keys(), late

    def _is_dead(self, db: sa.Connection, holder: str) -> bool:
        if holder == self.holder or holder.startswith(BATCH):
            return False
        host, pid, started, _ = holder.split("|")
        if host == self._host:
            ticks = _start_ticks(int(pid))
            # Without them, where processes of other users are hidden, it may be the one.
            return ticks != started if ticks else not psutil.pid_exists(int(pid))
        seen_s = db.scalar(sa.select(HOLDERS.c.seen_s).where(HOLDERS.c.holder == holder))
        return seen_s is None or self._unchanged_s(holder, seen_s) > _LONGEST_LEASE_S

    def _unchanged_s(self, holder: str, seen_s: float) -> float:
        """How long this client has seen no heartbeat of another, by its own clock: those of two
        machines differ."""
        now_s = time.monotonic()
        seen_before_s, since_s, looked_s = self._observed.get(holder, (seen_s, now_s, now_s))
        if seen_before_s != seen_s or now_s - looked_s > _LONGEST_GAP_S:
            since_s = now_s
        self._observed[holder] = seen_s, since_s, now_s
        return now_s - since_s

    def _grouped(
        self, db: sa.Connection, table: sa.Table, by: str, since_s: float, only: Mapping[str, str]
    ) -> dict[str, tuple[Any, ...]]:
        """By key: calls, for `calls` tokens, and dollars."""
        column: sa.ColumnElement[str] = table.c[{"run": "run_id", "month": "created_s"}.get(by, by)]
        if by == "month" and db.dialect.name == "postgresql":
            column = sa.func.to_char(
                sa.func.timezone("UTC", sa.func.to_timestamp(column)), "YYYY-MM"
            )
        elif by == "month":
            column = sa.func.strftime("%Y-%m", column, "unixepoch")
        names = (
            name for name in ("prompt_tokens", "completion_tokens", "cost_usd") if name in table.c
        )
        sums = (sa.func.sum(table.c[name]) for name in names)
        which = (
            table.c.created_s >= since_s,
            *(table.c[name] == value for name, value in only.items()),
        )
        query = sa.select(column, sa.func.count(), *sums).where(*which).group_by(column)
        return {row[0]: tuple(row[1:]) for row in db.execute(query)}


def _host() -> str:
    """This machine, as far as process ids go: cloned machines share a name, containers a
    machine."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(parts)


def _start_ticks(pid: int) -> str:
    """When a process began, in ticks since the machine's start: a change of the clock does not move
    them.

    Empty where the system does not show them; `ended` of a process that nobody has waited for.
    """
    status = process_status(pid)
    return ("ended" if status[0] == "Z" else status[19]) if status else ""


def _portions(hashes: Collection[str]) -> Iterator[list[str]]:
    each = list(hashes)
    for start in range(0, len(each), _PARAMETERS_PER_STATEMENT):
        yield each[start : start + _PARAMETERS_PER_STATEMENT]


def _month(created_s: float) -> str:
    return f"month:{datetime.fromtimestamp(created_s, UTC):%Y-%m}"
