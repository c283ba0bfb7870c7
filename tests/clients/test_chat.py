"""Asking over real HTTP: what is sent, when an answer is none, retries, and that nothing is paid
for twice."""

import asyncio
import gzip
import json
import re
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_service import completion, script_of, trickle
from fixture_types import Serve
from ledger_calls import ledger_in
from waiting import wait_until

from qinglan.clients import chat as chat_module
from qinglan.clients import limits
from qinglan.clients.chat import ChatClient
from qinglan.clients.completions import Account, request_of
from qinglan.clients.limits import CircuitBreaker
from qinglan.clients.openai_protocol import request_parameters
from qinglan.config import Budget, Endpoint, Price
from qinglan.errors import BudgetError, ConfigError, TeacherError
from qinglan.ledger.queue import LedgerQueue
from qinglan.runs.back_off import BackOff

MESSAGES = [{"role": "user", "content": "虾青素咋吃"}]
PRICE = Price(input_per_million_usd=1, output_per_million_usd=10)
TIMEOUT = "no answer"
GZIPPED = {"content-encoding": "gzip"}
CUT = (200, completion("虾青", "insufficient_system_resource"))
REPORTED_USD = (100 * 1 + 10 * 10) / 1e6
MOST_USD = (4 * 1 + 256 * 10) / 1e6
"""The cost of a question of five characters, and of an answer of max_tokens."""


@asynccontextmanager
async def client(
    path: Path,
    url: str,
    role: str = "teacher",
    salt: str = "",
    budget: Budget | None = None,
    **options: Any,
) -> AsyncIterator[ChatClient]:
    endpoint = Endpoint.model_validate({"model": "m", "max_retries": 2, "timeout_s": 5} | options)
    with ledger_in(path) as ledger:
        queue = LedgerQueue(ledger, "r", budget or Budget())
        account = Account("r", "t", role, "m", PRICE)
        chat = ChatClient(endpoint, url, account, queue, key_salt=salt)
        try:
            yield chat
        finally:
            await chat.close()
            await queue.close()


async def failure(path: Path, url: str, **options: Any) -> TeacherError:
    async with client(path, url, **options) as chat:
        with pytest.raises(TeacherError) as caught:
            await chat.ask(MESSAGES, str)
    return caught.value


async def ask_many(chat: ChatClient, count: int) -> list[Any]:
    questions = [[{"role": "user", "content": str(number)}] for number in range(count)]
    asking = (chat.ask(messages, str) for messages in questions)
    return await asyncio.gather(*asking, return_exceptions=True)


def usage(path: Path, role: str = "teacher") -> tuple[int, int]:
    with ledger_in(path) as ledger:
        usage_of_role = ledger.usage("r", role)
        return usage_of_role.calls, usage_of_role.failed


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries come at once, and no request goes through the proxy of the environment, where nobody
    is."""
    monkeypatch.setattr(chat_module, "_BACK_OFF", BackOff(0.0, 0.0))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("model", "sent"),
    [
        ("qwen-max", {"max_tokens": 9, "temperature": 0.5}),
        ("gpt-5-mini", {"max_completion_tokens": 9}),
        ("openai/gpt-5.1", {"max_completion_tokens": 9}),
        ("gpt-5-chat-latest", {"max_completion_tokens": 9, "temperature": 0.5}),
    ],
)
def test_reasoning_models_get_other_parameters(model: str, sent: dict[str, Any]):
    endpoint = Endpoint(model=model, max_tokens=9, temperature=0.5)
    assert request_parameters(endpoint) == {"model": model} | sent


@pytest.mark.parametrize(
    ("model", "setting", "kind"),
    [
        ("gpt-5", "auto", "json_schema"),
        ("deepseek-chat", "auto", "json_object"),
        ("Qwen/Qwen3-32B", "auto", None),
        ("Qwen/Qwen3-32B", "json_schema", "json_schema"),
        ("gpt-5", "off", None),
    ],
)
def test_json_is_asked_for_as_the_model_knows_it(model: str, setting: Any, kind: str | None):
    sent = request_parameters(Endpoint(model=model, structured_output=setting), {"type": "object"})
    assert sent.get("response_format", {}).get("type") == kind
    assert "response_format" not in request_parameters(
        Endpoint(model=model, structured_output=setting)
    )


async def test_an_answer_is_paid_once_over_clients_and_once_more_at_another_service(
    tmp_path: Path, serve: Serve
):
    service = serve(script_of((200, completion("虾青素 服用方法"))))
    async with client(tmp_path, service.url) as chat:
        first = await chat.ask(MESSAGES, str)
    async with client(tmp_path, service.url) as chat:
        second = await chat.ask(MESSAGES, str)
        assert (first.cached, second.cached, chat.cached_count) == (False, True, 1)
    assert (
        (first.value, first.cost_usd)
        == (second.value, second.cost_usd)
        == ("虾青素 服用方法", 0.0002)
    )
    assert len(service.bodies) == 1
    other_service = serve(script_of((200, completion("x"))))
    async with client(tmp_path, other_service.url, salt=other_service.url) as chat:
        assert (await chat.ask(MESSAGES, str)).value == "x"


async def test_the_same_question_under_way_is_sent_once_also_by_two_processes(
    tmp_path: Path, serve: Serve
):
    service = serve(lambda _: time.sleep(0.2) or (200, completion("x")))
    async with client(tmp_path, service.url) as first, client(tmp_path, service.url) as second:
        clients = (first, first, first, second)
        answers = await asyncio.gather(*(chat.ask(MESSAGES, str) for chat in clients))
    assert sorted(answer.cached for answer in answers) == [False, True, True, True]
    assert len(service.bodies) == 1


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (completion("虾青", "length"), "truncated"),
        (completion("", "content_filter"), "teacher_refused"),
        (completion(None, refusal="不行"), "teacher_refused"),
        (completion("x" * 11), "answer_too_long"),
        (completion("虾青", "tool_calls"), "unknown_ending"),
    ],
)
async def test_an_unusable_answer_is_a_failure_and_paid_once(
    tmp_path: Path, serve: Serve, body: dict[str, Any], reason: str
):
    service = serve(script_of((200, body)))
    for _ in range(2):
        error = await failure(tmp_path, service.url, max_answer_chars=10)
        assert (error.reason, error.transient) == (reason, False)
    assert len(service.bodies) == 1
    assert usage(tmp_path) == (1, 0)


async def test_what_arrives_while_the_process_is_stopped_is_not_asked_for_again(
    tmp_path: Path, serve: Serve
):
    service = serve(lambda _: time.sleep(0.3) or (200, completion("虾青素")))
    async with client(tmp_path, service.url, timeout_s=1) as chat:
        asking = asyncio.ensure_future(chat.ask(MESSAGES, str))
        await asyncio.to_thread(wait_until, "the request", lambda: service.bodies)
        signal.signal(signal.SIGUSR1, lambda *_: time.sleep(1.5))  # while it waits, as SIGSTOP
        threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1)).start()
        assert (await asking).cost_usd
    assert len(service.bodies) == 1


async def test_a_body_without_end_is_not_read(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(limits, "MOST_BODY_BYTES", 1000)
    service = serve(
        script_of((200, gzip.compress(json.dumps(completion("x" * 1000)).encode()), GZIPPED))
    )
    error = await failure(tmp_path, service.url)
    assert (error.reason, error.transient, len(service.bodies)) == ("answer_too_long", False, 1)
    assert "more than 1,000 bytes" in str(error)
    assert usage(tmp_path) == (1, 1)
    assert cost(tmp_path) == (pytest.approx(MOST_USD), pytest.approx(MOST_USD), [True])
    monkeypatch.setattr(limits, "MOST_BODY_BYTES", 2000)
    async with client(tmp_path, service.url) as chat:
        assert (await chat.ask(MESSAGES, len)).value == 1000


@pytest.mark.parametrize(
    ("fault", "wait_s"),
    [
        ((500, {}), 0.0),
        ((429, {"error": {"message": "slow"}}, {"retry-after-ms": "150"}), 0.3),
        (None, 0),
        (CUT, 0),
    ],
)
async def test_transient_failures_are_retried_when_the_service_says(
    tmp_path: Path, serve: Serve, fault: Any, wait_s: float
):
    service = serve(script_of(fault, fault, (200, completion("x"))))
    start = time.monotonic()
    async with client(tmp_path, service.url) as chat:
        assert (await chat.ask(MESSAGES, str)).value == "x"
    assert time.monotonic() - start >= wait_s
    assert usage(tmp_path)[0] == 3


async def test_a_malformed_answer_is_retried_and_shows_no_key(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("A_KEY", "sk-secret")
    service = serve(script_of((200, completion("x"), {"x-huge": "h" * 20_000})))
    error = await failure(tmp_path, service.url, api_key_env="A_KEY", max_retries=1)
    assert (error.reason, error.transient) == ("teacher_unavailable", True)
    chain = [error, error.__cause__, getattr(error.__cause__, "__cause__", None)]
    assert "sk-secret" not in "".join(map(repr, chain))
    assert usage(tmp_path) == (2, 2)


async def test_who_fails_lets_the_other_try(tmp_path: Path, serve: Serve):
    service = serve(script_of((500, {}), (200, completion("x"))))
    asking = partial(client, tmp_path, service.url, max_retries=0)
    async with asking() as first, asking() as second:
        answers = await asyncio.gather(
            first.ask(MESSAGES, str), second.ask(MESSAGES, str), return_exceptions=True
        )
    assert [getattr(answer, "value", None) for answer in answers] in ([None, "x"], ["x", None])


async def test_no_answer_gives_the_terminal_a_command(tmp_path: Path, serve: Serve):
    osc = "\x1b]52;c;aGk=\x07不行"
    replies: tuple[Any, ...] = (
        (200, completion(None, refusal=osc)),
        (400, {"error": {"message": osc}}),
        (500, {"error": {"message": osc}}),
    )
    for number, reply in enumerate(replies):
        error = await failure(tmp_path / str(number), serve(script_of(reply)).url, max_retries=0)
        assert "不行" in error.said
        assert "\x1b" not in error.said
        assert "不行" not in str(error), (
            "it may quote the question, which no page or notification may show"
        )


OVERDUE = (
    "billing_hard_limit_reached",
    "AllocationQuota.FreeTierOnly",
    "1113",
    "AccountOverdueError",
    "insufficient_user_quota",
    "pre_consume_token_quota_failed",
)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (
            (401, {"error": {"message": "bad key sk-secret"}}),
            "the service refuses the key; check the environment",
        ),
        ((403, {}), "refuses the key"),
        ((404, {}), "knows no model 'm'; set teacher.model"),
        ((429, {"error": {"message": "", "code": "insufficient_quota"}}), "quota is spent"),
        (
            (429, {"error": {"message": "", "type": "exceeded_current_quota_error"}}),
            "quota is spent",
        ),
        *(((403, {"error": {"message": "", "code": code}}), "quota is spent") for code in OVERDUE),
        (
            (402, {"error": {"message": "Insufficient Balance", "code": "invalid_request_error"}}),
            "spent .HTTP 402 invalid_request_error.; top",
        ),
        (
            (400, {"error": {"message": "", "code": "Arrearage", "type": "Arrearage"}}),
            "top it up and run again",
        ),
        ((403, {"code": 30001, "message": "balance is insufficient"}), "quota is spent"),
    ],
)
async def test_what_no_row_could_survive_is_a_config_error(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch, reply: Any, message: str
):
    monkeypatch.setenv("A_KEY", "sk-secret")
    async with client(
        tmp_path, serve(script_of(reply)).url, api_key_env="A_KEY", max_retries=0
    ) as chat:
        with pytest.raises(ConfigError, match=message) as caught:
            await chat.ask(MESSAGES, str)
    assert "sk-secret" not in str(caught.value)


def files_with(folder: Path, text: bytes) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text in path.read_bytes()]


async def test_the_secret_is_sent_but_never_kept(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
):
    # As `export KEY=$(cat file)` in some shells leaves it.
    monkeypatch.setenv("A_KEY", "sk-secret\n")
    service = serve(script_of((500, {"error": {"message": "x"}}), (200, completion("x"))))
    async with client(tmp_path, service.url, api_key_env="A_KEY") as chat:
        await chat.ask(MESSAGES, str)
    assert service.headers[0]["authorization"] == "Bearer sk-secret"
    assert not files_with(tmp_path, b"sk-secret")


async def test_no_more_requests_at_once_than_allowed(tmp_path: Path, serve: Serve):
    at_once = 0
    most = 0

    def slow(_: Any) -> Any:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        time.sleep(0.03)
        at_once -= 1
        return 200, completion("x")

    async with client(tmp_path, serve(slow).url, concurrency=2) as chat:
        await ask_many(chat, 6)
    assert most == 2


async def test_closing_lets_answers_come_in_and_sends_nothing_new(tmp_path: Path, serve: Serve):
    arrived = threading.Semaphore(0)
    service = serve(lambda _: arrived.release() or time.sleep(0.1) or (200, completion("x")))
    async with client(tmp_path, service.url, concurrency=2) as chat:
        questions = [[{"role": "user", "content": str(number)}] for number in range(6)]
        tasks = [asyncio.create_task(chat.ask(messages, str)) for messages in questions]
        await asyncio.to_thread(lambda: arrived.acquire() and arrived.acquire())
        for task in tasks:
            task.cancel()
    assert len(service.bodies) == 2
    assert usage(tmp_path) == (2, 0)


@pytest.mark.parametrize(
    "said",
    [
        {"reasoning_content": "塞纳河穿过巴黎"},
        {"reasoning_content": "塞纳河穿过巴黎", "reasoning": {"summary": []}},
    ],
)
async def test_a_chain_of_thought_comes_with_the_answer_also_from_the_ledger(
    tmp_path: Path, serve: Serve, said: dict[str, Any]
):
    reply = completion("巴黎")
    reply["choices"][0]["message"] |= said
    async with client(tmp_path, serve(lambda _: (200, reply)).url) as chat:
        answers = [await chat.ask(MESSAGES, str) for _ in range(2)]
    assert [answer.value for answer in answers] == ["巴黎"] * 2
    assert [answer.reasoning for answer in answers] == ["塞纳河穿过巴黎"] * 2
    assert [answer.cached for answer in answers] == [False, True]


@pytest.mark.parametrize(
    "message", [{"content": "改写" * 50}, {"content": "巴黎", "reasoning_content": "想" * 98}]
)
async def test_answers_that_are_not_counted_still_cost(
    tmp_path: Path, serve: Serve, message: dict[str, str]
):
    # As some gateways answer.
    reply = {"choices": [{"message": message, "finish_reason": None}], "usage": None}
    async with client(tmp_path, serve(script_of((200, reply))).url) as chat:
        answer = await chat.ask(MESSAGES, str)
    # 80 tokens of answer at $10 a million.
    assert answer.cost_usd >= 80 * 10 / 1e6


def cost(path: Path) -> tuple[float, float, list[bool]]:
    """The cost by the books of the run and by those of the request, and what of it is estimated."""
    with ledger_in(path) as ledger:
        lines = ledger.spending("run")
        request_hash = request_of(Endpoint(model="m"), "", MESSAGES).request_hash
        attempts = ledger.attempts("request_hash", request_hash)
        spending_usd = sum(line.cost_usd for line in lines)
        assert ledger.usage("r", "teacher").cost_usd == pytest.approx(spending_usd)
        return (
            ledger.spent_usd("r")[0],
            sum(attempt.cost_usd for attempt in attempts),
            [attempt.estimated for attempt in attempts],
        )


@pytest.mark.parametrize(
    ("reply", "reason", "usd", "estimated"),
    [
        ((200, {"error": {"message": "busy"}}), "teacher_bad_response", MOST_USD, True),
        ((200, {**completion("x"), "choices": []}), "teacher_bad_response", REPORTED_USD, False),
        (
            (200, {"choices": [], "usage": {"prompt_tokens": 100}}),
            "teacher_bad_response",
            MOST_USD,
            True,
        ),
        (
            (200, b"<html>captive portal</html>", {"content-type": "text/html"}),
            "teacher_bad_response",
            MOST_USD,
            True,
        ),
        ((200, b"{half"), "teacher_bad_response", MOST_USD, True),
        (CUT, "teacher_interrupted", REPORTED_USD, False),
        ((500, {}), "teacher_unavailable", 0.0, False),
        ((504, {}), "teacher_unavailable", MOST_USD, True),
        ((429, {}), "teacher_rate_limited", 0.0, False),
        ((400, {"error": {"message": "too long"}}), "teacher_bad_request", 0.0, False),
        (None, "teacher_unavailable", MOST_USD, True),
        (TIMEOUT, "teacher_timeout", MOST_USD, True),
        ((200, trickle()), "teacher_timeout", MOST_USD, True),
    ],
)
async def test_a_failed_call_has_a_reason_and_costs_what_the_service_says_or_the_most_that_it_can(
    tmp_path: Path, serve: Serve, reply: Any, reason: str, usd: float, estimated: bool
):
    late = threading.Event()

    def answer_late(_: Any) -> Any:
        late.wait(60)
        return 200, completion("x")

    script = answer_late if reply is TIMEOUT else script_of(reply)
    timeout_s = 0.3 if reason == "teacher_timeout" else 60
    error = await failure(tmp_path, serve(script).url, max_retries=0, timeout_s=timeout_s)
    late.set()
    assert (error.reason, error.transient) == (reason, reason != "teacher_bad_request")
    # It may have been paid for: the next attempt is the batch's to make.
    assert usage(tmp_path) == (1, 1)
    assert cost(tmp_path) == (pytest.approx(usd), pytest.approx(usd), [estimated])


async def test_a_request_that_never_left_costs_nothing(tmp_path: Path):
    error = await failure(tmp_path, "http://127.0.0.1:9/v1", max_retries=0)
    assert (error.reason, str(error)) == (
        "teacher_unavailable",
        "teacher: no connection: Connection refused",
    )
    assert cost(tmp_path) == (0.0, 0.0, [False])


async def test_failed_calls_count_against_the_budget(tmp_path: Path, serve: Serve):
    service = serve(script_of(CUT))
    async with client(
        tmp_path, service.url, budget=Budget(per_run_usd=2.5 * REPORTED_USD), max_retries=9
    ) as chat:
        with pytest.raises(BudgetError):
            await chat.ask(MESSAGES, str)
    assert len(service.bodies) == 3


@pytest.mark.parametrize(
    ("role", "reason"),
    [("teacher", "empty_answer"), ("answerer", "empty_candidate"), ("judge", "empty_judgement")],
)
async def test_a_blank_answer_is_asked_once_more_and_again_by_a_later_run(
    tmp_path: Path, serve: Serve, role: str, reason: str
):
    blank = (200, completion(" "))
    service = serve(script_of(blank, blank, blank, (200, completion("x"))))
    error = await failure(tmp_path, service.url, role=role)
    assert (error.reason, error.transient, len(service.bodies)) == (reason, False, 2)
    async with client(tmp_path, service.url, role=role) as chat:
        assert (await chat.ask(MESSAGES, str)).value == "x"
    assert usage(tmp_path, role) == (4, 3)
    with ledger_in(tmp_path) as ledger:
        assert ledger.spent_usd("r")[0] == pytest.approx(4 * REPORTED_USD)


@pytest.mark.parametrize(
    ("last", "retries"), [("HTTP 500", 0), ("HTTP 429", 4), ("Request timed out.", 4)]
)
async def test_a_service_that_fails_again_and_again_gets_no_more_requests_but_one_a_while(
    tmp_path: Path,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    last: str,
    retries: int,
):
    monkeypatch.setattr(chat_module, "_TRIAL_EVERY_S", 0.5 if retries else 15.0)
    monkeypatch.setattr(limits, "_PAUSE", BackOff(0.0, 0.0))
    up = threading.Event()
    hangs = last == "Request timed out."
    status = 429 if last == "HTTP 429" else 500

    def reply(_: Any) -> Any:
        if up.is_set() or up.wait(float(hangs)):
            return 200, completion("x")
        return status, {}

    service = serve(reply)
    timeout_s = 0.2 if hangs else 5
    async with client(
        tmp_path, service.url, concurrency=2, max_retries=retries, timeout_s=timeout_s
    ) as chat:
        errors = await ask_many(chat, 100)
        sent = len(service.bodies)
        # Those under way are let through, and trials.
        assert 22 <= sent <= 24 + 2 * retries
        assert {error.transient for error in errors} == {True}
        reasons = {error.reason for error in errors}
        assert reasons <= {"teacher_unavailable", "teacher_timeout", "teacher_rate_limited"}
        said = (
            rf"^teacher m: \d+ requests in a row failed, the last with `{last}`; "
            r"see whether http\S+ answers"
        )
        assert re.search(said, str(errors[-1]))
        assert "paid for" not in str(errors[-1])
        (warning,) = caplog.messages
        assert re.search(said, warning)
        up.set()
        assert isinstance((await ask_many(chat, 1))[0], TeacherError) == (not retries)
        monkeypatch.setattr(chat, "_breaker", CircuitBreaker(1, 0.0))
        chat._breaker.failed()
        assert [answer.value for answer in await ask_many(chat, 30)] == ["x"] * 30
    assert usage(tmp_path) == (sent + 30, sent), "what was not sent is no request"


@pytest.mark.parametrize("share", [0.05, 0.7])
async def test_a_service_that_answers_little_gets_few_retries(
    tmp_path: Path, serve: Serve, share: float
):
    def reply(_: Any) -> Any:
        is_answered = len(service.bodies) * share % 1 < share
        return (200, completion("x")) if is_answered else (500, {})

    service = serve(reply)
    async with client(tmp_path, service.url, max_retries=4) as chat:
        outcomes = await ask_many(chat, 200)
    errors = [outcome for outcome in outcomes if isinstance(outcome, TeacherError)]
    assert len(service.bodies) <= 200 + 50 + 2 * (200 - len(errors))
    assert [error for error in errors if not error.transient] == []
    assert bool(errors) == (share < 0.5)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (403, None),
        (403, "content_policy_violation"),
        (400, "data_inspection_failed"),
        (400, "DataInspectionFailed"),
        (400, "content_filter"),
        (400, "1301"),
        (400, "InputTextSensitiveContentDetected"),
    ],
)
async def test_a_flagged_question_is_its_rows_failure(
    tmp_path: Path, serve: Serve, status: int, code: str | None
):
    flagged = (status, {"error": {"message": "flagged", "code": code}})

    def reply(body: dict[str, Any]) -> Any:
        if body["messages"] == MESSAGES:
            return flagged
        time.sleep(0.1)
        return 200, completion("x")

    service = serve(reply)
    # In the end the ledger knows the other's answer.
    for folder, at_once in (("one", 1), ("two", 2), ("two", 2)):
        async with client(tmp_path / folder, service.url, concurrency=at_once) as chat:
            error, answer = await asyncio.gather(
                chat.ask(MESSAGES, str),
                chat.ask([{"role": "user", "content": "y"}], str),
                return_exceptions=True,
            )
        assert answer.value == "x"
        assert re.match("teacher: HTTP .*refused", str(error))
        assert (error.reason, error.transient) == ("teacher_refused", False)
        assert "flagged" in error.said


@pytest.mark.parametrize("reply", [(500, {}), (403, {})])
async def test_a_403_is_the_accounts_where_nothing_is_answered(
    tmp_path: Path, serve: Serve, reply: Any
):
    def reply_to(body: dict[str, Any]) -> Any:
        return (403, {}) if body["messages"][0]["content"] == "0" else reply

    service = serve(reply_to)
    async with (
        asyncio.timeout(20),
        client(tmp_path, service.url, concurrency=4, max_retries=0, timeout_s=60) as chat,
    ):
        assert isinstance((await ask_many(chat, 40))[0], ConfigError)


async def test_a_spent_quota_may_be_that_of_the_minute_where_answers_came_before(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
):
    spent = (429, {"error": {"message": "", "code": "insufficient_quota"}})
    service = serve(script_of((200, completion("x")), spent, (200, completion("y")), spent))
    async with client(tmp_path, service.url) as chat:
        for n, answer in enumerate("xy"):
            assert (await chat.ask([{"role": "user", "content": str(n)}], str)).value == answer
        monkeypatch.setattr(chat_module, "_QUOTA_RETURNS_S", 0.0)
        with pytest.raises(ConfigError, match="quota is spent"):
            await chat.ask(MESSAGES, str)
