"""The building blocks of sections: a frozen model that forbids unknown keys, and the kinds of
values."""

import os
import re
from typing import Annotated
from urllib.parse import parse_qsl, urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

EMBEDDED = "embedded"
"""Written in place of an address or a path: use the simulator that ships with Qinglan."""

# Whole words only: `sslkey=client.key` and `max_tokens=1` hold no secret.
_SECRET_PARAMETER = re.compile(
    r"pass(word|wd)?$|pwd|secret|(^|_)token$|(api|access)[_-]?key|^key$|^sig", re.IGNORECASE
)


def _auto_as_zero(value: object) -> object:
    return 0 if value == "auto" else value


Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
AutoCount = Annotated[int, Field(ge=0), BeforeValidator(_auto_as_zero)]
"""A number, or `auto`, kept as 0, where it follows from the rows."""


def uses_proxy(url: str) -> bool:
    """Should the proxy settings of the environment apply?

    They should not for this machine itself, where the simulators are.
    """
    return urlsplit(url).hostname not in ("127.0.0.1", "::1", "localhost")


def _refuse_secret_in_url(value: str) -> str:
    address = urlsplit(value)
    # A user's name alone is no secret to a database, but may be a token to a web server.
    is_login = address.password or (address.username and address.scheme in ("http", "https"))
    parameter_names = [name for name, _ in parse_qsl(address.query)]
    if is_login or any(map(_SECRET_PARAMETER.search, parameter_names)):
        raise ValueError("holds a password, which would be logged; give the address without it")
    return value


def _refuse_secret_as_name(value: str) -> str:
    if not re.fullmatch(r"[A-Z_][A-Z0-9_]{0,63}", value):
        raise ValueError(
            "write the name of an environment variable here, in capitals, never the key itself"
        )
    return value


def _require_pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{value!r} is no regular expression: {error}") from error
    return value


LocalPath = Annotated[str, AfterValidator(os.path.expanduser)]
Pattern = Annotated[str, AfterValidator(_require_pattern)]
Url = Annotated[str, AfterValidator(_refuse_secret_in_url)]
SecretName = Annotated[str, AfterValidator(_refuse_secret_as_name)]
"""Name of an environment variable that holds a secret."""


class Section(BaseModel):
    """One section of a profile."""

    # No namespace is protected: pydantic's own is `model_`, and ms-swift has a `model_type`.
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )
