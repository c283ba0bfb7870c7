"""A workbook for a judge of passages: what RL found in a finished run, with the verdicts that its
judge gave then.

Only training questions are taken: on dev questions the local judge is compared with the judge. RL
finds mostly right passages, and a judge that learns from these alone takes its terms from the
passage. So a question also has, as wrong ones, passages that were right for other questions whose
rewrites share a term with its own. Its rewrite is the best one that was judged right: RL learns the
knowledge base's words, and a judge of the teacher's own would refuse them.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pandas as pd
import pyarrow.parquet as pq

from qinglan.config import Profile
from qinglan.data.workbook_writer import write_questions
from qinglan.errors import ConfigError
from qinglan.evaluation.frames import run
from qinglan.recipes.passage_judge import RECIPE, RIGHT, WRONG
from qinglan.rows import Row
from qinglan.runs.run import stage_of


def write_pairs(profile: Profile, name: str, workbook: Path) -> tuple[str, dict[str, int]]:
    """Write the workbook: the run, and how many passages of each kind it has or lacks."""
    found = run(name, profile.paths.runs)
    directory = found.directory
    samples = found.samples().reindex(columns=["row_id", "passage", "relevant", "text", "rq"])
    answers = found.rows("distill").set_index("id").answer.dropna()
    infos = pq.read_table(stage_of(directory, "dataset").path("rl_train"), columns=["extra_info"])[
        "extra_info"
    ]
    questions = {info["row_id"]: info.get("question", "") for info in infos.to_pylist()}
    asked = samples[samples.row_id.isin(questions) & samples.passage.notna()]
    pair = ["row_id", "passage"]
    judged = asked[[*pair, "relevant"]].dropna().drop_duplicates(pair).sort_values(pair)
    best = asked[asked.relevant > 0].sort_values("rq", kind="stable").groupby("row_id").text.last()
    rewrites = best.combine_first(answers)
    wrong, right = (int((judged.relevant == side).sum()) for side in (0, 1))
    if not (right and wrong):
        hint = "name one whose RL asked the judge about passages: with reward.use_labels=false, without judge.local"
        raise ConfigError(
            f"run {directory.name}: has no verdicts on passages, or all are the same; {hint}"
        )
    others = list(_of_others(judged, rewrites))
    rows = []
    for at, passage, relevant in (*judged.itertuples(index=False), *others):
        inputs = {
            "candidate": passage,
            "verdict": RIGHT if relevant else WRONG,
            "rewrite": rewrites.get(at, ""),
        }
        source = f"{directory.name}: {at}" + (
            ", a passage of another question" if relevant is None else ""
        )
        rows.append(Row(id="", tenant="", query=questions[at], inputs=inputs, source=source))
    write_questions(workbook, rows, RECIPE)
    kinds = {"judged right": right, "judged wrong": wrong, "of another question": len(others)}
    return directory.name, kinds | {
        "without a verdict left out": len(asked.drop_duplicates(pair)) - len(judged)
    }


def _of_others(pairs: pd.DataFrame, rewrites: "pd.Series[str]") -> Iterator[tuple[str, str, None]]:
    """For two terms of a question's rewrite a passage that was right for another question, and not
    judged for this."""
    right = pairs[pairs.relevant > 0]
    right = (
        right.assign(term=right.row_id.map(lambda at: rewrites.get(at, "").split()))
        .explode("term")
        .dropna()
    )
    pools, known, rng = (
        right.groupby("term").passage.unique(),
        pairs.groupby("row_id").passage.agg(set),
        Random(0),
    )
    for at, terms in right.groupby("row_id").term:
        row_id, distinct = str(at), list(terms.unique())
        for term in rng.sample(distinct, min(2, len(distinct))):
            if pool := [passage for passage in pools[term] if passage not in known[row_id]]:
                known[row_id].add(drawn := rng.choice(pool))
                yield row_id, drawn, None
