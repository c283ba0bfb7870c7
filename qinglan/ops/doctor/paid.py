"""One short call to each paid chat service, with the parameters that a run sends: only an answer shows that it answers.

The call goes through the ledger, so that it counts towards the month's budget, under a role of its own, so that
estimates don't learn from it.
"""

import asyncio
import json
import secrets

from qinglan.clients.chat import Account, ChatClient
from qinglan.clients.openai_protocol import JsonSchema, request_parameters
from qinglan.clients.roles import site_ledger
from qinglan.config import Endpoint, Profile
from qinglan.errors import QinglanError, TeacherError
from qinglan.ledger import Ledger
from qinglan.ledger.queue import LedgerQueue
from qinglan.ops.checks import Check
from qinglan.text import usd

ANSWER_WITHIN_S = 18.0
_PROBE = "-probe"
_WORD = "Answer with one word: ready"
_JSON = 'Answer with this JSON and nothing else: {"ready": true}'
_BY_HAND = "ask it by hand with the same model and parameters"
_HINTS = {
    "empty_answer": "raise {role}.max_tokens, as thoughts count too, or name another model",
    "teacher_refused": "name another model",
    "teacher_timeout": "it is slow or away; try again later, or raise {role}.timeout_s for the run",
    "teacher_rate_limited": "lower {role}.concurrency, set {role}.requests_per_minute, or raise the account's limits",
    "teacher_bad_request": "correct what it names: {role}.temperature, reasoning_effort, structured_output, extra_body",
}
_SCHEMA: JsonSchema = {
    "type": "object",
    "properties": {"ready": {"type": "boolean"}},
    "required": ["ready"],
    "additionalProperties": False,
}


def check_answer(profile: Profile, role: str, endpoint: Endpoint) -> Check:
    name, detail = f"{role} answers", f"{endpoint.model} at {endpoint.base_url}"
    run_id, price = f"doctor-{secrets.token_hex(4)}", profile.prices[endpoint.model]
    account = Account(run_id, profile.tenant.id, role + _PROBE, endpoint.model, price)
    try:
        with site_ledger(profile) as ledger:
            try:
                latency_ms = asyncio.run(_ask(profile, endpoint, account, ledger))
            except QinglanError as error:
                cost, text = usd(ledger.spent_usd(account.run_id)[0]), str(error).replace(_PROBE, "").rstrip(".")
                if ";" not in text and isinstance(error, TeacherError):
                    text += f"; {_HINTS.get(error.reason, _BY_HAND).format(role=role)}"
                return Check(name, detail, f"{text} (the probe cost {cost})")
            cost = usd(ledger.spent_usd(account.run_id)[0])
    except QinglanError as error:
        return Check(name, detail, str(error))
    return Check(name, f"{detail}, after {latency_ms / 1000:.1f} s, for {cost}")


async def _ask(profile: Profile, endpoint: Endpoint, account: Account, ledger: Ledger) -> float:
    timeout_s = min(endpoint.timeout_s, ANSWER_WITHIN_S)
    once = endpoint.model_copy(update={"max_retries": 0, "timeout_s": timeout_s, "concurrency": 1})
    schema = _SCHEMA if account.role == f"judge{_PROBE}" else None  # the judge alone is asked for JSON
    must_be_json = "response_format" in request_parameters(endpoint, schema)

    def parse(text: str) -> str:
        try:
            if must_be_json:
                json.loads(text)
        except ValueError as error:
            raise TeacherError(
                f"{account.role}: asked for JSON, it answers {text[:60]!r}; set {account.role}.structured_output: off",
                "bad_json",
            ) from error
        return text.strip()

    queue = LedgerQueue(ledger, account.run_id, profile.budget)
    client = ChatClient(once, endpoint.base_url, account, queue, key_salt=account.run_id)
    try:
        answer = await client.ask([{"role": "user", "content": _JSON if schema else _WORD}], parse, schema)
        return answer.latency_ms or 0.0
    finally:
        await client.close()
        await queue.close()
