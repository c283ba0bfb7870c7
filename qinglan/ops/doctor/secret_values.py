"""No key may be shown, even if others repeat it: a service's error message, a proxy's address, a database's."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import unquote, urlsplit

from qinglan.config import Profile
from qinglan.ops.checks import Check

HIDDEN = "•••"
_OTHER_SECRETS = (
    "PREFECT_API_KEY",
    "PREFECT_API_AUTH_STRING",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "RAY_AUTH_TOKEN",
)
_SHORTEST = 4
_CREDENTIALS = re.compile(r"(?<=://)[^\s/@]+@")


def secret_values(profile: Profile) -> list[str]:
    """What the variables hold that the profile names, the longest first; of an address its password too."""
    values: set[str] = set()
    for name in {*_names(profile.model_dump()), *_OTHER_SECRETS}:
        value = os.environ.get(name, "").strip()
        values.add(value)
        with suppress(ValueError):
            password = urlsplit(value).password if "://" in value else value.partition(":")[2]
            values |= {password or "", unquote(password or "")}
    return sorted((value for value in values if len(value) >= _SHORTEST), key=len, reverse=True)


def hide(check: Check, values: list[str]) -> Check:
    """The same check without the values, and without the login of any address."""

    def cleaned(text: str) -> str:
        for value in values:
            text = text.replace(value, HIDDEN)
        return _CREDENTIALS.sub(f"{HIDDEN}@", text)

    problem, note = (text and cleaned(text) for text in (check.problem, check.note))
    return Check(check.name, cleaned(check.detail), problem, note)


def _names(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if str(key).endswith("_env") and isinstance(value, str):
                yield value
            else:
                yield from _names(value)
    elif isinstance(node, list | tuple):
        for each in node:
            yield from _names(each)
