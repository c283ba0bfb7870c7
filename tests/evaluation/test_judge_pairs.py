"""A judge's workbook from a run: whose verdicts it has, and that nothing of it leaks between
splits."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fixture_types import Qinglan
from run_stages import end_stage, end_stage_with

from qinglan.config import Profile
from qinglan.data.dataset.splits import place_rows
from qinglan.data.workbook import read_rows
from qinglan.recipes.passage_judge import RECIPE
from qinglan.runs.artifacts import Artifact
from qinglan.runs.run import open_run

ALIKE = {
    f"{n}{end}": f"{chr(0x4E00 + 50 * n) * 3}补剂一天要吃几次才合适{end}"
    for n in range(30)
    for end in ("", "呢")
}

REWRITES = {"0": "甲 饭后", "1": "甲", "3": "丙 饭前"}


def finish_run(profile: Profile, samples: list[dict[str, Any]]) -> None:
    with open_run(profile, "pipeline") as run:
        trained, log = (run.stage_directory(name) / name for name in ("dataset", "rl"))
        infos = [{"row_id": key, "question": question} for key, question in ALIKE.items()]
        pq.write_table(pa.table({"extra_info": infos}), trained)
        end_stage_with(run, "distill", [{"id": key, "answer": REWRITES.get(key)} for key in ALIKE])
        end_stage(run, "dataset", artifacts={"rl_train": Artifact.of(trained)})
        log.with_name("samples.jsonl").write_text(
            "".join(json.dumps({"text": "", "rq": 0.5} | s) + "\n" for s in samples)
        )
        end_stage(run, "rl")


def judged(row_id: str, passage: str, **fields: str | float) -> dict[str, Any]:
    return {"row_id": row_id, "passage": passage} | fields


def test_each_passage_once_with_the_best_rewrite_and_alike_questions_in_one_split(
    profile: Profile, qinglan: Qinglan, tmp_path: Path
):
    words = ("dataset", "judge-pairs", "--out", str(tmp_path / "judge.xlsx"))
    finish_run(profile, [judged("0", "甲", relevant=1), judged("1", "乙")])
    assert (
        "has no verdicts on passages, or all are the same; name one"
        in qinglan(*words, profile=profile)[2]
    )
    sides = [(key, side) for key in ALIKE for side in (0, 1) if (key, side) != ("3", 1)]
    samples = [judged(key, ("=1+1", "乙")[side], relevant=side) for key, side in sides]
    silent = [
        judged("0", "丁"),
        judged("0", "乙"),
        {"row_id": "0", "relevant": 0.0},
        {"outage": "rag"},
    ]
    more = [
        judged("0", "丙", relevant=0),
        judged("1", "己", relevant=1, text="饭后 乙", rq=0.9),
        judged("dev", "戊", relevant=1),
        judged("0", "乙", relevant=1, text="乙 饭后", rq=0.6),
    ]
    finish_run(profile, [*silent, *samples, samples[0], *more])
    status, out, err = qinglan(*words, profile=profile)
    assert (status, err) == (0, "")
    assert out.endswith(
        "60 judged right, 61 judged wrong, 1 of another question, 1 without a verdict left out\n"
    )
    rows = list(
        read_rows(tmp_path / "judge.xlsx", profile.data, profile.tenant, inputs=RECIPE.INPUTS)
    )
    said = [row.inputs["verdict"] for row in rows if row.status == "ok"]
    learnt = {RECIPE.own_answer(row) for row in rows}
    right, wrong = (
        {"正确", "乙有 饭后有，正确", "饭后有 乙有，正确"},
        {"错误", "乙无 饭后无，错误", "饭后无 乙无，错误", "丙无 饭前无，错误"},
    )
    assert learnt == right | wrong
    assert [row.query for row in rows if row.inputs["candidate"] == "己"] == [
        ALIKE["1"],
        ALIKE["0"],
    ]
    assert {row.query for row in rows} == {*ALIKE.values()}
    assert (
        said.count("正确"),
        said.count("错误"),
    ) == (60, 62)
    placed = {
        (row.query.rstrip("呢"), row.split) for row in place_rows(rows, profile.dataset).apply(rows)
    }
    assert len(placed) == 30
    assert {split for _, split in placed} == {"train", "dev", "test"}
