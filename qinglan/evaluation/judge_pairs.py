"""A workbook for a judge of passages: what RL found in a finished run, with the verdicts that its judge gave then.
Only training questions are taken: on dev questions the local judge is compared with the judge."""

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
    answers = found.rows("distill").set_index("id").answer.dropna()
    infos = pq.read_table(stage_of(directory, "dataset").path("rl_train"), columns=["extra_info"])["extra_info"]
    questions = {info["row_id"]: info.get("question", "") for info in infos.to_pylist()}
    asked = samples[samples.row_id.isin(questions) & samples.passage.notna()]
    judged = asked.dropna().drop_duplicates(["row_id", "passage"])
    fewest, most = sorted(int((judged.relevant == side).sum()) for side in (0, 1))
    if not fewest:
        hint = "name one whose RL asked the judge about passages: with reward.use_labels=false, without judge.local"
        raise ConfigError(f"run {directory.name}: has no verdicts on passages, or all are the same; {hint}")
    by_hash = judged.assign(order=(judged.row_id + judged.passage).map(hash_fraction)).sort_values("order")
    rows = []
    for at, passage, relevant, _ in by_hash.groupby("relevant").head(fewest).itertuples(index=False):
        inputs = {"candidate": passage, "verdict": RIGHT if relevant else WRONG, "rewrite": answers.get(at, "")}
        rows.append(Row(id="", tenant="", query=questions[at], inputs=inputs, source=f"{directory.name}: {at}"))
    write_questions(workbook, rows, RECIPE)
    unjudged = len(asked.drop_duplicates(["row_id", "passage"])) - len(judged)
    return directory.name, len(rows), {"passages without a verdict": unjudged, "of the other verdict": most - fewest}
