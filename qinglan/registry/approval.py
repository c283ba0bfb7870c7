"""A person's word on a model that the gate passed: one more rule of the decision."""

import time
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from qinglan.artifacts import write_json
from qinglan.errors import ConfigError
from qinglan.gate import Decision, Rule, Verdict, gain_of
from qinglan.prefect_api import call
from qinglan.prefect_server import server_at
from qinglan.report_words import rival_words
from qinglan.schema_versions import WAITING

APPROVAL = "approval"
WAITING_FILE = "waiting.json"
_REQUIRED = "a person's approval (gate.approval)"
_TIMEOUT_S = 10.0
_PAUSES_WITHIN_S, _POLL_S = 5.0, 0.5
_NO_LOGIN = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)


class Approval(BaseModel):
    """What a person decided."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    approve: bool
    reviewer: str
    comment: str = ""

    @property
    def found(self) -> str:
        """In words."""
        said = "approved" if self.approve else "refused"
        return f"{said} by {self.reviewer or 'a person without a name'}" + (f": {self.comment}" if self.comment else "")


class Waiting(BaseModel):
    """`waiting.json` in the gate's folder, for as long as the flow waits for a person."""

    flow_run_id: UUID
    api_url: str
    """Of the Prefect server that the flow runs under, without a login."""
    page: str
    """Where the form is."""
    until: str
    workbook: Path

    @classmethod
    def read(cls, folder: Path) -> "Waiting | None":
        """What a flow left that waits, or was killed while it waited."""
        try:
            return WAITING.read(cls, folder / WAITING_FILE)
        except (FileNotFoundError, ValidationError):
            return None

    def write(self, folder: Path) -> None:
        """Say where the answer is awaited."""
        write_json(folder / WAITING_FILE, WAITING.dump(self))


def decided_by(decision: Decision, approval: Approval | None) -> Decision:
    """The decision with a person's word in it; `undecided` while there is none."""
    outcome: dict[Verdict, Rule] = {
        "promote": Rule(name=APPROVAL, outcome="pass", found=approval.found if approval else "", required=_REQUIRED),
        "refuse": Rule(
            name=APPROVAL,
            outcome="fail",
            found=approval.found if approval else "",
            required=_REQUIRED,
            reason=approval.found if approval else "",
        ),
        "undecided": Rule(
            name=APPROVAL,
            outcome="unknown",
            found="nobody answered",
            required=_REQUIRED,
            reason=(
                "nobody approved it in time; `qinglan release approve RUN --reviewer NAME --profile PROFILE` still can"
            ),
        ),
    }
    verdict: Verdict = "undecided" if approval is None else "promote" if approval.approve else "refuse"
    rule = outcome[verdict]
    others = [each for each in decision.rules if each.name != APPROVAL]
    model = rival_words(decision.challenger).en
    instead = f" in place of version {decision.champion}" if decision.champion else ""
    gain = f"; {found}" if (found := gain_of(others)) else ""
    sentence = {
        "promote": f"Release {model}{instead}: {rule.found}, and all other rules hold{gain}.",
        "refuse": f"Do not release {model}: all other rules hold, but it was {rule.found}.",
        "undecided": f"Undecided about {model}: all other rules hold, but {rule.reason}.",
    }[verdict]
    return decision.model_copy(update={"verdict": verdict, "rules": [*others, rule], "sentence": sentence})


def lacks_only_approval(decision: Decision) -> bool:
    """Would a person's yes release it?"""
    blocking = [rule.name for rule in decision.rules if rule.outcome != "pass"]
    return decision.verdict == "undecided" and blocking == [APPROVAL]


def answer(waiting: Waiting, approval: Approval, state: Path) -> None:
    """Hand an answer to the flow that waits for it, as the form in Prefect's UI does.

    Args:
        state: the profile's `paths.state`.

    Raises:
        ConfigError: the server can't be reached, or the flow does not wait.
    """
    advice = "; if it no longer runs, run it again, and answer then"
    try:
        with server_at(waiting.api_url, state).client(timeout_s=_TIMEOUT_S) as api:
            result = _resume(api, waiting, approval)
            deadline = time.monotonic() + _PAUSES_WITHIN_S
            while result["status"] == "ABORT" and time.monotonic() < deadline:  # it says that it waits, then pauses
                time.sleep(_POLL_S)
                result = _resume(api, waiting, approval)
    except (httpx.HTTPError, ValueError) as error:
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in _NO_LOGIN:
            raise ConfigError(
                f"Prefect at {waiting.api_url}: did not accept the login; set PREFECT_API_URL to that address and "
                "PREFECT_API_AUTH_STRING or PREFECT_API_KEY to what it wants"
            ) from error
        raise ConfigError(f"Prefect at {waiting.api_url}: did not take the answer: {error}{advice}") from error
    if result["status"] != "ACCEPT":
        reason = (result.get("details") or {}).get("reason", result["status"])
        raise ConfigError(f"flow run {waiting.flow_run_id}: did not take the answer: {reason}{advice}")


def _resume(api: httpx.Client, waiting: Waiting, approval: Approval) -> dict[str, Any]:
    body = {"run_input": approval.model_dump()}
    result: dict[str, Any] = call(api, "POST", f"flow_runs/{waiting.flow_run_id}/resume", body)
    return result
