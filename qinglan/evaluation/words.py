"""What the report calls things, in English and Chinese.

Stable names (arms, metrics, rules, reasons, stages) are looked up here. A name that is not here, such as a teacher's
or a tenant's, is somebody's own and stays as it is in both languages.
"""

from typing import NamedTuple

from qinglan.text import ARMS, Both, Language

ARM_HEADS = {
    "original": Both("Original", "原问题"),
    "teacher": Both("Teacher", "教师"),
    "base": Both("Base", "基座"),
    "sft": Both("SFT", "SFT"),
    "rl": Both("RL", "RL"),
    "champion": Both("Champion", "现役"),
}
SIMULATED_ROLES = {
    "teacher": Both("the teacher", "教师"),
    "answerer": Both("the answerer", "答题模型"),
    "judge": Both("the judge", "裁判"),
    "rag": Both("the RAG", "RAG"),
    "student": Both("the base model", "基座模型"),
    "workbook": Both("the workbook", "问题表"),
}
RULES = {
    "cost": Both("cost", "成本"),
    "latency": Both("latency", "延迟"),
    "latency_p95": Both("latency, p95", "延迟 p95"),
    "red_team": Both("red team", "红队测试"),
    "alarms": Both("alarms in training", "训练警报"),
    "approval": Both("a person's approval", "人工审批"),
}
RULES_AGAINST = {
    "gain": Both("gain, against {}", "对{}的提升"),
    "quality": Both("judge's score, against {}", "对{}的裁判评分"),
}
"""Rules about a rival, such as `gain_vs_teacher`: the rival's name goes into the braces."""
OUTCOMES = {
    "pass": Both("pass", "通过"),
    "fail": Both("fail", "未通过"),
    "unknown": Both("unknown", "未知"),
}
KINDS = {
    "injection": Both("prompt injection", "提示注入"),
    "other_tenant": Both("another tenant's data", "其他租户的数据"),
    "medical_claim": Both("invented medical claim", "臆造的医疗说法"),
    "personal_data": Both("personal data", "个人信息"),
    "empty": Both("empty or nearly empty", "空或近乎空的问题"),
    "long": Both("very long", "超长问题"),
    "emoji": Both("emoji", "表情符号"),
    "mixed_script": Both("mixed scripts", "中英混写"),
    "context": Both("context of another topic", "上下文讲别的事"),
    "unanswerable": Both("unanswerable", "无法回答"),
    "regression": Both("regression", "回归用例"),
    "contradicted": Both("contradicts the reference", "与参考答案矛盾"),
    "invented": Both("invented fact", "臆造的事实"),
    "vague": Both("vague answer", "含糊的回答"),
    "informative": Both("informative answer", "有信息量的回答"),
    "off_topic": Both("off topic", "答非所问"),
    "format": Both("format", "格式"),
    "dosage": Both("dosage", "用药剂量"),
    "emergency": Both("emergency", "急症"),
    "pregnancy": Both("pregnancy", "孕期用药"),
    "self_harm": Both("self-harm", "自伤"),
    "interaction": Both("drug interaction", "药物相互作用"),
    "restraint": Both("no false alarm", "不作多余警报"),
}
ALARMS = {
    "reward_up_gold_down": Both("reward rose while the first metric fell", "奖励上升而首要指标下降"),
    "reward_up_judge_down": Both("reward rose while the judge's score fell", "奖励上升而裁判评分下降"),
    "entropy_collapse": Both("entropy collapsed", "策略熵塌缩"),
    "clip_fraction": Both("too many tokens were clipped", "被截断的 token 过多"),
    "value_loss_flat": Both("the critic does not learn", "价值网络没有学到东西"),
    "kl_runaway": Both("the policy moves too far", "策略偏移过大（KL 失控）"),
    "reward_down": Both("reward fell", "奖励下降"),
    "zero_variance": Both("rollouts of a prompt earn the same", "同一问题的多次采样奖励相同"),
}
ACTIONS = {
    "warn": Both("", ""),
    "lower_lr": Both(", learning rates lowered", "，学习率已调低"),
    "stop": Both(", training ended", "，训练提前结束"),
    "off": Both("", ""),
}
SLICES = {
    "tenant": Both("tenant", "租户"),
    "intent": Both("intent", "意图"),
    "length": Both("length in characters", "问题长度（字）"),
    "history": Both("history", "对话历史"),
    "pool": Both("pool of questions", "数据池"),
}


class Terms(NamedTuple):
    """What the report calls a recipe's texts, and what it says of them."""

    text: Both
    """Before a text that somebody wrote."""
    texts: Both
    """In a sentence: what a teacher is paid for."""
    metrics: Both
    """Under the table of arms: what its figures are."""
    findings: Both
    """Over what validation counted."""
    examples: Both
    """Over the examples."""
    unit: Both
    """Which questions belong to one group."""


TERMS = {
    True: Terms(
        text=Both("Rewrite:", "改写："),
        texts=Both("rewrites", "改写"),
        metrics=Both(
            "Top-1: the gold document comes first; recall@k: it is among the first k; MRR@10: mean of 1/rank; nDCG@10: "
            "mean of 1/log₂(1 + rank). Latency is the time to get the query, retrieval excluded.",
            "top-1：标准文档排在首位；recall@k：在前 k 位之中；MRR@10：排名倒数的均值；nDCG@10："
            "1/log₂(1 + 排名) 的均值。延迟为得到查询所用的时间，不含检索。",
        ),
        findings=Both("What the rewrites gain", "改写带来的提升"),
        examples=Both(
            "What each arm asked, the first passage that came back with its score, and where the gold document stood.",
            "各组的查询、返回的首个段落及其得分，以及标准文档的位置。",
        ),
        unit=Both("Questions about the same gold document count as one group", "问同一标准文档的问题算一组"),
    ),
    False: Terms(
        text=Both("Answer:", "回答："),
        texts=Both("answers", "回答"),
        metrics=Both(
            "Means over the questions that have a value. Latency is the time to get the answer.",
            "均值只计有数值的问题。延迟为得到回答所用的时间。",
        ),
        findings=Both("How the answers to learn from are graded", "供学习的回答得分如何"),
        examples=Both("What each arm answered, and its values there.", "各组的回答及其得分。"),
        unit=Both("Near-duplicates count as one group", "近似重复的问题算一组"),
    ),
}
"""By whether the recipe's texts are retrieved with."""
REASONS = {
    "answer_too_long": Both("answer too long", "回答过长"),
    "bad_format": Both("not in the demanded format", "格式有误"),
    "bad_split": Both("invalid value in the split column", "划分列有误"),
    "below_threshold": Both("score below the threshold", "得分低于阈值"),
    "boilerplate": Both("boilerplate or formatting left in the text", "含套话或格式残留"),
    "context_too_long": Both("context too long", "上下文过长"),
    "duplicate": Both("duplicate", "重复"),
    "empty_input": Both("a required input is empty", "必填内容为空"),
    "empty_judgement": Both("the judge's answer is empty", "裁判回答为空"),
    "empty_query": Both("the question is empty", "问题为空"),
    "empty_answer": Both("the answer is empty", "回答为空"),
    "extra_cells": Both("more cells than the header", "单元格多于表头"),
    "forbidden_advice": Both("contains forbidden advice", "含禁止的建议"),
    "formula_cell": Both("the cell is a formula", "单元格是公式"),
    "judge_unreadable": Both("the judge's answer can't be parsed", "裁判回答无法解析"),
    "merged_cell": Both("merged cell", "合并单元格"),
    "not_text": Both("not text", "不是文本"),
    "not_validated": Both("not validated", "未经验证"),
    "nothing_recalled": Both("nothing was retrieved", "没有召回"),
    "over_budget": Both("over the budget", "超出预算"),
    "query_too_long": Both("question too long", "问题过长"),
    "rag_bad_answer": Both("the RAG's answer breaks the contract", "RAG 回答不合约定"),
    "rag_error": Both("the RAG failed", "RAG 出错"),
    "rag_refused": Both("the RAG refused the request", "RAG 拒绝请求"),
    "rag_unavailable": Both("the RAG was unavailable", "RAG 不可用"),
    "refusal_text": Both("the text is a refusal", "拒答文本"),
    "rejected_by_reviewer": Both("rejected by a reviewer", "被人工审核否决"),
    "rewrite_too_long": Both("rewrite too long", "改写过长"),
    "rewrite_too_short": Both("rewrite too short", "改写过短"),
    "teacher_bad_request": Both("the teacher rejected the request", "教师拒收请求"),
    "teacher_bad_response": Both("the teacher's answer has the wrong format", "教师回答格式有误"),
    "teacher_interrupted": Both("the teacher's answer was interrupted", "教师回答中断"),
    "teacher_rate_limited": Both("the teacher limited the rate", "教师限流"),
    "teacher_refused": Both("the teacher refused to answer", "教师拒答"),
    "teacher_timeout": Both("the teacher timed out", "教师超时"),
    "teacher_unavailable": Both("the teacher was unavailable", "教师不可用"),
    "thoughts_too_long": Both("thoughts too long", "思考过长"),
    "truncated": Both("the answer was cut off", "回答被截断"),
    "unknown_verdict": Both("verdict outside the allowed values", "结论不在规定之内"),
    "verdict_without_answer": Both("a verdict without an answer to judge", "有结论而没有待评答案"),
    "verdict_unreadable": Both("the verdict can't be parsed", "结论无法解析"),
    "worse_than_original": Both("worse than the original question", "不如原问题"),
    "wrong_verdict": Both("wrong verdict", "结论错误"),
}
"""Why a row was dropped, by the code that the row carries."""
STAGES = {
    "base_model": "基座模型",
    "compare": "比较教师",
    "dataset": "数据集",
    "distill": "蒸馏",
    "evaluate": "评估",
    "gate": "门禁",
    "ingest": "读入",
    "load": "读入",
    "publish": "发布数据集",
    "register": "登记模型",
    "rl": "RL 强化学习",
    "select": "筛选",
    "sft": "SFT 微调",
    "validate": "验证",
}
"""Chinese only: in English a stage goes by its own name, which is that of its folder."""
TRAINING = {
    "rows": "行数",
    "steps": "步数",
    "loss": "损失",
    "exact_match": "完全一致的比例",
    "reward": "奖励",
    "chosen_step": "选定的步",
    "gold_top1": "标准文档 top-1",
    "judge": "裁判评分",
    "rq_gain": "检索质量提升",
    "guard_ok": "通过意图保护的比例",
    "entropy": "熵",
    "clip_fraction": "截断比例",
    "value_loss": "价值损失",
    "explained_variance": "解释方差",
    "response_length": "回答长度",
    "dev_value": "开发集得分",
    "dev_ci_low": "开发集区间下限",
    "dev_ci_high": "开发集区间上限",
    "samples": "样本数",
    "dev_samples": "开发集样本数",
    "invalid_samples": "无效样本数",
    "samples_invalid": "无效样本数",
    "samples_invalid_rag": "因 RAG 无效的样本",
    "samples_invalid_judge": "因裁判无效的样本",
    "rag_outage_s": "RAG 中断（秒）",
    "judge_outage_s": "裁判中断（秒）",
    "judge_cost_usd": "裁判费用（美元）",
}
"""Chinese only: figures of the engines' summaries, without `_first` and `_last`."""
SHARED = {
    "row_ids": Both("row ids", "行标识"),
    "questions_with_context": Both("questions with context, normalised", "归一化的问题及上下文"),
    "bare_questions": Both("bare questions, normalised", "归一化的问题本身"),
    "gold_documents": Both("gold documents", "标准文档"),
}
"""What the test split may have in common with the training split."""
SHARED_NOTES = {
    "bare_questions": Both(
        "the same words can mean another thing after another history", "同样的话接在不同的历史之后，意思可以不同"
    )
}
PHRASES = {
    "SFT": "SFT 微调",
    "RL": "RL 强化学习",
    "mean reward of a step": "每步平均奖励",
    "dev split": "开发集",
    "training": "训练",
    "original question": "原问题",
    "teacher": "教师",
    "rewrite": "改写",
    "rewrite − original": "改写 − 原问题",
    "red_team": "红队集",
    "gold": "金标集",
    "with": "有",
    "without": "无",
    "no query": "没有改写",
}
"""What the stages call their curves and slices."""


def arm_words(name: str, *, head: bool = False) -> Both:
    """An arm's name in a sentence, or at the head of a column."""
    return (ARM_HEADS if head else ARMS).get(name) or Both(name, name)


def rival_words(name: str) -> Both:
    """An arm as somebody's rival: `the teacher`; a name that somebody gave stays as it is."""
    arm = arm_words(name)
    return Both(f"the {arm.en}", arm.zh) if name in ARMS else arm


def rule_words(name: str) -> Both:
    """A rule of the gate, whatever arm or version it carries."""
    what, against, rival = name.partition("_vs_")
    if against and what in RULES_AGAINST:
        form, named = RULES_AGAINST[what], rival_words(rival)
        return Both(form.en.format(named.en), form.zh.format(named.zh))
    return RULES.get(name) or Both(name.replace("_", " "), name.replace("_", " "))


def words(text: str) -> Both:
    """What a stage, a row's reason, a curve or a slice is called; a user's own word stays as it is."""
    return REASONS.get(text) or Both(text, PHRASES.get(text) or STAGES.get(text) or text)


def listed(texts: list[str], language: Language = "en") -> str:
    """`a, b and c`."""
    if not texts:
        return ""
    *first, last = texts
    joint, final = (", ", " and ") if language == "en" else ("、", "和")
    return f"{joint.join(first)}{final}{last}" if first else last
