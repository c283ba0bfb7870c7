"""Splits that don't leak and don't move, and files that the trainers read."""

import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from qinglan.config import Dataset, Profile
from qinglan.dataset import NOT_JUDGED, assign_splits, near_duplicate_groups, write_datasets
from qinglan.errors import ConfigError, StageError
from qinglan.recipes import get_recipe, query_rewrite
from qinglan.rows import Retrieved, Row, normalise, row_id

PRICE = {"input_per_million_usd": 1, "output_per_million_usd": 1}
PROFILE = Profile.model_validate(
    {"name": "test", "teacher": {"model": "m"}, "judge": {"model": "m"}, "prices": {"m": PRICE}}
)
FOUND = Retrieved(ids=("a", "g"), scores=(0.9, 0.6), titles=("", ""))
LONG = "我爷爷今年六十八岁，患高血压多年，最近早晨起床后经常头晕，想请问一下医生应该怎样治疗比较好"
SAME = LONG.replace("，", " ").replace("比较好", "比较好呢？")


def row(query: str, profile: str = "", history: str = "", **fields: Any) -> Row:
    return Row(
        id=row_id("t", query, profile, history),
        tenant="t",
        query=query,
        profile=profile,
        history=history,
        source="q",
        **fields,
    )


def random_rows(count: int, seed: int = 0, **fields: Any) -> list[Row]:
    """Questions with next to no trigram in common."""
    source = random.Random(seed)
    letters = [chr(0x4E00 + i) for i in range(3000)]
    return [row("".join(source.sample(letters, 12)), **fields) for _ in range(count)]


def splits(rows: list[Row], seed: int = 1) -> dict[str, str | None]:
    return {r.id: r.split for r in assign_splits(rows, Dataset(), seed)}


# Groups


def grouped(*rows: Row, jaccard: float = 0.85) -> bool:
    return len(set(near_duplicate_groups(rows, jaccard).values())) == 1


def test_small_changes_of_a_question_make_one_group() -> None:
    assert grouped(row(LONG), row(SAME))
    assert not grouped(row(LONG), row(LONG.replace("高血压", "糖尿病").replace("头晕", "口渴")))


def test_a_long_shared_profile_does_not_merge_different_questions() -> None:
    assert not grouped(row("能吃蛋白粉吗", profile=LONG * 2), row("能喝鱼油吗", profile=LONG * 2))


def test_a_bare_question_under_different_histories_is_not_the_same() -> None:
    assert not grouped(row("多少钱一瓶", history="问过钙片"), row("多少钱一瓶", history="问过褪黑素"))


def test_short_questions_compare_whole() -> None:
    assert not grouped(row("疼"), row("痒"))
    assert grouped(row("疼", history=LONG), row("疼。", history=SAME))


def test_groups_are_transitive_and_named_by_their_smallest_id() -> None:
    chain = [row(LONG), row(SAME), row(SAME + "谢谢")]
    groups = near_duplicate_groups(chain, 0.85)
    assert groups == dict.fromkeys((r.id for r in chain), min(r.id for r in chain))
    assert groups == near_duplicate_groups(chain[::-1], 0.85)


@pytest.mark.parametrize("jaccard", [0.5, 0.7, 0.85, 1.0])
def test_groups_equal_those_of_comparing_every_pair(jaccard: float) -> None:
    source = random.Random(3)
    rows = [row("".join(letter for letter in LONG if source.random() > 0.03)) for _ in range(100)]
    groups = near_duplicate_groups(rows, jaccard)
    grams = {r.id: {normalise(r.query)[i : i + 3] for i in range(len(normalise(r.query)) - 2)} for r in rows}
    for a, b in itertools.combinations(grams, 2):
        if len(grams[a] & grams[b]) / len(grams[a] | grams[b]) >= jaccard:
            assert groups[a] == groups[b]
    assert 1 <= len(set(groups.values())) <= len(grams)


def test_nothing_to_group() -> None:
    assert near_duplicate_groups([], 0.85) == {}


# Splits


def test_shares_come_out_about_right() -> None:
    counts = Counter(splits(random_rows(1000)).values())
    assert 760 <= (counts["train"] or 0) <= 840
    assert min(counts["dev"], counts["test"]) >= 70


def test_a_group_goes_to_one_split_whole() -> None:
    twins = [r for seed in range(20) for r in random_rows(1, seed=1000 + seed)]
    twins = [t.model_copy(update={"query": t.query * 4}) for t in twins]
    twins += [row(t.query + "呢") for t in twins]
    placed = splits(random_rows(200) + twins)
    for first, second in zip(twins[:20], twins[20:], strict=True):
        assert placed[first.id] == placed[second.id]


def test_splits_depend_neither_on_order_nor_on_other_rows() -> None:
    rows = random_rows(300)
    placed = splits(rows)
    assert splits(rows[::-1]) == placed
    grown = splits(random_rows(300, seed=9) + rows)
    assert {key: grown[key] for key in placed} == placed


def test_another_seed_is_another_split() -> None:
    rows = random_rows(300)
    assert splits(rows, seed=1) != splits(rows, seed=2)


def test_assigning_twice_changes_nothing() -> None:
    rows = assign_splits([*random_rows(200), row(LONG), row(SAME)], Dataset(), 1)
    assert assign_splits(rows, Dataset(), 2) == rows


@pytest.mark.parametrize(
    ("first", "second", "reasons"),
    [
        ("train", "test", ["near_duplicate_of_test", None]),
        ("test", "dev", [None, "near_duplicate_of_test"]),
        ("dev", "train", [None, "near_duplicate_of_dev"]),
        ("train", "train", [None, None]),
    ],
)
def test_given_splits_are_kept_and_the_stricter_wins(first: str, second: str, reasons: list[str | None]) -> None:
    pair = [row(LONG, split=first), row(SAME, split=second)]
    placed = assign_splits([*pair, *random_rows(100)], Dataset(), 1)[:2]
    assert [r.reason for r in placed] == reasons
    assert [r.split for r in placed] == [first, second]


def test_a_row_without_split_joins_its_twins_given_one() -> None:
    placed = assign_splits([row(LONG, split="test"), row(SAME), *random_rows(100)], Dataset(), 1)
    assert (placed[1].split, placed[1].status) == ("test", "ok")


def test_a_leaking_row_says_so_whatever_it_failed_for() -> None:
    leak = row(LONG, split="train").failed("below_threshold")
    failed_test = row(SAME, split="test").failed("teacher_refused")
    placed = assign_splits([leak, failed_test, *random_rows(100)], Dataset(), 1)
    assert [r.reason for r in placed[:2]] == ["near_duplicate_of_test", "teacher_refused"]


def test_rows_failed_by_reading_take_no_part() -> None:
    bad = row(LONG, split="test").failed("query_too_long")
    placed = assign_splits([bad, row(SAME, split="train"), *random_rows(100)], Dataset(), 1)
    assert placed[0] == bad
    assert placed[1].status == "ok"


def test_an_empty_split_stops_the_run() -> None:
    with pytest.raises(StageError, match=r"a split is empty \(train 5, dev 0, test 5; 0 near-dup.*split column"):
        assign_splits([*random_rows(5, split="train"), *random_rows(5, seed=1, split="test")], Dataset(), 1)
    with pytest.raises(StageError, match=r"train 0, dev 1, test 1; 1 near-duplicates dropped, 1 unusable"):
        assign_splits(
            [
                row(LONG, split="test"),
                row(SAME, split="train"),
                row("头疼", split="dev"),
                row("").failed("empty_query"),
            ],
            Dataset(),
            1,
        )


# Files


def answered(split: str, seed: int, **fields: Any) -> Row:
    fields = {"rewrite": f"改写{seed}", "rewrite_retrieved": FOUND, "split": split} | fields
    return random_rows(1, seed, **fields)[0]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


ROWS = [
    answered("train", 1, gold_id="g", judge_score=4.0),
    answered("train", 2).failed("below_threshold"),
    answered("train", 3).failed("worse_than_original"),
    answered("train", 4).failed("rewrite_too_long"),
    answered("train", 5).failed("near_duplicate_of_test"),
    answered("train", 6, rewrite=None).failed("teacher_refused"),
    answered("train", 7, rewrite_retrieved=None).failed("rag_error"),
    answered("train", 8, rewrite_retrieved=Retrieved()).failed("nothing_recalled"),
    answered("dev", 9),
    answered("test", 10),
    answered("test", 11, rewrite=None).failed("teacher_timeout"),
    answered("test", 12).failed("duplicate"),
]


def test_sft_files_hold_ok_rows_only(tmp_path: Path) -> None:
    artifacts = write_datasets(tmp_path, ROWS, PROFILE)
    (line,) = lines(artifacts["sft_train"].path)
    assert line["messages"][:2] == query_rewrite.student_messages(ROWS[0], PROFILE.tenant)
    assert line["messages"][2] == {"role": "assistant", "content": "改写1"}
    assert line["metadata"] == {"row_id": ROWS[0].id, "tenant": "t", "gold_id": "g", "source": "q", "split": "train"}
    assert artifacts["sft_dev"].rows == 1


def test_rl_files_hold_every_row_with_a_valid_baseline(tmp_path: Path) -> None:
    artifacts = write_datasets(tmp_path, ROWS, PROFILE)
    records = pq.read_table(artifacts["rl_train"].path).to_pylist()
    assert [r["extra_info"]["row_id"] for r in records] == [r.id for r in ROWS[:4]]
    assert (artifacts["rl_train"].rows, artifacts["rl_dev"].rows) == (4, 1)


def test_rl_record_carries_the_teachers_baseline(tmp_path: Path) -> None:
    artifacts = write_datasets(tmp_path, ROWS, PROFILE)
    first, second = pq.read_table(artifacts["rl_train"].path).to_pylist()[:2]
    assert first == {
        "data_source": "qinglan/query_rewrite",
        "prompt": query_rewrite.student_messages(ROWS[0], PROFILE.tenant),
        "ability": "query_rewrite",
        "reward_model": {"style": "rule", "ground_truth": "g"},
        "extra_info": {
            "row_id": ROWS[0].id,
            "tenant": "t",
            "question": ROWS[0].query,
            "gold_id": "g",
            "teacher_rewrite": "改写1",
            "teacher_quality": pytest.approx(0.74),
            "teacher_top1_score": 0.9,
            "teacher_gold_rank": 2,
            "teacher_judge": 4.0,
        },
    }
    info = second["extra_info"]
    assert (info["gold_id"], info["teacher_gold_rank"], info["teacher_judge"]) == ("", 0, NOT_JUDGED)


def test_test_split_keeps_rows_where_the_teacher_failed(tmp_path: Path) -> None:
    artifacts = write_datasets(tmp_path, ROWS, PROFILE)
    assert [Row.model_validate(line) for line in lines(artifacts["test"].path)] == ROWS[9:11]
    assert [Row.model_validate(line) for line in lines(artifacts["rows"].path)] == ROWS


def test_an_empty_training_file_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"SFT train and SFT dev \(of 11 rows; failed: .*lower select.min_top1_score"):
        write_datasets(tmp_path, [r for r in ROWS[1:] if r.split != "dev"] + [ROWS[1]], PROFILE)
    assert not list(tmp_path.iterdir())


def test_unknown_recipe_names_the_nearest() -> None:
    assert get_recipe("query_rewrite") is query_rewrite
    with pytest.raises(ConfigError, match=r"recipe `query_rewriter`.*did you mean `query_rewrite`"):
        get_recipe("query_rewriter")
