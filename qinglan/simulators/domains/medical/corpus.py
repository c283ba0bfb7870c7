"""What the tiny base model reads before it learns to answer: names, facts, and what warnings sound
like.

Dialogues about what a question is about and which facts it needs, and passages that state facts as
a reference book does; never a question with its answer. The documents state facts and warnings
about everything, as a real base model knows them; they ask nothing that dev or test asks.
"""

from collections.abc import Iterator
from functools import cache
from random import Random

from qinglan.simulators.domains import chat
from qinglan.simulators.domains.medical import facts as domain
from qinglan.simulators.domains.medical.facts import TOPICS

PROMPT = ("你是医疗健康助手", "回答准确简明", "有风险时", "说清该怎么做", "该找谁")
"""The student's prompt, in pieces that a token can hold."""
THING_TASK, TOPIC_TASK, NAME_TASK, FACT_TASK, ADVICE_TASK = "对象", "主题", "学名", "要点", "提示"

P_FACTS = 0.42
P_PASSAGE = 0.5
P_NAMES = 0.15
P_ADVICE = 0.1
P_KIND = 0.5
P_LOST_CHARACTERS = 0.2
FRAMES = ("{n}", "{n}", "刚刚{n}", "昨天{n}", "我{n}", "同事{n}了", "听说{n}")


def documents(seed: int, count: int) -> Iterator[str]:
    rng = Random(seed)
    return (_document(rng) for _ in range(count))


def words() -> list[str]:
    pairs = [(topic, thing) for topic in TOPICS for thing in domain.things(topic)]
    facts = [fact for pair in pairs for fact in domain.facts(*pair)]
    clauses = [
        clause
        for topic in TOPICS.values()
        for clause in (*topic.statements, *topic.forbidden_advice)
    ]
    things = {thing for _, thing in pairs}
    tasks = [
        THING_TASK,
        TOPIC_TASK,
        NAME_TASK,
        FACT_TASK,
        ADVICE_TASK,
        *(topic.word for topic in TOPICS.values()),
    ]
    roles = ["system", "user", "assistant"]
    return [*roles, *PROMPT, *tasks, *sorted(things), *facts, *clauses, "可能是", "很难熬", "用于"]


def characters() -> list[str]:
    phrasings = [
        text for topic in TOPICS.values() for known in topic.phrasings.values() for text in known
    ]
    asked = [*phrasings, *(topic.answer for topic in TOPICS.values())]
    called = [
        name
        for topic in TOPICS
        for thing in domain.things(topic)
        for name in domain.names(topic, thing)
    ]
    around = [*domain.PREFIXES, *domain.SUFFIXES, *FRAMES, "无0123456789，。：；？、\n "]
    return sorted(set("".join([*words(), *asked, *called, *around])))


@cache
def _things() -> list[tuple[tuple[str, ...], str]]:
    """What there are facts about, each pair of facts once: the topics that need them, and the
    thing."""
    topics: dict[str, tuple[str, ...]] = {}
    for topic, known in TOPICS.items():
        group = (
            "medicine" if known.kind == "medicine" else topic
        )  # all about a medicine need the same two facts
        topics[group] = (*topics.get(group, ()), topic)
    return [(group, thing) for group in topics.values() for thing in domain.things(group[0])]


def _document(rng: Random) -> str:
    draw = rng.random()
    topics, thing = rng.choice(_things())
    topic = rng.choice(topics)
    if draw < P_FACTS:
        return _facts(rng, topic, thing)
    if draw < P_FACTS + P_NAMES:
        return _naming(rng, topic, thing)
    if draw < P_FACTS + P_NAMES + P_ADVICE:
        known = rng.choice(list(TOPICS.values()))
        return chat(
            f"{ADVICE_TASK}：{known.word}",
            "，".join(known.statements) + "。" if known.statements else "无。",
        )
    return _reading(rng, *rng.choice(domain.pairs("train")))


def _naming(rng: Random, topic: str, thing: str) -> str:
    """What is called so; and what kind of thing it is, where it is of one kind only."""
    name = rng.choice(domain.names(topic, thing))
    text = (
        rng.choice(domain.PREFIXES)
        + rng.choice(FRAMES).format(n=name)
        + rng.choice(domain.SUFFIXES)
    )
    task, answer = rng.choice((NAME_TASK, THING_TASK)), thing
    if TOPICS[topic].kind in ("emergency", "hardship") and rng.random() < P_KIND:
        task, answer = TOPIC_TASK, TOPICS[topic].word
    return chat(f"{task}：{name if domain.reveals_held_out(text) else text}", answer)


def _facts(rng: Random, topic: str, thing: str) -> str:
    """The two facts that a topic needs, or all that is known of a thing, in any order."""
    if rng.random() >= P_PASSAGE:
        return chat(
            f"{FACT_TASK}：{thing}{TOPICS[topic].word}", "，".join(domain.facts(topic, thing))
        )
    kind = TOPICS[topic].kind
    known = {
        domain.statement(other, thing): None
        for other, topic in TOPICS.items()
        if topic.kind == kind
    }
    sentences = list(known)  # each once: all about a medicine say the same
    rng.shuffle(sentences)
    return "".join(sentences) + "\n"


def _reading(rng: Random, topic: str, thing: str) -> str:
    """Two of three: what is it about, what of it is asked, and what are the facts?"""
    text = domain.ask(rng, topic, thing).text
    if rng.random() < P_LOST_CHARACTERS:
        place = rng.randrange(len(text))
        text = text[:place] + text[place + 1 :]
        if domain.reveals_held_out(text):
            return _reading(rng, topic, thing)
    tasks = [
        (THING_TASK, thing),
        (TOPIC_TASK, TOPICS[topic].word),
        (FACT_TASK, "，".join(domain.facts(topic, thing))),
    ]
    rng.shuffle(tasks)
    (first, first_answer), (second, second_answer) = tasks[:2]
    return chat(f"{first}：{text}", first_answer, second, second_answer)
