"""The simulated teacher and judge of query rewriting, and how they read a user's text.

The teacher knows the field, not the knowledge base: it writes its own habitual terms, sometimes an
alternative, and rarely misreads. Its random errors depend on the prompt and the seed alone, so that
reruns agree. A lexicon finds the product, ordered cues find the intent; history and profile count
only where the question itself gives nothing.
"""

import json
import re
import unicodedata
from functools import cache
from random import Random
from typing import NamedTuple

from qinglan.recipes.keywords import extractor
from qinglan.simulators.domains import random_of
from qinglan.simulators.domains.query_rewrite import facts as domain

P_ALTERNATIVE = 0.22
P_WRONG_INTENT = 0.012
P_WRONG_PRODUCT = 0.008
P_PASSAGE_MISJUDGED = 0.1
"""No judge of relevance is always right; without errors the simulated verdicts would equal the
labels."""
PANEL_BIAS = 0.5
"""The most that a text gains as the first of a panel, and loses as the last."""
P_BIASED = 0.3
OPEN_TEXT_KEYWORDS = 6

_REQUIRED = {"preg": "孕", "child": "儿童"}
_MAX_CLEAN_WORDS = 5
_SENTENCE_END = re.compile(r"[。！？!?；\n]|，(?:您好|你好|请问)")
_COURTESIES = {
    "您好", "你好", "请问", "谢谢", "大夫", "医生", "进行", "咨询", "一下", "之前", "之后", "最近", "有些", "没什么",
    "这个", "怎么回事",
}  # fmt: skip
_REWRITE_LABEL, _PASSAGE_LABEL = "\n改写：", "\n检索结果："
_TITLE = re.compile("《([^》]*)》")
_DIALOGUE_LABEL = "对话："
_SPEAKER = re.compile(r"(?:^|\s)(\w{1,6})：")
_CLAUSE = re.compile(r"[，。！？!?；;\s]+")
_ANSWERING = {"客服", "医生", "老师", "助手"}
_MOST_CLAUSES, _CLAUSE_CHARS = 3, 30
_NUMBERED = re.compile("改写([1-9][0-9]*)：(.*)", re.DOTALL)


class RewriteVerdict(NamedTuple):
    score: float
    reason: str


def teach(user_text: str, seed: int = 0) -> str:
    """The teacher's answer: a rewrite, or what a dialogue says."""
    return (
        read_dialogue(user_text)
        if user_text.startswith(_DIALOGUE_LABEL)
        else rewrite(user_text, seed)
    )


def read_dialogue(text: str) -> str:
    """As JSON, in the user's own words: clauses about the user as the profile, those that name a
    product as history."""
    first, *turns = _SPEAKER.split(text.removeprefix(_DIALOGUE_LABEL))
    spoken = [("", first), *zip(turns[::2], turns[1::2], strict=True)]
    clauses = [
        each
        for who, said in spoken
        if who not in _ANSWERING
        for each in _CLAUSE.split(said)
        if each
    ]
    asked = [each for each in clauses if _find_product(_clean(each), True)[0]]
    cues = "|".join(["岁", *domain.PROFILE_CUES.values()])
    about = [each for each in clauses if each not in asked and re.search(cues, each)]
    found = {"profile": about, "history": asked}
    texts = {
        name: "，".join(each[:_CLAUSE_CHARS] for each in some[:_MOST_CLAUSES])
        for name, some in found.items()
    }
    return json.dumps(texts, ensure_ascii=False)


def rewrite(user_text: str, seed: int = 0) -> str:
    """A question as `user_text` renders it → space-separated keywords."""
    reading = understand(user_text)
    if reading.product is None:
        return extract(user_text)
    rng = random_of(seed, user_text)
    product, intent = reading.product, reading.intent
    misread = rng.random()
    if misread < P_WRONG_INTENT:
        intent = rng.choice(list(domain.INTENTS))
    elif misread < P_WRONG_INTENT + P_WRONG_PRODUCT:
        product = rng.choice(list(domain.PRODUCTS))
    name = product if rng.random() < P_ALTERNATIVE else domain.NAME_MISMATCH.get(product, product)
    if intent is None:
        return name
    if rng.random() >= P_ALTERNATIVE:
        return f"{name} {domain.INTENTS[intent].habit}"
    terms, weights = zip(*domain.INTENTS[intent].alternatives, strict=True)
    return f"{name} {rng.choices(terms, weights)[0]}"


def extract(user_text: str) -> str:
    """A weaker, cheaper teacher: the keywords of the question itself, with no knowledge of the
    field."""
    return " ".join(keywords(" ".join(_stated(user_text))))


def judge(user_text: str, seed: int = 0) -> RewriteVerdict:
    """Score a rewrite or a passage; the text is a question with either after its label on the last
    line."""
    asked, label, passage = user_text.rpartition(_PASSAGE_LABEL)
    if label:
        return _judge_passage(asked, passage, random_of(seed, user_text))
    question, _, rewritten = user_text.rpartition(_REWRITE_LABEL)
    reading = understand(question, reads_every_typo=True)
    if reading.product is None or reading.intent is None:
        return _judge_open_text(question, rewritten)
    return _judge_supplement(reading.product, reading.intent, rewritten)


def panel_of(user_text: str) -> tuple[str, list[str]]:
    """The question and its numbered rewrites, on the last lines; none where the text asks for no
    panel."""
    lines, rewrites = user_text.split("\n"), list[str]()
    for number in range(len(lines) - 1, 0, -1):
        match = _NUMBERED.fullmatch(lines[number])
        if match is None:
            break
        rewrites.insert(0, match[2])
        if match[1] == "1":
            return "\n".join(lines[:number]), rewrites
    return user_text, []


def judge_panel(user_text: str, seed: int = 0) -> list[float]:
    """A score per rewrite: that of `judge`, sometimes biased by its position, as a real model's
    would be.

    Three rewrites in ten move by up to `PANEL_BIAS`, upwards in the first half of the list,
    downwards in the second. The choice depends on the whole text and the seed, so that another
    order gives other scores.
    """
    question, rewrites = panel_of(user_text)
    rng, last, scores = random_of(seed, "panel", user_text), len(rewrites) - 1, []
    for place, rewritten in enumerate(rewrites):
        bias = PANEL_BIAS * (1 - 2 * place / last) if last and rng.random() < P_BIASED else 0.0
        scores.append(_in_range(judge(f"{question}{_REWRITE_LABEL}{rewritten}", seed).score + bias))
    return scores


def judge_json(user_text: str, seed: int = 0) -> str:
    """The judge's answer: the scores of a panel, or a score with its reason."""
    _, rewrites = panel_of(user_text)
    answer = (
        {"scores": judge_panel(user_text, seed)} if rewrites else judge(user_text, seed)._asdict()
    )
    return json.dumps(answer, ensure_ascii=False)


def _judge_passage(question: str, passage: str, rng: Random) -> RewriteVerdict:
    """Judge a passage by its title: it must name the product, and the intent in any accepted
    wording."""
    reading, titled = understand(question, reads_every_typo=True), _TITLE.match(passage)
    if reading.product is None or reading.intent is None or titled is None:
        return _judge_open_text(question, passage)
    same_product = titled[1].startswith(reading.product)
    words = titled[1].removeprefix(reading.product).split()
    answers = (
        same_product
        and bool(words)
        and domain.INTENTS[reading.intent].accepted_words.issuperset(words)
    )
    if answers != (rng.random() < P_PASSAGE_MISJUDGED):
        return RewriteVerdict(5.0, "资料回答了问题")
    return (
        RewriteVerdict(2.0, "对象对，讲的是另一件事")
        if same_product
        else RewriteVerdict(0.0, "对象不对")
    )


def _judge_supplement(product: str, intent: str, rewritten: str) -> RewriteVerdict:
    """Product kept 2 points, intent kept 2, clean 1; wordings of teacher and knowledge base count
    alike.

    Tidiness counts only where product and intent are there: half a query is not a clean one, and
    stays below 3.
    """
    names = {name.lower() for name in (product, *domain.PRODUCTS[product])}
    words = rewritten.lower().split()
    kept = any(name in rewritten.lower() for name in names)
    others = [p for p in domain.PRODUCTS if p in rewritten and p != product and p not in product]
    terms = [word for word in words if word not in names]
    accepted = domain.INTENTS[intent].accepted_words
    right = sum(term in accepted for term in terms)
    score = 2.0 * kept - bool(others) + (2.0 * right / len(terms) if terms else 0.0)
    lacking = intent in _REQUIRED and _REQUIRED[intent] not in rewritten
    score -= lacking
    tidy = 0 < len(words) == len(set(words)) <= _MAX_CLEAN_WORDS
    score += tidy and kept and 0 < right == len(terms) and not others
    faults = [
        text
        for failed, text in (
            (not kept, "实体丢失"),
            (bool(others), "混入其他实体"),
            (right == 0 or lacking, "意图丢失"),
            (0 < right < len(terms), "有多余内容"),
            (not tidy, "重复或冗长"),
        )
        if failed
    ]
    return RewriteVerdict(_in_range(score), "，".join(faults) or "实体和意图保留，表达规范")


def _judge_open_text(question: str, rewritten: str) -> RewriteVerdict:
    """2 points for keywords of the question that the rewrite keeps, 2 for its share that the
    question supports."""
    words = rewritten.split()
    if not words:
        return RewriteVerdict(0.0, "改写为空")
    stated = "\n".join(_stated(question)).lower()
    wanted = keywords(stated)
    text = "".join(words).lower()
    survived = sum(word in text for word in wanted) / len(wanted) if wanted else 1.0
    pairs = [text[i : i + 2] for i in range(len(text) - 1)] or [text]
    backed = sum(pair in stated for pair in pairs) / len(pairs)
    clean = len(words) == len(set(words)) and len(text) <= max(12, len(stated))
    score = 2 * min(1.0, survived * 1.5) + 2 * min(1.0, backed * 1.25) + clean
    return RewriteVerdict(_in_range(score), f"关键词保留 {survived:.0%}，有依据 {backed:.0%}")


def _stated(user_text: str) -> list[str]:
    """The question, preceded by the history where the question alone is too short."""
    fields = split_fields(user_text)
    short = len(fields["query"]) < 8 and fields["history"]
    return [fields["history"], fields["query"]] if short else [fields["query"]]


def _in_range(score: float) -> float:
    return round(max(0.0, min(5.0, score)), 2)


def keywords(text: str) -> list[str]:
    """The keywords of any text, in its order; those of its last sentence, which asks the question,
    come first."""
    asked = [part for part in _SENTENCE_END.split(text) if part.strip()][-1:]
    found = _ranked_words("".join(asked))
    found += [word for word in _ranked_words(text) if word not in found]
    found = found[:OPEN_TEXT_KEYWORDS] or re.findall(r"\w+", text)[:OPEN_TEXT_KEYWORDS]
    return sorted(found, key=text.lower().find)


def _ranked_words(text: str) -> list[str]:
    tags = extractor().extract_tags(text, topK=OPEN_TEXT_KEYWORDS + len(_COURTESIES))
    return [tag for tag in tags if tag.strip() and tag not in _COURTESIES][:OPEN_TEXT_KEYWORDS]


# ---- reading: which product a text is about, and what the user wants to know ----

_FIELDS = {"用户画像：": "profile", "历史摘要：": "history", "当前问题：": "query"}


class Reading(NamedTuple):
    """What a text is about; None where the reader does not find it."""

    product: str | None
    intent: str | None


def split_fields(text: str) -> dict[str, str]:
    """`user_text` undone: query, profile and history; a text without labels is a query."""
    fields = {"query": "", "profile": "", "history": ""}
    current = "query"
    for line in text.split("\n"):
        label = next((label for label in _FIELDS if line.startswith(label)), None)
        current = _FIELDS[label] if label else current
        fields[current] += line.removeprefix(label or "")
    return fields


def understand(text: str, reads_every_typo: bool = False) -> Reading:
    """Read a text as `user_text` renders it. A judge reads typos that the teacher doesn't."""
    fields = {name: _clean(value) for name, value in split_fields(text).items()}
    product, rest = _find_product(fields["query"], reads_every_typo)
    if product is None and fields["history"]:
        product, _ = _find_product(fields["history"], reads_every_typo)
    cues = [(intent, cue, rest) for intent, cue in domain.QUESTION_CUES.items()]
    cues += [(intent, cue, fields["profile"]) for intent, cue in domain.PROFILE_CUES.items()]
    return Reading(
        product, next((intent for intent, cue, read in cues if re.search(cue, read)), None)
    )


@cache
def _lexicon(with_every_typo: bool) -> tuple[re.Pattern[str], dict[str, str]]:
    """A pattern that finds the longest name first (but not what it is to be taken *with*), and name
    → product."""
    names: dict[str, str] = {}
    for product, aliases in domain.PRODUCTS.items():
        typos = domain.PRODUCT_TYPOS.get(product, ())
        for name in (product, *aliases, *(typos if with_every_typo else typos[:1])):
            names[_clean(name)] = product
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("(?<![和跟与])(" + "|".join(map(re.escape, longest_first)) + ")"), names


def _find_product(text: str, with_every_typo: bool) -> tuple[str | None, str]:
    """The first product named, and the text without its name."""
    pattern, names = _lexicon(with_every_typo)
    match = pattern.search(text)
    if match is None:
        return None, text
    return names[match.group()], text[: match.start()] + text[match.end() :]


def _clean(text: str) -> str:
    text = unicodedata.normalize("NFKC", text).lower()
    for right, wrong in domain.WORD_TYPOS.items():
        text = text.replace(wrong, right)
    return text
