"""The meaning of failed calls, empty texts and missing texts, for everything that is graded.

- A failed call is not a number. Its error stands in `Grade.failures`, and its part of the grade
  stays None. Validation keeps the reason with the row, and RL learns nothing from the sample.
  Evaluation leaves an arm's failed retrieval out of that arm's means and of every comparison with
  it; where the judge failed, the question has a score for no arm.
- A model that answered with nothing gave an empty text. It retrieves nothing, has the judge's
  lowest score without the judge being asked, and earns the lowest reward.
- A text that is missing because a call failed is not graded: nothing is known of it.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Sequence
from typing import Any

from qinglan.clients.row_batches import tolerable_losses
from qinglan.errors import CallError, StageError
from qinglan.grading.judge_answers import CONTRADICTORY

EMPTY_ANSWER = "empty_answer"
"""The reason of a row or an arm's entry whose model answered with nothing."""
LOWEST_JUDGE_SCORE = 0.0
"""The judge's score of an empty text."""
LOWEST_REWARD = -1.0
"""The reward of an empty text."""
_UNREADABLE_REASONS = frozenset({"judge_unreadable", CONTRADICTORY})


async def settle(*calls: Awaitable[Any]) -> list[Any]:
    """The results of all calls, in their order; a failed call's error stands in its place.

    All calls end before any other error is raised: an answer in flight is paid for and must reach
    the ledger.
    """
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, CallError):
            raise result
    return results


def require_few_failures(
    reasons: Sequence[str | None],
    total: int,
    max_failed_share: float,
    *,
    stage: str = "evaluate",
    things: str = "questions",
) -> None:
    """Raise StageError, with the reasons, where too many calls failed for a fair comparison."""
    if len(reasons) <= tolerable_losses(total, max_failed_share):
        return
    counts = Counter(reasons).most_common()
    listed = ", ".join(f"{reason} {count}" for reason, count in counts)
    message = (
        f"{stage}: calls failed for {len(reasons)} of {total} {things} ({listed}), more than "
        f"evaluate.max_failed_share = {max_failed_share:.0%} allows; "
        "repair the service and run again"
    )
    if _UNREADABLE_REASONS.intersection(reasons):
        message += (
            "; what the judge answered is kept, so that for other answers judge.model or "
            "evaluate.seed must change"
        )
    raise StageError(message)
