"""The ledger: kept before used, shared by processes and machines, every paid call counted, nothing
claimed twice."""

import asyncio
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest
import sqlalchemy as sa
from ledger_calls import call, failure
from postgres import postgres_server

from qinglan.config import Budget, LedgerStore
from qinglan.errors import ConfigError, LedgerError
from qinglan.ledger import (
    BATCH,
    SCHEMA_VERSION,
    BatchJob,
    Ledger,
    Order,
    Retrieval,
    database,
    ledger_url,
    queue,
    store,
)
from qinglan.ledger.database import make_engine
from qinglan.rows import Retrieved

WRITER = """
import sys
from qinglan.ledger import Call, Ledger, Order
ledger = Ledger(sys.argv[1])
for number in range(40):
    names = {"run_id": "r", "tenant": "t", "role": "judge", "model": "m"}
    answer = {"text": "x", "finish_reason": "stop"}
    numbers = {"prompt_tokens": 1, "completion_tokens": 1, "cost_usd": 0.5, "latency_ms": 1}
    key = f"{sys.argv[2]}-{number}"
    assert ledger.exchange(Order(wanted=[key])).claimed == {key}
    ledger.exchange(Order(calls=[Call(request_hash=key, **names, **answer, **numbers)]))
    assert ledger.get(key)
ledger.exchange(Order(wanted=["held by all"]))
print("done", flush=True)
sys.stdin.read()
"""
FOUND = Retrieved(ids=("d1", None), scores=(0.9, 0.25), titles=("题", "x"))


@contextmanager
def closing_engine(url: str) -> Iterator[sa.Connection]:
    engine = sa.create_engine(url)
    with engine.begin() as db:
        yield db
    engine.dispose()


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """A PostgreSQL server of its own on a socket."""
    with postgres_server() as server:
        yield server.owners_url


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'ledger.db'}"
        return
    server = request.getfixturevalue("postgres")
    with closing_engine(server) as db:
        db.execute(sa.text("DROP SCHEMA public CASCADE"))
        db.execute(sa.text("CREATE SCHEMA public"))
    yield server


def test_an_answer_comes_back_whole_and_of_two_the_first_stays_but_both_count(url: str):
    with closing(Ledger(url)) as ledger:
        assert ledger.get("h") is None
        ledger.record([], [failure(reason="http_429")])
        ledger.record([call()])
        ledger.record([call(text="second")])
    with closing(Ledger(url)) as ledger:
        assert ledger.get("h") == call()
        usage = ledger.usage("r", "teacher")
        assert (usage.calls, usage.cost_usd) == (3, 0.5)
        outcomes = [attempt.outcome for attempt in ledger.attempts("run_id", "r")]
        assert outcomes == ["http_429", "stop", "stop"]


def test_usage_is_per_run_and_role_and_spending_by_any_key(url: str):
    with closing(Ledger(url)) as ledger:
        assert ledger.mean_tokens("m", "teacher") is None
        ledger.record([call("a"), call("b"), call("c", run_id="other")], [failure("d")])
        assert ledger.mean_tokens("m", "teacher") == (100.0, 10.0, 3)
        usage = ledger.usage("r", "teacher")
        assert (usage.calls, usage.failed, usage.prompt_tokens, usage.cost_usd) == (3, 1, 200, 0.5)
        assert ledger.usage("r", "judge").calls == 0
        runs = [
            (line.key, line.calls, line.cost_usd, line.failed) for line in ledger.spending("run")
        ]
        assert runs == [("r", 2, 0.5, 1), ("other", 1, 0.25, 0)]
        this_month = time.strftime("%Y-%m", time.gmtime())
        assert [line.key for line in ledger.spending("month")] == [this_month]
        assert ledger.spending("model", since_s=time.time() + 1) == []


def test_failed_calls_cost_what_they_cost(url: str):
    with closing(Ledger(url)) as ledger:
        late = failure("h", "teacher_timeout", cost_usd=0.5, estimated=True)
        ledger.record([call()], [late, failure("g")])
        assert ledger.spent_usd("r") == (0.75, 0.75)
        ledger.record([call("s", model="simulated-judge", role="judge")])
        assert ledger.spent_usd("r") == (1.0, 0.75), (
            "nobody pays for a simulated model, so the month goes without it"
        )
        assert ledger.usage("r", "teacher").cost_usd == 0.75
        assert [(line.cost_usd, line.failed) for line in ledger.spending("run")] == [(1.0, 2)]
        tries = sorted(
            (attempt.outcome, attempt.cost_usd, attempt.estimated)
            for attempt in ledger.attempts("request_hash", "h")
        )
        assert tries == [("stop", 0.25, False), ("teacher_timeout", 0.5, True)]


def test_a_dropped_answer_is_asked_again_and_stays_paid(url: str):
    with closing(Ledger(url)) as ledger:
        ledger.record([call("abc"), call("abd"), call("x%")])
        for prefix in ("", "ab", "_", "abce"):
            with pytest.raises(LedgerError, match=f"begins? with '{prefix}'"):
                ledger.drop(prefix)
        assert ledger.drop("abc") == [call("abc")]
        assert ledger.get_many(["abc", "abd", "x%"]).keys() == {"abd", "x%"}
        assert ledger.exchange(Order(wanted=["abc"])).claimed == {"abc"}
        assert (ledger.spent_usd("r")[0], ledger.usage("r", "teacher").cost_usd) == (0.75, 0.75)
        tries = ledger.attempts("request_hash", "abc")
        assert [(attempt.outcome, attempt.cost_usd) for attempt in tries] == [("dropped", 0.25)]
        quoting = call("q", reasoning=r"问 100%/_\n 吗")
        ledger.record([quoting, call("other", text="问 100 _n 吗")])
        for dropped in ([quoting], []):
            assert ledger.drop_all(ledger.requests_quoting({r"100%/_\n", "甲"})) == dropped


def test_what_one_claims_another_gets_as_soon_as_it_is_answered_or_released(url: str):
    with closing(Ledger(url)) as first, closing(Ledger(url)) as second:
        assert first.exchange(Order(wanted=["a", "b"])).claimed == {"a", "b"}
        delivery = second.exchange(Order(wanted=["a", "b"]))
        assert (delivery.found, delivery.claimed) == ({}, set())
        first.exchange(Order(calls=[call("a")], released=["b"]))
        delivery = second.exchange(Order(wanted=["a", "b"]))
        assert (list(delivery.found), delivery.claimed) == (["a"], {"b"})
    with closing(Ledger(url)) as later:
        assert later.exchange(Order(wanted=["b"])).claimed == {"b"}, (
            "a client that closed holds nothing"
        )


def test_claims_of_another_machine_end_when_it_is_not_heard_of(
    url: str, monkeypatch: pytest.MonkeyPatch
):
    wall_s = time.time()
    clock_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: clock_s)

    def claimed_by(near: Ledger, after_s: float) -> set[str]:
        nonlocal clock_s
        clock_s += after_s
        return near.exchange(Order(wanted=["a"])).claimed

    with closing(Ledger(url)) as far, closing(Ledger(url)) as near:
        far.holder = "elsewhere" + far.holder[far.holder.index("|") :]
        # Its clock is slow.
        monkeypatch.setattr(time, "time", lambda: wall_s - 3600)
        far.exchange(Order(wanted=["a"]))
        monkeypatch.setattr(time, "time", lambda: wall_s)
        assert [claimed_by(near, after_s=15) for _ in range(4)] == [set()] * 4
        far.heartbeat()
        assert [claimed_by(near, after_s=15) for _ in range(4)] == [set()] * 4, "it was heard of"
        assert not claimed_by(near, after_s=70), (
            "the database was away, and nobody could be heard of"
        )
        assert [claimed_by(near, after_s=15) for _ in range(4)] == [set()] * 4
        assert claimed_by(near, after_s=15) == {"a"}


def test_a_changed_clock_makes_no_process_look_dead(url: str, monkeypatch: pytest.MonkeyPatch):
    with closing(Ledger(url)) as first, closing(Ledger(url)) as second:
        first.exchange(Order(wanted=["a"]))
        began_s = psutil.Process().create_time()
        # psutil adds ticks to the clock.
        monkeypatch.setattr(psutil.Process, "create_time", lambda _: began_s + 3600)
        assert second.exchange(Order(wanted=["a"])).claimed == set()


def test_a_batch_holds_its_claims_until_it_is_merged(url: str):
    with closing(Ledger(url)) as ledger:
        assert ledger.claim(["a", "b"], f"{BATCH}1") == {"a", "b"}
    with closing(Ledger(url)) as ledger:
        assert ledger.exchange(Order(wanted=["a"])).claimed == set()
        ledger.record([call("a")])
        ledger.release(["b"])
        delivery = ledger.exchange(Order(wanted=["a", "b"]))
        assert (list(delivery.found), delivery.claimed) == (["a"], {"b"})
        assert ledger.claim(["a"], f"{BATCH}2") == set()


def test_batches_are_found_until_they_are_merged(url: str):
    job = BatchJob(
        digest="d",
        server="s",
        role="teacher",
        status="submitting",
        request_hashes=["a"],
        created_s=1.0,
    )
    with closing(Ledger(url)) as ledger:
        ledger.save_batch(job)
        ledger.save_batch(job.submitted("batch_1"))
        (open_job,) = ledger.open_batches(server="s", role="teacher")
        assert (open_job.status, open_job.batch_id) == ("submitted", "batch_1")
        assert ledger.open_batches(server="other", role="teacher") == []
        ledger.save_batch(job.merged())
        assert ledger.open_batches(server="s", role="teacher") == []


def test_processes_share_a_ledger_and_kill_9_loses_nothing_recorded(url: str):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, url, str(n)], **pipes) for n in range(3)
    ]
    for writer in writers:
        assert writer.stdout.readline() == "done\n"
    with closing(Ledger(url)) as ledger:
        assert ledger.exchange(Order(wanted=["held by all"])).claimed == set()
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
        assert ledger.exchange(Order(wanted=["held by all"])).claimed == {"held by all"}
        assert ledger.usage("r", "judge").calls == 120
        assert ledger.spent_usd("r") == (60.0, 60.0)


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_another_version_is_refused_and_stays_as_it_is(url: str, version: int):
    with closing(Ledger(url)), closing_engine(url) as db:
        db.execute(sa.text(f"UPDATE ledger_meta SET version = {version}"))
    for _ in range(2):
        with pytest.raises(
            LedgerError, match=f"is of version {version}, this Qinglan writes version"
        ):
            Ledger(url)


def retrieval(key: str, scope: str = "run") -> Retrieval:
    return Retrieval(key=key, scope=scope, found=FOUND)


def test_retrievals_come_back_whole_and_are_kept_by_scope(url: str):
    with closing(Ledger(url)) as ledger:
        ledger.exchange(Order(retrievals=[retrieval("a"), retrieval("b", "other"), retrieval("a")]))
        ledger.exchange(Order(retrievals=[retrieval("a")], is_resent=True))
    with closing(Ledger(url)) as ledger:
        assert ledger.exchange(Order(sought=["a", "c"])).retrieved == {"a": FOUND}
        assert ledger.retrieval_keys("run") == {"a"}
        assert ledger.retrieval_keys("none") == set()


def test_opening_drops_old_retrievals_in_small_portions_and_answers_never(
    url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(database, "_DROPPED_AT_ONCE", 2)
    with closing(Ledger(url)) as ledger, monkeypatch.context() as patch:
        patch.setattr(store.time, "time", lambda: 1.0)
        ledger.exchange(Order(calls=[call()], retrievals=[retrieval(key) for key in "abc"]))
    for key_count in (2, 1):
        with closing(Ledger(url)) as ledger:
            ledger.exchange(Order(retrievals=[retrieval("new")]))
            assert len(ledger.retrieval_keys("run")) == key_count
            assert ledger.get("h") == call()


def test_two_may_make_the_file_at_once(tmp_path: Path):
    path = tmp_path / "ledger.db"
    first = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    first.execute("BEGIN IMMEDIATE")
    first.execute("CREATE TABLE t (x)")
    threading.Timer(0.3, lambda: first.execute("COMMIT")).start()
    ledger = Ledger(f"sqlite:///{path}")
    assert ledger.get("none") is None
    ledger.close()
    first.close()


@pytest.mark.parametrize(("url", "expected"), [("", 10), ("?connect_timeout=3", "3")])
def test_a_server_that_does_not_answer_is_given_up_in_seconds(url: str, expected: object):
    engine = make_engine(f"postgresql+psycopg://me@127.0.0.1:9/none{url}")
    connecting: list[dict[str, object]] = []

    @sa.event.listens_for(engine, "do_connect")
    def _refuse(
        _dialect: object, _record: object, _arguments: object, parameters: dict[str, object]
    ) -> None:
        connecting.append(parameters)
        raise ConnectionError

    with pytest.raises(ConnectionError):
        engine.connect()
    (parameters,) = connecting
    assert parameters["connect_timeout"] == expected
    limits = {
        "tcp_user_timeout",
        "keepalives",
        "keepalives_idle",
        "keepalives_interval",
        "keepalives_count",
    }
    assert limits < {*parameters}


@pytest.fixture
def on_server(postgres: str) -> Iterator[Ledger]:
    with closing(Ledger(postgres)) as ledger:
        yield ledger


def test_limits_are_a_transactions_and_not_its_sessions(
    postgres: str, monkeypatch: pytest.MonkeyPatch
):
    engine = make_engine(postgres)
    limits = [
        sa.text(f"SHOW {on}_timeout") for on in ("lock", "statement", "idle_in_transaction_session")
    ]
    with engine.begin() as db:
        assert "0" not in [db.execute(limit).scalar() for limit in limits]
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
        session_limits = [db.execute(limit).scalar() for limit in limits]
        assert session_limits == ["0", "0", "0"], "a pooler gives the session to others"
    monkeypatch.setitem(database._LIMITS, "statement_timeout", "200ms")
    with pytest.raises(sa.exc.DBAPIError, match="due to statement timeout"), engine.begin() as db:
        db.execute(sa.text("SELECT pg_sleep(5)"))
    engine.dispose()


def test_a_lock_of_another_session_is_an_error(
    postgres: str, on_server: Ledger, monkeypatch: pytest.MonkeyPatch
):
    on_server.exchange(Order(calls=[call("before")]))
    monkeypatch.setitem(database._LIMITS, "lock_timeout", "200ms")
    with closing_engine(postgres) as holder:
        holder.execute(sa.text("LOCK TABLE spent"))
        start = time.monotonic()
        with pytest.raises(LedgerError, match="canceling statement due to lock timeout"):
            on_server.exchange(Order(calls=[call("kept")]))
        assert time.monotonic() - start < 5
    on_server.exchange(Order(calls=[call("kept")], is_resent=True))
    assert on_server.get("kept")


@pytest.mark.parametrize("queued", [True, False])
async def test_a_connection_that_brings_no_answer_is_left_for_another(
    queued: bool, postgres: str, on_server: Ledger, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(store, "_SAY_EVERY_S", 0.2)
    monkeypatch.setattr(store, "_ANSWER_WITHIN_S", 0.5)
    asking = queue.LedgerQueue(on_server, "r", Budget())
    with closing_engine(postgres) as db:
        other_sessions = sa.text(
            "SELECT pid FROM pg_stat_activity "
            "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        backends = [psutil.Process(pid) for pid in db.scalars(other_sessions)]
    for backend in backends:
        backend.suspend()
    try:
        recording = (
            asking.record(call("hung"))
            if queued
            else queue.to_the_end(on_server.record, [call("hung")])
        )
        await asyncio.wait_for(recording, 60)
        await asking.close()
        assert on_server.get("hung") == call("hung")
    finally:
        for backend in backends:
            backend.resume()


def test_who_stops_in_a_transaction_loses_its_locks(
    postgres: str, on_server: Ledger, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(database._LIMITS, "idle_in_transaction_session_timeout", "200ms")
    stopped = make_engine(postgres)
    with (
        pytest.raises(sa.exc.DBAPIError, match="idle-in-transaction timeout"),
        stopped.begin() as db,
    ):
        db.execute(sa.text("LOCK TABLE spent"))
        on_server.exchange(Order(calls=[call("waited")]))
        db.execute(sa.text("SELECT 1"))
    assert on_server.get("waited")
    stopped.dispose()


def test_a_server_that_is_restarted_is_unreachable_meanwhile_and_a_damaged_file_is_not(
    tmp_path: Path,
):
    with postgres_server() as server:
        ledger = Ledger(server.owners_url)
    with pytest.raises(LedgerError) as stopped:
        ledger.get("a")
    (tmp_path / "ledger.db").write_text("no database")
    with pytest.raises(LedgerError) as damaged:
        Ledger(ledger_url(LedgerStore(), tmp_path))
    assert stopped.value.unreachable
    assert not damaged.value.unreachable


def test_a_missing_driver_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(
        LedgerError, match=r"driver is not installed; run pip install 'qinglan\[postgres\]'"
    ):
        make_engine("postgresql+psycopg://me@127.0.0.1:9/none")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgresql://me:hush@127.0.0.1:9/none", r"me:\*\*\*@127.0.0.1"),
        ("mysql://me:hush@host/db", "LEDGER_URL holds no postgresql://"),
        ("postgresql://me:p@s:hush@host/db", "%40 for an @ in the password"),
        ("postgresql://me:pa@hush@host/db", "%40 for an @ in the password"),
    ],
)
def test_the_password_is_in_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, message: str
):
    with pytest.raises(ConfigError, match="needs the environment variable LEDGER_URL"):
        ledger_url(LedgerStore(url_env="LEDGER_URL"), tmp_path)
    monkeypatch.setenv("LEDGER_URL", url)
    with pytest.raises(LedgerError, match=message) as caught:
        Ledger(ledger_url(LedgerStore(url_env="LEDGER_URL"), tmp_path))
    assert "hush" not in str(caught.value)
