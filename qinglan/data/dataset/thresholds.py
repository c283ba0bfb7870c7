"""What the selection would keep with another `select.min_top1_score`, for a run of which too few
rows may teach."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from qinglan.config import Profile, Select
from qinglan.recipes import Finding, FindingRow, Recipe
from qinglan.rows import INPUT_REASONS, Row, top1_of
from qinglan.runs.artifacts import StageResult, read_jsonl
from qinglan.text import Both

_SHARES = (0.1, 0.3, 0.6)
_ADVISED_SHARE = 0.3
_QUANTILES = {Both("10%", "10%"): 0.1, Both("median", "中位数"): 0.5, Both("90%", "90%"): 0.9}


class SelectedScores:
    """Top-1 scores of the rows that were questions, the highest first."""

    def __init__(self, rows: Iterable[Row], recipe: Recipe, config: Select) -> None:
        self._config, self._questions = config, 0
        self._originals: list[float] = []
        self._rewrites: list[float] = []
        self._eligible: list[float] = []
        """Of the rewrites that every other rule keeps."""
        self._reasons: Counter[str | None] = Counter()
        any_score = config.model_copy(update={"min_top1_score": 0.0})
        for row in rows:
            if row.reason in INPUT_REASONS:
                continue
            self._questions += 1
            self._reasons[row.reason] += 1
            if (original := top1_of(row.original_retrieved)) is not None:
                self._originals.append(original)
            if (score := top1_of(row.answer_retrieved)) is None:
                continue
            self._rewrites.append(score)
            is_low = row.reason == "below_threshold"
            if row.status == "ok" or (is_low and recipe.grader.drop_reason(row, any_score) is None):
                self._eligible.append(score)
        for scores in (self._originals, self._rewrites, self._eligible):
            scores.sort(reverse=True)

    def threshold(self, share: float) -> float | None:
        """The highest threshold, in hundredths, that keeps this share of the questions; None where
        none does."""
        wanted = max(1, round(share * self._questions))
        return (
            math.floor(self._eligible[wanted - 1] * 100) / 100
            if wanted <= len(self._eligible)
            else None
        )

    def setting(self) -> str | None:
        """The one setting to change, as `--set` takes it; None where none would help."""
        for share in (_ADVISED_SHARE, min(_SHARES)):
            found = self.threshold(share)
            if found is not None and found < self._config.min_top1_score:
                return f"select.min_top1_score={found:g}"
        # The last of the rules, so that without it these rows are kept.
        worse = self._reasons["worse_than_original"]
        return (
            "select.not_worse_than_original=false"
            if worse and worse >= min(_SHARES) * self._questions
            else None
        )

    def findings(self) -> list[Finding]:
        """The scores, and what each threshold would keep."""
        lists = (
            (Both("original question", "原问题"), self._originals),
            (Both("rewrite", "改写"), self._rewrites),
        )
        scores = tuple(
            FindingRow(
                label=label, values=tuple(_quantile(values, share) for share in _QUANTILES.values())
            )
            for label, values in lists
        )
        kept = []
        for share in _SHARES:
            found = self.threshold(share)
            count = None if found is None else sum(score >= found for score in self._eligible)
            words = Both(f"about {share:.0%} of the rows", f"约 {share:.0%} 的行")
            kept.append(FindingRow(label=words, values=(found, count and count / self._questions)))
        setting = self.setting()
        title = Both(
            "What another select.min_top1_score would keep", "其他 select.min_top1_score 可保留的行"
        )
        if setting:
            title = Both(f"{title.en}; try --set {setting}", f"{title.zh}；可试 --set {setting}")
        heads = (
            Both("select.min_top1_score", "select.min_top1_score"),
            Both("share kept", "保留比例"),
        )
        return [
            Finding(
                title=Both("Score of the best passage", "首位得分"),
                columns=tuple(_QUANTILES),
                rows=scores,
                digits=2,
            ),
            Finding(title=title, columns=heads, rows=tuple(kept), digits=2),
        ]


def findings_of(stages: Sequence[StageResult], recipe: Recipe, profile: Profile) -> list[Finding]:
    """Those of the scores, where too few rows were selected for a dataset, or for `targets.rows`
    (unset: for 30%)."""
    least, _ = profile.targets.rows.get("select", (_ADVISED_SHARE, 1.0))
    for stage in stages if recipe.grader.retrieves else ():
        if stage.stage == "select" and (
            stage is stages[-1] or stage.rows_out < least * stages[0].rows_out
        ):
            return SelectedScores(
                read_jsonl(stage.path("rows"), Row), recipe, profile.select
            ).findings()
    return []


def _quantile(values: list[float], share: float) -> float | None:
    """Of values with the highest first."""
    return values[round((1 - share) * (len(values) - 1))] if values else None
