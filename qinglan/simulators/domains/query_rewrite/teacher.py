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
from qinglan.simulators.domains import ngrams, parts_in, pattern_of_any, random_of
from qinglan.simulators.domains.query_rewrite import facts

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

_REQUIRED_WORDS = {"preg": "孕", "child": "儿童"}
"""Words without which a rewrite loses the intent."""
_MAX_CLEAN_WORDS = 5
_SENTENCE_END = re.compile(r"[。！？!?；\n]|，(?:您好|你好|请问)")
_COURTESIES = {
    "您好", "你好", "请问", "谢谢", "大夫", "医生", "进行", "咨询", "一下", "之前", "之后",
    "最近", "有些", "没什么", "这个", "怎么回事",
}  # fmt: skip
_REWRITE_LABEL = "\n改写："
_PASSAGE_LABEL = "\n检索结果："
_TITLE = re.compile("《([^》]*)》")
_DIALOGUE_LABEL = "对话："
_SPEAKER = re.compile(r"(?:^|\s)(\w{1,6})：")
_CLAUSE = re.compile(r"[，。！？!?；;\s]+")
_ANSWERING = {"客服", "医生", "老师", "助手"}
_MOST_CLAUSES = 3
_CLAUSE_CHARS = 30
_NUMBERED_REWRITE = re.compile("改写([1-9][0-9]*)：(.*)", re.DOTALL)
_SHORT_QUERY_CHARS = 8
"""A shorter question says too little by itself."""


class RewriteVerdict(NamedTuple):
    score: float
    reason: str


# ---- the teacher ----


def teach(user_text: str, seed: int = 0) -> str:
    """The teacher's answer: a rewrite, or the content of a dialogue."""
    if user_text.startswith(_DIALOGUE_LABEL):
        return read_dialogue(user_text)
    return rewrite(user_text, seed)


def read_dialogue(text: str) -> str:
    """Profile and history from a dialogue as JSON, in the user's own words.

    Clauses about the user make the profile, those that name a product the history.
    """
    clauses = _clauses_of_user(text.removeprefix(_DIALOGUE_LABEL))
    about_products = [clause for clause in clauses if _names_product(clause)]
    cues = "|".join(["岁", *facts.PROFILE_CUES.values()])
    about_user = [
        clause for clause in clauses if clause not in about_products and re.search(cues, clause)
    ]
    contents = {"profile": _shortened(about_user), "history": _shortened(about_products)}
    return json.dumps(contents, ensure_ascii=False)


def _clauses_of_user(dialogue: str) -> list[str]:
    """The clauses of all turns except those of who answers."""
    before_first_speaker, *speakers_and_turns = _SPEAKER.split(dialogue)
    turns = [before_first_speaker]
    for speaker, turn in zip(speakers_and_turns[::2], speakers_and_turns[1::2], strict=True):
        if speaker not in _ANSWERING:
            turns.append(turn)
    clauses: list[str] = []
    for turn in turns:
        clauses += filter(None, _CLAUSE.split(turn))
    return clauses


def _names_product(clause: str) -> bool:
    product, _ = _find_product(_clean(clause), with_every_typo=True)
    return product is not None


def _shortened(clauses: list[str]) -> str:
    return "，".join(clause[:_CLAUSE_CHARS] for clause in clauses[:_MOST_CLAUSES])


def rewrite(user_text: str, seed: int = 0) -> str:
    """A question as `user_text` renders it → space-separated keywords."""
    product, intent = understand(user_text)
    if product is None:
        return extract(user_text)
    rng = random_of(seed, user_text)
    misread = rng.random()
    if misread < P_WRONG_INTENT:
        intent = rng.choice(list(facts.INTENTS))
    elif misread < P_WRONG_INTENT + P_WRONG_PRODUCT:
        product = rng.choice(list(facts.PRODUCTS))
    # The teacher's name for a product is often not the knowledge base's.
    name = product
    if rng.random() >= P_ALTERNATIVE:
        name = facts.NAME_MISMATCH.get(product, product)
    if intent is None:
        return name
    if rng.random() >= P_ALTERNATIVE:
        return f"{name} {facts.INTENTS[intent].habit}"
    terms, weights = zip(*facts.INTENTS[intent].alternatives, strict=True)
    return f"{name} {rng.choices(terms, weights)[0]}"


def extract(user_text: str) -> str:
    """The keywords of the question itself: a weaker, cheaper teacher.

    It has no knowledge of the field.
    """
    return " ".join(keywords(" ".join(_stated(user_text))))


# ---- the judge ----


def judge(user_text: str, seed: int = 0) -> RewriteVerdict:
    """Score a rewrite or a passage.

    The text is a question with either after its label on the last line.
    """
    question, label, passage = user_text.rpartition(_PASSAGE_LABEL)
    if label:
        return _judge_passage(question, passage, random_of(seed, user_text))
    question, _, rewritten = user_text.rpartition(_REWRITE_LABEL)
    reading = understand(question, reads_every_typo=True)
    if reading.product is None or reading.intent is None:
        return _judge_open_text(question, rewritten)
    return _judge_supplement(reading.product, reading.intent, rewritten)


def panel_of(user_text: str) -> tuple[str, list[str]]:
    """The question and its numbered rewrites, which are on the last lines.

    There are no rewrites where the text asks for no panel.
    """
    lines = user_text.split("\n")
    rewrites: list[str] = []
    # The first line holds the question, so it is no rewrite.
    for place in range(len(lines) - 1, 0, -1):
        match = _NUMBERED_REWRITE.fullmatch(lines[place])
        if match is None:
            break
        number, rewritten = match.groups()
        rewrites.insert(0, rewritten)
        if number == "1":
            return "\n".join(lines[:place]), rewrites
    return user_text, []


def judge_panel(user_text: str, seed: int = 0) -> list[float]:
    """A score per rewrite: that of `judge`, sometimes biased by its position.

    A real model's would be, too. Three rewrites in ten move by up to `PANEL_BIAS`, upwards in the
    first half of the list, downwards in the second. The choice depends on the whole text and the
    seed, so that another order gives other scores.
    """
    question, rewrites = panel_of(user_text)
    # The whole text is in the key: the same rewrites in another order are biased otherwise.
    rng = random_of(seed, "panel", user_text)
    scores = []
    for place, rewritten in enumerate(rewrites):
        bias = _position_bias(rng, place, len(rewrites))
        verdict = judge(f"{question}{_REWRITE_LABEL}{rewritten}", seed)
        scores.append(_in_range(verdict.score + bias))
    return scores


def _position_bias(rng: Random, place: int, count: int) -> float:
    last = count - 1
    if last == 0:
        # A single rewrite is neither first nor last; nothing is drawn for it.
        return 0.0
    if rng.random() >= P_BIASED:
        return 0.0
    return PANEL_BIAS * (1 - 2 * place / last)


def judge_json(user_text: str, seed: int = 0) -> str:
    """The judge's answer: the scores of a panel, or a score with its reason."""
    _, rewrites = panel_of(user_text)
    answer: dict[str, object]
    if rewrites:
        answer = {"scores": judge_panel(user_text, seed)}
    else:
        answer = judge(user_text, seed)._asdict()
    return json.dumps(answer, ensure_ascii=False)


def _judge_passage(question: str, passage: str, rng: Random) -> RewriteVerdict:
    """Judge a passage by its title.

    It must name the product, and the intent in any accepted wording.
    """
    reading = understand(question, reads_every_typo=True)
    title_match = _TITLE.match(passage)
    if reading.product is None or reading.intent is None or title_match is None:
        return _judge_open_text(question, passage)
    title = title_match[1]
    is_same_product = title.startswith(reading.product)
    words = title.removeprefix(reading.product).split()
    is_same_intent = bool(words) and facts.INTENTS[reading.intent].accepted_words.issuperset(words)
    answers_question = is_same_product and is_same_intent
    is_misjudged = rng.random() < P_PASSAGE_MISJUDGED
    if answers_question != is_misjudged:
        return RewriteVerdict(5.0, "资料回答了问题")
    if is_same_product:
        return RewriteVerdict(2.0, "对象对，讲的是另一件事")
    return RewriteVerdict(0.0, "对象不对")


def _judge_supplement(product: str, intent: str, rewritten: str) -> RewriteVerdict:
    """Score a rewrite of a question about a known product and intent.

    Product kept 2 points, intent kept 2, clean 1; another product or a lost required word takes a
    point. Wordings of teacher and knowledge base count alike. Tidiness counts only where product
    and intent are there: half a query is not a clean one, and stays below 3.
    """
    names = {name.lower() for name in (product, *facts.PRODUCTS[product])}
    words = rewritten.lower().split()
    is_product_kept = bool(parts_in(rewritten.lower(), names))
    has_other_product = _names_another_product(rewritten, product)
    terms = [word for word in words if word not in names]
    accepted_words = facts.INTENTS[intent].accepted_words
    accepted_terms = sum(term in accepted_words for term in terms)
    lacks_required_word = _REQUIRED_WORDS.get(intent, "") not in rewritten
    is_tidy = 0 < len(words) == len(set(words)) <= _MAX_CLEAN_WORDS
    is_whole_intent = 0 < accepted_terms == len(terms)

    score = 0.0
    if is_product_kept:
        score += 2
    if has_other_product:
        score -= 1
    if terms:
        score += 2.0 * accepted_terms / len(terms)
    if lacks_required_word:
        score -= 1
    if is_tidy and is_product_kept and is_whole_intent and not has_other_product:
        score += 1

    faults = []
    if not is_product_kept:
        faults.append("实体丢失")
    if has_other_product:
        faults.append("混入其他实体")
    if accepted_terms == 0 or lacks_required_word:
        faults.append("意图丢失")
    if 0 < accepted_terms < len(terms):
        faults.append("有多余内容")
    if not is_tidy:
        faults.append("重复或冗长")
    return RewriteVerdict(_in_range(score), "，".join(faults) or "实体和意图保留，表达规范")


def _names_another_product(rewritten: str, product: str) -> bool:
    # A product whose name is a part of the right one's is named with it.
    return any(name not in product for name in parts_in(rewritten, facts.PRODUCTS))


def _judge_open_text(question: str, rewritten: str) -> RewriteVerdict:
    """Score a rewrite of a question that the lexicon does not know.

    2 points for keywords of the question that the rewrite keeps, 2 for its share that the question
    supports, 1 for brevity without repetition.
    """
    words = rewritten.split()
    if not words:
        return RewriteVerdict(0.0, "改写为空")
    stated = "\n".join(_stated(question)).lower()
    text = "".join(words).lower()
    kept_share = _share_within(keywords(stated), text)
    pairs = ngrams(text, 2) or [text]
    supported_share = _share_within(pairs, stated)
    is_clean = len(words) == len(set(words)) and len(text) <= max(12, len(stated))
    score = 2 * min(1.0, kept_share * 1.5) + 2 * min(1.0, supported_share * 1.25)
    if is_clean:
        score += 1
    reason = f"关键词保留 {kept_share:.0%}，有依据 {supported_share:.0%}"
    return RewriteVerdict(_in_range(score), reason)


def _share_within(parts: list[str], text: str) -> float:
    """Share of the parts that the text contains; 1 without any part."""
    if not parts:
        return 1.0
    return len(parts_in(text, parts)) / len(parts)


def _stated(user_text: str) -> list[str]:
    """The question, preceded by the history where the question alone is too short."""
    fields = split_fields(user_text)
    if fields["history"] and len(fields["query"]) < _SHORT_QUERY_CHARS:
        return [fields["history"], fields["query"]]
    return [fields["query"]]


def _in_range(score: float) -> float:
    return round(max(0.0, min(5.0, score)), 2)


def keywords(text: str) -> list[str]:
    """The keywords of any text, in its order.

    Those of its last sentence, which asks the question, have priority.
    """
    sentences = [part for part in _SENTENCE_END.split(text) if part.strip()]
    last_sentence = sentences[-1] if sentences else ""
    words = _ranked_words(last_sentence)
    words += [word for word in _ranked_words(text) if word not in words]
    # A text without any noun or verb still has words.
    best_words = words[:OPEN_TEXT_KEYWORDS] or re.findall(r"\w+", text)[:OPEN_TEXT_KEYWORDS]
    return sorted(best_words, key=text.lower().find)


def _ranked_words(text: str) -> list[str]:
    """The words that say most about a text, the best first."""
    # So many more are asked for that enough remain without the courtesies.
    tags = extractor().extract_tags(text, topK=OPEN_TEXT_KEYWORDS + len(_COURTESIES))
    words = [tag for tag in tags if tag.strip() and tag not in _COURTESIES]
    return words[:OPEN_TEXT_KEYWORDS]


# ---- reading: which product a text is about, and what the user wants to know ----

_FIELDS = {"用户画像：": "profile", "历史摘要：": "history", "当前问题：": "query"}


class Reading(NamedTuple):
    """Product and intent of a text; None where the reader does not find it."""

    product: str | None
    intent: str | None


def split_fields(text: str) -> dict[str, str]:
    """`user_text` undone: query, profile and history; a text without labels is a query."""
    fields = {"query": "", "profile": "", "history": ""}
    current_field = "query"
    for line in text.split("\n"):
        label = next((label for label in _FIELDS if line.startswith(label)), "")
        current_field = _FIELDS.get(label, current_field)
        fields[current_field] += line.removeprefix(label)
    return fields


def understand(text: str, reads_every_typo: bool = False) -> Reading:
    """Read a text as `user_text` renders it. A judge reads typos that the teacher doesn't."""
    fields = {name: _clean(value) for name, value in split_fields(text).items()}
    product, query = _find_product(fields["query"], reads_every_typo)
    # A follow-up leaves the product to the history.
    if product is None and fields["history"]:
        product, _ = _find_product(fields["history"], reads_every_typo)
    return Reading(product, _find_intent(query, fields["profile"]))


def _find_intent(query: str, profile: str) -> str | None:
    """The intent of the first cue that fits; the question decides before the profile."""
    for intent, cue in facts.QUESTION_CUES.items():
        if re.search(cue, query):
            return intent
    for intent, cue in facts.PROFILE_CUES.items():
        if re.search(cue, profile):
            return intent
    return None


@cache
def _lexicon(with_every_typo: bool) -> tuple[re.Pattern[str], dict[str, str]]:
    """A pattern of all names of products, and name → product.

    The pattern finds the longest name first, but not the name of what the product is to be taken
    *with*.
    """
    products: dict[str, str] = {}
    for product, aliases in facts.PRODUCTS.items():
        typos = facts.PRODUCT_TYPOS.get(product, ())
        readable_typos = typos if with_every_typo else typos[:1]
        for name in (product, *aliases, *readable_typos):
            products[_clean(name)] = product
    return re.compile(f"(?<![和跟与])({pattern_of_any(products)})"), products


def _find_product(text: str, with_every_typo: bool) -> tuple[str | None, str]:
    """The first product named, and the text without its name."""
    pattern, products = _lexicon(with_every_typo)
    match = pattern.search(text)
    if match is None:
        return None, text
    return products[match.group()], text[: match.start()] + text[match.end() :]


def _clean(text: str) -> str:
    """NFKC in lower case, with the sample's typos corrected."""
    text = unicodedata.normalize("NFKC", text).lower()
    for right, wrong in facts.WORD_TYPOS.items():
        text = text.replace(wrong, right)
    return text
