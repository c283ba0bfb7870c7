"""Query rewriting: a user's colloquial question, with profile and history, becomes a query that
retrieval understands.

One renderer (`student_messages`) serves SFT, RL, evaluation and serving, so that training and
serving can't drift apart. The teacher gets the same user text under longer instructions.
"""

import math
import re
from collections.abc import Sequence

from qinglan.config import Extract, Reward, Tenant
from qinglan.recipes import Baseline, GradedRewrite, Message, RetrievalRecipe, Scored, prompt
from qinglan.recipes.kinds.selection import is_boilerplate
from qinglan.recipes.kinds.untrusted import DATA_RULE, delimited, in_context
from qinglan.rows import DIALOGUE, Row, bigrams

STUDENT_SYSTEM = "你是{domain}检索助手，把用户口语问题改写成检索关键词。"

EXTRACT_SYSTEM = (
    "你是{domain}领域的对话分析员。请从用户与客服的对话中提取两项信息，供改写用户接下来的问题使用：\n"
    "1. profile 是用户画像：用户本人的情况，如年龄、性别、身体状况、为谁提问，不超过 {profile_chars} 个字；\n"
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
    "你是{domain}领域的检索质量评审。给出用户的问题和 {count} 条改写，每条都按同一标准单独打 0 到 5 分："
    "实体是否保留（2 分）、意图是否保留（2 分）、是否简洁规范（1 分）。可以同分；先后次序没有含义。\n"
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


class QueryRewrite(RetrievalRecipe):
    """The student learns the teacher's rewrites, then to retrieve better than they do."""

    NAME = "query_rewrite"
    VERSION = "3"

    def question_text(self, row: Row) -> str:
        return user_text(row.query, row.profile, row.history)

    def student_messages(self, row: Row, tenant: Tenant) -> list[Message]:
        return prompt(STUDENT_SYSTEM.format(domain=tenant.domain), self.question_text(row))

    def extract_messages(self, row: Row, tenant: Tenant, limits: Extract) -> list[Message] | None:
        if DIALOGUE not in row.inputs:
            return None
        chars = {
            "profile_chars": limits.max_profile_chars // 2,
            "history_chars": limits.max_history_chars // 2,
        }
        system = EXTRACT_SYSTEM.format(domain=tenant.domain, **chars)
        return prompt(system, delimited("", ("对话", row.inputs[DIALOGUE])))

    def teacher_messages(self, row: Row, tenant: Tenant) -> list[Message]:
        system = TEACHER_SYSTEM.format(domain=tenant.domain)
        return prompt(system, delimited(self.question_text(row)), tenant.teacher_rules)

    def judge_messages(self, question: str, rewrite: str, tenant: Tenant) -> list[Message]:
        system = JUDGE_SYSTEM.format(domain=tenant.domain)
        return prompt(system, delimited(question, ("改写", rewrite)), tenant.judge_rules)

    def panel_messages(
        self, question: str, rewrites: Sequence[str], tenant: Tenant
    ) -> list[Message]:
        numbered = [(f"改写{number}", rewrite) for number, rewrite in enumerate(rewrites, 1)]
        system = PANEL_SYSTEM.format(domain=tenant.domain, count=len(rewrites))
        return prompt(system, delimited(question, *numbered), tenant.judge_rules)

    def relevance_messages(self, question: str, passage: str, tenant: Tenant) -> list[Message]:
        return prompt(
            RELEVANCE_SYSTEM.format(domain=tenant.domain),
            delimited(question, ("检索结果", passage)),
        )

    def parse_answer(self, text: str) -> str:
        return super().parse_answer(" ".join(text.split()).strip("“”\"'` "))

    def reward(self, config: Reward, baseline: Baseline, rewrite: GradedRewrite) -> Scored:
        """How much better than the teacher did this rewrite retrieve?

            R = 0.35·tanh(3·(judge_s − judge_t)/5) + 0.40·tanh(3·(rq_s − rq_t)) + 0.25·win,
            clipped to [−1, 1]

        with win = +0.5 / −0.3 / 0 and rq as in `Retrieved.quality`. Where the reward is not
        relative to the teacher, it is the weighted mean of judge_s/5 and rq_s. Weights of parts
        that are not known for a sample (the judge was not asked) are shared among the rest: an
        unasked judge is not a tie. Guards cap what a rewrite can earn that lost the question's
        meaning; without them this formula is hacked (docs/decisions.md).
        """
        text, retrieved, judge_score, relevance = rewrite
        rq_gain = retrieved.quality - baseline.teacher_quality
        win = (
            0.0
            if abs(rq_gain) <= config.tie_margin
            else (config.win if rq_gain > 0 else config.loss)
        )
        parts: list[tuple[float, float]]  # weight and value
        if config.relative_to_teacher:
            parts = [(config.retrieval_weight, math.tanh(3 * rq_gain)), (config.win_weight, win)]
            if judge_score is not None and baseline.teacher_judge >= 0:
                parts.append(
                    (config.judge_weight, math.tanh(3 * (judge_score - baseline.teacher_judge) / 5))
                )
        else:
            judged = [] if judge_score is None else [(config.judge_weight, judge_score / 5)]
            parts = [(config.retrieval_weight, retrieved.quality), *judged]
        score = sum(weight * value for weight, value in parts) / sum(weight for weight, _ in parts)
        guard_ok = not config.preservation_guard or (
            (judge_score is None or judge_score >= config.guard_min_judge)
            and len(text) <= config.max_chars
            and not is_repetitive(text)
            and not is_boilerplate(text)
            and entity_kept(baseline.question, baseline.teacher_rewrite, text)
        )
        if not guard_ok:
            score = min(score, config.guard_cap)
        gold_top1 = math.nan
        if baseline.gold_id:
            gold_top1 = float(retrieved.rank(baseline.gold_id) == 1)
            if config.gold_gate and config.use_labels and not gold_top1:
                score = min(score, config.gold_gate_cap)
        relevant = math.nan if relevance is None else float(relevance >= config.min_relevance)
        if relevant == 0:
            score = min(score, config.gold_gate_cap)
        judge = math.nan if judge_score is None else judge_score
        score = max(-1.0, min(1.0, score))
        return Scored(
            score, judge, retrieved.quality, rq_gain, win, gold_top1, relevant, float(guard_ok)
        )


def character_grams(text: str) -> set[str]:
    """Bigrams of Chinese runs, and alphanumeric runs whole: the units in which short texts
    overlap."""
    return set(bigrams(_WORDS.findall(text.lower())))


def entity_kept(question: str, teacher_rewrite: str, rewrite: str) -> bool:
    """Is the rewrite still about what the question is about?

    The anchors are the teacher's words that share characters with the question: mostly the entity.
    One of them must leave a trace in the rewrite. Where the teacher and the question share nothing,
    there is nothing to hold on to.
    """
    asked = character_grams(_USER_TEXT_LABELS.sub("", question))
    anchors = [
        grams for word in teacher_rewrite.split() if (grams := character_grams(word)) & asked
    ]
    return not anchors or any(grams & character_grams(rewrite) for grams in anchors)


def is_repetitive(rewrite: str) -> bool:
    """The same word twice, or one character filling half of the text."""
    words = rewrite.split()
    text = "".join(words)
    return len(set(words)) < len(words) or (
        len(text) > 5 and max(map(text.count, set(text))) * 2 > len(text)
    )


RECIPE = QueryRewrite()
