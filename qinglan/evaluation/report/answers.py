"""The report in three answers: did it work, what does it cost, is it safe to ship."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from qinglan.evaluation.models import Arm, Decision, Report, Rule, Tone
from qinglan.evaluation.red_team_cases import RedTeamResult
from qinglan.evaluation.report.chinese import chinese
from qinglan.evaluation.report.verdict import arm_label_words, candidate, opponent, starred, verdict
from qinglan.evaluation.report.words import arm_words, listed, rule_words
from qinglan.text import ARMS, Both, capitalised, count, latency, usd

_WORKED: dict[Tone, Both] = {
    "better": Both("Yes", "是"),
    "worse": Both("No", "否"),
    "open": Both("Not shown", "未能显示"),
    "none": Both("Not compared", "没有比较"),
}
_SHIP: dict[str, tuple[Both, Tone]] = {
    "promote": (Both("Yes, says the gate", "门禁：可以"), "better"),
    "refuse": (Both("No, says the gate", "门禁：不可以"), "worse"),
    "undecided": (Both("Not yet: undecided", "暂不：未能判定"), "open"),
}
_SAME_COST = 0.05
"""Two prices that differ by no more than this share are the same."""
_TOLD_APART = ("red_team", "alarms")
_NOT_ASKED = Both(
    "No gate was asked in this run, so nothing says that a model may be released.",
    "本次运行没有经过门禁，因此没有任何依据说明模型可以上线。",
)


class Answer(NamedTuple):
    """A reader's question, a word or two, and what stands behind them."""

    question: Both
    word: Both
    tone: Tone
    texts: list[Both]


class RedTeamCounts(NamedTuple):
    """How a student did on the red team's cases."""

    cases: int
    passed: int
    failed: int
    blocking: int
    """Failed, and a release needs them."""
    unchecked: int

    @classmethod
    def of(cls, results: Sequence[RedTeamResult]) -> "RedTeamCounts":
        """Count them."""
        failed = [result for result in results if result.passed is False]
        return cls(
            cases=len(results),
            passed=sum(result.passed is True for result in results),
            failed=len(failed),
            blocking=sum(result.must_pass for result in failed),
            unchecked=sum(result.passed is None for result in results),
        )


def answers(report: Report) -> list[Answer]:
    """In the order in which a product owner asks."""
    return [_worked(report), *([cost] if (cost := _cost(report)) else []), _safe(report)]


def _worked(report: Report) -> Answer:
    english, chinese = verdict(report), verdict(report, "zh")
    if report.purchase:
        question = Both("Which teacher to buy?", "该买哪个教师？")
        word = Both(report.purchase.labels[report.purchase.rival], report.purchase.labels[report.purchase.rival])
        advice = Both(english.reading, f"{chinese.reading}英文原文的建议：{english.reading}")
        return Answer(question, Both("", "") if english.tone == "none" else word, english.tone, [advice])
    star = _star(report)
    word = Both(_WORKED[english.tone].en + star, _WORKED[english.tone].zh + star)
    return Answer(Both("Did it work?", "有效吗？"), word, english.tone, [Both(english.reading, chinese.reading)])


def _cost(report: Report) -> Answer | None:
    name = candidate(report)
    # What a student saves is told against the teacher, also where another student is its rival.
    other = "teacher" if "teacher" in report.arms and name != "teacher" else opponent(report)
    mine, theirs = report.arms.get(name or ""), report.arms.get(other)
    if mine is None or mine.cost_per_1000_usd is None:
        return None
    label = arm_label_words(other, report)
    rival = Both(f"the {label.en}" if label in ARMS.values() else label.en, label.zh)
    own, base, star = mine.cost_per_1000_usd, (theirs.cost_per_1000_usd if theirs else None) or 0.0, _star(report)
    if theirs is None or not base:
        word, price = Both(f"{usd(own)} per 1,000{star}", f"每千次 {usd(own)}{star}"), _price(mine)
    else:
        share = f"{own / base:.0%}" if own / base >= 0.01 else "< 1%"
        word, price = Both(f"{share} of {rival.en}{star}", f"{rival.zh}的 {share}{star}"), _price(mine, theirs, rival)
    texts = [price] if mine.latency_p50_ms is None else [price, _speed(mine, theirs, rival)]
    return Answer(Both("What does it cost?", "成本如何？"), word, _tone(own, base), texts)


def _price(mine: Arm, theirs: Arm | None = None, rival: Both | None = None) -> Both:
    own = _money(mine)
    if theirs is None or rival is None:
        return Both(f"{own} per 1,000 questions.", f"每 1,000 个问题 {own}。")
    other = _money(theirs)
    return Both(f"{own} per 1,000 questions, {rival.en} {other}.", f"每 1,000 个问题 {own}，{rival.zh} {other}。")


def _tone(own: float, base: float) -> Tone:
    if base and abs(own - base) > _SAME_COST * base:
        return "better" if own < base else "worse"
    return "none"


def _speed(mine: Arm, theirs: Arm | None, rival: Both) -> Both:
    own = _median(mine)
    if theirs is None or not theirs.latency_p50_ms:
        return Both(f"Median latency {own.en}.", f"延迟中位数 {own.zh}。")
    other = _median(theirs)
    return Both(f"Median latency {own.en}, {rival.en} {other.en}.", f"延迟中位数 {own.zh}，{rival.zh} {other.zh}。")


def _median(arm: Arm) -> Both:
    value = f"{latency(arm.latency_p50_ms)} ms"
    if arm.latency_p50_ci95:
        low, high = arm.latency_p50_ci95
        value += f" [{latency(low)}, {latency(high)}]"
    load = arm.latency_load
    return Both(f"{value} ({load})", f"{value}（{chinese(load)}）") if load else Both(value, value)


def _money(arm: Arm) -> str:
    low_high = f" [{usd(arm.cost_ci95[0])}, {usd(arm.cost_ci95[1])}]" if arm.cost_ci95 else ""
    return f"{usd(arm.cost_per_1000_usd)}{low_high}"


def _safe(report: Report) -> Answer:
    question = Both("Is it safe to ship?", "可以上线吗？")
    name = report.decision.challenger if report.decision else candidate(report)
    found = report.red_team.get(name or "", [])
    texts = [_red_team(RedTeamCounts.of(found))] if found else []
    if report.training.rl is not None:
        texts.append(_alarms(report))
    if report.decision is None:
        return Answer(question, Both("Not decided", "未判定"), "none", [_NOT_ASKED, *texts])
    word, tone = _SHIP[report.decision.verdict]
    return Answer(question, word, tone, [*_decided(report.decision, metric_terms(report)), *texts])


def metric_terms(report: Report) -> dict[str, str]:
    """What the recipe calls its metrics, English → Chinese."""
    return {metric.en: metric.zh for metric in report.metrics}


def _decided(decision: Decision, terms: Mapping[str, str]) -> list[Both]:
    """What the gate says, and why: a rule that blocks and has no line of its own below with its reason."""
    rules = decision.rules
    if decision.verdict == "promote":
        instead = f"，取代版本 {decision.champion}" if decision.champion else ""
        chinese_text = f"可以发布{arm_words(decision.challenger).zh}{instead}：{len(rules)} 条规则全部满足。"
        return [Both(decision.sentence, chinese_text)]
    failed, unknown = ([rule for rule in rules if rule.outcome == outcome] for outcome in ("fail", "unknown"))
    parts = []
    if failed:
        names = _named(failed)
        parts.append(
            Both(f"{len(failed)} of {len(rules)} rules failed: {names.en}", f"{len(failed)} 条未通过：{names.zh}")
        )
    if unknown:
        names = _named(unknown)
        parts.append(Both(f"{len(unknown)} could not be decided: {names.en}", f"{len(unknown)} 条无法判断：{names.zh}"))
    counted = Both(
        f"{capitalised('; '.join(part.en for part in parts))}.",
        f"{len(rules)} 条规则中，{'；'.join(p.zh for p in parts)}。",
    )
    return [counted, *(_reason(rule, terms) for rule in (*failed, *unknown) if rule.name not in _TOLD_APART)]


def _reason(rule: Rule, terms: Mapping[str, str]) -> Both:
    name = rule_words(rule.name)
    return Both(f"{capitalised(name.en)}: {rule.reason}.", f"{name.zh}：{chinese(rule.reason, terms)}。")


def _named(rules: Sequence[Rule]) -> Both:
    names = [rule_words(rule.name) for rule in rules]
    return Both(listed([name.en for name in names]), listed([name.zh for name in names], "zh"))


def _red_team(counts: RedTeamCounts) -> Both:
    english = f"Red team: {counts.passed} of {counts.cases} cases passed"
    chinese = f"红队测试：{counts.cases} 个用例通过 {counts.passed} 个"
    if counts.failed:
        english += f", {counts.failed} failed ({counts.blocking} of them must pass)"
        chinese += f"，{counts.failed} 个未通过（其中 {counts.blocking} 个必须通过）"
    if counts.unchecked:
        english += f", {counts.unchecked} could not be checked"
        chinese += f"，{counts.unchecked} 个无法检查"
    return Both(f"{english}.", f"{chinese}。")


def _alarms(report: Report) -> Both:
    if not report.alarms:
        return Both("No alarm sounded in RL training.", "RL 训练中没有警报。")
    times = len(report.alarms)
    return Both(
        f"RL training sounded {count(times)} alarm{'s' if times > 1 else ''}.", f"RL 训练发出 {count(times)} 次警报。"
    )


def _star(report: Report) -> str:
    name = candidate(report)
    return "*" if name and (starred(report, name) or starred(report, opponent(report))) else ""
