"""The errors of chat services: what they mean, and whether the request may be paid for.

docs/how-to/teachers.md says whose codes these are.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx2

from qinglan.clients.limits import retry_after_s
from qinglan.text import without_controls

if TYPE_CHECKING:
    import openai

NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError)
"""Failures before a request left: it costs nothing."""
_GATEWAY_TIMEOUTS = (504, 524)
"""The model behind the gateway may go on, and is paid for."""
_ACCOUNT = re.compile(
    r"arrearage|overdue|insufficient_?balance|exceeded_current_quota|(user|token)_quota|billing_"
    r"|free_?tier_?only|\b(1113|30001)\b",
    re.I,
)
_QUOTA = re.compile(r"insufficient_?quota", re.I)
_POLICY = re.compile(
    r"content_?policy|content_?filter|data_?inspection|sensitive_?content|\b1301\b", re.I
)
_CODE = re.compile(r"[\w.-]{1,40}", re.ASCII)
"""A code or type of an error that quotes nothing."""


@dataclass(frozen=True)
class ServiceError:
    """A failed request, as the service and the openai package tell of it."""

    status: int | None
    """HTTP status; None where no answer came."""
    latency_ms: float | None
    after_s: float
    """Seconds after which the service takes the same request again; 0 where it names none."""
    content: bytes
    """Body of the answer, which may say what was used."""
    may_be_paid: bool
    code: str
    """Code or type of the error."""
    summary: str
    """The failure in words that quote no row, unless no answer came."""
    said: str
    """The service's own words, which may quote a row."""
    unavailable_reason: str
    """Reason of a row where the service did not take the request."""
    is_policy: bool
    """The service refuses the question's content."""

    @property
    def reason(self) -> str:
        """The ledger's reason of this try."""
        return f"http_{self.status}" if self.status else self.unavailable_reason

    @property
    def is_final(self) -> bool:
        """The same request would be refused again."""
        return is_final(self.status)


def is_final(status: int | None) -> bool:
    """A request that was answered with this HTTP status would be refused again."""
    is_client_error = status is not None and 400 <= status < 500
    return is_client_error and status not in (408, 409, 429)


def read_error(error: "openai.APIError") -> ServiceError:
    """Read an error of the openai package; one with a status carries `latency_ms` with its
    response."""
    import openai

    cause = error.__cause__
    message = without_controls(error.message)
    code = without_controls(error.code or error.type or "")
    is_policy = bool(_POLICY.search(_names(error)))
    if not isinstance(error, openai.APIStatusError):
        is_timeout = isinstance(error, openai.APITimeoutError)
        summary = message
        if isinstance(cause, httpx2.ConnectError):
            summary = f"no connection: {cause}"
        return ServiceError(
            status=None,
            latency_ms=None,
            after_s=0.0,
            content=b"",
            may_be_paid=not isinstance(cause, NOT_SENT),
            code=code,
            summary=summary,
            said="",
            unavailable_reason="teacher_timeout" if is_timeout else "teacher_unavailable",
            is_policy=is_policy,
        )
    is_rate_limit = isinstance(error, openai.RateLimitError)
    shown_code = code if _CODE.fullmatch(code) else ""
    return ServiceError(
        status=error.status_code,
        latency_ms=error.response.extensions["latency_ms"],
        after_s=retry_after_s(error.response.headers),
        content=error.response.content,
        may_be_paid=error.status_code in _GATEWAY_TIMEOUTS,
        code=code,
        summary=f"HTTP {error.status_code} {shown_code}".rstrip(),
        said=message,
        unavailable_reason="teacher_rate_limited" if is_rate_limit else "teacher_unavailable",
        is_policy=is_policy,
    )


def account_is_empty(error: "openai.APIError", *, quota_may_return: bool = False) -> bool:
    """Does the service say that nothing more can be paid for, whatever is asked?

    `quota_may_return` where it may be the quota of a minute that is spent.
    """
    if getattr(error, "status_code", None) == 402:
        return True
    names = _names(error)
    if _ACCOUNT.search(names):
        return True
    return bool(_QUOTA.search(names)) and not quota_may_return


def _names(error: "openai.APIError") -> str:
    return f"{error.code} {error.type}"
