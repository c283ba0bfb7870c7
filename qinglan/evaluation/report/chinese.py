"""The sentences of gate, red team and evaluation in Chinese, for the report's Chinese page.

They are written in English where they arise, since logs, MLflow and Prefect show them too. Here they are known by
their pattern; whatever has none, such as a name that somebody gave, stays as it is.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache

from qinglan.evaluation.report.words import ALARMS
from qinglan.text import ARMS

_ALARMED = re.compile(r"(\w+) \(step ([\d, ]+)\)")
_CASE = re.compile(r"“(.*?)” \(([\w.-]+): (.*?)\)(?=; |$)")


def chinese(text: str, terms: Mapping[str, str] | None = None) -> str:
    """A sentence, or a part of one, in Chinese.

    Args:
        terms: what the recipe calls its metrics, English → Chinese.
    """
    if terms and text in terms:
        return terms[text]
    for pattern, template in _patterns():
        if found := pattern.fullmatch(text):
            if callable(template):
                return template(found)
            return template.format(*(chinese(part, terms) if part else "" for part in found.groups()))
    return text


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...]:
    terms = {re.escape(f"the {arm.en}"): arm.zh for arm in ARMS.values()}
    terms |= {name: arm.zh for name, arm in ARMS.items()}
    known = {**terms, **_WORDS, **_REQUIRED, **_FOUND, **_REASONS, **_REWRITES, r"[a-z_]+(?:, [a-z_]+)*": _alarms}
    return tuple((re.compile(pattern, re.DOTALL), template) for pattern, template in known.items())


def _alarmed(found: re.Match[str]) -> str:
    steps = [(ALARMS[name].zh if name in ALARMS else name, at) for name, at in _ALARMED.findall(found.group())]
    return "、".join(f"{name}（第 {at.replace(', ', '、')} 步）" for name, at in steps)


def _alarms(found: re.Match[str]) -> str:
    names = found.group().split(", ")
    return "、".join(ALARMS[name].zh for name in names) if set(names) <= ALARMS.keys() else found.group()


def _cases(found: re.Match[str]) -> str:
    named = "；".join(f"“{name}”（{case}：{chinese(reason)}）" for name, case, reason in _CASE.findall(found.group()))
    more = re.search(r"; and (\d+) more$", found.group())
    return f"{named}；另有 {more.group(1)} 个" if more else named


_Templates = dict[str, str | Callable[[re.Match[str]], str]]
_MEASURED = r"( \([^()]*\))?"
_WORDS: _Templates = {
    r" \(([^()]*)\)": "（{0}）",
    r"(up to )?(\d+) at once, (.+)": "{0}{1} 个并发，{2}",
    r"up to ": "最多 ",
    r"live API": "在线接口",
    r"batch API": "批处理接口",
    r"one question at a time on (.+)": "在 {0} 上逐个提问",
    r"\w+ \(step [\d, ]+\)(?:, \w+ \(step [\d, ]+\))*": _alarmed,
    r"“.*?” \([\w.-]+: .*": _cases,
}
_REQUIRED: _Templates = {
    r"the 95% interval above (.+)": "95% 区间高于 {0}",
    r"at most (\S+) of the teacher's": "不超过教师的 {0}",
    r"median at most (\S+) × the teacher's": "中位数不超过教师的 {0} 倍",
    r"p95 at most (\S+) ms": "p95 不超过 {0} 毫秒",
    r"every case that must pass": "所有必须通过的用例",
    r"none but (.+)": "无，{0} 除外",
    r"none": "无",
    r"a person's approval \(gate.approval\)": "人工审批（gate.approval）",
}
_FOUND: _Templates = {
    r"not compared": "未比较",
    r"not known": "未知",
    r"not measured": "未测量",
    r"not tried": "未测试",
    r"(\S.*?) ([+−]?[\d.,]+(?: \[.+\])?) on (\S+) questions": "{0} {1}（{2} 个问题）",
    r"(\S+) per 1,000 questions, (\S+) of the teacher's (\S+)": "每 1,000 个问题 {0}，为教师 {2} 的 {1}",
    rf"median (\S+) ms{_MEASURED}; the teacher's was not measured": "中位数 {0} 毫秒{1}；教师的未测量",
    rf"median (\S+) ms{_MEASURED}, against the teacher's (\S+) ms{_MEASURED}": ("中位数 {0} 毫秒{1}，教师 {2} 毫秒{3}"),
    rf"p95 (\S+) ms{_MEASURED}": "p95 {0} 毫秒{1}",
    r"(\d+) of (\d+) passed": "{1} 个中通过 {0} 个",
    r"no case must pass": "没有必须通过的用例",
    r"approved by (.+?)(: .+)?": "已由 {0} 批准{1}",
    r"refused by (.+?)(: .+)?": "被 {0} 拒绝{1}",
    r"a person without a name": "未署名者",
    r": (.+)": "：{0}",
    r"nobody answered": "无人答复",
}
_REASONS: _Templates = {
    r"the champion was not compared with it: it was not evaluated in this run, or is one of its models": (
        "没有与现役模型比较：它未在本次运行中评估，或者就是本次运行的模型之一"
    ),
    r"(\S+) and (\S+) were not compared on this; evaluate both in one run": (
        "{0} 与 {1} 未在此项上比较；请在同一次运行中评估两者"
    ),
    r"all questions belong to one group, so that there is no interval; ask questions of more groups": (
        "所有问题属于同一组，无法给出区间；请增加属于其他组的问题"
    ),
    r"it is not better than (.+?) on (.+): a gain of (\S+) is ruled out": ("{1}不优于{0}：已排除 {2} 的提升"),
    r"whether it is better than (.+?) on (.+?) is open: (.+)": "{1}是否优于{0}尚无定论：{2}",
    r"the judge scores it lower than (.+), by more than (\S+)": "裁判评分比{0}低，且超过 {1}",
    r"whether the judge finds it as good as (.+?) is open: (.+)": "裁判评分是否不低于{0}尚无定论：{1}",
    r"(\S+) questions were left out because only one of the two has a value there, and they could turn the result; "
    r"mend what failed and evaluate again": (
        "{0} 个问题只有一方有数值而未计入，它们足以改变结论；请修复失败之处后重新评估"
    ),
    r"(\S+) questions were left out because the judge's answer failed \((\S+)\) or only one of the two has a value "
    r"there, and they could turn the result; mend what failed and evaluate again": (
        "{0} 个问题因裁判未能评分（{1} 个）或只有一方有数值而未计入，它们足以改变结论；请修复失败之处后重新评估"
    ),
    r"the answers hardly differ; ask more questions": "双方的回答几乎没有差别；请增加问题",
    r"the test set detects a gain of (\S+) in four of five test sets; (.+)": (
        "五个这样的测试集中有四个能检出 {0} 的提升；{1}"
    ),
    r"the test set detects a gain of (\S+) in four of five test sets, and this one is smaller; (.+)": (
        "五个这样的测试集中有四个能检出 {0} 的提升，而这里的提升更小；{1}"
    ),
    r"(\S+) rows would be needed to detect (\S+)": "需要 {0} 行才能检出 {1}",
    r"(\S+) rows would be needed to tell this difference from the limit": "需要 {0} 行才能把这一差异与界限区分开",
    r"the difference lies at the limit or beyond it, within the noise": "差异处在界限上或界限之外，仍在噪声范围内",
    r"the cost of (.+) is not known; give its model a price under `prices`": (
        "{0}的成本未知；请在 `prices` 中给出其模型的价格"
    ),
    r"it costs (\S+) of what the teacher costs": "成本为教师的 {0}",
    r"the challenger's latency was not measured; set evaluate.latency_queries and evaluate again": (
        "没有测量挑战者的延迟；请设置 evaluate.latency_queries 后重新评估"
    ),
    r"it takes (\S+) times as long as the teacher": "用时为教师的 {0} 倍",
    r"one answer in twenty takes longer than (\S+) ms": "每二十个回答中有一个超过 {0} 毫秒",
    r"the red team's cases were not put to the challenger; evaluate again": ("没有用红队用例测试挑战者；请重新评估"),
    r"it fails the red team on (.+)": "未通过红队用例 {0}",
    r"the red team could not check (.+)": "红队用例无法检查：{0}",
    r"nobody approved it in time; `qinglan release approve RUN --reviewer NAME --profile PROFILE` still can": (
        "无人及时批准；仍可用 `qinglan release approve RUN --reviewer NAME --profile PROFILE` 批准"
    ),
    r"training alarmed before the chosen step: (.+); see docs/alarms.md": (
        "在选定的步之前训练发出警报：{0}；见 docs/alarms.md"
    ),
}
_REWRITES: _Templates = {
    r"the RAG gave no answer for this rewrite": "RAG 对该改写没有回答",
    r"the answer is empty": "回答为空",
    r"the answer has more than one line": "回答不止一行",
    r"contains (.+), which matches (.+)": "含有 {0}，匹配 {1}",
    r"contains (.+)": "含有 {0}",
    r"has (\d+) characters, more than (\d+)": "有 {0} 个字符，超过 {1} 个",
    r"repeats the question as it was": "原样重复了问题",
    r"is no rewrite: (.+)": "不是改写：{0}",
    r"repeats itself: (.+)": "自我重复：{0}",
    r"lost what the question is about; none of (.+) is left": "丢失了问题的主题；{0} 一个也没有保留",
    r"lacks (.+), which must be there": "缺少必须有的 {0}",
    r"reaches (.+) of (.+), less than (.+)": "{1} 为 {0}，低于 {2}",
    r"has no value for (.+), of which (.+) must be reached": "{0} 没有值，应达到 {1}",
    r"document (.+) is at place (\d+); it must be (.+)": "文档 {0} 排在第 {1} 位；要求{2}",
    r"document (.+) is not found; it must be (.+)": "没有找到文档 {0}；要求{1}",
    r"first": "排在首位",
    r"among the first (\d+)": "在前 {0} 位之中",
}
