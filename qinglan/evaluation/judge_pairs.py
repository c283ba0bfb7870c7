"""A workbook for a judge of passages, from a finished run.

It holds the passages that RL found, with the verdicts that the run's judge gave then.

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
from qinglan.evaluation.frames import RunFrames, run
from qinglan.recipes.passage_judge import RECIPE, RIGHT, WRONG
from qinglan.rows import Row
from qinglan.runs.run import stage_of

_PAIR = ["row_id", "passage"]
_TERMS_PER_QUESTION = 2


def write_pairs(profile: Profile, name: str, workbook: Path) -> tuple[str, dict[str, int]]:
    """Write the workbook.

    Args:
        name: the run's id, a unique prefix, its path or `latest`.

    Returns:
        The run's id, and how many passages of each kind the workbook has or lacks.

    Raises:
        ConfigError: the run's verdicts are all the same, or there are none.
    """
    frames = run(name, profile.paths.runs)
    run_id = frames.directory.name
    # A run whose RL asked about no passage lacks some of these columns.
    samples = frames.samples().reindex(columns=["row_id", "passage", "relevant", "text", "rq"])
    teacher_answers = frames.rows("distill").set_index("id").answer.dropna()
    questions = _training_questions(frames)
    samples = samples[samples.row_id.isin(questions) & samples.passage.notna()]
    # Sorted, so that the draws below don't depend on the order of the samples.
    judged = samples[[*_PAIR, "relevant"]].dropna().drop_duplicates(_PAIR).sort_values(_PAIR)
    right = int((judged.relevant == 1).sum())
    wrong = int((judged.relevant == 0).sum())
    if right == 0 or wrong == 0:
        hint = (
            "name one whose RL asked the judge about passages: "
            "with reward.use_labels=false, without judge.local"
        )
        raise ConfigError(f"run {run_id}: has no verdicts on passages, or all are the same; {hint}")
    rewrites = _best_rewrites(samples, teacher_answers)
    wrong_pairs = list(_passages_of_other_questions(judged, rewrites))

    def pair_row(row_id: str, passage: str, verdict: str, source: str) -> Row:
        rewrite = rewrites.get(row_id, "")
        inputs = {"candidate": passage, "verdict": verdict, "rewrite": rewrite}
        return Row(id="", tenant="", query=questions[row_id], inputs=inputs, source=source)

    rows = []
    for row_id, passage, relevant in judged.itertuples(index=False):
        verdict = RIGHT if relevant else WRONG
        rows.append(pair_row(row_id, passage, verdict, f"{run_id}: {row_id}"))
    for row_id, passage in wrong_pairs:
        source = f"{run_id}: {row_id}, a passage of another question"
        rows.append(pair_row(row_id, passage, WRONG, source))
    write_questions(workbook, rows, RECIPE)
    return run_id, {
        "judged right": right,
        "judged wrong": wrong,
        "of another question": len(wrong_pairs),
        "without a verdict left out": len(samples.drop_duplicates(_PAIR)) - len(judged),
    }


def _training_questions(frames: RunFrames) -> dict[str, str]:
    """The questions that RL was trained on, by row id."""
    path = stage_of(frames.directory, "dataset").path("rl_train")
    infos = pq.read_table(path, columns=["extra_info"])["extra_info"]
    return {info["row_id"]: info.get("question", "") for info in infos.to_pylist()}


def _best_rewrites(samples: pd.DataFrame, teacher_answers: "pd.Series[str]") -> "pd.Series[str]":
    """RL's best rewrite that was judged right, otherwise the teacher's, by row id."""
    judged_right = samples[samples.relevant > 0]
    # Stable, so that of equally good rewrites the last one counts.
    by_quality = judged_right.sort_values("rq", kind="stable")
    best: pd.Series[str] = by_quality.groupby("row_id").text.last()
    return best.combine_first(teacher_answers)


def _passages_of_other_questions(
    judged: pd.DataFrame, rewrites: "pd.Series[str]"
) -> Iterator[tuple[str, str]]:
    """Row ids with a passage that was right for another question, and not judged for this.

    There is one for each of two terms of a question's rewrite, where such a passage exists.
    """
    right = judged[judged.relevant > 0]
    terms_of_row = right.row_id.map(lambda row_id: rewrites.get(row_id, "").split())
    right = right.assign(term=terms_of_row).explode("term").dropna()
    passages_by_term = right.groupby("term").passage.unique()
    judged_passages = judged.groupby("row_id").passage.agg(set)
    rng = Random(0)
    for row_key, terms in right.groupby("row_id").term:
        row_id = str(row_key)
        distinct = list(terms.unique())
        for term in rng.sample(distinct, min(_TERMS_PER_QUESTION, len(distinct))):
            pool = [
                passage
                for passage in passages_by_term[term]
                if passage not in judged_passages[row_id]
            ]
            if pool:
                passage = rng.choice(pool)
                # Two terms of a question may have the same passage.
                judged_passages[row_id].add(passage)
                yield row_id, passage
