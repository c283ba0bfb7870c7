"""Text to be shown: how numbers read, how untrusted text is escaped, and names in both languages.

Numbers have fixed decimals, a true minus, and a dash for no value.
"""

import html
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

_MARKDOWN = re.compile(r"[\\\[\]<!`|*~&]|(?<!\w)_|_(?!\w)")
"""An underscore inside a word is no markup."""

Language = Literal["en", "zh"]
Show = Callable[[float | None], str]


class Both(NamedTuple):
    """One text in both languages of the page."""

    en: str
    zh: str


ARMS = {
    "original": Both("original question", "原问题"),
    "teacher": Both("teacher", "教师"),
    "base": Both("base model", "基座模型"),
    "sft": Both("SFT student", "SFT 学生"),
    "rl": Both("RL student", "RL 学生"),
    "champion": Both("champion", "现役模型"),
}
NONE = "–"


def number(value: bool | float | None, digits: int = 3) -> str:
    if isinstance(value, bool):
        return "✓" if value else "✗"
    return NONE if value is None else f"{value:,.{digits}f}".replace("-", "−")


def signed(value: float | None, digits: int = 3) -> str:
    """Always with its sign, except what rounds to 0."""
    if value is None:
        return NONE
    if abs(value) < 0.5 * 10**-digits:
        return f"{0:.{digits}f}"
    return f"{value:+,.{digits}f}".replace("-", "−")


def interval(ends: tuple[float, float] | None, show: Show = number) -> str:
    return NONE if ends is None else f"[{show(ends[0])}, {show(ends[1])}]"


def with_interval(
    value: float | None, ends: tuple[float, float] | None, show: Show, show_end: Show = number
) -> str:
    return f"{show(value)} {interval(ends, show_end)}" if ends else show(value)


def some(texts: Sequence[str], most: int = 5) -> str:
    """The first of them, and how many more there are."""
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


def usd(value: float | None) -> str:
    """Dollars; more decimals below one dollar and below one cent."""
    if value is None:
        return NONE
    digits = 2 if value >= 0.995 or value == 0 else 3 if value >= 0.01 else 4
    return f"${value:,.{digits}f}"


def latency(value_ms: float | None) -> str:
    """Milliseconds without the unit; one decimal below 10."""
    return number(value_ms, 0 if value_ms is not None and value_ms >= 10 else 1)


def slug(text: str) -> str:
    """Lower-case letters, digits and dashes, as Prefect wants the names of artifacts and blocks."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def duration(seconds: float) -> str:
    """`2.4 s`, `3 min 05 s` or `1:02:03`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return (
        f"{minutes} min {rest:02d} s"
        if minutes < 60
        else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
    )


def size(count: float) -> str:
    """Bytes as `512 B`, `3.4 MB` or `1.2 TB`, in powers of 1,000."""
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if count < 999.5:
            break
        count, unit = count / 1000, larger
    return f"{count:.{0 if unit == 'B' or count >= 99.5 else 1}f} {unit}"


def p_value(value: float | None) -> str:
    return NONE if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def without_controls(text: str) -> str:
    """Untrusted text for a terminal: no escape sequences, only lines and tabs."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def one_line(text: str) -> str:
    """Untrusted text on one line, without the control characters by which it could steer the
    terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def shown(text: str, chars: int = 60) -> str:
    """Untrusted text in quotes, on one line, without control characters, shortened."""
    line = one_line(text[: 4 * chars])
    return f'"{line[:chars]}…"' if len(line) > chars or len(text) > 4 * chars else f'"{line}"'


def markdown_table(heads: Sequence[str], rows: Iterable[Iterable[str]], align: str = "") -> str:
    """The caller escapes cells (`markdown_cell`); `align` has an `r` in the place of each column of
    numbers."""
    rule = ["---:" if each == "r" else "---" for each in align.ljust(len(heads))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows))


def markdown_cell(text: str) -> str:
    """Untrusted text on one line of a Markdown table, where it is neither a cell's end nor
    markup."""
    return _MARKDOWN.sub(r"\\\g<0>", " ".join(text.split()))


def forms_of(text: str) -> set[str]:
    """How a text may stand in a file: as it is, on one line, in Markdown, CSV, HTML, JSON, and JSON
    in JSON."""
    escaped = html.escape(text)
    numbered = escaped.replace("&quot;", "&#34;").replace("&#x27;", "&#39;")  # as Jinja writes them
    forms = {text, " ".join(text.split()), markdown_cell(text), text.replace('"', '""')}
    forms |= {escaped, numbered, html.escape(text, quote=False)}
    for _ in range(2):
        forms |= {
            json.dumps(form, ensure_ascii=ascii)[1:-1] for form in forms for ascii in (True, False)
        }
    return forms


def pattern_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds any of these texts in any form, the longest first; nothing where there is none."""
    forms = {form for text in texts if text.strip() for form in forms_of(text)}
    return re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True))) or r"(?!)")


def without_texts(text: str, hidden: Iterable[str]) -> str:
    """The text with a … for each of the hidden ones, in whatever form."""
    return pattern_of(hidden).sub("…", text)


def plain(value: object) -> str:
    """Any summary value; floats with four digits."""
    if isinstance(value, float):
        return f"{value:.4g}".replace("-", "−")
    return count(value) if isinstance(value, int) and not isinstance(value, bool) else str(value)


def capitalised(text: str) -> str:
    """The first letter in upper case, the others as they are."""
    return text[:1].upper() + text[1:]
