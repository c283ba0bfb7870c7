"""No key may be shown, even if others repeat it: a service's error message, a proxy's address, a database's."""

import os
import re
from collections.abc import Iterator
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
        if value := os.environ.get(name, "").strip():
            values |= {value, *_parts(value)}
    return sorted((value for value in values if len(value) >= _SHORTEST), key=len, reverse=True)


def hide(check: Check, values: list[str]) -> Check:
    """The same without them."""

    def cleaned(text: str | None) -> str | None:
        if text is None:
            return None
        for value in values:
            text = text.replace(value, HIDDEN)
        return _CREDENTIALS.sub(f"{HIDDEN}@", text)

    return Check(check.name, cleaned(check.detail) or "", cleaned(check.problem), cleaned(check.note))


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


def _parts(value: str) -> set[str]:
    try:
        password = urlsplit(value).password if "://" in value else value.partition(":")[2]
    except ValueError:
        return set()
    return {password, unquote(password)} if password else set()
