"""The report in Chinese: every label of the page."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import pytest
from report_fixture import METRICS, comparison, full, report

from qinglan.config import AlarmName
from qinglan.evaluation.models import Purchase, Report, SharedThing, TrainingSummary
from qinglan.evaluation.report.html import render_html, t
from qinglan.evaluation.report.verdict import verdict
from qinglan.evaluation.words import (
    ALARMS,
    ARM_HEADS,
    KINDS,
    OUTCOMES,
    RULES,
    RULES_AGAINST,
    SHARED,
    SIMULATED_ROLES,
    SLICES,
    rule_words,
    words,
)
from qinglan.text import ARMS, Both

_SAME = """
    Qinglan query_rewrite embedded English RAG SFT RL GPT top MRR recall nDCG log token Holm McNemar
    gate smallest_gain docs alarms cpu sha256 run json qinglan
"""
TERMS = set(_SAME.split())
"""What is called the same in Chinese, and names of settings and files."""


METRIC_NAMES = {metric.name: Both(metric.en, metric.zh) for metric in METRICS}
NAMES = [ALARMS, ARM_HEADS, ARMS, KINDS, METRIC_NAMES, OUTCOMES, RULES, RULES_AGAINST, SHARED, SLICES, SIMULATED_ROLES]


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


@pytest.mark.parametrize("names", NAMES)
def test_every_name_has_a_chinese_one(names: dict[str, Any]) -> None:
    assert not [key for key, both in names.items() if not both.zh or english_in(both.zh)]


def test_a_rule_about_a_rival_names_it_in_both_languages() -> None:
    assert rule_words("gain_vs_sft") == ("gain, against the SFT student", "对SFT 学生的提升")
    assert rule_words("quality_vs_qwen3") == ("judge's score, against qwen3", "对qwen3的裁判评分")


def test_every_alarm_and_everything_shared_has_a_name() -> None:
    assert set(ALARMS) == set(get_args(AlarmName)) and set(SHARED) == set(get_args(SharedThing))


def test_a_stage_and_a_reason_have_chinese_names_and_a_users_own_word_stays() -> None:
    assert words("select").zh == "筛选" and words("below_threshold").zh == "得分低于阈值"
    assert words("my_tenant") == ("my_tenant", "my_tenant") and t("RL") == "RL"


def test_the_verdict_in_chinese() -> None:
    found = verdict(report())
    assert found.sentence.zh == "RL 学生 0.866，教师 0.795（top-1，996 个测试问题）：+0.071 [0.019, 0.128]"
    assert found.reading.zh == "95% 区间在 0 之上：在这类问题上，RL 学生优于教师。"


def test_a_purchase_in_chinese_leads_with_its_numbers() -> None:
    bought = Purchase(labels={"teacher": "gpt-5", "qwen": "qwen"}, rival="qwen", tone="open", sentence="s", reading="r")
    found = verdict(report(purchase=bought, comparisons=[comparison("qwen", "teacher", 0.01, (-0.1, 0.1))]))
    assert found.sentence.zh.startswith("qwen 0.866，gpt-5 0.795") and "没有显示出差异" in found.reading.zh
