"""Asking through the batch API over real HTTP: every answer once, at half price, whatever dies on
the way."""

import asyncio
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from batch_api_simulator import BatchRequest, SimulatedBatchStore, app_with_batches, running_app
from doubles import Clock, KilledError
from fake_service import completion, script_of, trickle
from fixture_types import Serve
from ledger_calls import call, ledger_in
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from qinglan.clients.batch_api import (
    BatchOutcome,
    BatchProgress,
    batch_costs_usd,
    chunks,
    distill_by_batch,
)
from qinglan.clients.batch_api.service import BatchService, parse_result, request_line
from qinglan.clients.batch_api.store import BatchStore, batch_server
from qinglan.clients.completions import Account, Request, cost_usd
from qinglan.clients.transport import openai_client
from qinglan.config import BatchApi, Endpoint, LedgerStore, Price
from qinglan.errors import ConfigError, LedgerError, TeacherError
from qinglan.ledger import Ledger, ledger_url
from qinglan.runs.artifacts import hash_of

PRICE = Price(input_per_million_usd=1, output_per_million_usd=10)
REWRITER = "simulated-rewriter"
ACCOUNT = Account("r", "t", "teacher", REWRITER, PRICE)
SERVER = "simulator"
Start = Callable[..., "Teacher"]


class CountingStore(SimulatedBatchStore):
    """Remembers what was created. May list nothing, and its first result files lack a line, or end
    in a long one."""

    listed = True
    short = 0
    shorten = b'"status_code": 200'
    too_long = b""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.created: list[list[str]] = []

    def create(self, request: BatchRequest) -> dict[str, Any]:
        content = self.file(request.input_file_id).decode()
        self.created.append(re.findall(r'"custom_id": "(\w+)"', content))
        return super().create(request)

    def list(self, after: str | None = None, limit: int = 20) -> dict[str, Any]:
        if not self.listed:
            return {"object": "list", "data": [], "has_more": False}
        return super().list(after, limit)

    def file(self, file_id: str) -> bytes:
        content = super().file(file_id)
        if self.short and self.shorten in content:
            self.short -= 1
            return content[: content.rstrip().rfind(b"\n") + 1]
        return content + self.too_long if b'"response"' in content else content

    @property
    def times_asked(self) -> Counter[str]:
        return Counter(itertools.chain.from_iterable(self.created))


@dataclass
class Trouble:
    """ASGI middleware: what is on the list happens once each, to the first request that fits."""

    app: Any
    to_come: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path's beginning, and whether the answer is lost (`lose`), ends in the middle
    (`half`), or is no more than a status, or a status and an error's code."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trouble = self.trouble_for(scope)
        if trouble is None:
            await self.app(scope, receive, send)
            return
        self.to_come.remove(trouble)
        how = trouble[2]
        status, _, code = how.partition(" ")
        if status.isdigit():
            error = {"error": {"message": "bad key sk-secret", "code": code}}
            await JSONResponse(error, int(status))(scope, receive, send)
            return

        async def badly(message: Message) -> None:
            if how == "half" and message["type"] == "http.response.start":
                await send(message)
            elif how == "half" and message.get("body"):
                half = message["body"][: len(message["body"]) // 2]
                await send({**message, "body": half, "more_body": True})

        # uvicorn closes a connection whose answer never ends.
        await self.app(scope, receive, badly)

    def trouble_for(self, scope: Scope) -> tuple[str, str, str] | None:
        # The start and the end of the app have neither.
        method = scope.get("method")
        path = scope.get("path", "")
        for trouble in self.to_come:
            if trouble[0] == method and re.match(trouble[1], path):
                return trouble
        return None


@dataclass
class Teacher:
    """A running simulator."""

    url: str
    store: CountingStore
    trouble: Trouble


@pytest.fixture
def start_one() -> Iterator[Start]:
    """Start simulators that end with the test."""
    running = ExitStack()

    def start(**options: Any) -> Teacher:
        store = CountingStore(**options)
        trouble = Trouble(app_with_batches(store))
        return Teacher(f"{running.enter_context(running_app(trouble))}/v1", store, trouble)

    with running:
        yield start


@pytest.fixture(params=[pytest.param(None, id=pytest.HIDDEN_PARAM, marks=pytest.mark.slow)])
def start(start_one: Start) -> Start:
    """Start simulators in one of the many tests that take minutes together."""
    return start_one


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qinglan.clients.batch_api.jobs.CREATED_WITHIN_S", 0.1)
    monkeypatch.setattr("qinglan.clients.batch_api.service.MOST_BODY_BYTES", 2000)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with ledger_in(tmp_path) as opened:
        yield opened


def requests(count: int, model: str = REWRITER) -> list[Request]:
    bodies = (
        {
            "model": model,
            "max_tokens": 60,
            "messages": [{"role": "user", "content": f"虾青素怎么吃{number}"}],
        }
        for number in range(count)
    )
    return [Request(hash_of(body), body) for body in bodies]


def new_ledger(folder: Path, kind: type[Ledger] = Ledger) -> Ledger:
    return kind(ledger_url(LedgerStore(), folder))


async def ask(
    ledger: Ledger, url: str, questions: list[Request], settings: Any = None, **options: Any
) -> BatchOutcome:
    async with openai_client(Endpoint(model=REWRITER, timeout_s=120), url, "teacher") as client:
        return await distill_by_batch(
            questions,
            client=client,
            ledger=ledger,
            settings=BatchApi.model_validate({"poll_every_s": 0.02} | (settings or {})),
            **{"account": ACCOUNT, "server": SERVER, "retries": 3} | options,
        )


async def ask_and_die(ledger: Ledger, url: str, questions: list[Request], batches: int = 1) -> None:
    """Ask, and be cancelled once so many batches are there and have been looked at."""
    are_looked_at = asyncio.Event()

    def look(progress: BatchProgress) -> None:
        if progress.batches == batches:
            are_looked_at.set()

    asking = asyncio.create_task(ask(ledger, url, questions, on_progress=look))
    await asyncio.wait_for(are_looked_at.wait(), 120)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


def free(ledger: Ledger, questions: list[Request]) -> bool:
    """Could the live pass ask all of these?"""
    hashes = set(hashes_of(questions))
    return ledger.claim(hashes, ledger.holder) == hashes


def hashes_of(questions: list[Request]) -> list[str]:
    return [question.request_hash for question in questions]


def missing_of(questions: list[Request], outcome: BatchOutcome) -> list[Request]:
    return [question for question in questions if question.request_hash in outcome.missing]


async def test_answers_come_at_half_price_and_without_a_latency(ledger: Ledger, start: Start):
    clock = Clock()
    looks: list[BatchProgress] = []
    teacher = start(batch_s=60.0, clock=clock)
    questions = requests(5)

    def look(progress: BatchProgress) -> None:
        looks.append(progress)
        clock.now += 60

    outcome = await ask(ledger, teacher.url, questions, on_progress=look)
    assert outcome == BatchOutcome(answered=5, missing=(), reasons={})
    calls = ledger.get_many(hashes_of(questions)).values()
    usage = ledger.usage("r", "teacher")
    assert not ledger.open_batches(server=batch_server(SERVER, REWRITER), role="teacher")
    full_price = (
        PRICE.input_per_million_usd * usage.prompt_tokens + 10 * usage.completion_tokens
    ) / 1e6
    assert usage.cost_usd == pytest.approx(full_price / 2)
    assert {call.latency_ms for call in calls} == {None}
    assert [call.text for call in calls if "虾青素" not in call.text] == []
    assert looks[0].completed == 0
    assert (looks[-1].completed, looks[-1].total) == (5, 5)


async def test_what_the_ledger_has_is_not_sent_again_and_batches_are_no_larger_than_asked_for(
    ledger: Ledger, start: Start
):
    teacher = start()
    await ask(ledger, teacher.url, requests(4))
    assert (await ask(ledger, teacher.url, requests(7), {"max_requests": 2})).answered == 7
    assert sorted(map(len, teacher.store.created)) == [1, 2, 4]


async def test_failed_lines_are_recorded_and_left_to_the_live_pass(ledger: Ledger, start: Start):
    teacher = start(fault_rate=0.3, seed=2)
    questions = requests(40)
    outcome = await ask(ledger, teacher.url, questions)
    failed = len(outcome.missing)
    assert (outcome.answered + failed, outcome.reasons) == (40, {"http_500": failed})
    assert failed > 3
    assert teacher.store._files == {}, "no question stays at the service"
    usage = ledger.usage("r", "teacher")
    assert (usage.calls, usage.failed) == (40, failed)
    assert free(ledger, missing_of(questions, outcome))


REPORTED_USD, MOST_USD, ESTIMATED_USD = (
    0.5 * cost_usd(PRICE, *tokens) for tokens in ((100, 10), (6, 60), (5, 1))
)
"""Costs of the lines below; a question has 7 characters, its answer at most 60 tokens."""


@pytest.mark.parametrize(
    ("body", "reason", "usd", "estimated"),
    [
        (completion(" "), "empty_answer", REPORTED_USD, False),
        (completion("虾青", "error"), "teacher_interrupted", REPORTED_USD, False),
        (completion("x") | {"choices": []}, "teacher_bad_response", REPORTED_USD, False),
        (completion(" ") | {"usage": None}, "empty_answer", MOST_USD, True),
        ("busy", "teacher_bad_response", MOST_USD, True),
        (completion("虾青") | {"usage": None}, None, ESTIMATED_USD, False),
    ],
)
@pytest.mark.parametrize("number", [0, 1])
async def test_lines_are_paid_for_and_those_without_an_answer_left_to_the_live_pass(
    ledger: Ledger, body: Any, reason: str | None, usd: float, estimated: bool, number: int
):
    request_hash = requests(1)[0].request_hash
    its_or_another = requests(2)[number]
    store = BatchStore(ledger, ACCOUNT, SERVER, {its_or_another.request_hash: its_or_another})
    line = {"custom_id": request_hash, "response": {"status_code": 200, "body": body}}
    result = parse_result(json.dumps(line).encode())
    assert result
    # The batch's files are read again where lines were missing.
    for _ in range(2):
        await store.keep([result])
    (tried,) = ledger.attempts("request_hash", request_hash)
    assert (tried.outcome, tried.cost_usd, tried.estimated) == (
        reason or "stop",
        pytest.approx(usd),
        estimated,
    )
    assert store.reasons == ({reason: 1} if reason else {})


@pytest.mark.parametrize(
    "trouble",
    [
        ("POST", "/v1/files", "lose"),
        ("POST", "/v1/batches", "lose"),
        ("GET", "/v1/batches/batch_", "lose"),
        ("GET", "/v1/files/.*/content", "half"),
        ("DELETE", "/v1/files", "lose"),
    ],
)
async def test_a_lost_answer_costs_nothing(
    ledger: Ledger, start: Start, trouble: tuple[str, str, str]
):
    teacher = start()
    teacher.trouble.to_come.append(trouble)
    assert (await ask(ledger, teacher.url, requests(600), {"max_requests": 600})).answered == 600
    assert ledger.usage("r", "teacher").calls == 600
    assert teacher.trouble.to_come == []
    assert len(teacher.store.created) == 1


@pytest.mark.parametrize(
    ("window_s", "settings", "reason"),
    [(30.0, {}, "batch_expired"), (86_400.0, {"give_up_after_h": 0.6 / 3600}, "batch_cancelled")],
)
async def test_a_batch_that_expires_or_is_late_and_cancelled_gives_what_it_has(
    ledger: Ledger, start: Start, window_s: float, settings: dict[str, float], reason: str
):
    clock = Clock()
    questions = requests(50)
    teacher = start(batch_s=60.0, window_s=window_s, clock=clock)
    began_s = clock.now

    def look(_: BatchProgress) -> None:
        """It gets half of its way, and after that as far as an expired or cancelled one gets."""
        (batch,) = teacher.store._batches.values()
        clock.now = began_s + (30 if settings and batch.cancelling_s is None else 60)

    outcome = await ask(ledger, teacher.url, questions, settings, on_progress=look)
    assert free(ledger, missing_of(questions, outcome))
    assert (outcome.answered, outcome.reasons) == (25, {reason: 25})


async def test_a_batch_that_does_not_even_end_when_cancelled_is_given_up_and_its_bill_booked(
    ledger: Ledger, start: Start, monkeypatch: pytest.MonkeyPatch
):
    async def go_on(*_: object) -> None:
        """Behave as a service that can't cancel."""

    monkeypatch.setattr("qinglan.clients.batch_api.jobs._CANCEL_WITHIN_S", 0.05)
    monkeypatch.setattr("qinglan.clients.batch_api.service.BatchService.cancel", go_on)
    teacher = start(batch_s=2.0)
    questions = requests(3)
    outcome = await ask(ledger, teacher.url, questions, {"give_up_after_h": 0.05 / 3600})
    assert (len(outcome.missing), outcome.reasons) == (3, {"batch_late": 3})
    assert free(ledger, questions)
    assert ledger.open_batches(server=batch_server(SERVER, REWRITER), role="teacher")
    # Bought one by one meanwhile.
    ledger.record([call(request_hash) for request_hash in hashes_of(questions)])
    await asyncio.sleep(2.0)
    live_usd = ledger.spent_usd("r")[0]
    await ask(ledger, teacher.url, questions)
    assert ledger.spent_usd("r")[0] > live_usd, "the service charges for the late batch as well"
    assert not ledger.open_batches(server=batch_server(SERVER, REWRITER), role="teacher")


async def test_a_batch_that_fails_as_a_whole_says_why(ledger: Ledger, start: Start):
    questions = requests(3, model="no-such-model")
    outcome = await ask(ledger, start().url, questions)
    assert (outcome.answered, outcome.reasons) == (0, {"batch_model_not_found": 3})
    assert free(ledger, questions)


async def test_a_batch_that_another_account_sent_is_not_bought_again_unless_it_is_dropped(
    ledger: Ledger, start: Start
):
    first = start(batch_s=60.0)
    second = start()
    questions = requests(3)
    await ask_and_die(ledger, first.url, questions)
    (batch_id,) = first.store._batches
    with pytest.raises(
        ConfigError, match=f"teacher: the service knows no batch {batch_id}, which has 3 requests"
    ):
        await ask(ledger, second.url, questions)
    assert not free(ledger, questions)
    assert second.store.created == []
    assert (await ask(ledger, second.url, requests(4)[3:])).answered == 1, "others may go on"
    assert ledger.drop_batch(batch_id)
    assert ledger.drop_batch(batch_id) is None
    assert (await ask(ledger, second.url, questions)).answered == 3


@pytest.mark.parametrize("how", ["lose", "lose, and the list fails", "429", "503"])
async def test_a_batch_is_asked_for_again_at_once_where_it_was_refused_else_when_it_can_not_come(
    ledger: Ledger,
    start_one: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    how: str,
):
    monkeypatch.setattr(
        "qinglan.clients.batch_api.jobs.CREATED_WITHIN_S", 0.5 if how == "503" else 60.0
    )
    teacher = start_one()
    teacher.store.listed = False
    list_fails = [("GET", "/v1/batches", "400")] * ("the list fails" in how)
    teacher.trouble.to_come += [("POST", "/v1/batches", how.split(",")[0]), *list_fails]
    asking = asyncio.create_task(ask(ledger, teacher.url, requests(3)))
    await asyncio.sleep(1)
    said = caplog.text
    teacher.store.listed = True
    assert (await asyncio.wait_for(asking, 20)).answered == 3
    assert set(teacher.store.times_asked.values()) == {1}
    assert ("batch of 3 requests: the service did not confirm it; it is looked for" in said) == (
        how != "429"
    )


@pytest.mark.parametrize(
    ("flaw", "answered", "files_stay"),
    [
        ({"short": 2}, 4, False),
        ({"short": 9}, 3, True),
        ({"short": 9, "shorten": b'"status_code": 500'}, 4, True),
        ({"too_long": b"x" * 3000}, 4, True),
    ],
)
async def test_a_file_that_lacks_lines_is_read_again_and_not_deleted_nor_one_with_too_long_a_line(
    ledger: Ledger,
    start_one: Start,
    caplog: pytest.LogCaptureFixture,
    flaw: dict[str, Any],
    answered: int,
    files_stay: bool,
):
    # The fourth of five fails.
    teacher = start_one(fault_rate=0.3)
    vars(teacher.store).update(flaw)
    outcome = await ask(ledger, teacher.url, requests(5))
    assert outcome.answered == answered
    assert bool(teacher.store._files) == files_stay
    assert caplog.text.count("its files stay there") == files_stay


async def test_a_result_file_that_trickles_is_not_waited_for(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("qinglan.clients.batch_api.service._READ_WITHIN_S", 0.3)
    async with openai_client(
        Endpoint(model=REWRITER), serve(script_of((200, trickle()))).url, "teacher"
    ) as client:
        reading = BatchService(client, "teacher", retries=0).results("f")
        with pytest.raises(TeacherError, match="broke off: not whole after 0 s") as caught:
            await asyncio.wait_for(anext(reading), 20)
    assert caught.value.transient


async def test_a_restart_waits_for_its_batch_and_merges_somebody_elses_in_passing(
    tmp_path: Path, start: Start
):
    clock = Clock()
    teacher = start(batch_s=60.0, clock=clock)
    others_questions = requests(9)[6:]
    for batches, questions in enumerate((requests(4), others_questions), 1):
        with ledger_in(tmp_path) as ledger:
            await ask_and_die(ledger, teacher.url, questions, batches)
    teacher.store._batch_s = 0.0
    clock.now += 60
    with ledger_in(tmp_path) as ledger:
        assert (await ask(ledger, teacher.url, requests(6))).answered == 6
        assert len(ledger.get_many(hashes_of(others_questions))) == 3
    assert sorted(map(len, teacher.store.created)) == [2, 3, 4]


async def test_two_at_once_send_one_batch(tmp_path: Path, start: Start):
    teacher = start(batch_s=0.3)
    ledgers = [new_ledger(tmp_path) for _ in range(2)]
    outcomes = await asyncio.gather(*(ask(ledger, teacher.url, requests(5)) for ledger in ledgers))
    again = await asyncio.gather(*(ask(ledger, teacher.url, requests(5)) for ledger in ledgers))
    assert max(outcome.answered for outcome in outcomes) == 5
    assert [outcome.answered for outcome in again] == [5, 5]
    assert ledgers[0].usage("r", "teacher").calls == 5
    assert set(teacher.store.times_asked.values()) == {1}
    for ledger in ledgers:
        ledger.close()


async def test_a_batch_lock_is_not_waited_for_for_ever(
    ledger: Ledger, start: Start, monkeypatch: pytest.MonkeyPatch
):
    teacher = start(batch_s=60.0)
    questions = requests(3)
    await ask_and_die(ledger, teacher.url, questions)
    (job,) = ledger.open_batches(server=batch_server(SERVER, REWRITER), role="teacher")
    monkeypatch.setattr("qinglan.clients.batch_api.jobs._CANCEL_WITHIN_S", 0.3)
    said = rf"^batch {job.batch_id} is held by process \d+ on .*; wait until that run has ended"
    ledger.claim([f"batch-lock:{job.digest}"], ledger.holder + "another")
    with pytest.raises(LedgerError, match=said):
        await asyncio.wait_for(
            ask(ledger, teacher.url, questions, {"give_up_after_h": 0.1 / 3600}), 20
        )


async def test_what_somebody_is_asking_live_is_not_sent(tmp_path: Path, start: Start):
    teacher = start()
    questions = requests(3)
    with ledger_in(tmp_path) as others_ledger:
        others_ledger.claim([questions[1].request_hash], others_ledger.holder)
        with ledger_in(tmp_path) as ledger:
            outcome = await ask(ledger, teacher.url, questions)
        assert outcome.missing == (questions[1].request_hash,)
        assert not free(new_ledger(tmp_path), questions[1:2])


async def test_only_what_can_be_paid_for_is_sent(ledger: Ledger, start: Start):
    teacher = start()
    questions = requests(20)
    worst_case_usd = sum(batch_costs_usd(questions, PRICE, None))

    def left_usd() -> float:
        return worst_case_usd / 2 - ledger.spent_usd("r")[0]

    outcome = await ask(ledger, teacher.url, questions, affordable_usd=left_usd)
    assert left_usd() >= 0
    # The real tokens left room for a second batch.
    assert 10 < outcome.answered < 20
    assert outcome.reasons == {"over_budget": len(outcome.missing)}
    assert len(teacher.store.created) == 2


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("404", "teacher: .* has no batch API .*404.*set distill.mode=live"),
        ("405", "teacher: .* has no batch API .*405.*set distill.mode=live"),
        ("401", "refuses the key; check teacher.api_key_env"),
        *(
            (how, "account of the batch API is empty")
            for how in ("402", "403 30001", "400 Arrearage")
        ),
        ("403 insufficient_quota", "account of the batch API is empty"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
async def test_a_service_that_takes_no_batch_is_a_config_error_and_no_question_is_left_there(
    tmp_path: Path, start: Start, path: str, how: str, message: str
):
    teacher = start()
    teacher.trouble.to_come.append(("POST", path, how))
    with ledger_in(tmp_path) as ledger, pytest.raises(ConfigError, match=message) as caught:
        await ask(ledger, teacher.url, requests(2))
    assert "sk-secret" not in str(caught.value)
    assert teacher.store._files == {}
    with ledger_in(tmp_path) as ledger:
        assert (await ask(ledger, teacher.url, requests(2))).answered == 2


async def test_a_dead_service_leaves_all_to_the_live_pass_and_is_no_reason_to_look_for_a_batch(
    ledger: Ledger,
):
    outcome = await ask(ledger, "http://127.0.0.1:9/v1", requests(2), retries=0)
    assert (len(outcome.missing), outcome.reasons) == (2, {"teacher_unavailable": 2})
    async with openai_client(
        Endpoint(model=REWRITER), "http://127.0.0.1:9/v1", "teacher"
    ) as client:
        with pytest.raises(TeacherError) as caught:
            await BatchService(client, "teacher", retries=0).create("digest", "file")
    assert caught.value.retry_after_s == 0


class MortalLedger(Ledger):
    """Dies before or after one of its writes, and writes nothing from then on, cleaning up
    included."""

    dies_at = -1
    after = False
    writes = 0
    dead = False

    def __init__(self, url: Any) -> None:
        super().__init__(url)
        self.holder = self.holder.replace(f"|{self.holder.split('|')[1]}|", "|4999999|")

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name in ("save_batch", "claim", "release", "exchange", "record"):
            return partial(self.write, value)
        return value

    def write(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if self.dead:
            raise KilledError
        self.dead = self.writes == self.dies_at
        self.writes += 1
        if self.dead and not self.after:
            raise KilledError
        result = method(*arguments, **options)
        if self.dead:
            raise KilledError
        return result


@pytest.mark.parametrize("after", [False, True])
async def test_killed_anywhere_nothing_is_lost_or_paid_twice(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, after: bool
):
    monkeypatch.setattr("qinglan.clients.batch_api.jobs._LINES_PER_COMMIT", 2)
    teacher = start()
    questions = requests(6)
    deaths = 0
    while True:
        folder = tmp_path / str(deaths)
        mortal = new_ledger(folder, MortalLedger)
        mortal.dies_at = deaths
        mortal.after = after
        teacher.store.created.clear()
        try:
            await ask(mortal, teacher.url, questions)
            break
        except KilledError:
            deaths += 1
        with ledger_in(folder) as ledger:
            assert (await ask(ledger, teacher.url, questions)).answered == 6
            assert ledger.usage("r", "teacher").calls == 6
            assert not ledger.open_batches(server=batch_server(SERVER, REWRITER), role="teacher")
        assert set(teacher.store.times_asked.values()) == {1}, deaths
    assert deaths > 10


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            b'{"custom_id": "a", "response": {"status_code": 429, "body": {}}, "error": null}',
            "http_429",
        ),
        (b'{"custom_id": "a", "response": null, "error": {"code": "=cmd|x!A1"}}', "batch_failed"),
        (b"{half", None),
        (b'{"custom_id": 7}', None),
    ],
)
def test_a_line_without_an_answer_has_a_reason_unless_it_names_no_request(
    line: bytes, reason: str | None
):
    result = parse_result(line)
    if reason is None:
        assert result is None
    else:
        assert result
        assert (result.completion, result.reason) == (None, reason)


def test_chunks_by_count_and_bytes():
    questions = requests(5)
    length = len(request_line(questions[0]))
    assert [len(chunk) for chunk in chunks(questions, 2)] == [2, 2, 1]
    assert [len(chunk) for chunk in chunks(questions, 9, max_bytes=3 * length)] == [3, 2]


def test_costs_are_those_of_the_longest_answer_until_enough_calls_are_known():
    (guessed,) = batch_costs_usd(requests(1), PRICE, (100, 10, 49))
    assert guessed == pytest.approx(0.5 * (6 + 10 * 60) / 1e6)
    (by_mean_tokens,) = batch_costs_usd(requests(1), PRICE, (100, 10, 50))
    assert by_mean_tokens == pytest.approx(1.1 * 0.5 * (100 + 10 * 10) / 1e6)
