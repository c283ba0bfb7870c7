"""The report's page: every section, partial reports, every label in Chinese, nothing of anybody's
script or address."""

import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import report_fixture
from report_fixture import EVIL, METRICS, case, comparison, full, page, report, scores, shown

from qinglan.evaluation.models import Report, TrainingSummary
from qinglan.evaluation.reasons import reason
from qinglan.evaluation.report.terminal import print_table
from qinglan.grading.validation_statistics import RetrievalStatistics
from qinglan.recipes import Finding, FindingRow, Metric
from qinglan.rows import Retrieved, Row
from qinglan.text import Both

SECTIONS = [
    *(
        "Arms",
        "Comparisons",
        "Training",
        "Where rows were dropped",
        "Examples",
        "What test and train share",
    ),
    *("Calls and cost", "Stages", "Where this comes from"),
]
PAGE_TERMS = """
    Qinglan query_rewrite embedded English RAG SFT RL GPT top MRR recall nDCG log token Holm McNemar
    gate smallest_gain min_gain docs reference reward cpu sha256 run json qinglan max_latency_ratio
    release profile rl clip_ratio actor_lr ppo_epochs
"""
"""What is called the same in Chinese, and names of settings and files."""


def english(html: str) -> str:
    """The page's text as it reads in English."""
    visible = re.sub(
        r'<span class="zh" lang="zh">.*?</span>', "", re.sub(r"(?s)<style>.*?</style>", "", html)
    )
    text = unescape(re.sub(r"<[^>]*>", " ", re.sub(r"</?(?:span|b|bdi|wbr)\b[^>]*>", "", visible)))
    return " ".join(text.replace("\u00a0", " ").replace("\u2011", "-").split())


def heads(html: str) -> list[str]:
    return [english(head) for head in re.findall(r"<h2>(.*?)</h2>", html)]


class Parsed(HTMLParser):
    """Start tags and their attributes, whether every element is closed, and what a reader of the
    Chinese page sees.

    The Chinese text is without what users wrote and without names of files and versions.
    """

    void = frozenset({"meta", "br", "wbr", "line", "circle", "rect", "path", "input"})
    not_chinese = frozenset({"style", "title", "bdi", "code", "label", "small"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[tuple[str, bool]] = []
        """Elements, and whether a reader of Chinese is not to read what is within."""
        self.chinese: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append((tag, values))
        if tag not in self.void:
            hidden = tag in self.not_chinese or values.get("class") == "en"
            self.open.append((tag, hidden or any(within for _, within in self.open[-1:])))

    def handle_endtag(self, tag: str) -> None:
        assert tag in self.void or self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and not any(within for _, within in self.open[-1:]):
            self.chinese.append(data.strip())


def english_labels(html: str) -> set[str]:
    text = Parsed(html).chinese
    assert "有效吗？" in text
    return {label for label in text if report_fixture.english_in(label, PAGE_TERMS)}


def test_page_has_every_section_and_is_well_formed(tmp_path: Path) -> None:
    html = page(tmp_path, report())
    assert Parsed(html).open == []
    assert heads(html) == ["Teacher against RL", *SECTIONS]
    text = english(html)
    assert text.count("gold first") == 10
    assert "failed: the answer is empty" in text
    assert "109 training questions with noise (emoji 61, a story before it 48)" in text
    assert "score below the threshold" in text
    assert "20261103-0210-55aa" in text
    assert "What the rewrites gain" not in text
    assert "workbook were simulated" in text
    html = page(tmp_path, full(simulated=[]))
    outside = re.search(r"https?:|url\(|@import|<script|<link|<img|<iframe", html)
    assert outside is None
    assert "default-src 'none'" in html
    first = [
        "Teacher against RL",
        "May it be released?",
        *SECTIONS[:2],
        "Slices",
        "Red team",
        *SECTIONS[2:],
    ]
    assert Parsed(html).open == []
    assert heads(html) == first
    assert "<code>clip_fraction</code>" in html
    assert "Yes, says" in english(page(tmp_path, full(decision=report_fixture.decision("promote"))))
    assert "simulated" not in english(html), "of a real run"
    assert "*" not in english(html), "of a real run"
    text = english(page(tmp_path, report()))
    labels = ("recall@3", "nDCG@10", "judge: its two passes differ by", "tokens in per 1,000")
    assert not [label for label in labels if f"{label}* " in text or f"{label} 0" in text]
    assert "qinglan run" not in text
    assert "Not passed by" not in text


@pytest.mark.parametrize(
    ("element", "texts"),
    [
        ('dl class="answers"', [
            "Yes*", "9% of the teacher*", "$0.051 [$0.049, $0.053]",
            "37 ms [30, 41] (one question at a time on cpu)",
            "No, says the gate", "1 failed: latency; 1 could not be decided",
            "3.4 times as long as the teacher", "on this test split before this one: 2.",
            "2 of 4 cases passed, 1 failed (1 of them must pass), 1 could",
        ]),
        ('table class="stack plan"', [
            "+0.071 [0.019, 0.128] 996 questions in 159 groups, 4 left out, 4 one-sided",
            "× 0.0892", "up to 16 at once, live API, n 50", "[$0.049, $0.053]",
        ]),
        ('table class="stack compare"', [
            "996 (159) 4 left out, 4 one-sided", "0.024", "6,734", "0.012",
        ]),
        ('table class="stack gate"', [
            "gain, against the champion unknown found not compared", "3.4 times as long as",
        ]),
        ("main", [
            "recall@3", "nDCG@10", "judge: its two passes differ by", "tokens in per 1,000",
            "Base, SFT, RL, Champion: one question at a time on cpu.",
            "qinglan run pipeline --profile embedded", "Not passed by the RL student (2)",
            "用例 c failed, must pass c repeats the question as it was Rewrite: ",
            "用例 d could not be checked",
        ]),
    ],
)  # fmt: skip
def test_the_page_tells_all_that_is_known_and_what_it_rests_on(
    tmp_path: Path, element: str, texts: list[str]
) -> None:
    match = re.search(rf"(?s)<{element}>(.*?)</{element.split()[0]}>", page(tmp_path, full()))
    text = english(match.group(1) if match else "")
    assert not [part for part in texts if part not in text]


def test_untrusted_text_stays_text(tmp_path: Path) -> None:
    evil = report_fixture.example(EVIL)
    evil |= {"profile": EVIL, "history": EVIL, "gold_title": EVIL, "inputs": {EVIL: EVIL}}
    evil["arms"]["rl"] = {"text": EVIL, "retrieved": report_fixture.retrieved(1, EVIL, 0.9)}
    evil["arms"]["sft"] = {"text": None, "reason": EVIL}
    stage = {"name": EVIL, "seconds": 1, "rows_in": 2, "rows_out": 1, "dropped": {EVIL: 1}}
    series = [{"label": EVIL, "x": [1, 2], "y": [1, 2]}]
    content = full(
        run_id=EVIL,
        examples=[evil],
        stages=[stage],
        versions={EVIL: EVIL},
        curves={EVIL: series},
        **evil_release(),
    )
    html = page(tmp_path, content)
    parsed = Parsed(html)
    assert not {"script", "img"} & {tag for tag, _ in parsed.tags}
    assert not [name for _, attrs in parsed.tags for name in attrs if name.startswith("on")]
    assert html.count("&lt;script&gt;alert(1)") >= 40
    assert "{{ 7*7 }}" in html


def evil_release() -> dict[str, Any]:
    bad = report_fixture.decision()
    said = reason("approved", reviewer=EVIL, comment=EVIL)
    bad["rules"][0] |= {
        "name": EVIL,
        "found": said,
        "required": said,
        "reason": said,
        "outcome": "fail",
    }
    both = Both(EVIL, EVIL)
    diff = {"a": "rl", "b": "teacher", "metric": "top1", "n": 9, "diff": 0.1}
    finding_row = FindingRow(label=both, values=(0.5,))
    contains = reason("contains", word=EVIL)
    return {
        "decision": bad | {"champion": EVIL},
        "command": EVIL,
        "unjudged": {EVIL: 1},
        "slices": [{"by": EVIL, "value": EVIL, "n": 9, "diffs": [diff]}],
        "metrics": [Metric("top1", EVIL, EVIL)],
        "findings": [Finding(title=both, columns=(both,), rows=(finding_row,))],
        "released": {"name": EVIL, "version": EVIL, "aliases": [EVIL], "dataset_version": EVIL},
        "red_team": {"rl": [case(EVIL, EVIL, False, name=EVIL, reason=contains, text=EVIL)]},
    }


def test_reports_with_little_in_them_render(tmp_path: Path) -> None:
    empty = Report(run_id="r", profile="p", recipe="query_rewrite", metrics=METRICS)
    html = page(tmp_path, empty)
    assert Parsed(html).open == []
    assert heads(html) == ["Calls and cost", "Where this comes from"]
    assert "Nothing was compared in this run." in english(html)
    data = {
        name: {"n": 5, **scores(mean_top1_score=mean)}
        for name, mean in (("original", 0.4), ("teacher", 0.8))
    }
    only = comparison(
        "teacher", "original", 0.4, (0.38, 0.42), metric="mean_top1_score", mean_a=0.8, mean_b=0.4
    )
    html = page(tmp_path, report(arms=data, comparisons=[only]))
    assert "mean top-1 score by arm" in english(html)
    assert "No gate was asked in this run" in english(html)
    arms = {
        "teacher": {"n": 3, **scores(top1=0.5)},
        "rl": {"n": 4, **scores(top1=1.0), "failed": 1, "empty": 2},
    }
    only = comparison("rl", "teacher", 0.5, None, groups=1, detectable_diff=None, p_value=None)
    bare = report(arms=arms, comparisons=[only])
    text = english(page(tmp_path, bare))
    assert "groups of questions: 1;" in text
    assert "What does it cost?" not in text
    assert "failed, left out – 1" in text
    assert "empty, counted as wrong – 2" in text
    terminal = shown(print_table(bare))
    assert "Failed, left out of the means: RL student 1" in terminal
    assert "wrong: RL student 2" in terminal


def test_the_gain_of_the_rewrites_is_drawn(tmp_path: Path) -> None:
    validated = RetrievalStatistics()
    for gain in (*[0.3] * 7, 0.0, 0.0, -0.1):
        question = Row(id="1", tenant="t", query="q", source="f!A1", answer="w")
        original, rewritten = (
            Retrieved(ids=("d",), scores=(score,)) for score in (0.4, 0.4 + gain)
        )
        validated.add(
            question.model_copy(
                update={"original_retrieved": original, "answer_retrieved": rewritten}
            )
        )
    html = page(tmp_path, report(distributions=validated.histograms()))
    text = english(html)
    assert "rewrite − original, median +0.30" in text
    assert re.search(r"original question, median 0\.\d\d .*rewrite, median", text)
    assert Parsed(html).open == []


def test_the_chinese_page_is_complete_and_has_no_english_label(tmp_path: Path) -> None:
    training = {"sft": {"rows": 617, "loss_first": 3.1}, "rl": {"steps": 60, "reward_last": 0.2}}
    html = page(tmp_path, full(versions={}, training=training))
    assert english_labels(html) == {"demo（1,000）", ": demo"}, "a tenant's"
    assert html.count('<span class="en">') == html.count('<span class="zh" lang="zh">') > 150
    assert '<span class="en"></span>' not in html
    assert '<span class="zh" lang="zh"></span>' not in html


@pytest.mark.parametrize(
    "content", [Report(run_id="r", profile="p", recipe="query_rewrite"), report(comparisons=[])]
)
def test_a_partial_report_has_no_english_label(tmp_path: Path, content: Report) -> None:
    partial = content.model_copy(
        update={"versions": {}, "stages": [], "training": TrainingSummary()}
    )
    assert english_labels(page(tmp_path, partial)) == set()
