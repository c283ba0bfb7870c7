"""Replaces personal numbers in a text by placeholders; the question around them stays.

Full-width digits and separators inside numbers are recognised. Names and addresses are not.
"""

import re
import unicodedata
from collections.abc import Callable
from datetime import date
from typing import NamedTuple

_LONGEST = 4_000
"""Characters that are looked at; nothing longer reaches a log."""
_GAP = r"[ \-‐-―\u00a0\u200b-\u200d\u2060\u3000\ufeff]?"
_CHINA = rf"(?:\+|00)86{_GAP}"
_IDENTITY_WEIGHTS = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)
_IDENTITY_CHECKS = "10X98765432"


def _is_identity(text: str) -> bool:
    """GB 11643: a day of birth, and a check digit by ISO 7064."""
    number = "".join(c for c in text.upper() if c.isdigit() or c == "X")
    try:
        date(int(number[6:10]), int(number[10:12]), int(number[12:14]))
    except ValueError:
        return False
    total = sum(weight * int(digit) for weight, digit in zip(_IDENTITY_WEIGHTS, number[:17], strict=True))
    return number[6:8] in ("18", "19", "20") and number[17] == _IDENTITY_CHECKS[total % 11]


def _is_bank_card(text: str) -> bool:
    """The Luhn check, which every card number passes and nine of ten others don't."""
    total = 0
    for place, digit in enumerate(reversed([c for c in text if c.isdigit()])):
        value = int(digit) * (1 + place % 2)
        total += value - 9 if value > 9 else value
    return total % 10 == 0


class _Kind(NamedTuple):
    placeholder: str
    pattern: re.Pattern[str]
    is_one: Callable[[str], bool] = lambda _: True


_KINDS = (
    _Kind("[邮箱]", re.compile(r"[A-Za-z0-9._%+\-]{1,64}@(?:[A-Za-z0-9\-]{1,63}\.){1,8}[A-Za-z0-9\-]{2,63}")),
    _Kind("[身份证号]", re.compile(rf"(?<!\d)[1-9](?:{_GAP}\d){{16}}{_GAP}[\dXx](?![\dA-Za-z])"), _is_identity),
    _Kind(
        "[银行卡号]",
        re.compile(rf"(?<!\d)(?:[3-69]\d{{12,18}}|[3-69]\d{{3}}(?:{_GAP}\d{{4}}){{2,3}}(?:{_GAP}\d{{1,4}})?)(?!\d)"),
        _is_bank_card,
    ),
    _Kind("[手机号]", re.compile(rf"(?<!\d)(?:{_CHINA})?1[3-9]\d{_GAP}\d{{4}}{_GAP}\d{{4}}(?!\d)")),
    _Kind(
        "[座机号]",
        re.compile(rf"(?<!\d)(?:{_CHINA}\(?0?|\(?0)(?:10|2\d|[3-9]\d\d)\)?{_GAP}\d{{3,4}}{_GAP}\d{{4}}(?!\d)"),
    ),
)
"""In this order: a card number may look like other numbers in part."""


def redact(text: str) -> str:
    text = text[:_LONGEST]
    for kind in _KINDS:
        # Full-width signs and foreign digits as ASCII, one for one, so that places in both texts are the same.
        plain = text if text.isascii() else "".join(map(_plain_sign, text))
        if "@" not in plain:
            if sum(map(str.isdigit, plain)) < 10:
                return text  # no number of a person has fewer
            if kind.placeholder == "[邮箱]":
                continue
        parts, end = [], 0
        for match in kind.pattern.finditer(plain):
            if kind.is_one(match.group()):
                parts += [text[end : match.start()], kind.placeholder]
                end = match.end()
        text = "".join([*parts, text[end:]])
    return text


def _plain_sign(sign: str) -> str:
    if "\uff01" <= sign <= "\uff5e":
        return chr(ord(sign) - 0xFEE0)
    digit = unicodedata.decimal(sign, None) if not sign.isascii() else None
    return sign if digit is None else str(digit)
