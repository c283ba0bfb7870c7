"""A run whose RL arm hits once, misses once and fails once."""

from run_stages import end_stage

from qinglan.config import Profile
from qinglan.evaluation.evaluating import evaluate
from qinglan.recipes.query_rewrite import RECIPE
from qinglan.rows import ArmRow, Retrieved, Row
from qinglan.runs.artifacts import Artifact, write_json, write_jsonl
from qinglan.runs.run import open_run
from qinglan.serving.lineage import Subject, subject_of

HIT = Retrieved(ids=("g", "x"), scores=(0.9, 0.2))
MISS = Retrieved(ids=("x", "g"), scores=(0.8, 0.3))
ROWS = [
    Row(
        id=name,
        tenant="default",
        query=f"问{name}",
        source=f"q.xlsx!问题!A{line}",
        gold_id="g",
        split="test",
        answer="教师",
        answer_request=f"t-{name}",
        answer_retrieved=HIT,
    )
    for line, name in enumerate("abc", 2)
]
ARM = [
    ArmRow(
        row_id="a",
        text="甲",
        retrieved=HIT,
        judge_score=4.0,
        judge_scores=(3.5, 4.5),
        requests=("j-a",),
    ),
    ArmRow(row_id="b", text="乙", retrieved=MISS, judge_score=2.0, requests=("j-b",)),
    ArmRow(row_id="c", text="丙", reason="rag_unavailable"),
]
TEACHER = [
    ArmRow(row_id=row.id, text="教师", retrieved=HIT, requests=(f"t-{row.id}",)) for row in ROWS
]


def evaluated_run(profile: Profile) -> Subject:
    """A run whose RL arm hits once, misses once and fails once."""
    with open_run(profile, "pipeline") as run:
        pass
    test = write_jsonl(run.stage_directory("dataset") / "test.jsonl", ROWS)
    end_stage(run, "dataset", artifacts={"test": test})
    folder = run.stage_directory("evaluate")
    arms = {"teacher": TEACHER, "rl": ARM}
    evaluation = evaluate(arms, ROWS, profile.evaluate, RECIPE)
    write_json(folder / "evaluation.json", evaluation.model_dump(mode="json"))
    files = {
        f"arm_{arm}": write_jsonl(folder / f"arm_{arm}.jsonl", rows) for arm, rows in arms.items()
    }
    files["evaluation"] = Artifact.of(folder / "evaluation.json")
    end_stage(run, "evaluate", artifacts=files)
    return subject_of(profile, run.id)
