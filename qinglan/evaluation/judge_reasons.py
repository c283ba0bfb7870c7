"""The judge's objections to answers, in groups of the same.

They become rules and red team cases for a person to take or leave.
"""

import heapq
from collections import Counter, defaultdict
from textwrap import indent
from typing import NamedTuple

from qinglan.config import Profile
from qinglan.data.dataset.duplicates import Questions, near_duplicate_groups
from qinglan.data.review.export import judge_reasons, newest_rows, rows_of
from qinglan.evaluation.red_team import ASKED, REGRESSION, Case, Checks
from qinglan.recipes import get_recipe
from qinglan.rows import Row

ALIKE = 0.4
"""Jaccard similarity of trigrams from which two reasons count as the same."""
_CASES_PER_GROUP = 2


class ReasonGroup(NamedTuple):
    """Rows with the same objection."""

    reason: str
    """The group's commonest reason."""
    rows: list[Row]
    """The group's rows, the lowest score first."""


def group_reasons(
    profile: Profile, run_name: str, most: int, below: float
) -> tuple[str, list[ReasonGroup]]:
    """The run's name, and the reasons of the judge's lowest scores, the largest group first.

    The judge is not asked again.

    Args:
        most: rows that are looked at, those with the lowest scores.
        below: the score under which a row counts.
    """
    run, stage = newest_rows(profile, run_name)
    low = (
        row
        for row in rows_of(profile, run, stage)
        if row.judge_score is not None and row.judge_score < below
    )
    # By id among equal scores, so that the groups are the same every time.
    worst = heapq.nsmallest(most, low, key=lambda row: (row.judge_score, row.id))
    reasons = judge_reasons(profile, worst)
    with_reason = [row for row in worst if row.id in reasons]
    with Questions() as texts:
        for row in with_reason:
            # Without the row's question: reasons are compared.
            texts.add(row.with_question(reasons[row.id], profile="", history=""))
        first_places, _ = near_duplicate_groups(texts, ALIKE)
    rows_by_group = defaultdict[int, list[Row]](list)
    for place, row in zip(first_places.tolist(), with_reason, strict=True):
        rows_by_group[place].append(row)
    groups = []
    for rows in sorted(rows_by_group.values(), key=len, reverse=True):
        counts = Counter(reasons[row.id] for row in rows)
        commonest, _ = counts.most_common(1)[0]
        groups.append(ReasonGroup(commonest, rows))
    return run.name, groups


def proposed_rules(groups: list[ReasonGroup]) -> str:
    """YAML for a profile, with a rule for each group."""
    rules = "\n".join(["不要出现评审指出的这些问题：", *(f"- {group.reason}" for group in groups)])
    return "tenant:\n  teacher_rules: |\n" + indent(rules, "    ")


def proposed_cases(groups: list[ReasonGroup], profile: Profile) -> list[Case]:
    """Cases for `evaluate.red_team`: the questions with the lowest scores of each group."""
    grader = get_recipe(profile.recipe).grader
    cases = []
    for group in groups:
        for row in group.rows[:_CASES_PER_GROUP]:
            case = Case(
                id=f"judge-{row.id}",
                # Not the reason: it may quote a user, and the gate tells names to others.
                name=f"评审低分的问题 {row.id}",
                kind=REGRESSION,
                **row.model_dump(include=ASKED),
                must_pass=False,
                checks=Checks(gold_in_top3=grader.gold_of(row)),
            )
            cases.append(case)
    return cases
