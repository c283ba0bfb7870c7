"""Rows are drawn for review by risk and at random; the newest verdict counts, and holds for what
was looked at."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from doubles import raising

from qinglan.config import Profile, Select
from qinglan.data.review import Review, Reviews, add_reviews, fingerprint, load_reviews, store_path
from qinglan.data.review.sample import ReviewSample, draw_sample
from qinglan.data.strata import ANSWER_STRATA, CONTROL, REWRITE_STRATA
from qinglan.errors import ArtifactError
from qinglan.rows import Retrieved, Row

CONFIG = Select(min_top1_score=0.6)


def row(row_id: str = "r1", answer: str | None = "头疼 缓解", **changes: Any) -> Row:
    return Row(
        id=row_id, tenant="default", query="头疼", source="q.csv:2", answer=answer, **changes
    )


def found(score: float) -> Retrieved:
    return Retrieved(ids=("d",), scores=(score,))


def rewritten(number: int = 0, **changes: Any) -> Row:
    scores = {"judge_score": 3.5, "answer_retrieved": found(0.9), "original_retrieved": found(0.5)}
    return row(f"r{number}", **(scores | changes))


def names(sample: ReviewSample) -> dict[str, tuple[str, ...]]:
    strata_names = {}
    for sampled in sample.rows:
        strata_names[sampled.row.id] = tuple(stratum.name for stratum in sampled.strata)
    return strata_names


@pytest.mark.parametrize(
    ("changes", "strata"),
    [
        ({}, ("control",)),
        ({"judge_score": 2.9}, ("control", "judge_low")),
        ({"judge_score": 4.0, "answer_retrieved": found(0.52)}, ("control", "judge_high")),
        ({"judge_score": 4.0, "answer_retrieved": found(0.6)}, ("control", "just_above")),
        ({"answer_retrieved": found(0.59)}, ("control", "just_below")),
        (
            {"answer_retrieved": found(0.54), "original_retrieved": found(0.55)},
            ("control", "worse_than_original"),
        ),
        ({"gold_id": "g"}, ("control", "gold_missed")),
        ({"gold_id": "g; d"}, ("control",)),
    ],
)
def test_which_rewrites_are_drawn_and_why(changes: dict[str, Any], strata: tuple[str, ...]):
    assert names(draw_sample([rewritten(**changes)], CONFIG, 5)) == {"r0": strata}


@pytest.mark.parametrize(
    ("changes", "strata"),
    [
        ({}, ("control",)),
        ({"judge_score": 2.9}, ("control", "low_score")),
        (
            {"judge_score": 4.0, "parts": {"format": 1.0, "safe": 0.4}},
            ("control", "high_score_low_part", "low_part"),
        ),
        ({"judge_score": None, "parts": {"safe": 0.9}}, ("control", "low_part")),
        ({"pool": "red_team"}, ("control", "in_pool")),
        ({"parts": None, "judge_score": None}, ("control",)),
    ],
)
def test_which_answers_are_drawn_and_why(changes: dict[str, Any], strata: tuple[str, ...]):
    answer = row(**({"judge_score": 3.5, "parts": {"format": 1.0, "safe": 1.0}} | changes))
    assert names(draw_sample([answer], CONFIG, 5, ANSWER_STRATA)) == {"r1": strata}


@pytest.mark.parametrize("reason", ["teacher_timeout", "empty_query", "near_duplicate_of_test"])
def test_what_no_verdict_could_change_is_not_drawn(reason: str):
    rewrite = "改写" if reason.startswith("near") else None
    assert not draw_sample([rewritten(answer=rewrite, gold_id="g").failed(reason)], CONFIG, 5).rows
    dropped = row(answer=None).failed("teacher_refused")
    assert names(draw_sample([dropped], CONFIG, 5)) == {"r1": ("by_rule",)}  # may be corrected


def mixed(count: int = 2000) -> Iterator[Row]:
    """Mostly good rows, and some of every kind of risk."""
    risks: dict[int, dict[str, Any]] = {
        0: {"judge_score": 1.0},
        1: {"judge_score": 5.0, "answer_retrieved": found(0.3), "original_retrieved": found(0.1)},
        2: {"answer_retrieved": found(0.62)},
        3: {"answer_retrieved": found(0.58)},
        4: {"original_retrieved": found(0.95)},
        5: {"gold_id": "g"},
    }
    reasons = {1: "below_threshold", 3: "below_threshold", 6: "refusal_text"}
    for n in range(count):
        kind = n % 20
        answered = rewritten(n, **risks.get(kind, {}))
        yield answered.failed(reasons[kind]) if kind in reasons else answered


def test_every_stratum_gets_its_share_whatever_the_order_of_the_rows():
    sample = draw_sample(mixed(), CONFIG, 200)
    assert sample == draw_sample(reversed(list(mixed())), CONFIG, 200)
    assert len(sample.rows) == len(names(sample)) == 200
    for stratum in REWRITE_STRATA:
        count = sum(stratum in sampled.strata for sampled in sample.rows)
        assert count >= stratum.share * 200, stratum.name
    assert sample.population["judge_low"] == 100
    smaller = names(draw_sample(mixed(), CONFIG, 80))
    assert {i for i, strata in smaller.items() if "control" in strata} <= {*names(sample)}


def test_places_that_a_stratum_cannot_fill_go_to_the_others():
    rows = [rewritten(n, judge_score=1.0) for n in range(100)]
    rows += [rewritten(n).failed("refusal_text") for n in range(100, 103)]
    sample = draw_sample(rows, CONFIG, 40)
    assert len(sample.rows) == 40
    assert sum("by_rule" in strata for strata in names(sample).values()) == 3
    assert len(draw_sample(rows, CONFIG, 500).rows) == 103


def test_controls_are_a_random_sample_of_what_teaches():
    """Their share of each kind is the population's, though the risky kinds are drawn far more
    often."""
    rows = list(mixed(20_000))
    teaching = [r for r in rows if r.status == "ok"]
    share = sum(r.judge_score == 1.0 for r in teaching) / len(teaching)
    controls = [row for row, strata in draw_sample(rows, CONFIG, 2000).rows if CONTROL in strata]
    assert {r.status for r in controls} == {"ok"}
    tested = [r.with_split("test") for r in rows[:500]]
    assert "control" not in {*chain(*names(draw_sample(tested, CONFIG, 100)).values())}
    assert abs(sum(r.judge_score == 1.0 for r in controls) / len(controls) - share) < 0.03


def review(
    verdict: str = "accept", row_id: str = "r1", answer: str = "头疼 缓解", **changes: Any
) -> Review:
    corrected = "头痛 缓解 方法" if verdict == "correct" else None
    values = {
        "tenant": "default",
        "imported_at": "2026-11-01T00:00:00+00:00",
        "file": "a.xlsx",
        "file_sha256": "f1",
    }
    values |= {
        "row": row_id,
        "verdict": verdict,
        "answer": answer,
        "fingerprint": fingerprint(answer),
    }
    return Review.model_validate(values | {"corrected": corrected} | changes)


def verdict_on(before: Row, *reviews: Review) -> tuple[str | None, str | None]:
    (after,) = Reviews(reviews).apply([before])
    assert after.with_review(before.review, before.corrected) == before
    return after.review, after.corrected


@pytest.mark.parametrize("verdict", ["accept", "reject"])
def test_a_verdict_holds_while_the_rewrite_is_the_one_that_was_reviewed(verdict: str):
    assert verdict_on(row(), review(verdict)) == (verdict, None)
    assert verdict_on(row(answer=" 头疼  缓解\n"), review(verdict)) == (verdict, None)
    assert verdict_on(
        row(answer="头疼 缓解 方法", review=verdict), review("correct"), review(verdict)
    ) == (None, None)


@pytest.mark.parametrize("rewrite", ["头疼 缓解", "别的", None])
def test_a_correction_holds_whatever_the_teacher_says(rewrite: str | None):
    after = next(Reviews([review("correct")]).apply([row(answer=rewrite)]))
    assert (after.review, after.target) == ("correct", "头痛 缓解 方法")


def test_the_digest_is_of_what_reviews_do():
    digest = Reviews([review(), review("reject", "r2")]).digest
    same_effect = [review("reject", "r2"), review("reject"), review(comment="好", reviewer="王")]
    assert Reviews(same_effect).digest == digest
    of_other_effects = [
        Reviews([]).digest,
        Reviews([review()]).digest,
        Reviews([review("reject"), review("reject", "r2")]).digest,
        Reviews([review("correct"), review("reject", "r2")]).digest,
    ]
    assert len({digest, *of_other_effects}) == 5
    assert Reviews([review("correct")]).digest == Reviews([review("correct", answer="别的")]).digest


def test_later_verdicts_are_appended_and_nothing_is_lost(profile: Profile):
    assert load_reviews(profile).by_row == {}
    reviews = [review(comment="一\n二 \u2028=1+1"), review(row_id="r2")]
    add_reviews(profile, reviews)
    assert list(load_reviews(profile).by_row.values()) == reviews
    first = store_path(profile).read_bytes()
    added = add_reviews(
        profile, [review("reject", file_sha256="f2"), review(row_id="r2", file_sha256="f2")]
    )
    assert (len(added.new), added.unchanged, added.replaced) == (1, 1, 1)
    assert store_path(profile).read_bytes().startswith(first)
    assert add_reviews(profile, reviews).unchanged == 2, "an old file imported again undoes nothing"
    assert load_reviews(profile).by_row["r1"].verdict == "reject"
    colleague = add_reviews(profile, [review("reject", file_sha256="f3", reviewer="李")])
    assert (len(colleague.new), colleague.replaced) == (1, 0)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: add_reviews(profile, [review(row_id=f"r{n}")]), range(8)))
    assert len(load_reviews(profile).by_row) == 8


def test_a_process_killed_while_it_writes_loses_nothing(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
):
    add_reviews(profile, [review()])
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            add_reviews(profile, [review(row_id="r2"), review(row_id="r3")])
    assert list(load_reviews(profile).by_row) == ["r1"]
    add_reviews(profile, [review(row_id="r2"), review(row_id="r3")])
    assert list(load_reviews(profile).by_row) == ["r1", "r2", "r3"]


@pytest.mark.parametrize("damage", [b'{"tenant": "def', b"\xff\xfe\n", b"{}\n"])
def test_a_damaged_line_is_named_and_never_skipped(profile: Profile, damage: bytes):
    add_reviews(profile, [review()])
    path = store_path(profile)
    path.write_bytes(path.read_bytes() + damage)
    message = r"default\.query_rewrite\.jsonl:2: is no review \(.*restore the file from a backup"
    with pytest.raises(ArtifactError, match=message):
        load_reviews(profile)


def test_every_tenant_has_a_file_of_its_own_inside_the_folder(profile_of: Any, tmp_path: Path):
    ids = [
        "default",
        "Default",
        "../x",
        "..",
        "a/b",
        "a b",
        "青蓝",
        "澄拉",
        "x" * 300,
        "x" * 299,
        "con.jsonl",
        "-",
    ]
    paths = {store_path(profile_of(tenant={"id": tenant})) for tenant in ids}
    assert len({str(path).lower() for path in paths}) == len(ids)
    assert {path.parent for path in paths} == {tmp_path / "state" / "reviews"}
    for path in paths:
        assert path.stem
        assert len(path.name) < 80, path.name
