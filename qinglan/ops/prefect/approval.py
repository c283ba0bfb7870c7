"""Gives a user's answer about a release to the flow run that waits for it, over Prefect's API."""

import time
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx2

from qinglan.errors import ConfigError
from qinglan.ops.prefect.api import call
from qinglan.ops.prefect.server import server_at
from qinglan.registry.approval import Approval, Waiting

_TRIES = 10
_POLL_S = 0.5
_RUN_AGAIN = "if it no longer runs, run it again, and answer then"
_LOG_IN = (
    "set PREFECT_API_URL to that address, and PREFECT_API_AUTH_STRING or PREFECT_API_KEY for it"
)


def answer(waiting: Waiting, approval: Approval, state: Path) -> None:
    """Give an answer to the flow that waits for it, as the form in Prefect's UI does.

    Raises ConfigError where the server can't be asked, or does not take the answer.
    """
    try:
        with server_at(waiting.api_url, state).client(timeout_s=10.0) as api:
            result = _resume(api, waiting.flow_run_id, approval)
    except (httpx2.HTTPError, ValueError) as error:
        if _is_refused_login(error):
            problem = f"did not accept the login; {_LOG_IN}"
        else:
            problem = f"did not take the answer: {error}; {_RUN_AGAIN}"
        raise ConfigError(f"Prefect at {waiting.api_url}: {problem}") from error
    status = result["status"]
    if status == "ACCEPT":
        return
    reason = (result.get("details") or {}).get("reason", status)
    run = f"flow run {waiting.flow_run_id}"
    raise ConfigError(f"{run}: did not take the answer: {reason}; {_RUN_AGAIN}")


def _resume(api: httpx2.Client, flow_run_id: UUID, approval: Approval) -> dict[str, Any]:
    """Give Prefect the approval, which it takes once the flow run is paused; its answer."""
    body = {"run_input": approval.model_dump()}
    for _ in range(_TRIES):
        result: dict[str, Any] = call(api, "POST", f"flow_runs/{flow_run_id}/resume", body)
        if result["status"] != "ABORT":
            break
        # A flow first says that it waits, then pauses.
        time.sleep(_POLL_S)
    return result


def _is_refused_login(error: Exception) -> bool:
    if not isinstance(error, httpx2.HTTPStatusError):
        return False
    return error.response.status_code in (httpx2.codes.UNAUTHORIZED, httpx2.codes.FORBIDDEN)
