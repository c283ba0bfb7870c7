"""Query rewriting: a user's colloquial question, with profile and history, becomes a query that
retrieval understands.

One renderer (`student_messages`) serves SFT, RL, evaluation and serving, so that training and
serving can't drift apart. The teacher gets the same user text under longer instructions.
"""

import math
import re
from collections.abc import Sequence

from qinglan.config import Extract, Reward, Tenant
from qinglan.grading.by_retrieval import or_nan, teacher_quality
from qinglan.grading.leftovers import is_boilerplate
from qinglan.recipes import Grade, Message, Panel, Recipe, RetrievalGrader, RewriteScore, prompt
from qinglan.recipes.prompting import DATA_RULE, delimited, in_context
from qinglan.rows import DIALOGUE, Row, bigrams

STUDENT_SYSTEM = "你是{domain}检索助手，把用户口语问题改写成检索关键词。"

EXTRACT_SYSTEM = (
    "你是{domain}领域的对话分析员。请从用户与客服的对话中提取两项信息，供改写用户接下来的问题使用：\n"
    "1. profile 是用户画像：用户本人的情况，如年龄、性别、身体状况、为谁提问，"
    "不超过 {profile_chars} 个字；\n"
    "2. history 是历史摘要：用户之前问过、说过、买过什么，不超过 {history_chars} 个字；\n"
    "3. 只写对话里明确说过的内容，尽量用原词，数字照抄，不推测；没有提到的一项写空字符串；\n"
    "4. 不写姓名、电话、地址、证件号和订单号；\n"
    '5. 只输出 JSON：{{"profile": "…", "history": "…"}}。' + DATA_RULE
)

TEACHER_SYSTEM = (
    "你是{domain}领域的检索专家。请把用户的口语问题改写成适合检索知识库的查询：\n"
    "1. 补全指代，用户画像和历史摘要只在当前问题需要时使用；\n"
    "2. 用规范名称和规范术语，去掉寒暄和语气词；\n"
    "3. 不改变用户的意图，不添加问题里没有的内容；\n"
    "4. 只输出改写后的查询，用空格分隔关键词，不要解释。\n" + DATA_RULE
)

JUDGE_SYSTEM = (
    "你是{domain}领域的检索质量评审。给出用户的问题和一条改写，按 0 到 5 打分："
    "实体是否保留（2 分）、意图是否保留（2 分）、是否简洁规范（1 分）。\n"
    '只输出 JSON：{{"score": 数字, "reason": "一句话"}}。' + DATA_RULE
)

PANEL_SYSTEM = (
    "你是{domain}领域的检索质量评审。给出用户的问题和 {count} 条改写，"
    "每条都按同一标准单独打 0 到 5 分："
    "实体是否保留（2 分）、意图是否保留（2 分）、是否简洁规范（1 分）。"
    "可以同分；先后次序没有含义。\n"
    '只输出 JSON：{{"scores": [改写1的分数, 改写2的分数, …]}}，共 {count} 个数字。' + DATA_RULE
)

RELEVANCE_SYSTEM = (
    "你是{domain}领域的检索质量评审。给出用户的问题和检索到的第一条资料，按 0 到 5 打分："
    "5 分：资料讲的正是用户问的对象和用户问的那件事；3 分：对象对，只回答了一部分；"
    "2 分：对象对，讲的是另一件事；0 分：对象不对。措辞不同不扣分。\n"
    '只输出 JSON：{{"score": 数字, "reason": "一句话"}}。' + DATA_RULE
)

_WORDS = re.compile(r"[一-鿿]+|[a-z0-9]+")
_USER_TEXT_LABELS = re.compile(r"^(?:用户画像|历史摘要|当前问题)：", re.MULTILINE)


def user_text(query: str, profile: str = "", history: str = "") -> str:
    """The question with whatever context there is, in a fixed order."""
    return in_context("当前问题", query, ("用户画像", profile), ("历史摘要", history))


def question_of(row: Row) -> str:
    """The row's question with its context, as student, teacher and judge read it."""
    return user_text(row.query, row.profile, row.history)


def judge_messages(row: Row, rewrite: str, tenant: Tenant) -> list[Message]:
    system = JUDGE_SYSTEM.format(domain=tenant.domain)
    return prompt(system, delimited(question_of(row), ("改写", rewrite)), tenant.judge_rules)


def panel_messages(row: Row, rewrites: Sequence[str], tenant: Tenant) -> list[Message]:
    numbered = [(f"改写{number}", rewrite) for number, rewrite in enumerate(rewrites, 1)]
    system = PANEL_SYSTEM.format(domain=tenant.domain, count=len(rewrites))
    return prompt(system, delimited(question_of(row), *numbered), tenant.judge_rules)


def relevance_messages(row: Row, passage: str, tenant: Tenant) -> list[Message]:
    system = RELEVANCE_SYSTEM.format(domain=tenant.domain)
    return prompt(system, delimited(question_of(row), ("检索结果", passage)))


def reward(config: Reward, row: Row, grade: Grade) -> RewriteScore:
    """The reward for retrieving better than the teacher's rewrite.

        R = 0.35·tanh(3·(judge_s − judge_t)/5) + 0.40·tanh(3·(rq_s − rq_t)) + 0.25·win

    clipped to [−1, 1], with win = +0.5 / −0.3 / 0 and rq as in `Retrieved.quality`. Where the
    reward is not relative to the teacher, it is the weighted mean of judge_s/5 and rq_s. Weights of
    parts that are not known for a sample (the judge was not asked) are shared among the rest: an
    unasked judge is not a tie. Guards cap what a rewrite can earn that lost the question's meaning;
    without them this formula is hacked (docs/decisions.md).
    """
    assert grade.retrieved is not None, "a sample whose retrieval failed has no reward"
    quality = grade.retrieved.quality
    rq_gain = quality - teacher_quality(row)
    win = _win(config, rq_gain)
    score = _weighted_score(config, row, grade, rq_gain, win)
    guard_ok = not config.preservation_guard or _keeps_meaning(config, row, grade)
    if not guard_ok:
        score = min(score, config.guard_cap)
    gold_top1 = math.nan
    if row.gold_id:
        gold_top1 = float(grade.retrieved.rank(row.gold_id) == 1)
        if config.gold_gate and config.use_labels and not gold_top1:
            score = min(score, config.gold_gate_cap)
    relevant = math.nan
    if grade.relevance is not None:
        relevant = float(grade.relevance >= config.min_relevance)
        if not relevant:
            score = min(score, config.gold_gate_cap)
    return RewriteScore(
        score=max(-1.0, min(1.0, score)),
        judge=or_nan(grade.judge_score),
        rq=quality,
        rq_gain=rq_gain,
        win=win,
        gold_top1=gold_top1,
        relevant=relevant,
        guard_ok=float(guard_ok),
    )


def _win(config: Reward, rq_gain: float) -> float:
    if abs(rq_gain) <= config.tie_margin:
        return 0.0
    return config.win if rq_gain > 0 else config.loss


def _weighted_score(config: Reward, row: Row, grade: Grade, rq_gain: float, win: float) -> float:
    """The weighted mean of the parts that are known for this sample, before guards and gates."""
    weighted_parts: list[tuple[float, float]] = []
    if config.relative_to_teacher:
        weighted_parts.append((config.retrieval_weight, math.tanh(3 * rq_gain)))
        weighted_parts.append((config.win_weight, win))
        if grade.judge_score is not None and row.judge_score is not None:
            judge_gain = grade.judge_score - row.judge_score
            weighted_parts.append((config.judge_weight, math.tanh(3 * judge_gain / 5)))
    else:
        assert grade.retrieved is not None
        weighted_parts.append((config.retrieval_weight, grade.retrieved.quality))
        if grade.judge_score is not None:
            weighted_parts.append((config.judge_weight, grade.judge_score / 5))
    weighted_sum = sum(weight * value for weight, value in weighted_parts)
    return weighted_sum / sum(weight for weight, _ in weighted_parts)


def _keeps_meaning(config: Reward, row: Row, grade: Grade) -> bool:
    """The preservation guard: entities and intent of the question are still in the rewrite."""
    rewrite = grade.text or ""
    if grade.judge_score is not None and grade.judge_score < config.guard_min_judge:
        return False
    if len(rewrite) > config.max_chars or is_repetitive(rewrite) or is_boilerplate(rewrite):
        return False
    return entity_kept(question_of(row), row.answer or "", rewrite)


def character_grams(text: str) -> set[str]:
    """Bigrams of Chinese runs, and alphanumeric runs whole.

    They are the units in which short texts overlap.
    """
    return set(bigrams(_WORDS.findall(text.lower())))


def entity_kept(question: str, teacher_rewrite: str, rewrite: str) -> bool:
    """Is the rewrite still about what the question is about?

    The anchors are the teacher's words that share characters with the question: mostly the entity.
    One of them must leave a trace in the rewrite. Where the teacher and the question share nothing,
    there is nothing to hold on to.
    """
    question_grams = character_grams(_USER_TEXT_LABELS.sub("", question))
    rewrite_grams = character_grams(rewrite)
    has_anchor = False
    for word in teacher_rewrite.split():
        word_grams = character_grams(word)
        if not word_grams & question_grams:
            continue
        has_anchor = True
        if word_grams & rewrite_grams:
            return True
    return not has_anchor


def is_repetitive(rewrite: str) -> bool:
    """The same word twice, or one character filling half of the text."""
    words = rewrite.split()
    if len(set(words)) < len(words):
        return True
    text = "".join(words)
    return len(text) > 5 and max(map(text.count, set(text))) * 2 > len(text)


class QueryRewrite(Recipe):
    """The student learns the teacher's rewrites, then to retrieve better than they do."""

    NAME = "query_rewrite"
    VERSION = "3"
    grader = RetrievalGrader(
        recipe=NAME,
        judge_messages=judge_messages,
        panel=Panel(panel_messages),
        relevance_messages=relevance_messages,
        reward=reward,
    )

    def question_text(self, row: Row) -> str:
        return question_of(row)

    def student_messages(self, row: Row, tenant: Tenant) -> list[Message]:
        return prompt(STUDENT_SYSTEM.format(domain=tenant.domain), question_of(row))

    def extract_messages(self, row: Row, tenant: Tenant, limits: Extract) -> list[Message] | None:
        if DIALOGUE not in row.inputs:
            return None
        system = EXTRACT_SYSTEM.format(
            domain=tenant.domain,
            profile_chars=limits.max_profile_chars // 2,
            history_chars=limits.max_history_chars // 2,
        )
        return prompt(system, delimited("", ("对话", row.inputs[DIALOGUE])))

    def teacher_messages(self, row: Row, tenant: Tenant) -> list[Message]:
        system = TEACHER_SYSTEM.format(domain=tenant.domain)
        return prompt(system, delimited(question_of(row)), tenant.teacher_rules)

    def parse_answer(self, text: str) -> str:
        return super().parse_answer(" ".join(text.split()).strip("“”\"'` "))

    def fallback(self, row: Row) -> str | None:
        """The question as it is: a rewriter that fails must not cost the user an answer."""
        return row.query


RECIPE = QueryRewrite()
