"""The words that a Chinese text is about, by jieba's TF-IDF."""

import warnings
from functools import cache
from typing import Any

# Words that say nothing about what a text is about.
_COURTESIES = frozenset(
    (
        "您好", "你好", "请问", "谢谢", "大夫", "医生", "进行", "咨询", "一下", "建议", "可以",
        "一般", "情况", "需要", "之前", "之后", "最近", "有些", "没什么", "这个", "怎么回事",
        "注意", "平时", "及时", "引起", "期望", "解答", "祝您", "帮助", "希望", "健康", "患者",
        "病人", "朋友", "通过", "出现", "导致",
    )
)  # fmt: skip


def distinctive_words(text: str, count: int) -> list[str]:
    """Up to `count` words of two characters or more, the most distinctive first."""
    tags = extractor().extract_tags(text, topK=count + len(_COURTESIES))
    words = [tag for tag in tags if _is_distinctive(tag)]
    return words[:count]


@cache
def extractor() -> Any:
    """jieba's TF-IDF with a dictionary of its own.

    Loading the dictionary in jieba's usual way writes a cache into the shared temporary folder.
    """
    with warnings.catch_warnings():
        # jieba's own warnings: pkg_resources, invalid escapes, files left open.
        warnings.simplefilter("ignore")
        import jieba
        import jieba.analyse

        tokenizer = jieba.Tokenizer()
        tokenizer.FREQ, tokenizer.total = tokenizer.gen_pfdict(tokenizer.get_dict_file())
        tokenizer.initialized = True
        tfidf = jieba.analyse.TFIDF()
        tfidf.tokenizer = tokenizer
    return tfidf


def _is_distinctive(word: str) -> bool:
    return len(word) > 1 and word not in _COURTESIES and not word.isascii()
