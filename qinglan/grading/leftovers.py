"""Texts that are no answer, whatever was asked.

They are refusals, what is left of an answer around it or in its place, and texts that go round in
circles.
"""

import re
from collections import Counter
from collections.abc import Iterable

_SORRY = "(?:非常|很|十分|真的)?(?:抱歉|对不起|不好意思)"
_AI = "(?:AI|人工智能|大?语言模型|大模型)(?:助手|助理|语言模型|模型)?"
_REFUSALS = (
    rf"^{_SORRY}(?:[，,。.！!：:]|\s*(?:我|作为|无法|不能|这|该)|$)",
    rf"^我?(?:作为|是)(?:一个|一名|一位|一款|个)?{_AI}(?:[，,。]|\s*我)",
    r"^(?:很遗憾[，,]?\s*)?我(?:无法|不能|没法|没有办法)"
    r"(?:[为给帮][您你助]|协助|回答|改写|生成|满足|处理[您你这该])",
    r"^(?:很遗憾[，,]?\s*)?我?(?:无法|不能)(?:回答|改写|满足|处理|提供)"
    r"(?:您|你|该|此|这|相关|任何|医疗建议|诊断)",
    r"^(?:(?:I['’]?m|I am|we['’]?re|we are)\s+(?:\w+\s+)?sorry\b|sorry\s*(?:[,.!]|but\b|I\b|we\b))",
    r"^(?:unfortunately,?\s+)?(?:I|we)\s*"
    r"(?:can\s*not|can['’]?t|am unable to|['’]m unable to|won['’]t)\s+"
    r"(?:help|assist|provide|answer|rewrite|comply|fulfil|process|generate|complete|create|respond"
    r"|discuss|do)\b",
    r"^as an? (?:AI|large language model|language model)\b",
)
"""A refusal in words. The patterns are anchored and hold the object, as 抱歉 and "I cannot" also
occur in questions."""

_SUBJECT = "(?:查询|问题|句子|文本|关键词|结果|检索词|检索关键词|检索查询)"
_BOILERPLATE = (
    r"[\r\n\u2028\u2029]",
    r"```|\*\*\S|^#+\s|^[-*•]\s|</?think>",
    r"^[{\[].*[}\]]$|[\"“]\w+[\"”]\s*[:：]",
    r"(?:^|\s)1\s*[.、)）]\s*[^\s\d].*\s2\s*[.、)）]\s*[^\s\d]",
    r"^(?:好的|当然|没问题)[，,。！!]",
    rf"^(?:以下|下面|这里?)(?:是|为).{{0,12}}(?:改写|重写|{_SUBJECT})",
    rf"^(?:最终|建议|推荐)?(?:的)?(?:改写|重写|优化)(?:后|结果)?(?:的)?{_SUBJECT}?\s*(?:是|为|如下)?\s*[:：]",
    r"^(?:检索|搜索|查询)?(?:关键词|关键字|检索词|查询词|查询语句|查询|检索|答案|回答|输出|结果)\s*[:：]",
    r"(?:用户画像|历史摘要|当前问题)\s*[:：]",
    r"^(?:(?:rewritten|search|final)\s+)?(?:query|rewrite|keywords?|answer|output)\s*[:：]",
    r"^(?:here(?:['’]s| is| are)|sure|certainly|of course)\b.*[:：,，!]",
)
"""Leftovers of an answer around a rewrite: labels, lists, markup, JSON, pieces of the prompt."""

_REFUSAL = re.compile("|".join(f"(?:{pattern})" for pattern in _REFUSALS), re.IGNORECASE)
_LEFTOVER_FLAGS = re.IGNORECASE | re.DOTALL
_LEFTOVER = re.compile("|".join(f"(?:{pattern})" for pattern in _BOILERPLATE), _LEFTOVER_FLAGS)


def is_refusal(text: str) -> bool:
    """Tell whether the text is a refusal in words."""
    return bool(_REFUSAL.search(text))


def is_leftover(text: str, more_patterns: Iterable[str] = ()) -> bool:
    """Tell whether the text is what is left of an answer around a rewrite.

    It is judged by the built-in patterns and by `more_patterns`.
    """
    if _LEFTOVER.search(text):
        return True
    return any(re.search(pattern, text, _LEFTOVER_FLAGS) for pattern in more_patterns)


def is_boilerplate(text: str) -> bool:
    """Tell whether the text is no rewrite, by the built-in patterns for refusals and leftovers."""
    return is_refusal(text) or is_leftover(text)


def is_degenerate(text: str) -> bool:
    """Tell whether a text goes round in circles, as a collapsed policy's does.

    A word that comes twice is no sign of it.
    """
    words = text.split()
    joined = "".join(words)
    repeats_word = max(Counter(words).values(), default=0) >= 3
    is_one_character = len(joined) > 5 and max(Counter(joined).values()) * 2 > len(joined)
    # Digits may repeat, as in a long number.
    repeats_piece = re.search(r"(\D{2,}?)\1\1", joined) is not None
    return repeats_word or is_one_character or repeats_piece
