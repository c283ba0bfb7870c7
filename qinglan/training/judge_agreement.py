"""The local judge's agreement with the judge that it replaces in RL, measured on dev rows before
RL.

Both are asked about passages that the teacher's rewrite and poorer ones find. A failed call is left
out and counted; an answer without a verdict is a disagreement.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple, Self

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
"""Passages of a row at most: as many as `_texts` gives."""
_UNREADABLE = frozenset(
    {"verdict_unreadable", CONTRADICTORY, "truncated", "empty_answer", "answer_too_long"}
)
"""Reasons for which an answer holds no verdict; other failures are those of the call."""
_RIGHT = "right"
_WRONG = "wrong"
_NEITHER = "neither"


class JudgedPassage(BaseModel):
    """A passage that was found for a question, and the scores of both judges."""

    row_id: str
    group: str
    question: str
    passage: str
    local: float | None = None
    """Local judge's score, 0 to 5; None where its answer holds no verdict."""
    judge: float | None = None
    """Judge's score, 0 to 5; None where the call failed."""
    unreadable: str | None = None
    """Reason why the local judge's answer holds no verdict."""
    failed: str | None = None
    """Reason why a call failed."""

    def with_failure(self, reason: str) -> Self:
        return self.model_copy(update={"failed": reason})

    def with_verdicts(self, local: "LocalVerdict", judge: float) -> Self:
        scores = {"local": local.score, "unreadable": local.unreadable, "judge": judge}
        return self.model_copy(update=scores)


class LocalVerdict(NamedTuple):
    """The local judge's score, or the reason why its answer holds none."""

    score: float | None = None
    unreadable: str | None = None


@dataclass(frozen=True)
class JudgeComparison:
    """Asks both judges about the passages that rows find."""

    profile: Profile
    recipe: Recipe
    grader: RetrievalGrader
    verdicts: PassageJudge
    local: ChatClient
    judge: ChatClient
    rag: RagClient
    """A client that keeps the best passage."""

    async def compare(self, rows: Sequence[Row]) -> list[JudgedPassage]:
        groups = groups_of(rows)
        pairs_of_rows = await asyncio.gather(*(self._pairs(row, groups[row.id]) for row in rows))
        judging: list[Awaitable[JudgedPassage]] = []
        for row, pairs in zip(rows, pairs_of_rows, strict=True):
            judging.extend(self._judged(row, pair) for pair in pairs)
        return list(await asyncio.gather(*judging))

    async def _pairs(self, row: Row, group: str) -> list[JudgedPassage]:
        """The different passages that a row's texts find, not yet judged."""
        about = {"row_id": row.id, "group": group, "question": self.recipe.question_text(row)}
        texts = _texts(row)
        try:
            retrieved = await asyncio.gather(
                *(self.rag.retrieve(row.query, text) for text in texts)
            )
        except CallError as error:
            # As many as there would have been, for the share of failures.
            return [JudgedPassage(**about, passage="?", failed=error.reason) for _ in texts]
        passages = dict.fromkeys(
            result.first_passage for result in retrieved if result.first_passage
        )
        return [JudgedPassage(**about, passage=passage) for passage in passages]

    async def _judged(self, row: Row, pair: JudgedPassage) -> JudgedPassage:
        if pair.failed:
            return pair
        messages = self.grader.relevance_messages(row, pair.passage, self.profile.tenant)
        try:
            local = await self._local_verdict(pair)
            answer = await self.judge.ask(
                messages, self.grader.parse_relevance, self.grader.relevance_schema
            )
        except CallError as error:
            return pair.with_failure(error.reason)
        return pair.with_verdicts(local, answer.value)

    async def _local_verdict(self, pair: JudgedPassage) -> LocalVerdict:
        messages = self.verdicts.verdict_messages(pair.question, pair.passage, self.profile.tenant)
        try:
            answer = await self.local.ask(messages, self.verdicts.verdict_score)
        except TeacherError as error:
            if error.reason not in _UNREADABLE:
                raise
            return LocalVerdict(unreadable=error.reason)
        return LocalVerdict(answer.value)


def choose_rows(rows: Iterable[Row], count: int) -> list[Row]:
    """So many dev rows with a rewrite of the teacher's, by their ids, which are hashes."""
    usable = (row for row in rows if row.split == "dev" and row.status == "ok" and row.answer)
    return sorted(usable, key=lambda row: row.id)[:count]


def _texts(row: Row) -> list[str | None]:
    """Texts to retrieve with: the teacher's rewrite, the user's own words (None), and poorer
    rewrites."""
    assert row.answer is not None
    texts = [row.answer, None]
    words = row.answer.split()
    if len(words) > 1:
        texts += [" ".join(words[1:]), " ".join(words[:-1])]
    return texts


class JudgeAgreement(BaseModel):
    """Counts of the passages, and how far both judges agree on them."""

    pairs: int
    """Number of passages that both judges scored."""
    unreadable: int
    failed: int
    share: float | None = None
    kappa: float | None = None
    kappa_low: float | None = None
    kappa_high: float | None = None
    right: float | None = None
    """Share of the pairs that the judge holds relevant: agreement by chance follows from it."""


def measure_agreement(passages: Sequence[JudgedPassage], min_relevance: float) -> JudgeAgreement:
    """The agreement over the passages that both judges scored; the judge holds one relevant from
    `min_relevance` on."""
    local_labels: dict[str, str] = {}
    judge_labels: dict[str, str] = {}
    groups: dict[str, str] = {}
    unreadable_count = 0
    for number, passage in enumerate(passages):
        if passage.failed:
            continue
        key = str(number)
        groups[key] = passage.group
        local_labels[key] = _NEITHER if passage.local is None else _label(passage.local, BEST)
        if passage.judge is not None:
            judge_labels[key] = _label(passage.judge, min_relevance)
        if passage.unreadable is not None:
            unreadable_count += 1
    result = JudgeAgreement(
        pairs=len(judge_labels),
        unreadable=unreadable_count,
        failed=sum(passage.failed is not None for passage in passages),
    )
    if judge_labels:
        result.right = fmean(label == _RIGHT for label in judge_labels.values())
    measured = agreement(local_labels, judge_labels, groups)
    if measured is not None:
        result.share = measured.share
        result.kappa = measured.kappa
        if measured.ci95:
            result.kappa_low, result.kappa_high = measured.ci95
    return result


def agreement_finding(measured: JudgeAgreement) -> Finding:
    """The agreement as a table of the report."""
    label = Both(
        f"passages that good and poor rewrites find ({measured.pairs:,})",
        f"好改写与较差改写检索到的首位资料（{measured.pairs:,} 条）",
    )
    values = (
        measured.share,
        measured.kappa,
        measured.kappa_low,
        measured.kappa_high,
        measured.right,
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
        rows=(FindingRow(label=label, values=values),),
    )


def describe_agreement(measured: JudgeAgreement) -> str:
    """The agreement in words for the log and for messages."""
    if measured.share is None:
        return "no pair that both judges have judged"
    share = f"agreement {measured.share:.0%}"
    passages = f"{measured.pairs:,} passages"
    if measured.kappa is None:
        return f"{share}, but both said the same of all {passages}, which shows nothing"
    interval = "no interval: one group of questions"
    if measured.kappa_low is not None:
        interval = f"95% {measured.kappa_low:.2f} to {measured.kappa_high:.2f}"
    text = f"{share}, κ {measured.kappa:.2f} ({interval}) on {passages}"
    if measured.unreadable:
        text += f", {measured.unreadable:,} of its answers without a verdict"
    return text


def require_agreement(
    measured: JudgeAgreement, local: LocalJudge, warn: Callable[[str], None]
) -> None:
    """Refuse RL with a judge whose agreement is too low or hardly known, or only warn
    (`judge.local.when_below`)."""
    hint = f"ask about more dev questions (judge.local.agreement_rows = {local.agreement_rows:,})"
    if measured.pairs < local.min_agreement_pairs:
        flaw = f"fewer than judge.local.min_agreement_pairs = {local.min_agreement_pairs:,}"
    elif measured.kappa_low is None or measured.kappa_low < local.min_agreement:
        flaw = (
            "κ's 95% interval must begin at "
            f"judge.local.min_agreement = {local.min_agreement:g} or above"
        )
        # More questions would only narrow the interval around a value that is too low.
        if measured.kappa is not None and measured.kappa < local.min_agreement:
            hint = "train the local judge on passages (docs/how-to/answer-judge.md)"
    else:
        return
    agreed = describe_agreement(measured)
    text = f"judge.local: {local.model} and the judge: {agreed}: {flaw}; {hint}"
    if local.when_below == "stop":
        raise StageError(f"{text}; or leave judge.local out; or --set judge.local.when_below=go_on")
    warn(f"{text}; RL goes on with it, as judge.local.when_below says")


def require_answers(passages: Sequence[JudgedPassage], max_failed_share: float) -> None:
    """Stop where too many calls failed for a fair comparison."""
    reasons = [passage.failed for passage in passages if passage.failed]
    require_few_failures(
        reasons, len(passages), max_failed_share, stage="judge.local", things="passages"
    )


def count_retryable(passages: Iterable[JudgedPassage]) -> int:
    """The number of passages whose calls failed for a reason that may pass."""
    return sum(passage.failed in RETRYABLE_REASONS for passage in passages)


def _label(score: float, right_from: float) -> str:
    return _RIGHT if score >= right_from else _WRONG
