"""What a run found, in words: the conclusion, the warnings, and the three answers at the head of the page.

Did it work, what does it cost, is it safe to ship. Texts are in both languages; the page shows both, the terminal
English.
"""

from collections.abc import Sequence
from typing import NamedTuple

from qinglan.config import EMBEDDED, Profile
from qinglan.evaluation.models import ArmFigures, Decision, Report, Rule, SimulatedRole, Tone
from qinglan.evaluation.red_team_cases import RedTeamResult
from qinglan.evaluation.words import ALARMS, SIMULATED_ROLES, arm_words, listed, rule_words
from qinglan.recipes import Metric, get_recipe
from qinglan.rows import ArmName
from qinglan.statistics import Comparison
from qinglan.text import ARMS, Both, capitalised, count, latency, number, signed, usd, with_interval

_PLACES = ["original", "teacher", "", "base", "sft", "rl", "champion"]
"""Of the arms on the page; further teachers stand where the empty name is."""
_MAIN_PAIRS = (("rl", "teacher"), ("sft", "teacher"), ("rl", "sft"), ("sft", "base"), ("teacher", "original"))
"""After those with the gate's rivals."""
STUDENTS = ("base", "sft", "rl", "champion")
QUALITY = "quality"
"""The metric that is the judge's score, whatever the recipe."""
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
_SHOWN_BELOW = ("red_team", "alarms")
"""Rules with a line of their own under the answer."""
_NOT_ASKED = Both(
    "No gate was asked in this run, so nothing says that a model may be released.",
    "本次运行没有经过门禁，因此没有任何依据说明模型可以上线。",
)


class Conclusion(NamedTuple):
    """The run's result in a sentence, and how to read it."""

    tone: Tone
    sentence: Both
    reading: Both


class ReportAnswer(NamedTuple):
    """A question, its answer in a word or two, and the explanation."""

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


def simulated_roles_of(profile: Profile) -> list[SimulatedRole]:
    """What embedded simulators replace under this profile, of what its recipe asks."""
    recipe = get_recipe(profile.recipe)
    asked = {*recipe.DISTILL_ROLES, *recipe.graders, "student", "workbook"}
    places: dict[SimulatedRole, str] = {
        "teacher": profile.teacher.base_url,
        "answerer": profile.answerer.base_url if profile.answerer else "",
        "judge": profile.judge.base_url,
        "rag": profile.rag.url,
        "student": profile.student.base_model,
        "workbook": "" if profile.data.sql else profile.data.workbook,
    }
    return [role for role, place in places.items() if role in asked and place == EMBEDDED]


def verdict(report: Report) -> Conclusion:
    """The main result: which teacher to buy, or the furthest student against the teacher on the best metric there is.

    A purchase's advice is kept as it was written, in English; in Chinese its main comparison stands in its place.
    """
    found, bought = headline(report), report.purchase
    if found is None or found.diff is None:
        sentence, reading = _without_comparison(report)
        tone: Tone = "none"
    else:
        a, b = (arm_label_words(name, report) for name in (found.a, found.b))
        tone, sentence, reading = _tone(found), _sentence(report, found, a, b), _reading(found, a, b)
    if bought is None:
        return Conclusion(tone, sentence, reading)
    if found is None:
        return Conclusion(bought.tone, *(Both(text, text) for text in (bought.sentence, bought.reading)))
    return Conclusion(bought.tone, Both(bought.sentence, sentence.zh), Both(bought.reading, reading.zh))


def simulator_warning(report: Report, *, marked: bool = True) -> Both | None:
    """What the numbers can't say; None where nothing was simulated.

    Args:
        marked: those that it concerns have a star.
    """
    if not report.simulated:
        return None
    roles = [SIMULATED_ROLES[role] for role in report.simulated]
    names = Both(listed([role.en for role in roles]), listed([role.zh for role in roles], "zh"))
    verb = "were simulated" if len(roles) > 1 else "was simulated"
    numbers = Both("The numbers marked *", "带 * 的数字") if marked else Both("These numbers", "这些数字")
    about = Both("your own service or data", "您自己的服务或数据")
    if "teacher" in report.simulated:
        about = Both("GPT-5 or your data", " GPT-5 或您的数据")
    return Both(
        f"{capitalised(names.en)} {verb}. {numbers.en} say that the machinery works, nothing about {about.en}.",
        f"{names.zh}由内置模拟器扮演。{numbers.zh}只说明整套流程能运行，不说明{about.zh}的情况。",
    )


def alarm_warning(report: Report) -> Both | None:
    """Which alarms there were in RL; None where there was none."""
    steps: dict[str, list[str]] = {}
    for alarm in report.alarms:
        steps.setdefault(alarm.name, []).append(str(alarm.step))
    if not steps:
        return None
    english = ", ".join(f"{name} (step {', '.join(at)})" for name, at in steps.items())
    chinese = "；".join(f"{ALARMS[name].zh}（第 {'、'.join(at)} 步）" for name, at in steps.items())
    return Both(
        f"RL training raised alarms: {english}. See docs/alarms.md.",
        f"RL 训练发出警报：{chinese}。详见 docs/alarms.md。",
    )


def answers(report: Report) -> list[ReportAnswer]:
    """In the order in which a product owner asks."""
    return [_worked(report), *([cost] if (cost := _cost(report)) else []), _safe(report)]


def _worked(report: Report) -> ReportAnswer:
    found = verdict(report)
    if report.purchase:
        label = report.purchase.labels[report.purchase.rival]
        word = Both("", "") if found.tone == "none" else Both(label, label)
        english, chinese = found.reading
        advice = Both(english, english if chinese == english else f"{chinese}英文原文的建议：{english}")
        return ReportAnswer(Both("Which teacher to buy?", "该买哪个教师？"), word, found.tone, [advice])
    word = Both(*(f"{word}{_star(report)}" for word in _WORKED[found.tone]))
    return ReportAnswer(Both("Did it work?", "有效吗？"), word, found.tone, [found.reading])


def _cost(report: Report) -> ReportAnswer | None:
    name = candidate(report)
    # What a student saves is shown against the teacher, also where another student is its rival.
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
    return ReportAnswer(Both("What does it cost?", "成本如何？"), word, _cost_tone(own, base), texts)


def _price(mine: ArmFigures, theirs: ArmFigures | None = None, rival: Both | None = None) -> Both:
    own = _money(mine)
    if theirs is None or rival is None:
        return Both(f"{own} per 1,000 questions.", f"每 1,000 个问题 {own}。")
    other = _money(theirs)
    return Both(f"{own} per 1,000 questions, {rival.en} {other}.", f"每 1,000 个问题 {own}，{rival.zh} {other}。")


def _cost_tone(own: float, base: float) -> Tone:
    if base and abs(own - base) > _SAME_COST * base:
        return "better" if own < base else "worse"
    return "none"


def _speed(mine: ArmFigures, theirs: ArmFigures | None, rival: Both) -> Both:
    own = _median(mine)
    if theirs is None or not theirs.latency_p50_ms:
        return Both(f"Median latency {own.en}.", f"延迟中位数 {own.zh}。")
    other = _median(theirs)
    return Both(f"Median latency {own.en}, {rival.en} {other.en}.", f"延迟中位数 {own.zh}，{rival.zh} {other.zh}。")


def _median(arm: ArmFigures) -> Both:
    value = f"{latency(arm.latency_p50_ms)} ms"
    if arm.latency_p50_ci95:
        low, high = arm.latency_p50_ci95
        value += f" [{latency(low)}, {latency(high)}]"
    load = arm.latency_load.words if arm.latency_load else None
    return Both(f"{value} ({load.en})", f"{value}（{load.zh}）") if load else Both(value, value)


def _money(arm: ArmFigures) -> str:
    low_high = f" [{usd(arm.cost_ci95[0])}, {usd(arm.cost_ci95[1])}]" if arm.cost_ci95 else ""
    return f"{usd(arm.cost_per_1000_usd)}{low_high}"


def _safe(report: Report) -> ReportAnswer:
    question = Both("Is it safe to ship?", "可以上线吗？")
    name = report.decision.challenger if report.decision else candidate(report)
    found = report.red_team.get(name or "", [])
    texts = [_red_team_words(RedTeamCounts.of(found))] if found else []
    if report.training.rl is not None:
        texts.append(_alarm_count(report))
    if report.decision is None:
        return ReportAnswer(question, Both("Not decided", "未判定"), "none", [_NOT_ASKED, *texts])
    word, tone = _SHIP[report.decision.verdict]
    return ReportAnswer(question, word, tone, [*_decided(report.decision), *texts])


def _decided(decision: Decision) -> list[Both]:
    """What the gate decided, and why: the reasons of the rules that block and have no line of their own below."""
    rules = decision.rules
    if decision.verdict == "promote":
        return [Both(*(" ".join(text.split()) for text in decision.reason.words))]
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
    reasons = []
    for rule in (*failed, *unknown):
        if rule.reason and rule.name not in _SHOWN_BELOW:
            name, why = rule_words(rule.name), rule.reason.words
            reasons.append(Both(f"{capitalised(name.en)}: {why.en}.", f"{name.zh}：{why.zh}。"))
    return [counted, *reasons]


def _named(rules: Sequence[Rule]) -> Both:
    names = [rule_words(rule.name) for rule in rules]
    return Both(listed([name.en for name in names]), listed([name.zh for name in names], "zh"))


def _red_team_words(counts: RedTeamCounts) -> Both:
    english = f"Red team: {counts.passed} of {counts.cases} cases passed"
    chinese = f"红队测试：{counts.cases} 个用例通过 {counts.passed} 个"
    if counts.failed:
        english += f", {counts.failed} failed ({counts.blocking} of them must pass)"
        chinese += f"，{counts.failed} 个未通过（其中 {counts.blocking} 个必须通过）"
    if counts.unchecked:
        english += f", {counts.unchecked} could not be checked"
        chinese += f"，{counts.unchecked} 个无法检查"
    return Both(f"{english}.", f"{chinese}。")


def _alarm_count(report: Report) -> Both:
    if not report.alarms:
        return Both("There was no alarm in RL training.", "RL 训练中没有警报。")
    times = len(report.alarms)
    return Both(
        f"RL training raised {count(times)} alarm{'s' if times > 1 else ''}.", f"RL 训练发出 {count(times)} 次警报。"
    )


def _star(report: Report) -> str:
    name = candidate(report)
    return "*" if name and (starred(report, name) or starred(report, opponent(report))) else ""


def continued_warning(report: Report) -> Both | None:
    """Which trainings continued from a checkpoint of other code, or nothing where none did."""
    found = {stage.name: ", ".join(stage.continued_anyway) for stage in report.stages if stage.continued_anyway}
    if not found:
        return None
    english = "{} continued from its checkpoint although the code of {} changed while it was interrupted."
    chinese = "{} 中断期间，{} 的代码已更改，训练仍从检查点继续。"
    return Both(
        " ".join(english.format(*each) for each in found.items()),
        "".join(chinese.format(*each) for each in found.items()),
    )


def starred(report: Report, key: str) -> bool:
    """Whether an arm's or a metric's numbers come from a simulator; a student learnt from its teacher and its RAG."""
    sources: dict[str, set[SimulatedRole]] = {
        "original": {"workbook"},
        "teacher": {"workbook", "teacher"},
        "base": {"workbook", "student"},
        QUALITY: {"workbook", "judge"},
        "judge_consistency": {"workbook", "judge"},
    }
    if key in ("sft", "rl", "champion"):
        return bool(report.simulated)
    if report.purchase and key in report.purchase.labels and key != "teacher":
        return key in report.purchase.simulated
    return not sources.get(key, {"workbook", "rag"}).isdisjoint(report.simulated)


def arms_of(report: Report) -> dict[ArmName, ArmFigures]:
    """The report's arms, in the order in which they are shown."""
    names = sorted(report.arms, key=lambda name: _PLACES.index(name if name in ARMS else ""))
    return {name: report.arms[name] for name in names}


def arm_label_words(name: str, report: Report | None = None, *, head: bool = False) -> Both:
    """An arm's name in both languages; a teacher that is compared goes by its own."""
    own = report.purchase.labels.get(name) if report and report.purchase else None
    return Both(own, own) if own else arm_words(name, head=head)


def metric_words(name: str, report: Report) -> Both:
    """A metric's name in a sentence."""
    metric = report.metric(name)
    return Both(metric.en, metric.zh)


def pair_words(a: ArmName, b: ArmName, report: Report | None = None) -> Both:
    """`RL − Teacher` in both languages."""
    left, right = (arm_label_words(name, report, head=True) for name in (a, b))
    return Both(f"{left.en} − {right.en}", f"{left.zh} − {right.zh}")


def headline(report: Report) -> Comparison | None:
    """The comparison that the verdict speaks of: the challenger's, where a gate decided on one."""
    usable = {(c.a, c.b, c.metric): c for c in report.comparisons if c.diff is not None}
    challenger = (report.decision.challenger,) if report.decision else ()
    gated = [(arm, rival) for arm in (*challenger, "rl", "sft") for rival in report.rivals]
    pairs = [(report.purchase.rival, "teacher")] if report.purchase else [*gated, *_MAIN_PAIRS]
    keys = ((a, b, metric.name) for a, b in pairs for metric in by_preference(report))
    return next((usable[key] for key in keys if key in usable), None)


def by_preference(report: Report) -> list[Metric]:
    """The metrics, those that a headline should be about first."""
    return sorted(report.metrics, key=lambda metric: not metric.primary)


def candidate(report: Report) -> ArmName | None:
    """The arm that the report is about: the gate's challenger, or the first of the headline."""
    if report.decision and report.decision.challenger in report.arms:
        return report.decision.challenger
    found = headline(report)
    return found.a if found else None


def opponent(report: Report) -> ArmName:
    """What the candidate is held against: the gate's rival; the teacher against the original question."""
    found, name = headline(report), candidate(report)
    if found and found.a == name:
        return found.b
    return "original" if name == "teacher" else report.rivals[0]


def _without_comparison(report: Report) -> tuple[Both, Both]:
    """Of a refresh, at least what became of the rows."""
    nothing = Both("Nothing was compared", "没有可比较的结果")
    why = Both("o two arms have values for the same questions.", "没有两个组在相同的问题上都有数值。")
    read, made = report.stage("ingest"), report.stage("dataset")
    if not (report.is_of_data and read and made):
        return Both(f"{nothing.en} in this run.", "本次运行没有可比较的结果。"), Both(f"N{why.en}", why.zh)
    rows_in, rows_out = count(read.rows_in), count(made.rows_out)
    kept = Both(f"{rows_out} of {rows_in} rows are in the dataset.", f"{rows_in} 行中有 {rows_out} 行进入数据集。")
    return kept, Both(f"{nothing.en}: n{why.en}", f"{nothing.zh}：{why.zh}")


def _sentence(report: Report, found: Comparison, a: Both, b: Both) -> Both:
    metric = report.metric(found.metric)
    mean_a, mean_b = (number(mean, metric.digits) for mean in (found.mean_a, found.mean_b))
    difference = with_interval(found.diff, found.ci95, signed)
    of_test = any(arm in report.arms for arm in STUDENTS)
    questions = Both("test questions", "个测试问题") if of_test else Both("questions", "个问题")
    return Both(
        f"{capitalised(a.en)} {mean_a} vs {b.en} {mean_b} {metric.en} on {count(found.n)} {questions.en}: {difference}",
        f"{a.zh} {mean_a}，{b.zh} {mean_b}（{metric.zh}，{count(found.n)} {questions.zh}）：{difference}",
    )


def _tone(found: Comparison) -> Tone:
    if found.ci95 is None or found.ci95[0] <= 0 <= found.ci95[1]:
        return "open"
    return "better" if found.ci95[0] > 0 else "worse"


def _reading(found: Comparison, a: Both, b: Both) -> Both:
    if found.ci95 is None:
        return Both(
            "All questions belong to one group, so that no interval can be given.", "所有问题属于同一组，无法给出区间。"
        )
    tone, detectable = _tone(found), number(found.detectable_diff) if found.detectable_diff else ""
    if tone == "open":
        return Both(
            "The 95% interval includes 0: no difference is shown."
            + (f" This test set can detect {detectable}." if detectable else ""),
            "95% 区间包含 0：没有显示出差异。" + (f"本测试集能检出 {detectable} 的差异。" if detectable else ""),
        )
    side, than = (Both("above", "上"), "优于") if tone == "better" else (Both("below", "下"), "不如")
    return Both(
        f"The 95% interval lies {side.en} 0: the {a.en} is {tone} than the {b.en} on questions like these.",
        f"95% 区间在 0 之{side.zh}：在这类问题上，{a.zh}{than}{b.zh}。",
    )
