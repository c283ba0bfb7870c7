"""Does a RAG keep the contract, above all: does it retrieve by `rewritten_query`? Three probes show
it, or a fourth.

Asked are r(A), r(A, rewritten B) and r(B, rewritten B). Where the rewrite is honoured, the last two
agree; where it is ignored, the first two do. The control is not the plain r(B), as some services
rewrite that by themselves. Passages are compared by their content, as some services make up new ids
every time. docs/how-to/rag.md explains each finding. Where `rag.mapping` sends the rewrite as the
query, the same probes show that another text gets another answer.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any, Literal, get_args

import httpx2

from qinglan.clients.limits import BodyTooLargeError, receive
from qinglan.clients.rag import Passage, address_of, authorization, read_passages, request_body
from qinglan.config import Rag, RagPreset, uses_proxy
from qinglan.errors import ConfigError, RetrievalError
from qinglan.rows import normalise
from qinglan.text import shown, without_texts

Ask = Callable[[str, str | None], list[Passage]]
"""Query and rewrite to passages."""
Scores = dict[str, float]
"""Content to score: what two answers are compared by."""

GUIDE = "docs/how-to/rag.md"
FALLBACK = ("益生菌什么时候吃效果最好", "高血压患者日常饮食要注意什么")
_MAX_QUESTIONS = 50
_SAME = 0.8
"""Share of common passages from which two answers count as the same but for noise, as of an
approximate index."""
_NEAR = 0.75
_SCORE_NOISE = 0.02
_CLEAR_GAP = 0.05


@dataclass(frozen=True)
class ContractFinding:
    kind: Literal[
        "honoured", "ignored", "undecidable", "unstable", "reranked_by_query", "mixed", "positions", "ids_missing",
        "ids_change",
    ]  # fmt: skip
    text: str


_HONOURED = ContractFinding("honoured", "`rewritten_query` is honoured")
_SEARCHED = ContractFinding("honoured", "another text gets another answer")
_POSITIONS = ContractFinding(
    "positions",
    "rag.mapping.score_as is `rank`, so that the best passage of any text has the score 1, and only gold documents "
    f"tell good rewrites from bad ones ({GUIDE})",
)
_IGNORED = ContractFinding(
    "ignored",
    "gives the same answer with and without `rewritten_query`: it ignores the field, or reranks by `query`, and no "
    f"rewrite could ever help; {GUIDE} shows what to change in the service, and how to send the rewrite as the query",
)
_UNSTABLE = ContractFinding(
    "unstable",
    "answers one question differently each time, so it can't be checked whether a rewrite counts, and scores are "
    "noise; look for sampling in the service, such as a rewriting at a temperature above 0",
)
_RERANKED = ContractFinding(
    "reranked_by_query",
    "retrieves by `rewritten_query` but scores the passages by another text, most likely by `query`, so that a better "
    f"rewrite can hardly show; rerank by the rewrite ({GUIDE})",
)
_MIXED = ContractFinding(
    "mixed",
    "given `rewritten_query`, answers neither as for query nor as for rewrite: it seems to mix them, to rerank by "
    f"`query` or to rewrite once more, which blurs what a rewrite is worth ({GUIDE})",
)


def probe_rag(rag: Rag, tenant_id: str, questions: Iterable[str] = ()) -> list[ContractFinding]:
    """Ask the service three or four times, with two of the questions, and say what was found.

    Raises ConfigError where it can't be reached, RetrievalError where it refuses or an answer
    breaks the contract.
    """
    return examine(_asking(rag, tenant_id), rag, *pair_of(questions))


def find_preset(rag: Rag, tenant_id: str, questions: Iterable[str] = ()) -> RagPreset | None:
    """The first preset by which the address gives passages; each is asked once. Raises as
    `probe_rag` does."""
    question, _ = pair_of(questions)
    for preset in get_args(RagPreset):
        tried = Rag.model_validate(rag.model_dump(exclude={"mapping"}) | {"preset": preset})
        with suppress(RetrievalError):
            if _asking(tried, tenant_id)(question, None):
                return tried.preset
    return None


def _asking(rag: Rag, tenant_id: str) -> Ask:
    url = address_of(rag, rag.url)
    verify = (
        httpx2.create_ssl_context()
    )  # loading the certificates takes 50 ms, and each probe has a client

    async def post(body: dict[str, Any]) -> httpx2.Response:
        async with httpx2.AsyncClient(
            timeout=rag.timeout_s, trust_env=uses_proxy(url), verify=verify
        ) as http:
            request = http.build_request("POST", url, json=body, headers=authorization(rag))
            return await receive(http.send(request, stream=True), request)

    def ask(query: str, rewritten_query: str | None) -> list[Passage]:
        try:
            response = asyncio.run(post(request_body(rag, tenant_id, query, rewritten_query)))
        except BodyTooLargeError as error:
            raise RetrievalError(
                f"rag {url}: {error}; send fewer or shorter passages", "rag_bad_answer"
            ) from error
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            said = str(error) or type(error).__name__
            raise ConfigError(
                f"rag.url can't be reached: {said}; is it up, is the address right?"
            ) from error
        asked = (query, rewritten_query or "")
        if response.status_code >= 300:
            new_field = rewritten_query is not None and rag.mapping.takes_rewrite
            said = without_texts(response.text, asked)
            raise RetrievalError(
                _refusal(url, response.status_code, said, new_field), "rag_refused"
            )
        return read_passages(
            rag, response.content, url, response.headers.get("content-type", ""), asked
        )

    return ask


def pair_of(questions: Iterable[str]) -> tuple[str, str]:
    """The first question and the one least like it among the first 50; questions of our own where
    there are no two."""
    distinct: dict[str, str] = {}
    for text in islice(questions, _MAX_QUESTIONS):
        distinct.setdefault(normalise(text), text)
    distinct.pop("", None)
    if len(distinct) < 2:
        return FALLBACK
    first, *others = distinct
    return distinct[first], distinct[min(others, key=lambda other: _overlap(first, other))]


def examine(ask: Ask, rag: Rag, a: str, b: str) -> list[ContractFinding]:
    """What the answers to two questions show; the finding about `rewritten_query` comes first."""
    answers = [ask(a, None), ask(a, b), ask(b, b)]
    plain, rewritten, control = map(_scores, answers)
    about_rewrite = _compare(plain, rewritten, control, lambda: _scores(ask(a, None)))
    if about_rewrite is _HONOURED and not rag.mapping.takes_rewrite:
        about_rewrite = _SEARCHED
    return [
        about_rewrite,
        *([_POSITIONS] if rag.mapping.score_as == "rank" else []),
        *_id_findings(answers),
    ]


def _compare(
    plain: Scores, rewritten: Scores, control: Scores, repeat: Callable[[], Scores]
) -> ContractFinding:
    if not (plain or rewritten or control):
        return ContractFinding(
            "undecidable",
            "nothing was recalled for the probes, so it can't be checked whether a rewrite counts",
        )
    if (likeness := _likeness(rewritten, plain, control)) is None:
        return ContractFinding(
            "undecidable",
            f"both probes recall the same, so it can't be checked with them whether a rewrite counts; see {GUIDE}",
        )
    by_plain, by_control = likeness
    if by_control >= _NEAR and _gap(rewritten, control) <= _SCORE_NOISE:
        return _HONOURED
    if by_plain >= _NEAR and by_control <= 1 - _NEAR:
        return _IGNORED
    again = repeat()
    if _overlap(plain, again) < _SAME or _gap(plain, again) > _CLEAR_GAP:
        return _UNSTABLE
    noise = _SCORE_NOISE + _gap(plain, again)
    if by_control >= _NEAR and _gap(rewritten, control) <= noise:
        return _HONOURED
    keeps_plain_scores = bool(rewritten.keys() & plain.keys()) and _gap(rewritten, plain) <= noise
    other_scores = _gap(rewritten, control) > noise
    return _RERANKED if other_scores and (by_control >= _NEAR or keeps_plain_scores) else _MIXED


def _likeness(answer: Scores, plain: Scores, control: Scores) -> tuple[float, float] | None:
    """How near an answer is to each of two others: 1 the same, 0 no nearer than they are to each
    other.

    None where the two are the same. A small knowledge base recalls all it has for any question:
    then the scores decide.
    """
    apart = _overlap(plain, control)
    if apart < _SAME:
        return (_overlap(answer, plain) - apart) / (1 - apart), (
            _overlap(answer, control) - apart
        ) / (1 - apart)
    gap = _gap(plain, control)
    return (
        (1 - _gap(answer, plain) / gap, 1 - _gap(answer, control) / gap)
        if gap > _CLEAR_GAP
        else None
    )


def _id_findings(answers: Sequence[Sequence[Passage]]) -> Iterator[ContractFinding]:
    passages = [passage for answer in answers for passage in answer]
    if nameless := sum(passage.id is None for passage in passages):
        share = (
            "no passage has"
            if nameless == len(passages)
            else f"{nameless} of {len(passages)} passages lack"
        )
        yield ContractFinding(
            "ids_missing",
            f"{share} an `id`: gold top-1 can't be measured; send the document's id, or label nothing",
        )
    named: list[dict[str, set[str]]] = [defaultdict(set) for _ in answers]
    for ids_by_content, answer in zip(named, answers, strict=True):
        for passage in answer:
            if passage.id is not None:
                ids_by_content[passage.content].add(passage.id)
    if any(
        one[text].isdisjoint(other[text])
        for one, other in combinations(named, 2)
        for text in one.keys() & other
    ):
        yield ContractFinding(
            "ids_change",
            "a passage gets another `id` in every answer: gold top-1 can't be measured; send the document's own id",
        )


def _scores(passages: Iterable[Passage]) -> Scores:
    return {passage.content: passage.reranker_score for passage in passages}


def _overlap(one: Iterable[str], other: Iterable[str]) -> float:
    """Share of what is in both of all that is in either; 1 for nothing and nothing."""
    a, b = set(one), set(other)
    return len(a & b) / len(a | b) if a or b else 1.0


def _gap(one: Scores, other: Scores) -> float:
    """The largest difference in score of a common passage; 0 where none is common."""
    return max(
        (abs(one[content] - other[content]) for content in one.keys() & other.keys()), default=0.0
    )


def _refusal(url: str, status: int, said: str, with_rewrite: bool) -> str:
    hint = "see the service's own log" if status >= 500 else f"compare what it expects with {GUIDE}"
    if with_rewrite and status in (400, 422):  # the request before, without the field, went well
        hint = f"it refuses the field `rewritten_query`, see {GUIDE}"
    elif status in (401, 403):
        hint = "check the variable that rag.api_key_env names"
    elif status in (404, 405):
        hint = f"rag.url needs the whole address that takes a POST, with its path ({GUIDE})"
    elif status == 429:
        hint = "ask the service for a higher limit, or come back later"
    return f"rag {url}: answers HTTP {status}: {shown(said, 120)}; {hint}"
