"""Training questions with noise: which rows get them, what they carry, and that no held-out
question trains."""

from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pyarrow.parquet as pq
import pytest
from question_rows import lines, random_rows, row

from qinglan.config import Data, Dataset, NoiseKind, Profile, load_profile
from qinglan.data.dataset import BuiltDataset, build
from qinglan.data.dataset.augment import noisy_copies
from qinglan.data.public_layouts import import_rows
from qinglan.data.workbook import read_rows
from qinglan.evaluation.red_team import cases_of, row_of
from qinglan.recipes import get_recipe
from qinglan.rows import Retrieved, Row, Split, normalise
from qinglan.runs.artifacts import write_jsonl
from qinglan.simulators.domains import domain_of

EMBEDDED = load_profile("embedded")
FOUND = Retrieved(ids=("a",), scores=(0.9,), titles=("",))
ALL = dict.fromkeys(get_args(NoiseKind), 0.3)


def profile_with(data: Data | None = None, **dataset: Any) -> Profile:
    return EMBEDDED.model_copy(
        update={"data": data or EMBEDDED.data, "dataset": Dataset(**dataset)}
    )


def answered(rows: list[Row], split: Split) -> list[Row]:
    return [
        each.model_copy(update={"answer": "改写", "answer_retrieved": FOUND, "split": split})
        for each in rows
    ]


ROWS = [
    row
    for n, split in enumerate(("train", "dev", "test"))
    for row in answered(random_rows(60, n), split)
]


def built(
    folder: Path, rows: list[Row] = ROWS, red_team: tuple[Row, ...] = (), **dataset: Any
) -> BuiltDataset:
    write_jsonl(folder / "in.jsonl", rows)
    return build(folder / "in.jsonl", folder / "out", profile_with(**dataset), red_team=red_team)


def taught(result: BuiltDataset) -> list[tuple[str, str | None, str]]:
    """Row id, noise and question of every line."""
    found = lines(result.artifacts["sft_train"].path)
    return [
        (x["metadata"]["row_id"], x["metadata"]["noise"], x["messages"][1]["content"])
        for x in found
    ]


def test_the_same_seed_gives_the_same_copies_whatever_the_order_and_another_seed_others(
    tmp_path: Path,
) -> None:
    first = {*taught(built(tmp_path, augment=ALL))}
    assert {*taught(built(tmp_path, ROWS[::-1], augment=dict(reversed(ALL.items()))))} == first
    other = {*taught(built(tmp_path, augment=ALL, seed=2))}
    assert all(noise in (None, "traditional") for _, noise, _ in first & other) and first - other
    more = {*taught(built(tmp_path, augment=ALL | {"emoji": 0.6}))}
    assert first < more, "a larger share keeps what a smaller one has"


def test_a_copy_has_its_rows_answer_and_origin_and_only_training_rows_have_any(
    tmp_path: Path,
) -> None:
    result, plain = built(tmp_path / "a", augment=ALL), built(tmp_path / "b")
    rows = {each.id: each for each in ROWS}
    found = lines(result.artifacts["sft_train"].path)
    for line in found:
        origin = rows[line["metadata"]["row_id"]]
        assert (line["messages"][2]["content"], line["metadata"]["split"]) == (
            origin.target,
            "train",
        )
        assert (line["messages"][1]["content"] == origin.query) == (
            line["metadata"]["noise"] is None
        )
    counts = Counter(line["metadata"]["noise"] for line in found if line["metadata"]["noise"])
    assert counts == Counter({kind: each["sft"] for kind, each in result.augmented.items()})
    assert 5 < counts["story"] < 35, "a share of 0.3 of 60"
    for name in ("sft_dev", "rl_dev", "rl_train", "test", "rows"):
        assert result.artifacts[name].sha256 == plain.artifacts[name].sha256
    assert (result.before.ok, result.after.ok, result.splits) == (
        plain.before.ok,
        plain.after.ok,
        plain.splits,
    )


def test_rl_asks_a_copy_where_it_is_wanted_and_grades_it_as_the_row(tmp_path: Path) -> None:
    result = built(tmp_path, augment=ALL, augment_rl=True)
    records = pq.read_table(result.artifacts["rl_train"].path).to_pylist()
    by_row = {
        r["extra_info"]["row_id"]: r
        for r in records
        if r["prompt"][1]["content"] == r["extra_info"]["question"]
    }
    copies = [r for r in records if r["prompt"][1]["content"] != r["extra_info"]["question"]]
    assert (
        len(by_row) == 60
        and len(copies) == sum(counts["rl"] for counts in result.augmented.values()) > 60
    )
    assert [r["extra_info"]["index"] for r in records] == list(range(len(records)))
    for each in copies:
        same = by_row[each["extra_info"]["row_id"]]
        assert each["extra_info"] | {"index": 0} == same["extra_info"] | {"index": 0}


def test_a_copy_that_becomes_a_held_out_question_is_left_out(tmp_path: Path) -> None:
    (origin,) = answered([row("魚油怎么吃")], "train")
    held_out = {"dev": "魚油怎麼吃", "test": "「魚油」怎麼吃？"}
    for split, query in held_out.items():
        result = built(
            tmp_path, [origin, *ROWS, *answered([row(query)], split)], augment={"traditional": 1.0}
        )
        assert result.augmented["traditional"]["left_out"] == 1 and (origin.id, None) in {
            x[:2] for x in taught(result)
        }
        assert normalise(query) not in {normalise(text) for *_, text in taught(result)}
    result = built(tmp_path, [origin, *ROWS], (row("魚油怎麼吃"),), augment={"traditional": 1.0})
    assert result.augmented["traditional"]["left_out"] == 1


def test_nothing_learns_from_a_question_of_the_red_team(tmp_path: Path) -> None:
    (asked,) = answered([row("鱼油🐟怎么吃")], "train")
    result = built(
        tmp_path, [asked, *ROWS], (row("鱼油怎么吃😋？"), row("？？"), row("")), augment=ALL
    )
    assert result.after.reasons["near_duplicate_of_evaluation"] == 1
    assert asked.id not in {row_id for row_id, *_ in taught(result)}


def content(row: Row) -> tuple[str, ...]:
    return normalise(row.query), *map(normalise, row.inputs.values())


@pytest.mark.parametrize("name", ["embedded", "medical", "answer_judge"])
def test_no_shipped_question_or_copy_of_one_that_trains_is_of_the_shipped_red_team(
    name: str, tmp_path: Path
) -> None:
    profile = load_profile(name, (f"dataset.augment={ALL}",))
    recipe, cases = (
        get_recipe(profile.recipe),
        [row_of(case, profile.tenant) for case in cases_of(profile)],
    )
    books = [domain_of(profile.recipe).write_sample(tmp_path, profile.embedded).workbook]
    for layout in {"medical": ["medical-r1"], "answer_judge": ["flashrag"]}.get(name, []):
        books.append(tmp_path / f"{layout}.xlsx")
        import_rows(
            layout, Path(__file__).parents[2] / f"examples/layouts/{layout}.jsonl", books[-1], print
        )
    read = (
        each
        for book in books
        for each in read_rows(book, profile.data, profile.tenant, inputs=recipe.INPUTS)
    )
    rows = [one for each in read for one in answered([each], each.split or "train")]
    assert not {each.id for each in rows} & {each.id for each in cases}
    assert not {content(each) for each in rows if each.split != "test"} & {
        content(each) for each in cases
    }
    write_jsonl(tmp_path / "in.jsonl", rows)
    result = build(tmp_path / "in.jsonl", tmp_path / "out", profile, red_team=cases)
    asked, queries = (
        {normalise(each.query) for each in cases},
        {each.id: normalise(each.query) for each in rows},
    )
    learnt = [(row_id, normalise(text)) for row_id, _, text in taught(result)]
    assert learnt and not [text for row_id, text in learnt if {text, queries[row_id]} & asked]


def test_a_copy_is_no_longer_than_a_question_may_be() -> None:
    profile = profile_with(Data(max_query_chars=60), augment={"story": 1.0})
    texts = [copy.query for each in ROWS for _, copy in noisy_copies(each, profile)]
    assert 0 < len(texts) < len(ROWS) and max(map(len, texts)) <= 60
