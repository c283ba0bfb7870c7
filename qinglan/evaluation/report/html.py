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


@cache
def page_template() -> jinja2.Template:
    """Compiled once a process, as that takes a quarter of a second."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown = (number, signed, interval, count, usd, p_value)
    named = (t, unbroken, words, rule_words, alarm_words, tables.left_out, tables.duration_words)
    environment.filters |= {helper.__name__: helper for helper in (*shown, *named)}
    environment.globals |= {"t": t, "Both": Both, "texts": TEXTS}
    return environment.get_template("report.html.j2")


def render_html(report: Report, out: Path) -> Artifact:
    page = page_template().render(_view(report))
    with written_whole(out) as partial:
        partial.write_text(page, encoding="utf-8")
    return Artifact.of(out)


def t(english: str | Both, chinese: str | None = None) -> Markup:
    """A text in both languages, of which the page shows one; once where they are the same."""
    en, zh = (
        (english.en, english.zh) if isinstance(english, Both) else (english, chinese or english)
    )
    if en == zh:
        return escape(en)
    return Markup('<span class="en">{}</span><span class="zh" lang="zh">{}</span>').format(en, zh)


def unbroken(text: Both) -> Both:
    """With no line break inside an interval."""
    return Both(
        *(
            re.sub(r"\[[^\]]*\]", lambda found: found.group().replace(" ", "\u00a0"), part)
            for part in text
        )
    )


def _view(report: Report) -> dict[str, Any]:
    arms = list(verdict.arms_of(report))
    sentence = verdict.verdict(report).sentence
    english = sentence.en
    for metric in report.metrics:  # no line break inside a name such as `top-1`
        english = english.replace(metric.en, metric.en.replace("-", "\u2011"))
    return {
        "report": report,
        "arm_words": partial(verdict.arm_label_words, report=report),
        "arm_words_head": partial(verdict.arm_label_words, report=report, head=True),
        "slice_cell": partial(tables.slice_cell, report),
        "example_values": partial(tables.example_values, report),
        "sentence": Both(english, sentence.zh),
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
        "terms": TEXTS["terms_of_retrieval" if report.retrieves else "terms_of_answers"],
    }
