"""Advice on the selection's threshold, for a run of which too few rows may teach.

It tells what would be kept with another `select.min_top1_score`.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from qinglan.config import Profile, Select
from qinglan.recipes import Finding, FindingRow, Recipe
from qinglan.rows import Row, top1_of
from qinglan.runs.artifacts import StageResult, read_jsonl
from qinglan.text import Both

_SHARES = (0.1, 0.3, 0.6)
_ADVISED_SHARE = 0.3
_QUANTILES = {Both("10%", "10%"): 0.1, Both("median", "中位数"): 0.5, Both("90%", "90%"): 0.9}


class SelectedScores:
    """Top-1 scores of the rows that were questions, the highest first."""

    def __init__(self, rows: Iterable[Row], recipe: Recipe, config: Select) -> None:
        self._config = config
        self._questions = 0
        self._originals: list[float] = []
        self._rewrites: list[float] = []
        self._eligible: list[float] = []
        """Scores of the rewrites that every other rule keeps."""
        self._reasons: Counter[str | None] = Counter()
        any_score = config.model_copy(update={"min_top1_score": 0.0})
        for row in rows:
            if not row.was_question:
                continue
            self._questions += 1
            self._reasons[row.reason] += 1
            original_score = top1_of(row.original_retrieved)
            if original_score is not None:
                self._originals.append(original_score)
            rewrite_score = top1_of(row.answer_retrieved)
            if rewrite_score is None:
                continue
            self._rewrites.append(rewrite_score)
            # A row has one reason only: a low score may hide another rule that drops it too.
            is_only_low = (
                row.reason == "below_threshold"
                and recipe.grader.drop_reason(row, any_score) is None
            )
            if row.status == "ok" or is_only_low:
                self._eligible.append(rewrite_score)
        for scores in (self._originals, self._rewrites, self._eligible):
            scores.sort(reverse=True)

    def threshold(self, share: float) -> float | None:
        """The highest threshold, in hundredths, that keeps this share of the questions.

        None where even the lowest one does not.
        """
        rows_needed = max(1, round(share * self._questions))
        if rows_needed > len(self._eligible):
            return None
        lowest_kept = self._eligible[rows_needed - 1]
        return math.floor(lowest_kept * 100) / 100

    def setting(self) -> str | None:
        """The one setting to change, as `--set` takes it; None where none would help."""
        for share in (_ADVISED_SHARE, min(_SHARES)):
            threshold = self.threshold(share)
            if threshold is not None and threshold < self._config.min_top1_score:
                return f"select.min_top1_score={threshold:g}"
        # The last of the rules, so that without it these rows are kept.
        worse = self._reasons["worse_than_original"]
        if worse and worse >= min(_SHARES) * self._questions:
            return "select.not_worse_than_original=false"
        return None

    def findings(self) -> list[Finding]:
        """The scores, and what each threshold would keep; no table where no row has a score."""
        if not self._originals and not self._rewrites:
            return []
        return [self._scores_finding(), self._thresholds_finding()]

    def _scores_finding(self) -> Finding:
        """Quantiles of the scores of original questions and of rewrites."""
        scores_by_label = {
            Both("original question", "原问题"): self._originals,
            Both("rewrite", "改写"): self._rewrites,
        }
        rows: list[FindingRow] = []
        for label, scores in scores_by_label.items():
            quantiles = tuple(_quantile(scores, share) for share in _QUANTILES.values())
            rows.append(FindingRow(label=label, values=quantiles))
        return Finding(
            title=Both("Score of the best passage", "首位得分"),
            columns=tuple(_QUANTILES),
            rows=tuple(rows),
            digits=2,
        )

    def _thresholds_finding(self) -> Finding:
        """The threshold for each share of the rows, and the share that it would really keep."""
        rows: list[FindingRow] = []
        for share in _SHARES:
            threshold = self.threshold(share)
            kept_share = None
            if threshold is not None:
                # More than asked for where several rows have the score of the threshold.
                kept_rows = sum(score >= threshold for score in self._eligible)
                kept_share = kept_rows / self._questions
            label = Both(f"about {share:.0%} of the rows", f"约 {share:.0%} 的行")
            rows.append(FindingRow(label=label, values=(threshold, kept_share)))

        title = Both(
            "What another select.min_top1_score would keep", "其他 select.min_top1_score 可保留的行"
        )
        setting = self.setting()
        if setting:
            title = Both(f"{title.en}; try --set {setting}", f"{title.zh}；可试 --set {setting}")
        columns = (
            Both("select.min_top1_score", "select.min_top1_score"),
            Both("share kept", "保留比例"),
        )
        return Finding(title=title, columns=columns, rows=tuple(rows), digits=2)


def findings_of(stages: Sequence[StageResult], recipe: Recipe, profile: Profile) -> list[Finding]:
    """Advice on the threshold, where too few rows were selected.

    Too few are those that make no dataset, or fewer than `targets.rows` (unset: than 30%).
    """
    least_share, _ = profile.targets.rows.get("select", (_ADVISED_SHARE, 1.0))
    for stage in stages:
        if stage.stage != "select":
            continue
        # A run that ends with its selection could make no dataset of the rows.
        is_last = stage is stages[-1]
        if is_last or stage.rows_out < least_share * stages[0].rows_out:
            rows = read_jsonl(stage.path("rows"), Row)
            return SelectedScores(rows, recipe, profile.select).findings()
    return []


def _quantile(values: Sequence[float], share: float) -> float | None:
    """The quantile of values that have the highest first; None where there are none."""
    if not values:
        return None
    return values[round((1 - share) * (len(values) - 1))]
