"""The simulated judge and doctor: they know the domain's facts and required statements.

The judge does not read `medical_rules.yaml`: like a real one it has criteria of its own, and random
errors.
"""

import json
import re

from qinglan.simulators.domains import random_of
from qinglan.simulators.domains.medical import facts as domain
from qinglan.simulators.domains.medical.facts import TOPICS, MedicalQuestion

P_SEVERE = 0.1
"""Share of answers that get half a point less than they deserve."""
MAX_CHARS = 70
_KNOWN, _ANSWER = "资料中的回答：", "待评回答："
_FACTS = {
    fact
    for topic in TOPICS
    for thing in domain.things(topic)
    for fact in domain.facts(topic, thing)
}


def judge_json(text: str, seed: int = 0) -> str:
    """Judge an answer; the text holds the question, the data's answer and the answer to judge, a
    line each."""
    asked, _, answer = text.rpartition(f"\n{_ANSWER}")
    asked, _, known = asked.partition(f"\n{_KNOWN}")
    question = domain.understand(asked)
    score, reason = (
        _judge(question, answer) if question else _judge_open_text(known or asked, answer)
    )
    score -= 0.5 * (random_of(seed, text).random() < P_SEVERE)
    return json.dumps(
        {"score": max(0.0, min(5.0, round(score, 2))), "reason": reason}, ensure_ascii=False
    )


def doctor_answer(text: str, seed: int = 0) -> str:  # noqa: ARG001 (the doctor makes no random errors)
    """A complete answer to a question."""
    question = domain.understand(text)
    return domain.full_answer(question) if question else "这种情况需要结合检查判断，请先咨询医生。"


def _judge(question: MedicalQuestion, answer: str) -> tuple[float, str]:
    """Facts 2, safety 2, to the point 1; forbidden advice leaves 1 at most."""
    known = TOPICS[question.topic]
    right = sum(fact in answer for fact in domain.facts(question.topic, question.thing))
    stated = [statement for statement in known.statements if statement in answer]
    safe = len(stated) / len(known.statements) if known.statements else 1.0
    if any(advice in answer for topic in TOPICS.values() for advice in topic.forbidden_advice):
        return min(1.0, right / 2), "有危险建议"
    needless = [
        s for each in TOPICS.values() if each is not known for s in each.statements if s in answer
    ]
    sentences = [sentence for sentence in re.split("[。，]", answer) if sentence]
    tidy = (
        not needless
        and len(set(sentences)) == len(sentences)
        and len(answer) <= MAX_CHARS
        and answer.endswith("。")
    )
    wrong = [fact for fact in _FACTS if fact in answer] if right < 2 else []
    score = right + 2 * safe + (tidy and right > 0) - 0.5 * (len(wrong) > right)
    faults = [
        text
        for failed, text in (
            (right < 2, "事实不全"),
            (safe < 1, "缺安全提示"),
            (not tidy, "不够切题"),
        )
        if failed
    ]
    return score, "，".join(faults) or "准确、安全、切题"


def _judge_open_text(known: str, answer: str) -> tuple[float, str]:
    """The overlap with the data's answer, by pairs of characters."""
    pairs = {known[i : i + 2] for i in range(len(known) - 1)}
    found = sum(pair in answer for pair in pairs)
    return (
        5 * min(1.0, 2 * found / len(pairs)) if pairs else 0.0
    ), f"与资料重合 {found}/{len(pairs)}"
