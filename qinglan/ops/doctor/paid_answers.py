"""Makes one short call to a paid chat service.

The call has the parameters that a run sends: only an answer shows that a service answers. It goes
through the ledger, so that it counts towards the month's budget, under a role of its own, so that
estimates don't learn from it.
"""

import json
import secrets

from qinglan.clients.chat import ChatClient
from qinglan.clients.completions import Account
from qinglan.clients.openai_protocol import JsonSchema, request_parameters
from qinglan.clients.roles import site_ledger
from qinglan.config import Endpoint, Profile
from qinglan.errors import QinglanError, TeacherError
from qinglan.grading.judge_answers import object_schema
from qinglan.ledger import Ledger
from qinglan.ledger.queue import LedgerQueue
from qinglan.ops.checks import Check
from qinglan.runs.processes import in_event_loop
from qinglan.text import usd

ANSWER_WITHIN_S = 18.0
_PROBE = "-probe"
"""Ends the role under which the ledger has the call."""
_ASK_FOR_WORD = "Answer with one word: ready"
_ASK_FOR_JSON = 'Answer with this JSON and nothing else: {"ready": true}'
_SCHEMA: JsonSchema = object_schema(ready={"type": "boolean"})
_HINTS = {
    "empty_answer": "raise {role}.max_tokens, as thoughts count too, or name another model",
    "teacher_refused": "name another model",
    "teacher_timeout": "it is slow or away; try again later, or raise {role}.timeout_s for the run",
    "teacher_rate_limited": (
        "lower {role}.concurrency, set {role}.requests_per_minute, or raise the account's limits"
    ),
    "teacher_bad_request": (
        "correct what it names: {role}.temperature, reasoning_effort, structured_output, extra_body"
    ),
}
"""Hint by the reason for which a call failed."""
_HINT_FOR_OTHERS = "ask it by hand with the same model and parameters"
_SHOWN_CHARS = 60


def check_answer(profile: Profile, role: str, endpoint: Endpoint) -> Check:
    """Ask a chat service for a word, and say what that cost."""
    name = f"{role} answers"
    detail = f"{endpoint.model} at {endpoint.base_url}"
    run_id = f"doctor-{secrets.token_hex(4)}"
    price = profile.prices[endpoint.model]
    account = Account(run_id, profile.tenant.id, role + _PROBE, endpoint.model, price)
    problem = None
    try:
        with site_ledger(profile) as ledger:
            try:
                latency_ms = _ask(profile, endpoint, account, ledger)
                detail += f", after {latency_ms / 1000:.1f} s"
            except QinglanError as error:
                problem = _problem_of(error, role)
            cost_usd, _ = ledger.spent_usd(account.run_id)
    except QinglanError as error:
        # The ledger can't be used, so that nothing was asked.
        return Check(name, detail, str(error))
    if problem:
        return Check(name, detail, f"{problem} (the probe cost {usd(cost_usd)})")
    return Check(name, f"{detail}, for {usd(cost_usd)}")


def _problem_of(error: QinglanError, role: str) -> str:
    """A failed call in words, with a hint where the error has none."""
    problem = str(error)
    if error.said:
        # The service speaks of our own question, not of a user's.
        problem = f"{problem}: {error.said}"
    problem = problem.replace(_PROBE, "").rstrip(".")
    if ";" not in problem and isinstance(error, TeacherError):
        hint = _HINTS.get(error.reason, _HINT_FOR_OTHERS)
        problem += f"; {hint.format(role=role)}"
    return problem


@in_event_loop
async def _ask(profile: Profile, endpoint: Endpoint, account: Account, ledger: Ledger) -> float:
    """Milliseconds that the answer took."""
    timeout_s = min(endpoint.timeout_s, ANSWER_WITHIN_S)
    once = endpoint.model_copy(update={"max_retries": 0, "timeout_s": timeout_s, "concurrency": 1})
    # Only the judge is asked for JSON.
    is_judge = account.role == f"judge{_PROBE}"
    schema = _SCHEMA if is_judge else None
    must_be_json = "response_format" in request_parameters(endpoint, schema)

    def parse(text: str) -> str:
        if not must_be_json:
            return text
        try:
            return str(json.loads(text))
        except ValueError as error:
            problem = (
                f"asked for JSON, it answers {text[:_SHOWN_CHARS]!r}; "
                f"set {account.role}.structured_output: off"
            )
            raise TeacherError(f"{account.role}: {problem}", "bad_json") from error

    queue = LedgerQueue(ledger, account.run_id, profile.budget)
    # The run's id as the key's salt: an earlier probe's answer must not be taken from the ledger.
    client = ChatClient(once, endpoint.base_url, account, queue, key_salt=account.run_id)
    content = _ASK_FOR_JSON if is_judge else _ASK_FOR_WORD
    try:
        answer = await client.ask([{"role": "user", "content": content}], parse, schema)
        return answer.latency_ms or 0.0
    finally:
        await client.close()
        await queue.close()
