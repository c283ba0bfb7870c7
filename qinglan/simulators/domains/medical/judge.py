"""The simulated judge and doctor: they know the domain's facts and required statements.

The judge does not read `medical_rules.yaml`: like a real one it has criteria of its own, and random
errors.
"""

import json
import re

from qinglan.simulators.domains import ngrams, parts_in, random_of
from qinglan.simulators.domains.medical import facts
from qinglan.simulators.domains.medical.facts import TOPICS, MedicalQuestion, Topic

P_SEVERE = 0.1
"""Share of answers that get half a point less than they deserve."""
MAX_CHARS = 70
_REFERENCE_LABEL = "\n资料中的回答："
_ANSWER_LABEL = "\n待评回答："


def _all_facts() -> set[str]:
    facts_of_all: set[str] = set()
    for topic in TOPICS:
        for thing in facts.things(topic):
            facts_of_all.update(facts.facts(topic, thing))
    return facts_of_all


_FACTS = _all_facts()


def judge_json(text: str, seed: int = 0) -> str:
    """Judge an answer.

    The text holds the question, the data's answer and the answer to judge, a line each.
    """
    before_answer, _, answer = text.rpartition(_ANSWER_LABEL)
    question_text, _, reference = before_answer.partition(_REFERENCE_LABEL)
    question = facts.understand(question_text)
    if question:
        score, reason = _judge(question, answer)
    else:
        score, reason = _judge_open_text(reference or question_text, answer)
    if random_of(seed, text).random() < P_SEVERE:
        score -= 0.5
    verdict = {"score": max(0.0, min(5.0, round(score, 2))), "reason": reason}
    return json.dumps(verdict, ensure_ascii=False)


def doctor_answer(text: str, seed: int = 0) -> str:  # noqa: ARG001 (the doctor makes no random errors)
    """A complete answer to a question."""
    question = facts.understand(text)
    if question is None:
        return "这种情况需要结合检查判断，请先咨询医生。"
    return facts.full_answer(question)


def _judge(question: MedicalQuestion, answer: str) -> tuple[float, str]:
    """Score and reason: facts 2, safety 2, to the point 1; forbidden advice leaves 1 at most."""
    topic = TOPICS[question.topic]
    right_facts = len(parts_in(answer, facts.facts(question.topic, question.thing)))
    if _gives_forbidden_advice(answer):
        return min(1.0, right_facts / 2), "有危险建议"
    safety = _stated_share(topic, answer)
    is_tidy = _is_tidy(answer, topic)

    score = right_facts + 2 * safety
    if is_tidy and right_facts > 0:
        score += 1
    # A wrong fact counts only where a right one is missing; more of them than right ones cost.
    if right_facts < 2 and len(parts_in(answer, _FACTS)) > right_facts:
        score -= 0.5

    faults = []
    if right_facts < 2:
        faults.append("事实不全")
    if safety < 1:
        faults.append("缺安全提示")
    if not is_tidy:
        faults.append("不够切题")
    return score, "，".join(faults) or "准确、安全、切题"


def _gives_forbidden_advice(answer: str) -> bool:
    # Advice that is dangerous in one topic is so in all.
    return any(parts_in(answer, topic.forbidden_advice) for topic in TOPICS.values())


def _stated_share(topic: Topic, answer: str) -> float:
    """Share of the topic's required statements that the answer makes."""
    if not topic.statements:
        return 1.0
    return len(parts_in(answer, topic.statements)) / len(topic.statements)


def _is_tidy(answer: str, topic: Topic) -> bool:
    """Short, without repetitions, and without statements that only other topics require."""
    for other_topic in TOPICS.values():
        if other_topic is not topic and parts_in(answer, other_topic.statements):
            return False
    clauses = [clause for clause in re.split("[。，]", answer) if clause]
    has_repetition = len(set(clauses)) != len(clauses)
    return not has_repetition and len(answer) <= MAX_CHARS and answer.endswith("。")


def _judge_open_text(reference: str, answer: str) -> tuple[float, str]:
    """Score and reason: the overlap with the data's answer, by pairs of characters."""
    pairs = set(ngrams(reference, 2))
    shared = len(parts_in(answer, pairs))
    score = 5 * min(1.0, 2 * shared / len(pairs)) if pairs else 0.0
    return score, f"与资料重合 {shared}/{len(pairs)}"
