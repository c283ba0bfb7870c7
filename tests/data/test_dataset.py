"""The files that the trainers read."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from fake_service import SIMULATED
from question_rows import LONG, SAME, lines, random_rows, row

from qinglan.config import Profile
from qinglan.data.dataset import BuiltDataset, build
from qinglan.data.dataset import files as dataset_files
from qinglan.errors import StageError, WorkbookError
from qinglan.recipes import query_rewrite
from qinglan.rows import Retrieved, Row, Split
from qinglan.runs.artifacts import write_jsonl

PROFILE = Profile.model_validate({"name": "test"} | SIMULATED)
FOUND = Retrieved(ids=("a", "g"), scores=(0.9, 0.6), titles=("", ""))


def built(
    folder: Path,
    rows: Iterable[Row],
    profile: Profile = PROFILE,
    pinned: dict[str, Split] | None = None,
) -> BuiltDataset:
    write_jsonl(folder / "in.jsonl", rows)
    return build(folder / "in.jsonl", folder / "out", profile, pinned)


def answered(split: Split | None, seed: int, **fields: Any) -> Row:
    fields = {"answer": f"改写{seed}", "answer_retrieved": FOUND, "split": split} | fields
    return row(fields.pop("query", random_rows(1, seed)[0].query), **fields)


ROWS = [
    answered("train", 1, gold_id="g", judge_score=4.0),
    answered("train", 2).failed("below_threshold"),
    answered("train", 3).failed("worse_than_original"),
    answered("train", 4).failed("rewrite_too_long"),
    answered("train", 5).failed("near_duplicate_of_test"),
    answered("train", 6, answer=None).failed("teacher_refused"),
    answered("train", 7, answer_retrieved=None).failed("rag_unavailable"),
    answered("train", 8, answer_retrieved=Retrieved()).failed("nothing_recalled"),
    answered("train", 13).failed("refusal_text"),
    answered("train", 15).failed("rewrite_too_short"),
    answered("train", 17).failed("rejected_by_reviewer"),
    answered("dev", 9),
    answered("test", 10),
    answered("test", 11, answer=None).failed("teacher_timeout"),
    answered("test", 12).failed("duplicate"),
]


def test_the_files_of_a_dataset(tmp_path: Path) -> None:
    result = built(tmp_path, ROWS)
    artifacts = result.artifacts
    (line,) = lines(artifacts["sft_train"].path)
    assert line["messages"][:2] == query_rewrite.RECIPE.student_messages(ROWS[0], PROFILE.tenant)
    assert line["messages"][2] == {"role": "assistant", "content": "改写1"}
    origin = {
        "row_id": ROWS[0].id,
        "tenant": "t",
        "gold_id": "g",
        "source": "q",
        "split": "train",
        "noise": None,
    }
    assert line["metadata"] == origin
    records = pq.read_table(artifacts["rl_train"].path).to_pylist()
    assert [r["extra_info"]["row_id"] for r in records] == [r.id for r in (*ROWS[:4], ROWS[9])]
    assert (artifacts["sft_dev"].rows, artifacts["rl_dev"].rows) == (1, 1)
    assert [Row.model_validate(line) for line in lines(artifacts["test"].path)] == ROWS[12:14]
    assert [Row.model_validate(line) for line in lines(artifacts["rows"].path)] == ROWS
    assert (result.before.total, result.before.ok) == (15, 3)
    assert (result.after.total, result.after.ok) == (15, 3)
    assert result.splits == {"train": 11, "dev": 1, "test": 3}
    first, second = pq.read_table(built(tmp_path, ROWS).artifacts["rl_train"].path).to_pylist()[:2]
    assert first["reward_model"] == {"style": "rule", "ground_truth": "g"}
    first_info = first["extra_info"]
    second_info = second["extra_info"]
    labelled = Row.model_validate_json(first_info["row"])
    assert labelled.answer == "改写1"
    assert labelled.judge_score == 4.0
    assert labelled.answer_retrieved is not None
    assert labelled.answer_retrieved.quality == pytest.approx(0.74)
    unlabelled = Row.model_validate_json(second_info["row"])
    assert unlabelled.gold_id is None
    assert unlabelled.judge_score is None
    assert first_info["unit"] == "g"
    assert second_info["unit"] == second_info["row_id"] == unlabelled.id


def test_a_correction_is_what_sft_learns_and_rl_leaves_it_alone(tmp_path: Path) -> None:
    fixed = answered("train", 20, review="correct", corrected="虾青素 服用方法")
    unanswered = answered(
        "train", 21, answer=None, answer_retrieved=None, review="correct", corrected="钙片 用量"
    )
    artifacts = built(tmp_path, [fixed, unanswered, *ROWS[1:]]).artifacts
    taught = [line["messages"][-1]["content"] for line in lines(artifacts["sft_train"].path)]
    assert taught == ["虾青素 服用方法", "钙片 用量"]
    records = pq.read_table(artifacts["rl_train"].path).to_pylist()
    assert {fixed.id, unanswered.id}.isdisjoint(r["extra_info"]["row_id"] for r in records)


def test_rows_keep_the_splits_of_an_earlier_version(tmp_path: Path) -> None:
    pair = [answered(None, 30, query=LONG), answered(None, 31, query=SAME)]
    result = built(tmp_path, [*ROWS, *pair], pinned={pair[0].id: "train", pair[1].id: "test"})
    assert result.after.reasons["near_duplicate_of_test"] == 2


def test_evaluation_workbooks_keep_their_questions_out_of_training(tmp_path: Path) -> None:
    book = tmp_path / "evaluation.csv"
    essay = "".join(r.query for r in random_rows(60, seed=7))
    book.write_text(f"问题\n{SAME}\n{essay}\n{ROWS[12].query}\n", encoding="utf-8")
    config = PROFILE.dataset.model_copy(update={"decontaminate_against": (str(book),)})
    profile = PROFILE.model_copy(update={"dataset": config})
    repeated = answered("train", 40, query=LONG)
    too_long = answered("dev", 41, query=essay + "呢")
    result = built(tmp_path, [repeated, too_long, *ROWS], profile)
    assert result.after.reasons["near_duplicate_of_evaluation"] == 2, (
        "nothing is learned from the test's row"
    )
    taught = lines(result.artifacts["sft_train"].path) + lines(result.artifacts["sft_dev"].path)
    assert {line["metadata"]["row_id"] for line in taught}.isdisjoint({repeated.id, too_long.id})
    with pytest.raises(WorkbookError, match=r"gone\.csv"):
        lost = config.model_copy(update={"decontaminate_against": (str(tmp_path / "gone.csv"),)})
        built(tmp_path, ROWS, PROFILE.model_copy(update={"dataset": lost}))


def test_an_evaluation_workbook_needs_none_of_the_recipes_inputs(tmp_path: Path) -> None:
    book = tmp_path / "evaluation.csv"
    book.write_text(f"问题\n{SAME}\n", encoding="utf-8")
    recipe = Path(__file__).parents[1] / "support" / "capitals_recipe.py"
    changed = {"recipe": str(recipe), "data": {"columns": {"inputs": {"hint": "线索"}}}}
    own = PROFILE.model_dump() | changed | {"dataset": {"decontaminate_against": (str(book),)}}
    hints = {"inputs": {"hint": "在南方"}, "parts": {"right": 1.0}}
    rows = [answered("train", 40, query=LONG), *ROWS]
    hinted = [row.model_copy(update=hints) for row in rows]
    reasons = built(tmp_path, hinted, Profile.model_validate(own)).after.reasons
    assert reasons["near_duplicate_of_evaluation"] == 1


def test_files_of_several_row_groups_read_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_files, "_ROW_GROUP", 2)
    path = built(tmp_path, ROWS).artifacts["rl_train"].path
    assert pq.ParquetFile(path).num_row_groups == 3
    assert pq.read_table(path).num_rows == 5


def test_an_empty_split_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(
        StageError, match=r"a split is empty \(train 5, dev 0, test 5; 0 near-dup.*split column"
    ):
        built(tmp_path, [*random_rows(5, split="train"), *random_rows(5, seed=1, split="test")])
    rows = [
        row(LONG, split="test"),
        row(SAME, split="train"),
        row("头疼", split="dev"),
        row("").failed("empty_query"),
    ]
    with pytest.raises(
        StageError, match=r"train 0, dev 1, test 1; 1 near-duplicates dropped, 1 unusable"
    ):
        built(tmp_path, rows)


def test_a_threshold_is_advised_only_where_low_scores_emptied_the_split(tmp_path: Path) -> None:
    low = dict.fromkeys(
        ("answer_retrieved", "original_retrieved"), FOUND.model_copy(update={"scores": (0.3,)})
    )
    train = [answered("train", n, **low).failed("below_threshold") for n in range(20, 30)]
    for why, advice in {
        "below_threshold": "min_top1_score=0.3;",
        "teacher_refused": "add questions",
    }.items():
        with pytest.raises(StageError, match=f"no usable rows for SFT dev .*{advice}"):
            built(tmp_path, [ROWS[0], *train, answered("dev", 9, **low).failed(why), ROWS[12]])


def test_an_empty_training_file_stops_the_run_and_leaves_the_files_of_an_earlier_one(
    tmp_path: Path,
) -> None:
    rows = [r for r in ROWS[1:] if r.split != "dev"] + [
        answered("dev", 9).failed("rewrite_too_long")
    ]
    with pytest.raises(
        StageError,
        match=r"SFT train and SFT dev \(of 14 rows; failed: [^;]*; add questions, or see",
    ):
        built(tmp_path, rows)
    assert not list((tmp_path / "out").iterdir())
    artifacts = built(tmp_path, ROWS).artifacts
    with pytest.raises(StageError):
        built(tmp_path, rows)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        a.path.name for a in artifacts.values()
    }
    for artifact in artifacts.values():
        artifact.verify()
