"""Gives a user's answer about a release to the flow run that waits for it, over Prefect's API."""

import time
from pathlib import Path

import httpx2

from qinglan.errors import ConfigError
from qinglan.ops.prefect.api import call
from qinglan.ops.prefect.server import server_at
from qinglan.serving.registry.approval import Approval, Waiting

_TIMEOUT_S = 10.0
_PAUSES_WITHIN_S, _POLL_S = 5.0, 0.5
_NO_LOGIN = (httpx2.codes.UNAUTHORIZED, httpx2.codes.FORBIDDEN)


def answer(waiting: Waiting, approval: Approval, state: Path) -> None:
    """Give an answer to the flow that waits for it, as the form in Prefect's UI does.

    Raises:
        ConfigError: the server can't be reached, or the flow does not wait.
    """
    advice = "; if it no longer runs, run it again, and answer then"
    try:
        with server_at(waiting.api_url, state).client(timeout_s=_TIMEOUT_S) as api:
            deadline, body = time.monotonic() + _PAUSES_WITHIN_S, {"run_input": approval.model_dump()}
            while True:
                result = call(api, "POST", f"flow_runs/{waiting.flow_run_id}/resume", body)
                if result["status"] != "ABORT" or time.monotonic() >= deadline:
                    break
                time.sleep(_POLL_S)  # the flow says that it waits, then pauses
    except (httpx2.HTTPError, ValueError) as error:
        if isinstance(error, httpx2.HTTPStatusError) and error.response.status_code in _NO_LOGIN:
            raise ConfigError(
                f"Prefect at {waiting.api_url}: did not accept the login; set PREFECT_API_URL to that address and "
                "PREFECT_API_AUTH_STRING or PREFECT_API_KEY to what it wants"
            ) from error
        raise ConfigError(f"Prefect at {waiting.api_url}: did not take the answer: {error}{advice}") from error
    if result["status"] != "ACCEPT":
        reason = (result.get("details") or {}).get("reason", result["status"])
        raise ConfigError(f"flow run {waiting.flow_run_id}: did not take the answer: {reason}{advice}")
