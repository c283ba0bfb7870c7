"""Does the local judge agree with the judge that it replaces in RL? Measured on dev rows, before
RL.

Both are asked about passages that the teacher's rewrite and poorer ones find. A failed call is left
out and counted; an answer without a verdict is a disagreement.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from pydantic import BaseModel

from qinglan.clients.chat import ChatClient
from qinglan.clients.rag import RagClient
from qinglan.clients.row_batches import RETRYABLE_REASONS
from qinglan.config import LocalJudge, Profile
from qinglan.errors import CallError, StageError, TeacherError
from qinglan.grading.by_retrieval import RetrievalGrader
from qinglan.grading.failures import require_few_failures
from qinglan.grading.judge_answers import CONTRADICTORY
from qinglan.recipes import Finding, FindingRow, Recipe
from qinglan.recipes.passage_judge import BEST, PassageJudge
from qinglan.rows import Row, groups_of
from qinglan.statistics import agreement
from qinglan.text import Both

PASSAGES_A_ROW = 4
"""At most: as many as `_texts` gives."""
_UNREADABLE = frozenset(
    {"verdict_unreadable", CONTRADICTORY, "truncated", "empty_answer", "answer_too_long"}
)
"""Reasons for which an answer holds no verdict; other failures are those of the call."""
_RIGHT, _WRONG, _NEITHER = "right", "wrong", "neither"


class JudgedPassage(BaseModel):
    """A passage that was found for a question, and the scores of both judges."""

    row_id: str
    group: str
    question: str
    passage: str
    local: float | None = None  # 0–5; None where there is no verdict
    judge: float | None = None  # 0–5; None where the call failed
    unreadable: str | None = None  # why the local judge's answer holds no verdict
    failed: str | None = None  # why a call failed


@dataclass(frozen=True)
class JudgeComparison:
    profile: Profile
    recipe: Recipe
    grader: RetrievalGrader
    verdicts: PassageJudge
    local: ChatClient
    judge: ChatClient
    rag: RagClient  # that keeps the best passage

    async def compare(self, rows: Sequence[Row]) -> list[JudgedPassage]:
        groups = groups_of(rows)
        pairs_by_row = await asyncio.gather(*(self._pairs(row, groups[row.id]) for row in rows))
        judging: list[Awaitable[JudgedPassage]] = []
        for row, pairs in zip(rows, pairs_by_row, strict=True):
            judging.extend(self._judged(row, pair) for pair in pairs)
        return list(await asyncio.gather(*judging))

    async def _pairs(self, row: Row, group: str) -> list[JudgedPassage]:
        about = {"row_id": row.id, "group": group, "question": self.recipe.question_text(row)}
        try:
            found = await asyncio.gather(
                *(self.rag.retrieve(row.query, text) for text in _texts(row))
            )
        except CallError as error:
            return [JudgedPassage(**about, passage="?", failed=error.reason) for _ in _texts(row)]
        passages = dict.fromkeys(each.first_passage for each in found if each.first_passage)
        return [JudgedPassage(**about, passage=passage) for passage in passages]

    async def _judged(self, row: Row, pair: JudgedPassage) -> JudgedPassage:
        if pair.failed:
            return pair
        messages = self.grader.relevance_messages(row, pair.passage, self.profile.tenant)
        try:
            known = await self._verdict(pair)
            answer = await self.judge.ask(
                messages, self.grader.parse_relevance, self.grader.relevance_schema
            )
        except CallError as error:
            return pair.model_copy(update={"failed": error.reason})
        return pair.model_copy(update={**known, "judge": answer.value})

    async def _verdict(self, pair: JudgedPassage) -> dict[str, float | str]:
        messages = self.verdicts.verdict_messages(pair.question, pair.passage, self.profile.tenant)
        try:
            return {"local": (await self.local.ask(messages, self.verdicts.verdict_score)).value}
        except TeacherError as error:
            if error.reason not in _UNREADABLE:
                raise
            return {"unreadable": error.reason}


def choose_rows(rows: Iterable[Row], count: int) -> list[Row]:
    """So many dev rows with a rewrite of the teacher's, by their ids, which are hashes."""
    usable = (row for row in rows if row.split == "dev" and row.status == "ok" and row.answer)
    return sorted(usable, key=lambda row: row.id)[:count]


def _texts(row: Row) -> list[str | None]:
    """What is retrieved with: the teacher's rewrite, the user's own words (None), and poorer
    rewrites."""
    assert row.answer is not None
    words = row.answer.split()
    poorer = [" ".join(words[1:]), " ".join(words[:-1])] if len(words) > 1 else []
    return [row.answer, None, *poorer]


class JudgeAgreement(BaseModel):
    pairs: int  # passages that both judges scored
    unreadable: int
    failed: int
    share: float | None = None
    kappa: float | None = None
    kappa_low: float | None = None
    kappa_high: float | None = None
    right: float | None = None
    """Share of the pairs that the judge holds relevant: agreement by chance follows from it."""


def measure_agreement(passages: Sequence[JudgedPassage], min_relevance: float) -> JudgeAgreement:
    """Over the passages that both judges scored; the judge holds one relevant from `min_relevance`
    on."""
    counted = {str(number): each for number, each in enumerate(passages) if not each.failed}
    local = {
        key: _NEITHER if each.local is None else _label(each.local, BEST)
        for key, each in counted.items()
    }
    judge = {
        key: _label(each.judge, min_relevance)
        for key, each in counted.items()
        if each.judge is not None
    }
    found = agreement(local, judge, {key: each.group for key, each in counted.items()})
    low, high = (found and found.ci95) or (None, None)
    return JudgeAgreement(
        pairs=len(judge),
        unreadable=sum(each.unreadable is not None for each in counted.values()),
        failed=sum(each.failed is not None for each in passages),
        right=fmean(label == _RIGHT for label in judge.values()) if judge else None,
        share=found and found.share,
        kappa=found and found.kappa,
        kappa_low=low,
        kappa_high=high,
    )


def agreement_finding(found: JudgeAgreement) -> Finding:
    asked = Both(
        f"passages that good and poor rewrites find ({found.pairs:,})",
        f"好改写与较差改写检索到的首位资料（{found.pairs:,} 条）",
    )
    return Finding(
        title=Both(
            "The local judge in RL: agreement with the judge", "强化学习所用本地裁判与裁判的一致性"
        ),
        columns=(
            Both("agree", "一致率"),
            Both("Cohen's κ", "Cohen's κ"),
            Both("95% from", "95% 下限"),
            Both("to", "上限"),
            Both("right, by the judge", "裁判判为正确"),
        ),
        rows=(
            FindingRow(
                label=asked,
                values=(found.share, found.kappa, found.kappa_low, found.kappa_high, found.right),
            ),
        ),
    )


def describe_agreement(found: JudgeAgreement) -> str:
    if found.share is None:
        return "no pair that both judges have judged"
    share, passages = f"agreement {found.share:.0%}", f"{found.pairs:,} passages"
    if found.kappa is None:
        return f"{share}, but both said the same of all {passages}, which shows nothing"
    interval = "no interval: one group of questions"
    if found.kappa_low is not None:
        interval = f"95% {found.kappa_low:.2f} to {found.kappa_high:.2f}"
    unreadable = (
        f", {found.unreadable:,} of its answers without a verdict" if found.unreadable else ""
    )
    return f"{share}, κ {found.kappa:.2f} ({interval}) on {passages}{unreadable}"


def require_agreement(
    found: JudgeAgreement, local: LocalJudge, warn: Callable[[str], None]
) -> None:
    """Refuse RL with a judge whose agreement is too low or hardly known, or only warn
    (`judge.local.when_below`)."""
    hint = f"ask about more dev questions (judge.local.agreement_rows = {local.agreement_rows:,})"
    if found.pairs < local.min_agreement_pairs:
        flaw = f"fewer than judge.local.min_agreement_pairs = {local.min_agreement_pairs:,}"
    elif found.kappa_low is None or found.kappa_low < local.min_agreement:
        flaw = f"κ's 95% interval must begin at judge.local.min_agreement = {local.min_agreement:g} or above"
        if found.kappa is not None and found.kappa < local.min_agreement:
            hint = "train the local judge on passages (docs/how-to/answer-judge.md)"
    else:
        return
    text = f"judge.local: {local.model} and the judge: {describe_agreement(found)}: {flaw}; {hint}"
    if local.when_below == "stop":
        raise StageError(f"{text}; or leave judge.local out; or --set judge.local.when_below=go_on")
    warn(f"{text}; RL goes on with it, as judge.local.when_below says")


def require_answers(passages: Sequence[JudgedPassage], max_failed_share: float) -> None:
    """Stop where too many calls failed for a fair comparison."""
    failed = [passage.failed for passage in passages if passage.failed]
    require_few_failures(
        failed, len(passages), max_failed_share, stage="judge.local", things="passages"
    )


def count_retryable(passages: Iterable[JudgedPassage]) -> int:
    return sum(passage.failed in RETRYABLE_REASONS for passage in passages)


def _label(score: float, right_from: float) -> str:
    return _RIGHT if score >= right_from else _WRONG
