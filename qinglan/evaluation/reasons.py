"""Reasons: a code with values, and the sentence that each code has in English and in Chinese.

Gate, red team and evaluation store codes. A reason becomes text only where somebody reads it: the report's page, the
terminal, Prefect, MLflow.
"""

from collections.abc import Callable
from string import Formatter
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, model_validator

from qinglan import text
from qinglan.evaluation.words import ALARMS, arm_words, rival_words
from qinglan.text import Both, Language


class Reason(BaseModel):
    """What was found, demanded or wrong. Its code has a sentence in `SENTENCES`, and the values fill that in."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    code: str
    values: "dict[str, Value]" = {}
    """Words in both languages are a mapping from `en` and `zh`."""

    @model_validator(mode="after")
    def _has_a_sentence(self) -> "Reason":
        if self.code not in SENTENCES:
            raise ValueError(f"{self.code!r} is no reason's code")
        if (wanted := placeholders(SENTENCES[self.code].en)) != self.values.keys():
            raise ValueError(f"reason {self.code!r} takes {sorted(wanted)}, not {sorted(self.values)}")
        return self

    def render(self, language: Language = "en") -> str:
        """The sentence."""
        return _Sentence(language).format(getattr(SENTENCES[self.code], language), **self.values)

    @property
    def words(self) -> Both:
        """The sentence in both languages."""
        return Both(*(self.render(language) for language in get_args(Language)))


Value = Reason | str | int | float | list[Reason] | list[str] | list[int] | dict[str, str] | None
Reason.model_rebuild()


def reason(code: str, **values: "Value | Both") -> Reason:
    """Make a reason."""
    plain = {name: value._asdict() if isinstance(value, Both) else value for name, value in values.items()}
    return Reason.model_validate({"code": code, "values": plain})


def placeholders(sentence: str) -> set[str]:
    """Names of the values that a sentence takes."""
    return {name for _, name, _, _ in Formatter().parse(sentence) if name}


class _Sentence(Formatter):
    """Fills in a sentence; what stands behind a placeholder's colon says how its value is shown."""

    def __init__(self, language: Language) -> None:
        self.language = language

    def format_field(self, value: Any, how: str) -> str:
        if how in _OPTIONAL:
            form = str(getattr(_OPTIONAL[how], self.language))
            return form.format(self.format_field(value, "")) if value else ""
        if isinstance(value, Reason):
            return value.render(self.language)
        if isinstance(value, list):
            nested = how != "comma" and any(isinstance(each, Reason) for each in value)
            joint = str(getattr(_SEMICOLON if nested else _COMMA, self.language))
            return joint.join(self.format_field(each, how) for each in value)
        if isinstance(value, dict):
            return str(value[self.language])
        if how in _WORDS:
            return str(getattr(_WORDS[how](value), self.language))
        return "" if value is None else _NUMBERS.get(how, str)(value)


_COMMA, _SEMICOLON = Both(", ", "、"), Both("; ", "；")
_OPTIONAL = {"brackets": Both(" ({})", "（{}）"), "colon": Both(": {}", "：{}"), "semicolon": Both("; {}", "；{}")}
"""A value with its punctuation before it, or nothing where there is none."""
_WORDS: dict[str, Callable[[str], Both]] = {"arm": arm_words, "rival": rival_words, "alarm": ALARMS.__getitem__}
_NUMBERS: dict[str, Callable[[Any], str]] = {
    "count": text.count,
    "usd": text.usd,
    "signed": text.signed,
    "signed2": lambda value: text.signed(value, 2),
    "number": text.number,
    "number0": lambda value: text.number(value, 0),
    "number1": lambda value: text.number(value, 1),
    "number2": lambda value: text.number(value, 2),
    "short": lambda value: f"{value:g}",
    "percent": lambda value: f"{value:.0%}",
    "share": lambda value: f"{value:.0%}" if value >= 0.01 else f"{value:.1%}",
}

_REQUIRED = {
    "gain_interval_above": Both("the 95% interval above {limit:signed}", "95% 区间高于 {limit:signed}"),
    "quality_interval_above": Both("the 95% interval above {limit:signed2}", "95% 区间高于 {limit:signed2}"),
    "cost_at_most": Both("at most {ratio:percent} of the teacher's", "不超过教师的 {ratio:percent}"),
    "median_at_most": Both("median at most {ratio:short} × the teacher's", "中位数不超过教师的 {ratio:short} 倍"),
    "p95_at_most": Both("p95 at most {limit_ms:number0} ms", "p95 不超过 {limit_ms:number0} 毫秒"),
    "every_needed_case": Both("every case that must pass", "所有必须通过的用例"),
    "no_alarm": Both("none", "无"),
    "no_alarm_but": Both("none but {accepted}", "无，{accepted:alarm} 除外"),
    "approval_needed": Both("a person's approval (gate.approval)", "人工审批（gate.approval）"),
}
_FOUND = {
    "not_compared": Both("not compared", "未比较"),
    "not_known": Both("not known", "未知"),
    "not_measured": Both("not measured", "未测量"),
    "not_tried": Both("not tried", "未测试"),
    "difference": Both(
        "{metric} {diff:signed} [{low:number}, {high:number}] on {n:count} questions",
        "{metric} {diff:signed} [{low:number}, {high:number}]（{n:count} 个问题）",
    ),
    "difference_without_interval": Both(
        "{metric} {diff:signed} on {n:count} questions", "{metric} {diff:signed}（{n:count} 个问题）"
    ),
    "cost_beside_teacher": Both(
        "{cost:usd} per 1,000 questions, {ratio:share} of the teacher's {teacher:usd}",
        "每 1,000 个问题 {cost:usd}，为教师 {teacher:usd} 的 {ratio:share}",
    ),
    "median": Both(
        "median {ms:number0} ms{load:brackets}; the teacher's was not measured",
        "中位数 {ms:number0} 毫秒{load:brackets}；教师的未测量",
    ),
    "median_beside_teacher": Both(
        "median {ms:number0} ms{load:brackets}, against the teacher's {teacher_ms:number0} ms{teacher_load:brackets}",
        "中位数 {ms:number0} 毫秒{load:brackets}，教师 {teacher_ms:number0} 毫秒{teacher_load:brackets}",
    ),
    "p95": Both("p95 {ms:number0} ms{load:brackets}", "p95 {ms:number0} 毫秒{load:brackets}"),
    "cases_passed": Both("{passed} of {cases} passed", "{cases} 个中通过 {passed} 个"),
    "no_case_must_pass": Both("no case must pass", "没有必须通过的用例"),
    "alarms": Both("{alarms:comma}", "{alarms:comma}"),
    "alarm_at_steps": Both("{name} (step {steps})", "{name:alarm}（第 {steps} 步）"),
    "approved": Both("approved by {reviewer}{comment:colon}", "已由 {reviewer} 批准{comment:colon}"),
    "refused": Both("refused by {reviewer}{comment:colon}", "被 {reviewer} 拒绝{comment:colon}"),
    "nameless": Both("a person without a name", "未署名者"),
    "nobody_answered": Both("nobody answered", "无人答复"),
    "one_at_a_time": Both("one question at a time on {device}", "在 {device} 上逐个提问"),
    "live_at_once": Both("up to {questions} at once, live API", "最多 {questions} 个并发，在线接口"),
}
_WHY = {
    "champion_not_compared": Both(
        "the champion was not compared with it: it was not evaluated in this run, or is one of its models",
        "没有与现役模型比较：它未在本次运行中评估，或者就是本次运行的模型之一",
    ),
    "arms_not_compared": Both(
        "{a} and {b} were not compared on this; evaluate both in one run",
        "{a:arm} 与{b:arm} 未在此项上比较；请在同一次运行中评估两者",
    ),
    "one_group": Both(
        "all questions belong to one group, so that there is no interval; ask questions of more groups",
        "所有问题属于同一组，无法给出区间；请增加属于其他组的问题",
    ),
    "gain_ruled_out": Both(
        "it is not better than {rival:rival} on {metric}: a gain of {gain:number} is ruled out",
        "{metric}不优于{rival:rival}：已排除 {gain:number} 的提升",
    ),
    "gain_open": Both(
        "whether it is better than {rival:rival} on {metric} is open: {why}",
        "{metric}是否优于{rival:rival}尚无定论：{why}",
    ),
    "quality_lower": Both(
        "the judge scores it lower than {rival:rival}, by more than {margin:number2}",
        "裁判评分比{rival:rival}低，且超过 {margin:number2}",
    ),
    "quality_open": Both(
        "whether the judge finds it as good as {rival:rival} is open: {why}",
        "裁判评分是否不低于{rival:rival}尚无定论：{why}",
    ),
    "one_sided": Both(
        "{questions:count} questions were left out because only one of the two has a value there, and they could turn "
        "the result; correct what failed and evaluate again",
        "{questions:count} 个问题只有一方有数值而未计入，它们足以改变结论；请修复失败之处后重新评估",
    ),
    "one_sided_or_unjudged": Both(
        "{questions:count} questions were left out because the judge's answer failed ({unjudged:count}) or only one of "
        "the two has a value there, and they could turn the result; correct what failed and evaluate again",
        "{questions:count} 个问题因裁判未能评分（{unjudged:count} 个）或只有一方有数值而未计入，它们足以改变结论；"
        "请修复失败之处后重新评估",
    ),
    "answers_hardly_differ": Both(
        "the answers hardly differ; ask more questions", "双方的回答几乎没有差别；请增加问题"
    ),
    "more_rows_for_gain": Both(
        "the test set detects a gain of {detectable:number} in four of five test sets; {rows:count} rows would be "
        "needed to detect {gain:number}",
        "五个这样的测试集中有四个能检出 {detectable:number} 的提升；需要 {rows:count} 行才能检出 {gain:number}",
    ),
    "smaller_than_detectable": Both(
        "the test set detects a gain of {detectable:number} in four of five test sets, and this one is smaller; {why}",
        "五个这样的测试集中有四个能检出 {detectable:number} 的提升，而这里的提升更小；{why}",
    ),
    "rows_for_difference": Both(
        "{rows:count} rows would be needed to tell this difference from the limit",
        "需要 {rows:count} 行才能把这一差异与界限区分开",
    ),
    "difference_at_limit": Both(
        "the difference lies at the limit or beyond it, within the noise", "差异处在界限上或界限之外，仍在噪声范围内"
    ),
    "cost_unknown": Both(
        "the cost of {arm:rival} is not known; give its model a price under `prices`",
        "{arm:rival}的成本未知；请在 `prices` 中给出其模型的价格",
    ),
    "cost_too_high": Both("it costs {ratio:share} of what the teacher costs", "成本为教师的 {ratio:share}"),
    "latency_not_measured": Both(
        "the challenger's latency was not measured; set evaluate.latency_queries and evaluate again",
        "没有测量挑战者的延迟；请设置 evaluate.latency_queries 后重新评估",
    ),
    "slower_than_teacher": Both(
        "it takes {factor:number1} times as long as the teacher", "用时为教师的 {factor:number1} 倍"
    ),
    "p95_too_long": Both(
        "one answer in twenty takes longer than {ms:number0} ms", "每二十个回答中有一个超过 {ms:number0} 毫秒"
    ),
    "red_team_not_tried": Both(
        "the red team's cases were not put to the challenger; evaluate again",
        "没有用红队用例测试挑战者；请重新评估",
    ),
    "red_team_failed": Both("it fails the red team on {cases}", "未通过红队用例 {cases}"),
    "red_team_unchecked": Both("the red team could not check {cases}", "红队用例无法检查：{cases}"),
    "case": Both("“{name}” ({case_id}: {reason})", "“{name}”（{case_id}：{reason}）"),
    "and_more": Both("and {cases} more", "另有 {cases} 个"),
    "alarmed": Both(
        "training alarmed before the chosen step: {alarms:comma}; see docs/alarms.md",
        "在选定的步之前训练发出警报：{alarms:comma}；见 docs/alarms.md",
    ),
    "nobody_approved": Both(
        "nobody approved it in time; `qinglan release approve RUN --reviewer NAME --profile PROFILE` still can",
        "无人及时批准；仍可用 `qinglan release approve RUN --reviewer NAME --profile PROFILE` 批准",
    ),
}
_DECIDED = {
    "promote": Both(
        "Release {model:rival}{instead}: all {rules} rules hold{gain:semicolon}.",
        "可以发布{model:rival}{instead}：{rules} 条规则全部满足{gain:semicolon}。",
    ),
    "undecided": Both("Undecided about {model:rival}: {reasons}.", "{model:rival}尚无定论：{reasons}。"),
    "refuse": Both("Do not release {model:rival}: {reasons}.{besides}", "不可发布{model:rival}：{reasons}。{besides}"),
    "promote_approved": Both(
        "Release {model:rival}{instead}: {approval}, and all other rules hold{gain:semicolon}.",
        "可以发布{model:rival}{instead}：{approval}，其他规则全部满足{gain:semicolon}。",
    ),
    "refuse_approval": Both(
        "Do not release {model:rival}: all other rules hold, but it was {approval}.",
        "不可发布{model:rival}：其他规则全部满足，但{approval}。",
    ),
    "undecided_approval": Both(
        "Undecided about {model:rival}: all other rules hold, but {why}.",
        "{model:rival}尚无定论：其他规则全部满足，但{why}。",
    ),
    "in_place_of": Both(" in place of version {version}", "，取代版本 {version}"),
    "gain_against": Both("{found} against {rival:rival}", "{found}，对比{rival:rival}"),
    "besides_unknown": Both(" Besides, {rules} of the rules could not be decided.", "此外，{rules} 条规则无法判断。"),
}
_RED_TEAM = {
    "rag_no_answer": Both("the RAG gave no answer for this rewrite", "RAG 对该改写没有回答"),
    "empty": Both("the answer is empty", "回答为空"),
    "several_lines": Both("the answer has more than one line", "回答不止一行"),
    "contains": Both("contains {word!r}", "含有 {word!r}"),
    "matches": Both("contains {found!r}, which matches {pattern}", "含有 {found!r}，匹配 {pattern}"),
    "too_long": Both("has {chars} characters, more than {limit}", "有 {chars} 个字符，超过 {limit} 个"),
    "echo": Both("repeats the question as it was", "原样重复了问题"),
    "boilerplate": Both("is no rewrite: {text!r}", "不是改写：{text!r}"),
    "repetitive": Both("repeats itself: {text!r}", "自我重复：{text!r}"),
    "subject_lost": Both(
        "lost what the question is about; none of {words} is left", "丢失了问题的主题；{words} 一个也没有保留"
    ),
    "words_missing": Both("lacks {words}, which must be there", "缺少必须有的 {words}"),
    "part_without_value": Both(
        "has no value for {part}, of which {least:short} must be reached", "{part} 没有值，应达到 {least:short}"
    ),
    "part_too_low": Both(
        "reaches {value:short} of {part}, less than {least:short}", "{part} 为 {value:short}，低于 {least:short}"
    ),
    "document_too_low": Both(
        "document {document!r} is at place {place}; it must be {demand}",
        "文档 {document!r} 排在第 {place} 位；要求{demand}",
    ),
    "document_not_found": Both(
        "document {document!r} is not found; it must be {demand}", "没有找到文档 {document!r}；要求{demand}"
    ),
    "first_place": Both("first", "排在首位"),
    "first_places": Both("among the first {places}", "在前 {places} 位之中"),
}
SENTENCES = _REQUIRED | _FOUND | _WHY | _DECIDED | _RED_TEAM
