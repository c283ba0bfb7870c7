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
from qinglan.recipes import get_recipe, query_rewrite
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
    answer = {"answer": "改写", "answer_retrieved": FOUND}
    return [row.model_copy(update=answer).with_split(split) for row in rows]


ROWS = [
    *answered(random_rows(60, 0), "train"),
    *answered(random_rows(60, 1), "dev"),
    *answered(random_rows(60, 2), "test"),
]


def built(
    folder: Path, rows: list[Row] = ROWS, red_team: tuple[Row, ...] = (), **dataset: Any
) -> BuiltDataset:
    write_jsonl(folder / "in.jsonl", rows)
    return build(folder / "in.jsonl", folder / "out", profile_with(**dataset), red_team=red_team)


def taught(result: BuiltDataset) -> list[tuple[str, str | None, str]]:
    """Row id, noise and question of every line."""
    copies = []
    for line in lines(result.artifacts["sft_train"].path):
        origin = line["metadata"]
        copies.append((origin["row_id"], origin["noise"], line["messages"][1]["content"]))
    return copies


def test_the_same_seed_gives_the_same_copies_whatever_the_order_and_another_seed_others(
    tmp_path: Path,
) -> None:
    first = {*taught(built(tmp_path, augment=ALL))}
    assert {*taught(built(tmp_path, ROWS[::-1], augment=dict(reversed(ALL.items()))))} == first
    of_another_seed = {*taught(built(tmp_path, augment=ALL, seed=2))}
    # A text has only one form in the other script, whatever the seed.
    assert {noise for _, noise, _ in first & of_another_seed} <= {None, "traditional"}
    assert first - of_another_seed
    more = {*taught(built(tmp_path, augment=ALL | {"emoji": 0.6}))}
    assert first < more, "a larger share keeps what a smaller one has"


def test_a_copy_has_its_rows_answer_and_origin_and_only_training_rows_have_any(
    tmp_path: Path,
) -> None:
    result = built(tmp_path / "a", augment=ALL)
    plain = built(tmp_path / "b")
    rows = {row.id: row for row in ROWS}
    counts: Counter[str] = Counter()
    for line in lines(result.artifacts["sft_train"].path):
        origin = rows[line["metadata"]["row_id"]]
        noise = line["metadata"]["noise"]
        _, question, answer = line["messages"]
        assert (answer["content"], line["metadata"]["split"]) == (origin.target, "train")
        assert (question["content"] == origin.query) == (noise is None)
        if noise:
            counts[noise] += 1
    taught_by_kind = {kind: by_file["sft"] for kind, by_file in result.augmented.items()}
    assert counts == Counter(taught_by_kind)
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
    by_row = {}
    copies = []
    for record in records:
        row = Row.model_validate_json(record["extra_info"]["row"])
        if record["prompt"][1]["content"] == query_rewrite.RECIPE.question_text(row):
            by_row[record["extra_info"]["row_id"]] = record
        else:
            copies.append(record)
    assert len(by_row) == 60
    assert len(copies) == sum(counts["rl"] for counts in result.augmented.values()) > 60
    assert [record["extra_info"]["index"] for record in records] == list(range(len(records)))
    for copy in copies:
        original = by_row[copy["extra_info"]["row_id"]]
        assert copy["extra_info"] | {"index": 0} == original["extra_info"] | {"index": 0}


def test_a_copy_that_becomes_a_held_out_question_is_left_out(tmp_path: Path) -> None:
    (origin,) = answered([row("魚油怎么吃")], "train")
    held_out = {"dev": "魚油怎麼吃", "test": "「魚油」怎麼吃？"}
    for split, query in held_out.items():
        result = built(
            tmp_path, [origin, *ROWS, *answered([row(query)], split)], augment={"traditional": 1.0}
        )
        assert result.augmented["traditional"]["left_out"] == 1
        assert (origin.id, None) in {(row_id, noise) for row_id, noise, _ in taught(result)}
        assert normalise(query) not in {normalise(text) for *_, text in taught(result)}
    result = built(tmp_path, [origin, *ROWS], (row("魚油怎麼吃"),), augment={"traditional": 1.0})
    assert result.augmented["traditional"]["left_out"] == 1


def test_nothing_learns_from_a_question_of_the_red_team(tmp_path: Path) -> None:
    (repeated,) = answered([row("鱼油🐟怎么吃")], "train")
    red_team = (row("鱼油怎么吃😋？"), row("？？"), row(""))
    result = built(tmp_path, [repeated, *ROWS], red_team, augment=ALL)
    assert result.after.reasons["near_duplicate_of_evaluation"] == 1
    assert repeated.id not in {row_id for row_id, *_ in taught(result)}


def content(row: Row) -> tuple[str, ...]:
    return normalise(row.query), *map(normalise, row.inputs.values())


@pytest.mark.parametrize("name", ["embedded", "medical", "answer_judge"])
def test_no_shipped_question_or_copy_of_one_that_trains_is_of_the_shipped_red_team(
    name: str, tmp_path: Path
) -> None:
    profile = load_profile(name, (f"dataset.augment={ALL}",))
    recipe = get_recipe(profile.recipe)
    cases = [row_of(case, profile.tenant) for case in cases_of(profile)]
    books = [domain_of(profile.recipe).write_sample(tmp_path, profile.embedded).workbook]
    for layout in {"medical": ["medical-r1"], "answer_judge": ["flashrag"]}.get(name, []):
        books.append(tmp_path / f"{layout}.xlsx")
        example = Path(__file__).parents[2] / f"examples/layouts/{layout}.jsonl"
        import_rows(layout, example, books[-1], print)
    rows = []
    for book in books:
        for question in read_rows(book, profile.data, profile.tenant, inputs=recipe.INPUTS):
            rows += answered([question], question.split or "train")
    assert {row.id for row in rows}.isdisjoint(case.id for case in cases)
    learnable = {content(row) for row in rows if row.split != "test"}
    assert learnable.isdisjoint(map(content, cases))
    write_jsonl(tmp_path / "in.jsonl", rows)
    result = build(tmp_path / "in.jsonl", tmp_path / "out", profile, red_team=cases)
    case_queries = {normalise(case.query) for case in cases}
    queries = {row.id: normalise(row.query) for row in rows}
    learnt = [(row_id, normalise(text)) for row_id, _, text in taught(result)]
    assert learnt
    assert not [text for row_id, text in learnt if {text, queries[row_id]} & case_queries]


def test_a_copy_is_no_longer_than_a_question_may_be() -> None:
    profile = profile_with(Data(max_query_chars=60), augment={"story": 1.0})
    texts: list[str] = []
    for question in ROWS:
        texts += [copy.query for _, copy in noisy_copies(question, profile)]
    assert 0 < len(texts) < len(ROWS)
    assert max(map(len, texts)) <= 60
