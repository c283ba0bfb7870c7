"""The report in Chinese: every label of the page."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args

import pytest
from report_fixture import full, report

from qinglan.config import AlarmName
from qinglan.evaluation.models import Report, SharedThing, TrainingSummary
from qinglan.evaluation.reasons import TEXTS
from qinglan.evaluation.report.html import render_html
from qinglan.evaluation.report.verdict import verdict

_SAME = """
    Qinglan query_rewrite embedded English RAG SFT RL GPT top MRR recall nDCG log token Holm McNemar
    gate smallest_gain docs alarms cpu sha256 run json qinglan
"""
TERMS = set(_SAME.split())
"""What is called the same in Chinese, and names of settings and files."""


class Chinese(HTMLParser):
    """What a reader of the Chinese page sees, without what users wrote and without names of files and versions."""

    hidden = frozenset({"style", "title", "bdi", "code", "label", "small"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.skipping: list[bool] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in {"meta", "br", "wbr", "line", "circle", "rect", "path", "input"}:
            named = dict(attrs)
            hidden = tag in self.hidden or named.get("class") == "en" or (named.get("lang") == "en" and tag != "html")
            self.skipping.append(hidden or any(self.skipping[-1:]))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Of drawings; holds no text."""

    def handle_endtag(self, tag: str) -> None:
        self.skipping.pop()

    def handle_data(self, data: str) -> None:
        if not any(self.skipping[-1:]) and data.strip():
            self.text.append(data.strip())


def english_in(text: str) -> set[str]:
    """Words that a Chinese reader would have to look up."""
    return set(re.findall(r"[A-Za-z_]{3,}\d*", text)) - TERMS


def shown(tmp_path: Path, content: Report) -> list[str]:
    text = Chinese(render_html(content, tmp_path / "report.html").path.read_text(encoding="utf-8")).text
    assert "有效吗？" in text
    return text


def test_the_chinese_page_has_no_english_label(tmp_path: Path) -> None:
    training = {"sft": {"rows": 617, "loss_first": 3.1}, "rl": {"steps": 60, "reward_last": 0.2}}
    content = full(versions={}, training=training)
    tenant = {"demo（1,000）", ": demo"}
    assert {text for text in shown(tmp_path, content) if english_in(text)} == tenant


def test_both_languages_are_complete(tmp_path: Path) -> None:
    html = render_html(full(), tmp_path / "report.html").path.read_text(encoding="utf-8")
    assert html.count('<span class="en">') == html.count('<span class="zh" lang="zh">') > 150
    assert '<span class="en"></span>' not in html and '<span class="zh" lang="zh"></span>' not in html


@pytest.mark.parametrize("content", [Report(run_id="r", profile="p", recipe="query_rewrite"), report(comparisons=[])])
def test_a_partial_report_has_no_english_label(tmp_path: Path, content: Report) -> None:
    partial = content.model_copy(update={"versions": {}, "stages": [], "training": TrainingSummary()})
    assert not {text for text in shown(tmp_path, partial) if english_in(text)}


@pytest.mark.parametrize("table", sorted(TEXTS.keys() - {"sentences", "alarm_actions"}))
def test_every_name_has_a_chinese_one(table: str) -> None:
    assert not [key for key, both in TEXTS[table].items() if not both.en or not both.zh or english_in(both.zh)]


def test_every_alarm_and_everything_shared_has_a_name() -> None:
    assert TEXTS["alarms"].keys() == set(get_args(AlarmName))
    assert TEXTS["shared"].keys() == set(get_args(SharedThing))


def test_the_verdict_in_chinese() -> None:
    found = verdict(report())
    assert found.sentence.zh == "RL 学生 0.866，教师 0.795（top-1，996 个测试问题）：+0.071 [0.019, 0.128]"
    assert found.reading.zh == "95% 区间在 0 之上：在这类问题上，RL 学生优于教师。"
