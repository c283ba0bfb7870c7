"""The domain of query rewriting: sample, corpus, teacher and judge.

Nothing of the sample's dev and test may leak into the base model's corpus.
"""

from collections import Counter
from itertools import chain
from itertools import product as product_of
from random import Random

import pytest

from benchmarks.describe_sample import MISMATCHED, describe
from qinglan.config import Embedded, Tenant
from qinglan.errors import ConfigError
from qinglan.recipes.prompting import undelimited
from qinglan.recipes.query_rewrite import judge_messages, panel_messages, user_text
from qinglan.rows import Row, Split, row_id
from qinglan.simulators.domains.query_rewrite import (
    RewriteSampleRow,
    build_sample,
    corpus,
    teacher,
    trigrams,
)
from qinglan.simulators.domains.query_rewrite import facts as domain
from qinglan.simulators.domains.query_rewrite.teacher import (
    Reading,
    judge,
    judge_panel,
    rewrite,
    understand,
)

SMALL = Embedded(sample_train_rows=60, sample_dev_rows=10, sample_test_rows=30)
DOCUMENTS = list(corpus.documents(seed=3, count=3000))
TEXTS = ["虾青素 服用方法 推荐用量", "虾青素", "胶原蛋白肽 功效", "虾青素 保存方法"]


@pytest.fixture(scope="module")
def rows() -> list[RewriteSampleRow]:
    return build_sample(Embedded())[0]


def test_sizes_and_splits_and_that_test_rows_resemble_no_training_row(rows: list[RewriteSampleRow]):
    assert Counter(row.split for row in rows) == {"train": 2000, "dev": 400, "test": 1000}
    ids = {
        row_id("t", row.question.query, row.question.profile, row.question.history) for row in rows
    }
    assert len(ids) == len(rows)
    for row in rows:
        assert domain.pair_split(row.product, row.intent) == row.split
    # Half of them.
    assert Counter(row.split for row in rows if row.unseen_phrasing) == {"dev": 200, "test": 500}
    for intent in domain.INTENTS.values():
        phrasings = list(chain.from_iterable(intent.phrasings.values()))
        assert len(phrasings) == len(set(phrasings))
    training = [trigrams(row.question) for row in rows if row.split == "train"]
    for row in rows[-1000::10]:
        grams = trigrams(row.question)
        assert max(jaccard(grams, training_grams) for training_grams in training) < 0.85, row


def jaccard(grams: frozenset[str], other_grams: frozenset[str]) -> float:
    return len(grams & other_grams) / len(grams | other_grams)


def test_there_is_something_to_learn_and_to_amplify(rows: list[RewriteSampleRow]):
    described = describe(rows, domain.documents(), min_top1_score=0.6, seed=7)
    top1 = described.top1
    counts = described.selected_with_kb_wording
    assert 0.1 <= top1["original test"] <= 0.3
    assert 0.80 <= top1["teacher test"] <= 0.85
    assert 0.78 <= top1["teacher train"] <= 0.86
    assert top1["oracle test"] >= 0.95
    for intent in MISMATCHED:
        assert 8 <= counts[intent] <= 40, intent
    for product in domain.NAME_MISMATCH:
        assert counts[product] >= 4, product


def test_too_many_rows_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(domain, "ask", lambda *_: domain.RewriteQuestion("虾青素怎么吃"))
    with pytest.raises(ConfigError, match="sample_train_rows: 60 is too many"):
        build_sample(SMALL)


@pytest.mark.parametrize(
    ("split", "phrased"), [("dev", "train"), ("dev", "dev"), ("test", "train"), ("test", "test")]
)
def test_every_question_of_dev_and_test_would_be_found(split: Split, phrased: Split):
    rng = Random(1)
    for product, intent in domain.pairs(split) * 3:
        question = domain.ask(rng, product, intent, phrased)
        assert corpus.leak(user_text(question.query, question.profile, question.history))


def test_no_document_leaks_and_no_answer_is_a_rewrite():
    assert list(filter(None, map(corpus.leak, DOCUMENTS))) == []
    terms: list[str] = []
    for intent in domain.INTENTS.values():
        terms += [intent.habit, intent.kb_term, *(term for term, _ in intent.alternatives)]
    rewrites = {f"{product} {term}" for product, term in product_of(domain.PRODUCTS, terms)}
    answers: set[str] = set()
    for text in DOCUMENTS:
        turns = text.split("<|im_start|>assistant\n")[1:]
        answers.update(turn.partition("<|im_end|>")[0] for turn in turns)
    assert answers & rewrites == set()


@pytest.mark.parametrize("intent", domain.INTENTS)
def test_reads_every_phrasing(intent: str):
    spec = domain.INTENTS[intent]
    for phrasing in chain.from_iterable(spec.phrasings.values()):
        for product, aliases in domain.PRODUCTS.items():
            question = phrasing.format(p=aliases[0])
            assert understand(question) == Reading(product, intent), question


def test_reads_context_and_typos():
    readings = {
        "历史摘要：上轮问了鱼油\n当前问题：那它孕妇能吃吗": Reading("深海鱼油", "preg"),
        "历史摘要：上轮问了鱼油\n当前问题：钙片怎么保存": Reading("碳酸钙", "store"),
        "用户画像：孕28周\n当前问题：燕窝能吃吗": Reading("燕窝", "preg"),
        "用户画像：孕28周\n当前问题：燕窝怎么保存": Reading("燕窝", "store"),
        "退黑素有付作用吗": Reading("褪黑素", "side"),
        "腿黑素安全吗": Reading(None, "side"),
        "ＮＭＮ怎么吃": Reading("烟酰胺单核苷酸", "how"),
    }
    assert {text: understand(text) for text in readings} == readings


def test_rewrites_by_habit_with_some_alternatives():
    answers = Counter(
        rewrite(f"{prefix}虾青素怎么吃", seed) for prefix in ("", "请问") for seed in range(200)
    )
    assert answers.most_common(1)[0][0] == "虾青素 服用方法 推荐用量"
    assert 0.70 < answers["虾青素 服用方法 推荐用量"] / 400 < 0.82
    assert 0.05 < answers["虾青素 食用建议 每日摄入量"] / 400 < 0.16


def test_judges_supplements_open_text_and_passages():
    scores = {
        "胶原蛋白肽 服用方法 推荐用量": 5,
        "胶原蛋白肽 食用建议 每日摄入量": 5,
        "胶原蛋白肽": 2,
        "": 0,
        "胶原蛋白肽 食用建议 食用建议 食用建议": 4,
    }
    for text, score in scores.items():
        assert score_of_rewrite("请问胶原怎么吃", text) == score, text
    assert score_of_rewrite("请问胶原怎么吃", "虾青素 食用建议 每日摄入量") <= 2
    question = "我有高血压，高血压患者能吃党参吗？"
    assert score_of_rewrite(question, "高血压 党参") > 4
    assert score_of_rewrite(question, "感冒 发烧 咳嗽") < 2
    prompt = "虾青素有没有副作用\n检索结果：《虾青素 不良反应 耐受性评价》虾青素是一种……"
    scores_of_passage = [judge(prompt, seed).score for seed in range(400)]
    assert 0.86 < scores_of_passage.count(5.0) / 400 < 0.94, "one verdict in ten is wrong"


def score_of_rewrite(question: str, rewritten: str) -> float:
    return judge(f"{question}\n改写：{rewritten}").score


QUESTION = Row(id="1", tenant="t", query="虾青素怎么吃", source="f:1")


def panel(*texts: str, seed: int = 7) -> list[float]:
    messages = panel_messages(QUESTION, texts, Tenant())
    return judge_panel(undelimited(messages[-1]["content"]), seed)


def alone(text: str) -> float:
    messages = judge_messages(QUESTION, text, Tenant())
    return judge(undelimited(messages[-1]["content"])).score


def test_a_panel_scores_as_the_judge_does_alone_up_to_a_position_bias():
    scores_alone = list(map(alone, TEXTS))
    for seed in range(50):
        scores = panel(*TEXTS, seed=seed)
        assert scores == pytest.approx(scores_alone, abs=teacher.PANEL_BIAS)
    assert panel(TEXTS[1]) == [alone(TEXTS[1])]
