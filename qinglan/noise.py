"""Noise that leaves a question's meaning as it is: emoji, stutter, stories before it, other
scripts, and more.

The data stage gives it to copies of training rows, and the tiny base models read it in pretraining.
The words that it is made of are in `noise.yaml`; none of them names a thing that a question can be
about.
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
_PINYIN = re.compile("|".join(sorted(_TEXTS["pinyin"], key=len, reverse=True)))
_P_KAOMOJI = 0.2
_P_PINYIN = 0.6
"""Share of the known words that are written in pinyin; one is always."""


def add_noise(kind: NoiseKind, text: str, rng: Random) -> str:
    """The text with noise of that kind; unchanged where the kind finds nothing to change."""
    return _ADD[kind](text, rng) if text.strip() else text


def characters() -> list[str]:
    """What noise is made of, but for emoji and invisible characters, of which there are too many to
    know each."""
    texts = (
        *_TEXTS["openings"], *_TEXTS["sentences"], *_TEXTS["requests"], *_TEXTS["numbers"], *_TEXTS["punctuation"],
        *_TEXTS["syllables"], *_TEXTS["pinyin"].values(), *_TRADITIONAL.values(),
        *map(chr, _WIDE), *map(chr, _WIDE.values()),
    )  # fmt: skip
    return sorted(set("".join(texts)) - {"{", "}"})


def _emoji(text: str, rng: Random) -> str:
    kaomoji = [rng.random() < _P_KAOMOJI for _ in range(rng.randint(1, 3))]
    return _insert(text, [rng.choice(_TEXTS["kaomoji"] if one else _EMOJI) for one in kaomoji], rng)


def _stutter(text: str, rng: Random) -> str:
    """A piece of a word said again and again; never digits, which would become another number."""
    length = rng.choice((1, 2, 2, 3))
    starts = [n for n in range(len(text) - length + 1) if text[n : n + length].isalpha()]
    if not starts:
        return text
    end = rng.choice(starts) + length
    return text[:end] + text[end - length : end] * rng.choice((1, 1, 2, 3, 5, 9)) + text[end:]


def _story(text: str, rng: Random) -> str:
    sentences = rng.sample(_TEXTS["sentences"], rng.randint(1, 7))
    return "".join(
        (rng.choice(_TEXTS["openings"]), *sentences, rng.choice(_TEXTS["requests"]), text)
    )


def _pinyin(text: str, rng: Random) -> str:
    found = list(_PINYIN.finditer(text))
    if not found:
        return text
    always = rng.choice(found)
    for match in reversed(found):
        if match is always or rng.random() < _P_PINYIN:
            text = text[: match.start()] + _TEXTS["pinyin"][match.group()] + text[match.end() :]
    return text


def _latin(text: str, rng: Random) -> str:
    """A made-up word, as of a brand."""
    word = "".join(rng.sample(_TEXTS["syllables"], rng.randint(2, 3)))
    word = rng.choice((word, word.capitalize(), word.upper()))
    return rng.choice((f"{word} {text}", f"{text} {word}", f"（{word}）{text}"))


def _punctuation(text: str, rng: Random) -> str:
    marks: list[str] = _TEXTS["punctuation"]
    return _insert(text, rng.choices(marks, k=rng.randint(0, 2)), rng) + rng.choice(
        marks
    ) * rng.randint(2, 5)


def _number(text: str, rng: Random) -> str:
    """A number that has nothing to do with the question, as of an order."""
    digits = "".join(rng.choices("0123456789", k=rng.choice((6, 8, 11, 12, 16, 24, 40))))
    return str(rng.choice(_TEXTS["numbers"])).format(n=digits, q=text)


_ADD: Mapping[NoiseKind, Callable[[str, Random], str]] = {
    "emoji": _emoji, "stutter": _stutter, "story": _story, "pinyin": _pinyin, "latin": _latin,
    "punctuation": _punctuation, "number": _number,
    "full_width": lambda text, _: text.translate(_WIDE),
    "traditional": lambda text, _: text.translate(_TRADITIONAL),
    "invisible": lambda text, rng: _insert(text, rng.choices(_INVISIBLE, k=rng.randint(1, 4)), rng),
}  # fmt: skip


def _insert(text: str, pieces: list[str], rng: Random) -> str:
    """The pieces at some places, but not inside a Latin word or a number, nor before a character's
    accent."""
    places = [n for n in range(1, len(text) + 1) if not _is_joined(text[n - 1 : n + 1])]
    for place, piece in sorted(
        zip(rng.choices(places, k=len(pieces)), pieces, strict=True), reverse=True
    ):
        text = text[:place] + piece + text[place:]
    return text


def _is_joined(pair: str) -> bool:
    return len(pair) == 2 and (
        (pair.isascii() and " " not in pair) or bool(unicodedata.combining(pair[1]))
    )
