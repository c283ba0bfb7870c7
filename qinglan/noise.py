"""Noise that leaves a question's meaning as it is: emoji, stutter, other scripts, and more.

The data stage adds noise to copies of training rows, and the tiny base models read it in
pretraining. The words that noise is made of are in `noise.yaml`; none of them names a thing that a
question can be about.
"""

import re
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import yaml

from qinglan.config import NoiseKind

_TEXTS: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)
_EMOJI_BLOCKS = (
    (0x1F32D, 0x1F37F),
    (0x1F420, 0x1F43F),
    (0x1F450, 0x1F4FC),
    (0x1F60C, 0x1F64F),
    (0x2600, 0x26FF),
)
_EMOJI = [chr(code) for first, last in _EMOJI_BLOCKS for code in range(first, last + 1)]
_INVISIBLE = list("\u200b\u200c\u200d\u200e\u200f\u202a\u202b\u202d\u2060\u2066\ufeff")
_WIDE = {code: code + 0xFEE0 for code in range(0x21, 0x7F) if chr(code).isalnum()}
_TRADITIONAL = {ord(pair[0]): pair[1] for pair in _TEXTS["traditional"].split()}
# The longest word first, as a word may be the beginning of another.
_PINYIN = re.compile("|".join(sorted(_TEXTS["pinyin"], key=len, reverse=True)))
_P_KAOMOJI = 0.2
"""Share of the emoji that are drawn in characters."""
_P_PINYIN = 0.6
"""Share of the known words that are written in pinyin; one is always."""


def add_noise(kind: NoiseKind, text: str, rng: Random) -> str:
    """The text with noise of that kind; unchanged where the kind finds nothing to change."""
    if not text.strip():
        return text
    return _ADD[kind](text, rng)


def characters() -> list[str]:
    """The characters that noise is made of.

    Emoji and invisible characters are not among them: there are too many to know each.
    """
    texts = (
        *_TEXTS["openings"],
        *_TEXTS["sentences"],
        *_TEXTS["requests"],
        *_TEXTS["numbers"],
        *_TEXTS["punctuation"],
        *_TEXTS["syllables"],
        *_TEXTS["pinyin"].values(),
        *_TRADITIONAL.values(),
        *map(chr, _WIDE),
        *map(chr, _WIDE.values()),
    )
    # Braces stand only around the placeholders in `numbers`.
    return sorted(set("".join(texts)) - {"{", "}"})


def _emoji(text: str, rng: Random) -> str:
    are_kaomoji = [rng.random() < _P_KAOMOJI for _ in range(rng.randint(1, 3))]
    pieces = [rng.choice(_TEXTS["kaomoji"] if is_one else _EMOJI) for is_one in are_kaomoji]
    return _insert(text, pieces, rng)


def _stutter(text: str, rng: Random) -> str:
    """A piece of a word said again and again; never digits, which would become another number."""
    length = rng.choice((1, 2, 2, 3))
    last_start = len(text) - length
    starts = [start for start in range(last_start + 1) if text[start : start + length].isalpha()]
    if not starts:
        return text
    end = rng.choice(starts) + length
    piece = text[end - length : end]
    return text[:end] + piece * rng.choice((1, 1, 2, 3, 5, 9)) + text[end:]


def _story(text: str, rng: Random) -> str:
    sentences = rng.sample(_TEXTS["sentences"], rng.randint(1, 7))
    opening = rng.choice(_TEXTS["openings"])
    request = rng.choice(_TEXTS["requests"])
    return "".join((opening, *sentences, request, text))


def _pinyin(text: str, rng: Random) -> str:
    matches = list(_PINYIN.finditer(text))
    if not matches:
        return text
    always = rng.choice(matches)
    # From the end of the text, so that the places of earlier matches stay right.
    for match in reversed(matches):
        if match is always or rng.random() < _P_PINYIN:
            pinyin = _TEXTS["pinyin"][match.group()]
            text = text[: match.start()] + pinyin + text[match.end() :]
    return text


def _latin(text: str, rng: Random) -> str:
    """A made-up word, such as a brand's name, beside the text."""
    word = "".join(rng.sample(_TEXTS["syllables"], rng.randint(2, 3)))
    word = rng.choice((word, word.capitalize(), word.upper()))
    return rng.choice((f"{word} {text}", f"{text} {word}", f"（{word}）{text}"))


def _punctuation(text: str, rng: Random) -> str:
    marks: list[str] = _TEXTS["punctuation"]
    marks_inside = rng.choices(marks, k=rng.randint(0, 2))
    text = _insert(text, marks_inside, rng)
    return text + rng.choice(marks) * rng.randint(2, 5)


def _number(text: str, rng: Random) -> str:
    """A number that has nothing to do with the question, such as an order's."""
    digits = "".join(rng.choices("0123456789", k=rng.choice((6, 8, 11, 12, 16, 24, 40))))
    return str(rng.choice(_TEXTS["numbers"])).format(n=digits, q=text)


def _full_width(text: str, _: Random) -> str:
    return text.translate(_WIDE)


def _traditional(text: str, _: Random) -> str:
    return text.translate(_TRADITIONAL)


def _invisible(text: str, rng: Random) -> str:
    return _insert(text, rng.choices(_INVISIBLE, k=rng.randint(1, 4)), rng)


_ADD: Mapping[NoiseKind, Callable[[str, Random], str]] = {
    "emoji": _emoji,
    "stutter": _stutter,
    "story": _story,
    "pinyin": _pinyin,
    "latin": _latin,
    "punctuation": _punctuation,
    "number": _number,
    "full_width": _full_width,
    "traditional": _traditional,
    "invisible": _invisible,
}


def _insert(text: str, pieces: list[str], rng: Random) -> str:
    """The text with the pieces at random places.

    No place is inside a Latin word or a number, or before a character's accent.
    """
    places = [place for place in range(1, len(text) + 1) if not _is_joined(text, place)]
    drawn_places = rng.choices(places, k=len(pieces))
    # From the end of the text, so that the other places stay right.
    for place, piece in sorted(zip(drawn_places, pieces, strict=True), reverse=True):
        text = text[:place] + piece + text[place:]
    return text


def _is_joined(text: str, place: int) -> bool:
    """Tell whether the characters on both sides of a place belong together."""
    pair = text[place - 1 : place + 1]
    if len(pair) < 2:
        return False
    is_latin = pair.isascii() and " " not in pair
    return is_latin or bool(unicodedata.combining(pair[1]))
