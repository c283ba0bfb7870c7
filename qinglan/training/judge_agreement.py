"""Does the judge of our own agree with the judge whose place it takes in RL? Measured on dev rows, before RL.

Both are asked about passages that poor rewrites of a dev question find: the user's own words, and the teacher's rewrite
without its first or last word. Ours says whether such a passage agrees with the reference, the other one whether it
answers the question. What a call failed for is left out and counted; an answer without a verdict is a disagreement.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from pydantic import BaseModel

from qinglan.clients.chat import ChatClient
from qinglan.clients.rag import RagClient
from qinglan.clients.row_batches import RETRYABLE_REASONS
from qinglan.config import LocalJudge, Profile
from qinglan.errors import CallError, StageError, TeacherError
from qinglan.recipes import Finding, FindingRow, RetrievalRecipe
from qinglan.recipes._verdicts import RIGHT_FROM, VerdictRecipe, reference_of
from qinglan.rows import Row
from qinglan.statistics import Agreement, agreement
from qinglan.text import Both

PASSAGES_A_ROW = 4
"""At most: as many as `_texts` gives."""
_UNREADABLE = frozenset({"verdict_unreadable", "truncated", "empty_answer", "answer_too_long"})
"""The judge's own failures: it answered, and gave no verdict."""
_RIGHT, _WRONG, _NEITHER = "right", "wrong", "neither"


class Pair(BaseModel):
    """A passage that was found for a question, and what both judges say of it."""

    row_id: str
    group: str
    question: str
    reference: str
    passage: str
    """Equal to the reference: only the judge is asked, as RL asks nobody."""
    local: float | None = None
    """0–5; None where there is no verdict."""
    judge: float | None = None
    """0–5; None where the call failed."""
    unreadable: str | None = None
    """Why the local judge's answer holds no verdict."""
    failed: str | None = None
    """Why a call failed."""

    @property
    def is_reference(self) -> bool:
        """Is there nothing to judge?"""
        return self.passage == self.reference

    @property
    def counts(self) -> bool:
        """Do both have an opinion on it that RL would ask for?"""
        return not self.is_reference and self.failed is None

    @property
    def said(self) -> str:
        """Of the local judge."""
        return _NEITHER if self.local is None else _word(self.local, RIGHT_FROM)


@dataclass(frozen=True)
class Judges:
    """Who is asked what."""

    profile: Profile
    recipe: RetrievalRecipe
    verdicts: VerdictRecipe
    local: ChatClient
    judge: ChatClient
    rag: RagClient
    """That keeps the best passage."""

    async def compare(self, rows: Sequence[Row]) -> list[Pair]:
        """Every pair of these rows, judged by both."""
        found = await asyncio.gather(*(self._pairs(row) for row in rows))
        return list(await asyncio.gather(*(self._judged(pair) for pairs in found for pair in pairs)))

    async def _pairs(self, row: Row) -> list[Pair]:
        about = {"row_id": row.id, "group": row.unit, "question": self.recipe.question_text(row)}
        try:
            best, *others = await asyncio.gather(*(self.rag.retrieve(row.query, text) for text in _texts(row)))
        except CallError as error:
            return [Pair(**about, reference="", passage="?", failed=error.reason) for _ in _texts(row)]
        reference = reference_of(best, row.gold_id, use_labels=self.profile.reward.use_labels)
        if not reference:
            return []
        passages = dict.fromkeys(found.first_passage for found in (best, *others) if found.first_passage)
        return [Pair(**about, reference=reference, passage=passage) for passage in passages]

    async def _judged(self, pair: Pair) -> Pair:
        if pair.failed:
            return pair
        messages = self.recipe.relevance_messages(pair.question, pair.passage, self.profile.tenant)
        try:
            known = {} if pair.is_reference else await self._verdict(pair)
            answer = await self.judge.ask(messages, self.recipe.parse_judge, self.recipe.JUDGE_SCHEMA)
        except CallError as error:
            return pair.model_copy(update={"failed": error.reason})
        return pair.model_copy(update={**known, "judge": answer.value})

    async def _verdict(self, pair: Pair) -> dict[str, float | str]:
        messages = self.verdicts.verdict_messages(pair.question, pair.reference, pair.passage, self.profile.tenant)
        try:
            return {"local": (await self.local.ask(messages, self.verdicts.verdict_score)).value}
        except TeacherError as error:
            if error.reason not in _UNREADABLE:
                raise
            return {"unreadable": error.reason}


def drawn(rows: Iterable[Row], count: int) -> list[Row]:
    """So many dev rows with a rewrite of the teacher's, by their ids, which are hashes."""
    usable = (row for row in rows if row.split == "dev" and row.status == "ok" and row.answer)
    return sorted(usable, key=lambda row: row.id)[:count]


def _texts(row: Row) -> list[str | None]:
    """What is retrieved with: the teacher's rewrite, the user's own words (None), and poorer rewrites."""
    assert row.answer is not None
    words = row.answer.split()
    poorer = [" ".join(words[1:]), " ".join(words[:-1])] if len(words) > 1 else []
    return [row.answer, None, *poorer]


class Measured(BaseModel):
    """The figures of a comparison."""

    pairs: int
    """That both judged and RL would ask about."""
    unreadable: int
    failed: int
    share: float | None = None
    kappa: float | None = None
    kappa_low: float | None = None
    kappa_high: float | None = None
    right: float | None = None
    """Share of these that the judge holds relevant: what agreement by chance comes from."""
    references: int = 0
    reference_right: float | None = None
    """Share of the references that the judge holds relevant; RL takes all of them for right."""

    @property
    def metrics(self) -> dict[str, float]:
        """For the tracker."""
        return {name: float(value) for name, value in self if value is not None}


def measured(pairs: Sequence[Pair], min_relevance: float) -> Measured:
    """Over the pairs that both have judged.

    Args:
        min_relevance: from which score on the judge holds a passage relevant.
    """
    told = {f"{number}": pair for number, pair in enumerate(pairs) if pair.counts}
    strong = {key: _word(pair.judge, min_relevance) for key, pair in told.items() if pair.judge is not None}
    one = agreement({key: pair.said for key, pair in told.items()}, strong, {k: p.group for k, p in told.items()})
    references = [pair.judge for pair in pairs if pair.is_reference and pair.judge is not None]
    return Measured(
        pairs=len(strong),
        unreadable=sum(pair.unreadable is not None for pair in told.values()),
        failed=sum(pair.failed is not None for pair in pairs),
        right=fmean(word == _RIGHT for word in strong.values()) if strong else None,
        references=len(references),
        reference_right=fmean(score >= min_relevance for score in references) if references else None,
        **(_figures(one) if one else {}),
    )


def _figures(found: Agreement) -> dict[str, float | None]:
    low, high = found.ci95 or (None, None)
    return {"share": found.share, "kappa": found.kappa, "kappa_low": low, "kappa_high": high}


def finding(found: Measured) -> Finding:
    """For the report."""
    asked = Both(
        f"passages that poor rewrites find ({found.pairs:,})", f"较差改写检索到的首位资料（{found.pairs:,} 条）"
    )
    references = Both(
        f"the references themselves ({found.references:,}), taken for right",
        f"参照资料本身（{found.references:,} 条，一律视为正确）",
    )
    return Finding(
        title=Both("The local judge in RL: agreement with the judge", "强化学习所用本地裁判与裁判的一致性"),
        columns=(
            Both("agree", "一致率"),
            Both("Cohen's κ", "Cohen's κ"),
            Both("95% from", "95% 下限"),
            Both("to", "上限"),
            Both("right, by the judge", "裁判判为正确"),
        ),
        rows=(
            FindingRow(label=asked, values=(found.share, found.kappa, found.kappa_low, found.kappa_high, found.right)),
            FindingRow(label=references, values=(found.reference_right, None, None, None, found.reference_right)),
        ),
    )


def sentence(found: Measured) -> str:
    """The result in a line."""
    if found.share is None:
        return "no pair that both judges have judged"
    if found.kappa is None:
        return (
            f"agreement {found.share:.0%}, but both said the same of all {found.pairs:,} passages, which shows nothing"
        )
    interval = "" if found.kappa_low is None else f" ({found.kappa_low:.2f} to {found.kappa_high:.2f})"
    unreadable = f", {found.unreadable:,} of its answers without a verdict" if found.unreadable else ""
    return f"agreement {found.share:.0%}, κ {found.kappa:.2f}{interval} on {found.pairs:,} passages{unreadable}"


def require_agreement(found: Measured, local: LocalJudge, warn: Callable[[str], None]) -> None:
    """May RL ask this judge?

    Args:
        warn: is told where the profile goes on all the same.

    Raises:
        StageError: it agrees too little, and the profile says stop.
    """
    if found.kappa is not None and found.kappa >= local.min_agreement:
        return
    text = f"judge.local: {local.model} and the judge: {sentence(found)}, below judge.local.min_agreement = "
    text += f"{local.min_agreement:g}"
    if local.when_below == "stop":
        raise StageError(f"{text}; RL with the judge: leave judge.local out; or --set judge.local.when_below=go_on")
    warn(f"{text}; RL goes on with it, as judge.local.when_below says")


def require_answers(pairs: Sequence[Pair], max_failed_share: float) -> None:
    """Stop where too many calls failed for a fair comparison.

    Raises:
        StageError: with the reasons.
    """
    failed = Counter(pair.failed for pair in pairs if pair.failed)
    if failed.total() > max_failed_share * len(pairs):
        reasons = ", ".join(f"{reason} {count}" for reason, count in failed.most_common())
        raise StageError(
            f"judge.local: calls failed for {failed.total()} of {len(pairs)} passages ({reasons}), more than "
            f"evaluate.max_failed_share = {max_failed_share:.0%} allows; mend the service and run again"
        )


def retryable(pairs: Iterable[Pair]) -> int:
    """Failed calls that another run may mend."""
    return sum(pair.failed in RETRYABLE_REASONS for pair in pairs)


def _word(score: float | None, right_from: float) -> str:
    return _RIGHT if score is not None and score >= right_from else _WRONG
