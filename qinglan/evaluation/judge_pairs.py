"""A workbook for a judge of passages: what RL found in a finished run, with the verdicts that its judge gave then.

Only training questions are taken: on dev questions the local judge is compared with the judge.
"""

from pathlib import Path

import pyarrow.parquet as pq

from qinglan.config import Profile
from qinglan.data.workbook_writer import write_questions
from qinglan.errors import ConfigError
from qinglan.evaluation.frames import run
from qinglan.recipes.answer_judge import RIGHT, WRONG
from qinglan.recipes.passage_judge import RECIPE
from qinglan.rows import Row, hash_fraction
from qinglan.runs.run import stage_of


def write_pairs(profile: Profile, name: str, workbook: Path) -> tuple[str, int, dict[str, int]]:
    """Write as many right as wrong passages: the run, how many rows, and how many of what were left out."""
    found = run(name, profile.paths.runs)
    directory, samples = found.directory, found.samples().reindex(columns=["row_id", "passage", "relevant"])
    infos = pq.read_table(stage_of(directory, "dataset").path("rl_train"), columns=["extra_info"])["extra_info"]
    questions = {info["row_id"]: info.get("question", "") for info in infos.to_pylist()}
    judged = samples[samples.row_id.isin(questions) & samples.passage.notna()].drop_duplicates(["row_id", "passage"])
    sides = dict[str, list[Row]]({RIGHT: [], WRONG: []})
    for at, passage, relevant in judged.dropna().itertuples(index=False):
        inputs = {"candidate": passage, "verdict": RIGHT if relevant else WRONG}
        row = Row(id=f"{at}{passage}", tenant="", query=questions[at], inputs=inputs, source=f"{directory.name}: {at}")
        sides[inputs["verdict"]].append(row)
    counts = sorted(map(len, sides.values()))
    if not (fewest := counts[0]):
        hint = "name one whose RL asked the judge about passages: with reward.use_labels=false, without judge.local"
        raise ConfigError(f"run {directory.name}: has no verdicts on passages, or all are the same; {hint}")
    chosen = [row for side in sides.values() for row in sorted(side, key=lambda row: hash_fraction(row.id))[:fewest]]
    write_questions(workbook, chosen, RECIPE)
    left_out = {"passages without a verdict": len(judged) - sum(counts), "of the other verdict": counts[1] - fewest}
    return directory.name, len(chosen), left_out
