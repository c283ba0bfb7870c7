"""Validation's findings: streamed figures agree with arithmetic, a broken service is noticed."""

import statistics
from random import Random

import pytest

from qinglan.errors import StageError
from qinglan.grading.validation_statistics import RetrievalStatistics
from qinglan.rows import Retrieved, Row
from qinglan.statistics import Histogram, regrouped

BASE = Row(id="0", tenant="t", query="它咋吃", answer="虾青素 服用方法", source="f!A1")


def row(
    original: float | None, rewritten: float | None, gold: str | None = None, **changes: object
) -> Row:
    """A row with one passage per answer, `g` for the rewrite and `o` for the question.

    Args:
        original: the score of the question's passage; None where nothing is recalled.
        rewritten: the same of the rewrite's passage.
    """
    fields = {
        "original_retrieved": passage("o", original),
        "answer_retrieved": passage("g", rewritten),
        "gold_id": gold,
    }
    return BASE.model_copy(update=fields | changes)


def passage(document_id: str, score: float | None) -> Retrieved:
    return Retrieved() if score is None else Retrieved(ids=(document_id,), scores=(score,))


def findings(*rows: Row) -> RetrievalStatistics:
    statistics = RetrievalStatistics()
    for row in rows:
        statistics.add(row)
    return statistics


def test_figures_of_many_rows_agree_with_plain_arithmetic():
    rng = Random(5)
    pairs = [(rng.random(), rng.random() ** 0.5) for _ in range(3000)]
    rows = [
        row(original, rewritten, "g" if number % 2 else None)
        for number, (original, rewritten) in enumerate(pairs)
    ]
    streamed = findings(*rows)
    figures = streamed.metrics()
    gains = [rewritten - original for original, rewritten in pairs]
    originals = sorted(original for original, _ in pairs)
    rewrites = sorted(rewritten for _, rewritten in pairs)
    assert figures["gain_mean"] == pytest.approx(statistics.mean(gains))
    assert figures["gain_se"] == pytest.approx(statistics.stdev(gains) / len(gains) ** 0.5)
    assert figures["top1_score_mean"] == pytest.approx(statistics.mean(rewrites))
    assert figures["better_share"] == sum(gain > 0 for gain in gains) / 3000
    assert figures["top1_score_p10"] == pytest.approx(rewrites[300], abs=0.01)
    assert figures["top1_score_p50"] == pytest.approx(statistics.median(rewrites), abs=0.01)
    assert figures["original_top1_score_p90"] == pytest.approx(originals[2700], abs=0.01)
    assert (figures["gold_top1"], figures["original_gold_top1"]) == (1.0, 0.0)
    counts = [sum(part["counts"]) for parts in streamed.histograms().values() for part in parts]
    assert counts == [3000] * 3


def test_only_rows_that_were_retrieved_for_both_ways_count():
    half = row(0.5, 0.7, "g", answer_retrieved=None)
    figures = findings(row(0.6, 0.9, "g"), row(0.6, None, "g"), row(0.6, 0.9), half, BASE).metrics()
    assert figures["success_rate"] == pytest.approx(2 / 3)
    assert figures["top1_score_mean"] == pytest.approx(0.6)
    assert (figures["gold_top1"], figures["original_gold_top1"]) == (0.5, 0.0)
    assert {"gold_top1", "gain_se"}.isdisjoint(findings(row(0.6, 0.9)).metrics())
    assert findings(BASE, BASE.failed("rag_unavailable")).metrics() == {}


def same(score: float, noise: float = 0.0) -> Row:
    """A row whose two answers have the same passage."""
    original = Retrieved(ids=("d",), titles=("t",), scores=(score,))
    rewritten = Retrieved(ids=("d",), titles=("t",), scores=(score + noise,))
    return BASE.model_copy(update={"original_retrieved": original, "answer_retrieved": rewritten})


def test_a_service_that_ignores_rewrites_is_noticed_through_noise():
    with pytest.raises(
        StageError, match=r"same passages .* on 20 of 20 rows; .* \(docs/how-to/rag\.md\)"
    ):
        findings(*[same(0.5, 4e-4)] * 20).check()
    with pytest.raises(StageError, match="99 of 100"):
        findings(row(0.5, 0.9), *[same(0.5)] * 99).check()
    findings(*[row(0.5, 0.9)] * 3, *[same(0.5)] * 97).check()
    findings(*[same(0.5, 0.01)] * 20).check()
    findings(*[same(0.5)] * 19).check()
    same_words = same(0.5).model_copy(update={"answer": " 它咋吃？"})
    findings(*[same_words] * 50).check()


def test_labels_need_ids():
    nameless = {
        "answer_retrieved": Retrieved(ids=(None,), scores=(0.5,)),
        "original_retrieved": Retrieved(),
    }
    findings(row(None, 0.5, None, **nameless)).check()
    with pytest.raises(StageError, match="no passage of the RAG has an `id`"):
        findings(row(None, 0.5, "g", **nameless)).check()
    strangers = [row(0.4, 0.5, "g.0")] * 20
    with pytest.raises(
        StageError, match=r'20 rows name .* none at any rank; they name "g\.0", it sends "g"; write'
    ):
        findings(*strangers, row(0.4, 0.5)).check()
    findings(*strangers[:19], row(0.4, None, "g.0")).check()
    findings(*strangers, row(0.4, 0.5, "o")).check()


def test_a_histogram_keeps_what_lies_outside_at_its_ends():
    histogram = Histogram(0, 1, 10)
    for value in (-5, 0.0, 0.3, 1.0, 7):
        histogram.add(value)
    assert histogram.counts == [2, 0, 0, 1, 0, 0, 0, 0, 0, 2]
    assert regrouped(histogram.counts, 5) == [2, 1, 0, 0, 2]
