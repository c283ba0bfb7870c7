"""Gives a user's answer about a release to the flow run that waits for it, over Prefect's API."""

import time
from pathlib import Path

import httpx2

from qinglan.errors import ConfigError
from qinglan.ops.prefect.api import call
from qinglan.ops.prefect.server import server_at
from qinglan.registry.approval import Approval, Waiting

_TRIES, _POLL_S = 10, 0.5


def answer(waiting: Waiting, approval: Approval, state: Path) -> None:
    """Give an answer to the flow that waits for it, as the form in Prefect's UI does."""
    advice = "if it no longer runs, run it again, and answer then"
    try:
        with server_at(waiting.api_url, state).client(timeout_s=10.0) as api:
            for _ in range(_TRIES):
                body = {"run_input": approval.model_dump()}
                result = call(api, "POST", f"flow_runs/{waiting.flow_run_id}/resume", body)
                if result["status"] != "ABORT":
                    break
                time.sleep(_POLL_S)  # the flow says that it waits, then pauses
    except (httpx2.HTTPError, ValueError) as error:
        problem = f"did not take the answer: {error}"
        if isinstance(error, httpx2.HTTPStatusError) and error.response.status_code in (401, 403):
            problem = "did not accept the login"
            advice = "set PREFECT_API_URL to that address, and PREFECT_API_AUTH_STRING or PREFECT_API_KEY for it"
        raise ConfigError(f"Prefect at {waiting.api_url}: {problem}; {advice}") from error
    if result["status"] != "ACCEPT":
        reason = (result.get("details") or {}).get("reason", result["status"])
        raise ConfigError(
            f"flow run {waiting.flow_run_id}: did not take the answer: {reason}; {advice}"
        )
