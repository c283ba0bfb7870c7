"""The report as one self-contained HTML page, in English and Chinese.

Every text that came from a workbook, a model or the RAG is untrusted: the template escapes it, and
the page's content policy allows no script and no network. Both languages are in the page; two radio
buttons and CSS show one.
"""

import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from qinglan.evaluation.models import Report
from qinglan.evaluation.reasons import TEXTS, alarm_words, rule_words, words
from qinglan.evaluation.report import plots, tables, verdict
from qinglan.runs.artifacts import Artifact, written_whole
from qinglan.text import Both, count, interval, number, p_value, signed, usd

_TEMPLATES = Path(__file__).parent / "templates"
_INTERVAL = re.compile(r"\[[^\]]*\]")
_UNBROKEN_SPACE = "\u00a0"
_UNBROKEN_HYPHEN = "\u2011"


@cache
def page_template() -> jinja2.Template:
    """Compiled once a process, as that takes a quarter of a second."""
    # Untrusted texts are escaped, and an unknown name in a template is an error.
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (
        number,
        signed,
        interval,
        count,
        usd,
        p_value,
        t,
        unbroken,
        words,
        rule_words,
        alarm_words,
        tables.left_out,
        tables.duration_words,
    )
    for function in filters:
        environment.filters[function.__name__] = function
    environment.globals |= {"t": t, "Both": Both, "texts": TEXTS}
    return environment.get_template("report.html.j2")


def render_html(report: Report, out: Path) -> Artifact:
    page = page_template().render(_view(report))
    with written_whole(out) as partial:
        partial.write_text(page, encoding="utf-8")
    return Artifact.of(out)


def t(english: str | Both, chinese: str | None = None) -> Markup:
    """A text in both languages, of which the page shows one; once where they are the same.

    Args:
        english: the text, or a text in both languages.
        chinese: the same text, where `english` is not in both languages.
    """
    text = english if isinstance(english, Both) else Both(english, chinese or english)
    if text.en == text.zh:
        return escape(text.en)
    # Fonts and screen readers go by `lang`.
    spans = Markup('<span class="en">{}</span><span class="zh" lang="zh">{}</span>')
    return spans.format(text.en, text.zh)


def unbroken(text: Both) -> Both:
    """The text without a line break inside an interval."""

    def with_unbroken_spaces(match: re.Match[str]) -> str:
        return match.group().replace(" ", _UNBROKEN_SPACE)

    english = _INTERVAL.sub(with_unbroken_spaces, text.en)
    chinese = _INTERVAL.sub(with_unbroken_spaces, text.zh)
    return Both(english, chinese)


def _heading(report: Report) -> Both:
    """The verdict's sentence, without a line break inside a metric's name such as `top-1`."""
    sentence = verdict.verdict(report).sentence
    english = sentence.en
    for metric in report.metrics:
        english = english.replace(metric.en, metric.en.replace("-", _UNBROKEN_HYPHEN))
    return Both(english, sentence.zh)


def _view(report: Report) -> dict[str, Any]:
    """The values that the template takes."""
    arms = list(verdict.arms_of(report))
    return {
        "report": report,
        "arm_words": partial(verdict.arm_label_words, report=report),
        "arm_words_head": partial(verdict.arm_label_words, report=report, head=True),
        "slice_cell": partial(tables.slice_cell, report),
        "example_values": partial(tables.example_values, report),
        "sentence": _heading(report),
        "answers": verdict.answers(report),
        "main": verdict.main_comparison(report),
        "warning": verdict.simulator_warning(report),
        "alarms": verdict.alarm_warning(report),
        "continued": verdict.continued_warning(report),
        "weights": verdict.weights_words(report),
        "star": partial(verdict.star, report),
        "plan": tables.side_by_side(report),
        "arms": arms,
        "students": [name for name in arms if name in verdict.STUDENTS],
        "arm_dots": plots.arm_dots(report, arms),
        "arm_lines": tables.arm_lines(report, arms),
        "loads": tables.loads(report, arms),
        "difference_dots": plots.difference_dots(report),
        "pairs": tables.comparisons_by_pair(report),
        "slices": plots.slice_plots(report),
        "red_team": tables.red_team(report),
        "charts": plots.charts(report.curves),
        "distributions": plots.distributions(report.distributions),
        "funnel": tables.funnel(report.stages),
        "noise": tables.noise(report),
        "training": tables.training(report),
    }
