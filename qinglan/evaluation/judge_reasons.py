"""What the judge found wrong with answers, grouped into rules and red-team cases for a person to
take or leave."""

import heapq
from collections import Counter, defaultdict
from textwrap import indent
from typing import NamedTuple

from qinglan.config import Profile
from qinglan.data.dataset.duplicates import Questions, near_duplicate_groups
from qinglan.data.review.export import judge_reasons, newest_rows, rows_of
from qinglan.evaluation.red_team import ASKED, Case, Checks
from qinglan.recipes import get_recipe
from qinglan.rows import Row

ALIKE = 0.4
"""Jaccard similarity of trigrams from which two reasons count as the same."""


class ReasonGroup(NamedTuple):
    reason: str
    """The commonest of the group."""
    rows: list[Row]
    """The lowest score first."""


def group_reasons(
    profile: Profile, run_name: str, most: int, below: float
) -> tuple[str, list[ReasonGroup]]:
    """The run's name, and why the judge gave its lowest scores, the largest group first; it is not
    asked again."""
    run, stage = newest_rows(profile, run_name)
    low = (
        row
        for row in rows_of(profile, run, stage)
        if row.judge_score is not None and row.judge_score < below
    )
    worst = heapq.nsmallest(most, low, key=lambda row: (row.judge_score, row.id))
    reasons = judge_reasons(profile, worst)
    told = [row for row in worst if row.id in reasons]
    with Questions() as texts:
        for row in told:
            texts.add(
                row.model_copy(update={"query": reasons[row.id], "profile": "", "history": ""})
            )
        first, _ = near_duplicate_groups(texts, ALIKE)
    members = defaultdict[int, list[Row]](list)
    for place, row in zip(first.tolist(), told, strict=True):
        members[place].append(row)
    groups = sorted(members.values(), key=len, reverse=True)
    commonest = (Counter(reasons[row.id] for row in rows).most_common(1)[0][0] for rows in groups)
    return run.name, list(map(ReasonGroup, commonest, groups))


def proposed_rules(groups: list[ReasonGroup]) -> str:
    """YAML for a profile, with a rule for each group."""
    rules = "\n".join(["不要出现评审指出的这些问题：", *(f"- {group.reason}" for group in groups)])
    return "tenant:\n  teacher_rules: |\n" + indent(rules, "    ")


def proposed_cases(groups: list[ReasonGroup], profile: Profile) -> list[Case]:
    """For `evaluate.red_team`: the questions with the lowest scores of each group."""
    return [
        Case(
            id=f"judge-{row.id}",
            name=f"评审低分的问题 {row.id}",  # not the reason: it may quote a user, and the gate tells names to others
            kind="regression",
            **row.model_dump(include=ASKED),
            must_pass=False,
            checks=Checks(
                gold_in_top3=row.gold_id if get_recipe(profile.recipe).grader.retrieves else None
            ),
        )
        for group in groups
        for row in group.rows[:2]
    ]
