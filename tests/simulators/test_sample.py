"""The shipped sample: what may not leak, what must be there to learn, and that it never changes by itself."""

from collections import Counter
from pathlib import Path

import pytest
from openpyxl import load_workbook

from benchmarks.describe_sample import MISMATCHED, SampleFigures, describe
from qinglan.config import Embedded
from qinglan.errors import ConfigError
from qinglan.rows import row_id
from qinglan.simulators.domains.query_rewrite import facts as domain
from qinglan.simulators.domains.query_rewrite.sample import (
    RewriteSampleRow,
    build_sample,
    trigrams,
    write_sample,
)

SMALL = Embedded(sample_train_rows=60, sample_dev_rows=10, sample_test_rows=30)


@pytest.fixture(scope="module")
def rows() -> list[RewriteSampleRow]:
    return build_sample(Embedded())[0]


@pytest.fixture(scope="module")
def description(rows: list[RewriteSampleRow]) -> SampleFigures:
    return describe(rows, domain.documents(), min_top1_score=0.6, seed=7)


def test_sizes_and_splits(rows):
    assert Counter(row.split for row in rows) == {"train": 2000, "dev": 200, "test": 1000}
    ids = {row_id("t", row.question.query, row.question.profile, row.question.history) for row in rows}
    assert len(ids) == len(rows)
    for row in rows:
        owner = domain.pair_split(row.product, row.intent)
        assert owner == ("test" if row.split == "test" else "train")


def test_test_rows_resemble_no_training_row(rows):
    training = [trigrams(row.question) for row in rows if row.split != "test"]
    for grams in (trigrams(row.question) for row in rows[-1000::10]):
        assert all(len(grams & other) < 0.85 * len(grams | other) for other in training)


def test_unseen_phrasings_are_half_of_test_only(rows):
    unseen = Counter(row.split for row in rows if row.unseen_phrasing)
    assert unseen == {"test": 500}
    for intent in domain.INTENTS.values():
        assert not set(intent.phrasings) & set(intent.test_phrasings)


def test_top1(description):
    top1 = description.top1
    assert 0.1 <= top1["original test"] <= 0.3
    assert 0.80 <= top1["teacher test"] <= 0.85
    assert 0.78 <= top1["teacher train"] <= 0.86
    assert top1["oracle test"] >= 0.95


def test_selected_rows_hold_something_to_amplify(description):
    counts = description.selected_with_kb_wording
    assert all(8 <= counts[intent] <= 30 for intent in MISMATCHED)
    assert all(counts[product] >= 4 for product in domain.NAME_MISMATCH)


def test_knowledge_base_wording_scores_best(description):
    quality = dict(description.quality)
    best = quality.pop("knowledge base's wording")
    assert best > max(quality.values())
    assert best > quality["teacher's wording"] + 0.15
    titles = description.quality_of_titles.values()
    assert max(titles) - min(titles) < 0.05


def test_judge_rejects_what_games_retrieval(description):
    assert description.judge["oracle"] == 5
    assert description.judge["teacher"] > 4.5
    assert description.judge["bare product"] < 3
    assert description.judge["product and 功效与作用"] < 3


def test_workbook_reads_back(tmp_path: Path):
    sheet = load_workbook(write_sample(tmp_path, SMALL).workbook).worksheets[0]
    header, *cells = sheet.iter_rows(values_only=True)
    assert header == ("问题", "用户画像", "历史摘要", "标准文档", "划分", "意图")
    assert {row[5] for row in cells} <= {intent.name for intent in domain.INTENTS.values()}
    assert len(cells) == 100
    assert {row[3] for row in cells} <= {document.id for document in domain.documents()}


def test_too_many_rows_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "qinglan.simulators.domains.query_rewrite.sample.ask", lambda *_: domain.RewriteQuestion("虾青素怎么吃")
    )
    with pytest.raises(ConfigError, match="sample_train_rows: 60 is too many"):
        build_sample(SMALL)
