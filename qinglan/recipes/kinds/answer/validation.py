"""Validate: grade the teacher's answer by rule, and ask the judge about it where the recipe has one."""

from collections import Counter, defaultdict
from typing import Any

from qinglan.clients.roles import Clients
from qinglan.clients.row_batches import Work
from qinglan.config import Tenant
from qinglan.errors import StageError
from qinglan.recipes.kinds.answer.parts import grade, part_names
from qinglan.recipes.kinds.answer.recipe import AnswerRecipe
from qinglan.recipes.kinds.common import judged, outline
from qinglan.rows import Row
from qinglan.statistics import Histogram

_TELLING_ROWS = 20


def validator(recipe: AnswerRecipe, clients: Clients, tenant: Tenant, *, judge: bool) -> Work:
    """The work on one row."""

    async def validate(row: Row) -> Row:
        assert row.answer is not None
        parts, score = grade(recipe, row, row.answer), None
        if judge and (messages := recipe.judge_messages(row, row.answer, tenant)):
            score = await judged(clients, messages, recipe)
        return row.model_copy(update={"parts": parts, "judge_score": score})

    return validate


class Findings:
    """What validation found: the parts' means, the share of answers that must not teach, the judge's mean score.

    Counted are rows that were graded; a part's mean is of the rows that have it.
    """

    def __init__(self, recipe: AnswerRecipe) -> None:
        self._recipe, self._names = recipe, part_names(recipe)
        self._rows = self._judged = 0
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: Counter[str] = Counter()
        self._flaws: Counter[str] = Counter()
        self._judge_sum = 0.0
        self._scores = Histogram(0, 5, 50)

    def add(self, row: Row) -> None:
        """Count a row; one that was not graded counts as nothing."""
        if row.parts is None:
            return
        self._rows += 1
        for name, value in row.parts.items():
            self._sums[name] += value
            self._counts[name] += 1
        if flaw := self._recipe.flaw(row):
            self._flaws[flaw] += 1
        if row.judge_score is not None:
            self._judged += 1
            self._judge_sum += row.judge_score
            self._scores.add(row.judge_score)

    def metrics(self) -> dict[str, float]:
        """`<part>_mean`, `flawed_share` and `judge_mean`; nothing where no row was graded."""
        if not self._rows:
            return {}
        means = {f"{name}_mean": self._sums[name] / self._counts[name] for name in self._names if self._counts[name]}
        judge = {"judge_mean": self._judge_sum / self._judged} if self._judged else {}
        return means | {"flawed_share": self._flaws.total() / self._rows} | judge

    def shown(self) -> dict[str, float]:
        """All of them."""
        return self.metrics()

    def check(self) -> None:
        """Notice a teacher, or rules, by which nothing could be learned.

        Raises:
            StageError: every answer has a flaw.
        """
        if self._rows >= _TELLING_ROWS and self._flaws.total() == self._rows:
            flaws = ", ".join(f"{flaw} {count:,}" for flaw, count in self._flaws.most_common())
            raise StageError(
                f"validation: all {self._rows:,} of the teacher's answers have a flaw ({flaws}), so none may teach; "
                "look at some in rows.jsonl, then mend the teacher's prompt or the recipe's rules"
            )

    def histograms(self) -> dict[str, list[dict[str, Any]]]:
        """The judge's scores, where there are any."""
        if not self._judged:
            return {}
        return {"judge_score": [outline("teacher", self._scores.low, self._scores.high, self._scores.counts)]}
