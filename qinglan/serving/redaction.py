"""Replaces personal numbers in a text by placeholders; names and addresses are not recognised."""

import re
import unicodedata
from collections.abc import Callable
from datetime import date
from typing import NamedTuple

MOST_CHARS = 4_000
"""Characters of a text that are looked at; what stands behind them is cut off."""
_FEWEST_DIGITS = 10
"""No number of a person has fewer digits."""
_SIGNS = r" \-‐-―\u00a0\u200b-\u200d\u2060\u3000\ufeff"
_GAP = rf"[{_SIGNS}]?"
_MOBILE_GAP = rf"[{_SIGNS}\s·•・._/]{{0,2}}"
_MOBILE = (
    rf"(?<!\d)(?:(?:\+|00)?86{_MOBILE_GAP})?(?:\(1[3-9]\d\)|1[3-9]\d){_MOBILE_GAP}"
    rf"(?:\d{{4}}{_MOBILE_GAP}\d{{4}}|\d{{3}}{_MOBILE_GAP}\d{{5}})(?!\d)"
)
_EMAIL = r"[A-Za-z0-9._%+\-]{1,64}@(?:[A-Za-z0-9\-]{1,63}\.){1,8}[A-Za-z0-9\-]{2,63}"
_IDENTITY = rf"(?<!\d)[1-9](?:{_GAP}\d){{16}}{_GAP}[\dXx](?![\dA-Za-z])"
_BANK_CARD = (
    r"(?<!\d)(?:[3-69]\d{12,18}"
    rf"|[3-69]\d{{3}}(?:{_GAP}\d{{4}}){{2,3}}(?:{_GAP}\d{{1,4}})?)(?!\d)"
)
_LANDLINE = (
    rf"(?<!\d)(?:(?:\+|00)86{_GAP}\(?0?|\(?0)(?:10|2\d|[3-9]\d\d)\)?"
    rf"{_GAP}\d{{3,4}}{_GAP}\d{{4}}(?!\d)"
)
_CHECK_DIGITS = "0123456789X"
_FIRST_FULL_WIDTH = "\uff01"
_LAST_FULL_WIDTH = "\uff5e"
_FULL_WIDTH_DISTANCE = 0xFEE0
"""Distance of a full-width sign from its ASCII sign."""


def _is_identity(text: str) -> bool:
    """Check a citizen's number by GB 11643: a day of birth, and a check digit by ISO 7064."""
    number = "".join(sign for sign in text.upper() if sign.isdigit() or sign == "X")
    try:
        date(int(number[6:10]), int(number[10:12]), int(number[12:14]))
    except ValueError:
        return False
    total = 0
    for place, sign in enumerate(number):
        total += pow(2, 17 - place, 11) * _CHECK_DIGITS.index(sign)
    return number[6:8] in ("18", "19", "20") and total % 11 == 1


def _is_bank_card(text: str) -> bool:
    """The Luhn check, which every card number passes and nine of ten others don't."""
    digits = [int(sign) for sign in text if sign.isdigit()]
    total = 0
    for place, digit in enumerate(reversed(digits)):
        is_doubled = place % 2 == 1
        value = 2 * digit if is_doubled else digit
        total += value // 10 + value % 10
    return total % 10 == 0


class _PersonalNumber(NamedTuple):
    placeholder: str
    pattern: re.Pattern[str]
    is_valid: Callable[[str], bool] = lambda _: True
    """A check of what the pattern has matched."""


# The order matters: a card number may look like another number in part.
_EMAIL_ADDRESS = _PersonalNumber("[邮箱]", re.compile(_EMAIL))
_PERSONAL_NUMBERS = (
    _EMAIL_ADDRESS,
    _PersonalNumber("[身份证号]", re.compile(_IDENTITY), _is_identity),
    _PersonalNumber("[银行卡号]", re.compile(_BANK_CARD), _is_bank_card),
    _PersonalNumber("[手机号]", re.compile(_MOBILE)),
    _PersonalNumber("[座机号]", re.compile(_LANDLINE)),
)


def redact(text: str) -> str:
    """Replace personal numbers by placeholders; the question around them stays.

    Full-width digits and separators inside numbers are recognised.
    """
    text = text[:MOST_CHARS]
    for kind in _PERSONAL_NUMBERS:
        plain = _in_ascii(text)
        if "@" not in plain:
            digits = sum(sign.isdigit() for sign in plain)
            if digits < _FEWEST_DIGITS:
                return text
            if kind is _EMAIL_ADDRESS:
                continue
        text = _replace(kind, text, plain)
    return text


def _replace(kind: _PersonalNumber, text: str, plain: str) -> str:
    """The text with a placeholder for each number of this kind that `plain` shows."""
    parts: list[str] = []
    end = 0
    for match in kind.pattern.finditer(plain):
        if kind.is_valid(match.group()):
            parts.append(text[end : match.start()])
            parts.append(kind.placeholder)
            end = match.end()
    parts.append(text[end:])
    return "".join(parts)


def _in_ascii(text: str) -> str:
    """The text with full-width signs and foreign digits as ASCII.

    Each sign stands for one, so that places in both texts are the same.
    """
    return text if text.isascii() else "".join(map(_ascii_sign, text))


def _ascii_sign(sign: str) -> str:
    if _FIRST_FULL_WIDTH <= sign <= _LAST_FULL_WIDTH:
        return chr(ord(sign) - _FULL_WIDTH_DISTANCE)
    if sign.isascii():
        return sign
    digit = unicodedata.decimal(sign, None)
    return sign if digit is None else str(digit)
