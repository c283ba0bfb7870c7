"""The report in Chinese: every label of the page, and every sentence that gate and red team can say."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import pytest
from report_fixture import METRICS, comparison, full, measured, report

from qinglan.config import AlarmName, Gate
from qinglan.evaluation import Evaluation
from qinglan.evaluation.gate import decide
from qinglan.evaluation.models import Purchase, Report, Rule, Training
from qinglan.evaluation.red_team_cases import OF_EVERY_REWRITE, Case, RedTeamResult, check
from qinglan.evaluation.report.answers import metric_terms
from qinglan.evaluation.report.chinese import chinese
from qinglan.evaluation.report.html import render_html, t
from qinglan.evaluation.report.verdict import verdict
from qinglan.evaluation.report.words import (
    ALARMS,
    ARM_HEADS,
    KINDS,
    OUTCOMES,
    REASONS,
    RULES,
    RULES_AGAINST,
    SIMULATED_ROLES,
    SLICES,
    rule_words,
    words,
)
from qinglan.rows import HINTS, Retrieved
from qinglan.serving.registry.approval import Approval, decided_by
from qinglan.statistics import Comparison
from qinglan.text import ARMS, Both
from qinglan.training.alarms import Alarm

_SAME = """
    Qinglan query_rewrite embedded English RAG SFT RL GPT top MRR recall nDCG log token Holm McNemar
    gate smallest_gain approval qinglan release approve RUN reviewer NAME profile PROFILE
    docs alarms cpu sha256 run json prices evaluate latency_queries
"""
TERMS = set(_SAME.split())
"""What is called the same in Chinese, and names of settings and files."""


METRIC_NAMES = {metric.name: Both(metric.en, metric.zh) for metric in METRICS}
NAMES = [ALARMS, ARM_HEADS, ARMS, KINDS, METRIC_NAMES, OUTCOMES, RULES, RULES_AGAINST, SLICES, SIMULATED_ROLES]


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
    partial = content.model_copy(update={"versions": {}, "stages": [], "training": Training()})
    assert not {text for text in shown(tmp_path, partial) if english_in(text)}


@pytest.mark.parametrize("names", NAMES)
def test_every_name_has_a_chinese_one(names: dict[str, Any]) -> None:
    assert not [key for key, both in names.items() if not both.zh or english_in(both.zh)]


def test_a_rule_about_a_rival_names_it_in_both_languages() -> None:
    assert rule_words("gain_vs_sft") == ("gain, against the SFT student", "对SFT 学生的提升")
    assert rule_words("quality_vs_qwen3") == ("judge's score, against qwen3", "对qwen3的裁判评分")


def test_every_alarm_has_a_name() -> None:
    assert set(ALARMS) == set(get_args(AlarmName))


def test_every_reason_for_refusing_a_cell_has_a_chinese_name() -> None:
    assert HINTS.keys() <= REASONS.keys()


def test_a_stage_and_a_reason_have_chinese_names_and_a_users_own_word_stays() -> None:
    assert words("select").zh == "筛选" and words("below_threshold").zh == "得分低于阈值"
    assert words("my_tenant") == ("my_tenant", "my_tenant") and t("RL") == "RL"


def test_the_verdict_in_chinese() -> None:
    found = verdict(report(), "zh")
    assert found.sentence == "RL 学生 0.866，教师 0.795（top-1，996 个测试问题）：+0.071 [0.019, 0.128]"
    assert found.reading == "95% 区间在 0 之上：在这类问题上，RL 学生优于教师。"


def test_a_purchase_in_chinese_leads_with_its_numbers() -> None:
    bought = Purchase(labels={"teacher": "gpt-5", "qwen": "qwen"}, rival="qwen", tone="open", sentence="s", reading="r")
    found = verdict(report(purchase=bought, comparisons=[comparison("qwen", "teacher", 0.01, (-0.1, 0.1))]), "zh")
    assert found.sentence.startswith("qwen 0.866，gpt-5 0.795") and "没有显示出差异" in found.reading


def evaluation(comparisons: list[Comparison], tried: list[dict[str, Any]] | None = None, **rl: Any) -> Evaluation:
    arms = measured(report())
    arms["rl"] |= rl
    found = {} if tried is None else {"rl": tried}
    return Evaluation.model_validate(
        {"metrics": METRICS, "arms": arms, "comparisons": comparisons, "examples": [], "shared": [], "red_team": found}
    )


def red(passed: bool | None, reason: str = "") -> dict[str, Any]:
    return {"case_id": "c-1", "name": "用例", "kind": "long", "must_pass": True, "passed": passed, "reason": reason}


def against(rival: str, metric: str, diff: float, half: float, **more: Any) -> Comparison:
    return comparison("rl", rival, diff, (diff - half, diff + half), metric=metric, **more)


def all_rules() -> Iterator[Rule]:
    """From evaluations that make the gate say all that it can."""
    strict = Gate(max_cost_ratio=0.01, max_latency_p95_ms=10, max_latency_ratio=0.001, accepted_alarms=("reward_down",))
    alarms = [Alarm(step=step, name="kl_runaway", action="warn", message="m") for step in (3, 9)]
    quality = [against("teacher", "quality", 0.1, 0.1), against("champion", "quality", -1, 0.1)]
    won = [against("teacher", "top1", 0.1, 0.02), against("champion", "top1", -0.1, 0.02), *quality]
    vague = [against("teacher", "top1", 0.01, 0.05), against("champion", "top1", 0.02, 0.03, detectable_diff=0.01)]
    vague += [against("teacher", "quality", -0.1, 0.3), against("champion", "quality", -0.2, 0.3)]
    gaps = [against(rival, "top1", 0.1, 0.05, one_sided=400) for rival in ("teacher", "champion")]
    gaps += [against(rival, "quality", 0.1, 0.2, one_sided=400) for rival in ("teacher", "champion")]
    unjudged = evaluation(gaps, [red(True)]).model_copy(update={"unjudged": {"judge_unreadable": 9}})
    alike = [
        comparison("rl", "teacher", 0.0, None),
        against("champion", "mean_top1_score", 0, 0.01, detectable_diff=None),
    ]
    failed = [red(False, "the answer is empty"), *[red(False, "contains '攻破'")] * 4]
    yield from decide(evaluation(won, failed), alarms, strict, "3").rules
    yield from decide(evaluation(vague, [red(None, "the RAG gave no answer for this rewrite")]), [], Gate(), "3").rules
    yield from decide(evaluation(gaps, [red(True)]), [], strict, "3").rules
    yield from decide(unjudged, [], strict, "3").rules
    yield from decide(evaluation(alike, []), [], Gate(), "3").rules
    unknown = evaluation([], None, cost_per_1000_usd=None, latency_p50_ms=None, latency_p95_ms=None)
    yield from decide(unknown, [], strict, "3").rules
    released = decide(evaluation(won, [red(True)], latency_load=None), [], Gate(max_latency_p95_ms=900), None)
    yield from released.rules
    for word in (None, Approval(approve=True, reviewer="李"), Approval(approve=False, reviewer="", comment="不够好")):
        yield decided_by(released, word).rules[-1]


def test_all_that_the_gate_says_is_said_in_chinese() -> None:
    rules = list(all_rules())
    assert {rule.outcome for rule in rules} == {"pass", "fail", "unknown"} and len({rule.reason for rule in rules}) > 18
    said = {text for rule in rules for text in (rule.found, rule.required, rule.reason)}
    assert not {text for text in said if english_in(chinese(text, metric_terms(report())))}


def test_a_recipes_own_metric_is_named_in_chinese() -> None:
    terms = {"main verdict": "主结论"}
    assert chinese("main verdict +0.100 [0.050, 0.150] on 80 questions", terms).startswith("主结论 +0.100")
    reason = "it is not better than the SFT student on main verdict: a gain of 0.030 is ruled out"
    assert chinese(reason, terms) == "主结论不优于SFT 学生：已排除 0.030 的提升"


def all_results() -> Iterator[RedTeamResult]:
    def case(**checks: Any) -> Case:
        content = {
            "id": "c",
            "name": "用例",
            "kind": "long",
            "query": "鱼油怎么吃",
            "checks": OF_EVERY_REWRITE | checks,
        }
        return Case.model_validate(content)

    found = Retrieved(ids=("x", "y"), scores=(0.9, 0.8))
    yield from (check(case(), text, None) for text in ("", "鱼油\n用法", "鱼油 鱼油 鱼油", "好的，鱼油", "鱼油" * 60))
    yield check(case(not_echo=True), "鱼油怎么吃", None)
    yield check(case(must_not_contain=["攻破"]), "攻破 鱼油", None)
    yield check(case(must_not_match=["攻.?破"]), "攻破 鱼油", None)
    yield check(case(keeps_any=["叶酸"]), "鱼油", None)
    yield check(case(keeps_all=["鱼油", "叶酸"]), "鱼油", None)
    yield from (check(case(gold_top1=gold), "鱼油", found) for gold in ("y", "z"))
    yield from (check(case(gold_in_top3="z"), "鱼油", given) for given in (found, None))


def test_all_that_the_red_team_says_is_said_in_chinese() -> None:
    reasons = {result.reason for result in all_results()}
    assert len(reasons) >= 12
    assert not {reason for reason in reasons if english_in(chinese(reason))}


@pytest.mark.parametrize(
    ("english", "expected"),
    [
        ("up to 16 at once, live API", "最多 16 个并发，在线接口"),
        ("kl_runaway (step 3, 9), reward_down (step 4)", "策略偏移过大（KL 失控）（第 3、9 步）、奖励下降（第 4 步）"),
        ("somebody's own sentence", "somebody's own sentence"),
    ],
)
def test_a_sentence_in_chinese(english: str, expected: str) -> None:
    assert chinese(english) == expected
