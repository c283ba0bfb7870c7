"""The tiny base model's texts before it learns to answer: names, facts, and warnings.

Dialogues about what a question is about and which facts it needs, and passages that state facts as
a reference book does; never a question with its answer. The documents state facts and warnings
about everything, as a real base model knows them; they ask nothing that dev or test asks.
"""

from collections.abc import Iterator
from functools import cache
from random import Random

from qinglan.simulators.domains import chat
from qinglan.simulators.domains.medical import facts
from qinglan.simulators.domains.medical.facts import TOPICS

PROMPT = ("你是医疗健康助手", "回答准确简明", "有风险时", "说清该怎么做", "该找谁")
"""The student's prompt, in pieces that a token can hold."""
THING_TASK = "对象"
TOPIC_TASK = "主题"
NAME_TASK = "学名"
FACT_TASK = "要点"
ADVICE_TASK = "提示"

P_FACTS = 0.42
P_PASSAGE = 0.5
P_NAMES = 0.15
P_ADVICE = 0.1
P_KIND = 0.5
P_LOST_CHARACTERS = 0.2
FRAMES = ("{n}", "{n}", "刚刚{n}", "昨天{n}", "我{n}", "同事{n}了", "听说{n}")


def documents(seed: int, count: int) -> Iterator[str]:
    rng = Random(seed)
    for _ in range(count):
        yield _document(rng)


def words() -> list[str]:
    pairs = _all_pairs()
    fact_words: list[str] = []
    for pair in pairs:
        fact_words += facts.facts(*pair)
    topic_words: list[str] = []
    clauses: list[str] = []
    for topic in TOPICS.values():
        topic_words.append(topic.word)
        clauses += [*topic.statements, *topic.forbidden_advice]
    return [
        "system",
        "user",
        "assistant",
        *PROMPT,
        THING_TASK,
        TOPIC_TASK,
        NAME_TASK,
        FACT_TASK,
        ADVICE_TASK,
        *topic_words,
        *sorted({thing for _, thing in pairs}),
        *fact_words,
        *clauses,
        "可能是",
        "很难熬",
        "用于",
    ]


def _all_pairs() -> list[tuple[str, str]]:
    pairs = []
    for topic in TOPICS:
        pairs += [(topic, thing) for thing in facts.things(topic)]
    return pairs


def characters() -> list[str]:
    texts = [*words(), *facts.PREFIXES, *facts.SUFFIXES, *FRAMES, "无0123456789，。：；？、\n "]
    for topic in TOPICS.values():
        texts.append(topic.answer)
        for phrasings in topic.phrasings.values():
            texts += phrasings
    for pair in _all_pairs():
        texts += facts.names(*pair)
    return sorted(set("".join(texts)))


@cache
def _subjects() -> list[tuple[tuple[str, ...], str]]:
    """The topics that need the same two facts about a thing, and the thing.

    Each pair of facts is there once.
    """
    groups: dict[str, list[str]] = {}
    for name, topic in TOPICS.items():
        # All topics about a medicine need the same two facts.
        group = "medicine" if topic.kind == "medicine" else name
        groups.setdefault(group, []).append(name)
    subjects = []
    for topics in groups.values():
        subjects += [(tuple(topics), thing) for thing in facts.things(topics[0])]
    return subjects


def _document(rng: Random) -> str:
    draw = rng.random()
    # Each pair of facts is as frequent as any other, however many topics share it.
    topics, thing = rng.choice(_subjects())
    topic = rng.choice(topics)
    if draw < P_FACTS:
        return _facts(rng, topic, thing)
    if draw < P_FACTS + P_NAMES:
        return _naming(rng, topic, thing)
    if draw < P_FACTS + P_NAMES + P_ADVICE:
        return _advice(rng)
    return _reading(rng, *rng.choice(facts.pairs("train")))


def _advice(rng: Random) -> str:
    """The statements that answers about a topic must make."""
    topic = rng.choice(list(TOPICS.values()))
    advice = facts.sentence(topic.statements) or "无。"
    return chat(f"{ADVICE_TASK}：{topic.word}", advice)


def _naming(rng: Random, topic: str, thing: str) -> str:
    """The thing or topic that a name stands for.

    The topic is asked for only where the thing belongs to one alone.
    """
    name = rng.choice(facts.names(topic, thing))
    prefix = rng.choice(facts.PREFIXES)
    framed_name = rng.choice(FRAMES).format(n=name)
    text = prefix + framed_name + rng.choice(facts.SUFFIXES)
    task = rng.choice((NAME_TASK, THING_TASK))
    answer = thing
    if TOPICS[topic].kind in ("emergency", "hardship") and rng.random() < P_KIND:
        task = TOPIC_TASK
        answer = TOPICS[topic].word
    # A frame can turn a name into a phrasing that only dev or test has.
    if facts.reveals_held_out(text):
        text = name
    return chat(f"{task}：{text}", answer)


def _facts(rng: Random, topic: str, thing: str) -> str:
    """The two facts that a topic needs, or all that is known of a thing, in any order."""
    if rng.random() >= P_PASSAGE:
        question = f"{FACT_TASK}：{thing}{TOPICS[topic].word}"
        return chat(question, "，".join(facts.facts(topic, thing)))
    kind = TOPICS[topic].kind
    sentences: list[str] = []
    for name, topic_of_any_kind in TOPICS.items():
        if topic_of_any_kind.kind != kind:
            continue
        sentence = facts.statement(name, thing)
        # All topics about a medicine say the same.
        if sentence not in sentences:
            sentences.append(sentence)
    rng.shuffle(sentences)
    return "".join(sentences) + "\n"


def _reading(rng: Random, topic: str, thing: str) -> str:
    """Two of three tasks about a question: its thing, its topic, and the facts that it needs."""
    text = facts.ask(rng, topic, thing).text
    if rng.random() < P_LOST_CHARACTERS:
        place = rng.randrange(len(text))
        text = text[:place] + text[place + 1 :]
        # A lost character can turn one phrasing into another.
        if facts.reveals_held_out(text):
            return _reading(rng, topic, thing)
    tasks = [
        (THING_TASK, thing),
        (TOPIC_TASK, TOPICS[topic].word),
        (FACT_TASK, "，".join(facts.facts(topic, thing))),
    ]
    rng.shuffle(tasks)
    (first_task, first_answer), (second_task, second_answer) = tasks[:2]
    return chat(f"{first_task}：{text}", first_answer, second_task, second_answer)
