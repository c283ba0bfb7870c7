"""Text to be shown: how numbers read, how untrusted text is escaped, and names in both languages.

Numbers have fixed decimals, a true minus, and a dash for no value.
"""

import difflib
import html
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

_MARKDOWN = re.compile(r"[\\\[\]<!`|*~&]|(?<!\w)_|_(?!\w)")
"""The signs of Markdown's markup; an underscore inside a word is none."""

_NEVER = r"(?!)"
"""A pattern that finds nothing."""

Language = Literal["en", "zh"]
Show = Callable[[float | None], str]


class Both(NamedTuple):
    """One text in both languages of the page."""

    en: str
    zh: str

    def in_language(self, language: Language) -> str:
        return self.en if language == "en" else self.zh


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
    """A number with fixed decimals; a truth value as a tick or a cross."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "✓" if value else "✗"
    return f"{value:,.{digits}f}".replace("-", "−")


def signed(value: float | None, digits: int = 3) -> str:
    """A number with its sign, also a plus; what rounds to 0 has none."""
    if value is None:
        return NONE
    if abs(value) < 0.5 * 10**-digits:
        return f"{0:.{digits}f}"
    return f"{value:+,.{digits}f}".replace("-", "−")


def interval(ends: tuple[float, float] | None, show: Show = number) -> str:
    if ends is None:
        return NONE
    low, high = ends
    return f"[{show(low)}, {show(high)}]"


def with_interval(
    value: float | None, ends: tuple[float, float] | None, show: Show, show_end: Show = number
) -> str:
    """The value, followed by its interval where there is one."""
    if ends is None:
        return show(value)
    return f"{show(value)} {interval(ends, show_end)}"


def some(texts: Sequence[str], most: int = 5) -> str:
    """The first `most` texts, and how many more there are."""
    listed = ", ".join(texts[:most])
    if len(texts) > most:
        return f"{listed} and {len(texts) - most} more"
    return listed


def count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


def usd(value: float | None) -> str:
    """Dollars; more decimals below one dollar and below one cent."""
    if value is None:
        return NONE
    # What rounds to $1.00 has the decimals of a dollar.
    if value >= 0.995 or value == 0:
        digits = 2
    elif value >= 0.01:
        digits = 3
    else:
        digits = 4
    return f"${value:,.{digits}f}"


def latency(value_ms: float | None) -> str:
    """Milliseconds without the unit; one decimal below 10."""
    is_long = value_ms is not None and value_ms >= 10
    return number(value_ms, 0 if is_long else 1)


def joined(texts: Sequence[Both], joint: Both) -> Both:
    """The texts one after the other, with `joint` between them."""
    english = joint.en.join([text.en for text in texts])
    chinese = joint.zh.join([text.zh for text in texts])
    return Both(english, chinese)


def slug(text: str) -> str:
    """Lower-case letters, digits and dashes, as Prefect wants the names of artifacts and blocks."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def duration(seconds: float) -> str:
    """`2.4 s`, `3 min 05 s` or `1:02:03`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s:02d} s"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest_s:02d}"


def size(count: float) -> str:
    """Bytes as `512 B`, `3.4 MB` or `1.2 TB`, in powers of 1,000."""
    unit = "B"
    for larger_unit in ("kB", "MB", "GB", "TB"):
        # What would round to 1000 takes the next unit.
        if count < 999.5:
            break
        count /= 1000
        unit = larger_unit
    is_whole = unit == "B" or count >= 99.5
    return f"{count:.0f} {unit}" if is_whole else f"{count:.1f} {unit}"


def p_value(value: float | None) -> str:
    if value is None:
        return NONE
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def without_controls(text: str) -> str:
    """Untrusted text for a terminal: no escape sequences, only lines and tabs."""

    def is_harmless(character: str) -> bool:
        return character in "\n\t" or unicodedata.category(character) != "Cc"

    return "".join(filter(is_harmless, text))


def one_line(text: str) -> str:
    """Untrusted text on one line, without control characters, which could steer the terminal."""
    printable = (character if character.isprintable() else " " for character in text)
    return " ".join("".join(printable).split())


def shown(text: str, chars: int = 60) -> str:
    """Untrusted text in quotes, on one line, without control characters, shortened."""
    # A text may be megabytes long: only so much is read as one line takes, even with many spaces.
    beginning = text[: 4 * chars]
    line = one_line(beginning)
    if len(line) > chars or len(text) > len(beginning):
        return f'"{line[:chars]}…"'
    return f'"{line}"'


def markdown_table(heads: Sequence[str], rows: Iterable[Iterable[str]], align: str = "") -> str:
    """A table in Markdown.

    Args:
        heads: the columns' heads.
        rows: cells, which the caller has escaped with `markdown_cell`.
        align: an `r` in the place of each column that is aligned right, such as one of numbers.
    """
    rule = ["---:" if side == "r" else "---" for side in align.ljust(len(heads))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows))


def markdown_cell(text: str) -> str:
    """Untrusted text for a cell of a Markdown table: on one line, its signs of markup escaped."""
    return _MARKDOWN.sub(r"\\\g<0>", " ".join(text.split()))


def forms_of(text: str) -> set[str]:
    """The forms in which a text may stand in a file.

    These are: as it is, on one line, in Markdown, CSV, HTML, JSON, and JSON in JSON.
    """
    escaped = html.escape(text)
    # Jinja writes the quotes as numbers.
    escaped_by_jinja = escaped.replace("&quot;", "&#34;").replace("&#x27;", "&#39;")
    forms = {
        text,
        " ".join(text.split()),
        markdown_cell(text),
        text.replace('"', '""'),
        escaped,
        escaped_by_jinja,
        html.escape(text, quote=False),
    }
    # The second round gives JSON in JSON.
    for _ in range(2):
        for form in list(forms):
            forms.add(_in_json(form, ascii_only=False))
            forms.add(_in_json(form, ascii_only=True))
    return forms


def _in_json(text: str, *, ascii_only: bool) -> str:
    """The text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=ascii_only)[1:-1]


def pattern_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds any of these texts in any form; blank texts are left out."""
    forms = set[str]()
    for text in texts:
        if text.strip():
            forms |= forms_of(text)
    if not forms:
        return re.compile(_NEVER)
    # The longest first, as a text may be the beginning of another.
    longest_first = sorted(forms, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))


def without_texts(text: str, hidden: Iterable[str]) -> str:
    """The text with a … in place of each of the hidden texts, in whatever form."""
    return pattern_of(hidden).sub("…", text)


def plain(value: object) -> str:
    """Any summary value; floats with four digits."""
    if isinstance(value, float):
        return f"{value:.4g}".replace("-", "−")
    # A truth value is an int, too.
    if isinstance(value, int) and not isinstance(value, bool):
        return count(value)
    return str(value)


def capitalised(text: str) -> str:
    """The first letter in upper case, the others as they are."""
    return text[:1].upper() + text[1:]


def nearest_names(
    name: str, names: Iterable[str], *, most: int = 1, cutoff: float = 0.6
) -> list[str]:
    """The names most like one that is not among them, the most alike first.

    Args:
        most: how many to return at most.
        cutoff: the likeness, from 0 to 1, from which a name counts.
    """
    return difflib.get_close_matches(name, list(names), n=most, cutoff=cutoff)


def did_you_mean(name: str, names: Iterable[str], otherwise: str, *, cutoff: float = 0.6) -> str:
    """A hint at the name most like one that is not there; `otherwise` where none is like it."""
    nearest = nearest_names(name, names, cutoff=cutoff)
    return f"did you mean `{nearest[0]}`?" if nearest else otherwise
