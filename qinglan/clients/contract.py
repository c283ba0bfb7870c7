"""Does a RAG keep the contract, above all: does it retrieve by `rewritten_query`? Three probes show
it, or a fourth.

The probes are r(A), r(A, rewritten B) and r(B, rewritten B). Where the rewrite is honoured, the
last two agree; where it is ignored, the first two do. The control is not the plain r(B), as some
services rewrite that by themselves. Passages are compared by their content, as some services make
up new ids every time. docs/how-to/rag.md explains each finding. Where `rag.mapping` sends the
rewrite as the query, the same probes show that another text gets another answer.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any, Literal, NamedTuple, get_args

import httpx2

from qinglan.clients.limits import BodyTooLargeError, receive
from qinglan.clients.rag import address_of, authorization, request_body
from qinglan.clients.rag.answers import Passage, read_passages
from qinglan.config import Rag, RagPreset, uses_proxy
from qinglan.errors import ConfigError, RetrievalError
from qinglan.rows import normalise
from qinglan.text import shown, without_texts

Ask = Callable[[str, str | None], list[Passage]]
"""Query and rewrite to passages."""
Scores = dict[str, float]
"""Score by content: two answers are compared by it."""

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
    """One thing that the probes show of a service."""

    kind: Literal[
        "honoured",
        "ignored",
        "undecidable",
        "unstable",
        "reranked_by_query",
        "mixed",
        "positions",
        "ids_missing",
        "ids_change",
    ]
    text: str


_HONOURED = ContractFinding("honoured", "`rewritten_query` is honoured")
_SEARCHED = ContractFinding("honoured", "another text gets another answer")
_POSITIONS = ContractFinding(
    "positions",
    "rag.mapping.score_as is `rank`, so that the best passage of any text has the score 1, and "
    f"only gold documents tell good rewrites from bad ones ({GUIDE})",
)
_NOTHING_RECALLED = ContractFinding(
    "undecidable",
    "nothing was recalled for the probes, so it can't be checked whether a rewrite counts",
)
_ALL_THE_SAME = ContractFinding(
    "undecidable",
    "both probes recall the same, so it can't be checked with them whether a rewrite counts; "
    f"see {GUIDE}",
)
_IGNORED = ContractFinding(
    "ignored",
    "gives the same answer with and without `rewritten_query`: it ignores the field, or reranks "
    f"by `query`, and no rewrite could ever help; {GUIDE} shows what to change in the service, and "
    "how to send the rewrite as the query",
)
_UNSTABLE = ContractFinding(
    "unstable",
    "answers one question differently each time, so it can't be checked whether a rewrite counts, "
    "and scores are noise; look for sampling in the service, such as a rewriting at a temperature "
    "above 0",
)
_RERANKED = ContractFinding(
    "reranked_by_query",
    "retrieves by `rewritten_query` but scores the passages by another text, most likely by "
    f"`query`, so that a better rewrite can hardly show; rerank by the rewrite ({GUIDE})",
)
_MIXED = ContractFinding(
    "mixed",
    "given `rewritten_query`, answers neither as for query nor as for rewrite: it seems to mix "
    "them, to rerank by `query` or to rewrite once more, which blurs what a rewrite is worth "
    f"({GUIDE})",
)


def probe_rag(rag: Rag, tenant_id: str, questions: Iterable[str] = ()) -> list[ContractFinding]:
    """Ask the service three or four times, with two of the questions, and say what was found.

    Raises ConfigError where it can't be reached, RetrievalError where it refuses or an answer
    breaks the contract.
    """
    first, second = pair_of(questions)
    return examine(_asking(rag, tenant_id), rag, first, second)


def find_preset(rag: Rag, tenant_id: str, questions: Iterable[str] = ()) -> RagPreset | None:
    """The first preset by which the address gives passages; each is asked once.

    Raises as `probe_rag` does.
    """
    question, _ = pair_of(questions)
    for preset in get_args(RagPreset):
        settings = rag.model_dump(exclude={"mapping"}) | {"preset": preset}
        candidate = Rag.model_validate(settings)
        with suppress(RetrievalError):
            if _asking(candidate, tenant_id)(question, None):
                return candidate.preset
    return None


def _asking(rag: Rag, tenant_id: str) -> Ask:
    """A function that asks the service over HTTP."""
    url = address_of(rag, rag.url)
    # Loading the certificates takes 50 ms, and each probe has a client.
    verify = httpx2.create_ssl_context()

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
            message = f"rag {url}: {error}; send fewer or shorter passages"
            raise RetrievalError(message, "rag_bad_answer") from error
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            said = str(error) or type(error).__name__
            raise ConfigError(
                f"rag.url can't be reached: {said}; is it up, is the address right?"
            ) from error
        texts = (query, rewritten_query or "")
        if response.status_code >= 300:
            with_rewrite = rewritten_query is not None and rag.mapping.takes_rewrite
            said = without_texts(response.text, texts)
            raise RetrievalError(
                _refusal(url, response.status_code, said, with_rewrite), "rag_refused"
            )
        content_type = response.headers.get("content-type", "")
        return read_passages(rag, response.content, url, content_type, texts)

    return ask


def pair_of(questions: Iterable[str]) -> tuple[str, str]:
    """The first question and the one least like it among the first 50.

    They are questions of our own where there are no two.
    """
    texts: dict[str, str] = {}
    for text in islice(questions, _MAX_QUESTIONS):
        texts.setdefault(normalise(text), text)
    texts.pop("", None)
    if len(texts) < 2:
        return FALLBACK
    first, *candidates = texts
    least_alike = min(candidates, key=lambda candidate: _overlap(first, candidate))
    return texts[first], texts[least_alike]


def examine(ask: Ask, rag: Rag, a: str, b: str) -> list[ContractFinding]:
    """The findings about two questions' answers; the one about `rewritten_query` comes first."""
    answers = [ask(a, None), ask(a, b), ask(b, b)]
    plain, rewritten, control = map(_scores, answers)
    about_rewrite = _compare(plain, rewritten, control, lambda: _scores(ask(a, None)))
    if about_rewrite is _HONOURED and not rag.mapping.takes_rewrite:
        about_rewrite = _SEARCHED
    findings = [about_rewrite]
    if rag.mapping.score_as == "rank":
        findings.append(_POSITIONS)
    findings.extend(_id_findings(answers))
    return findings


def _compare(
    plain: Scores, rewritten: Scores, control: Scores, repeat: Callable[[], Scores]
) -> ContractFinding:
    """The finding about the rewrite.

    Args:
        plain: r(A).
        rewritten: r(A, rewritten B).
        control: r(B, rewritten B).
        repeat: asks r(A) once more, where the three don't suffice.
    """
    if not (plain or rewritten or control):
        return _NOTHING_RECALLED
    likeness = _likeness(rewritten, plain, control)
    if likeness is None:
        return _ALL_THE_SAME
    is_near_control = likeness.to_control >= _NEAR
    gap_to_control = _gap(rewritten, control)
    if is_near_control and gap_to_control <= _SCORE_NOISE:
        return _HONOURED
    if likeness.to_plain >= _NEAR and likeness.to_control <= 1 - _NEAR:
        return _IGNORED
    again = repeat()
    gap_of_repeat = _gap(plain, again)
    if _overlap(plain, again) < _SAME or gap_of_repeat > _CLEAR_GAP:
        return _UNSTABLE
    # Scores that differ by no more than those of the same question do are the same.
    noise = _SCORE_NOISE + gap_of_repeat
    has_scores_of_control = gap_to_control <= noise
    if is_near_control and has_scores_of_control:
        return _HONOURED
    has_common_passages = bool(rewritten.keys() & plain.keys())
    keeps_plain_scores = has_common_passages and _gap(rewritten, plain) <= noise
    if not has_scores_of_control and (is_near_control or keeps_plain_scores):
        return _RERANKED
    return _MIXED


class _Likeness(NamedTuple):
    """Nearness of an answer to two others: 1 the same, 0 no nearer than they are to each other."""

    to_plain: float
    to_control: float


def _likeness(answer: Scores, plain: Scores, control: Scores) -> _Likeness | None:
    """The likeness of an answer to the plain one and to the control; None where these two are the
    same.

    A small knowledge base recalls all it has for any question: then the scores decide.
    """
    apart = _overlap(plain, control)
    if apart < _SAME:
        return _Likeness(
            to_plain=(_overlap(answer, plain) - apart) / (1 - apart),
            to_control=(_overlap(answer, control) - apart) / (1 - apart),
        )
    gap = _gap(plain, control)
    if gap <= _CLEAR_GAP:
        return None
    return _Likeness(
        to_plain=1 - _gap(answer, plain) / gap, to_control=1 - _gap(answer, control) / gap
    )


def _id_findings(answers: Sequence[Sequence[Passage]]) -> Iterator[ContractFinding]:
    passages = [passage for answer in answers for passage in answer]
    nameless = sum(passage.id is None for passage in passages)
    if nameless:
        share = f"{nameless} of {len(passages)} passages lack"
        if nameless == len(passages):
            share = "no passage has"
        yield ContractFinding(
            "ids_missing",
            f"{share} an `id`: gold top-1 can't be measured; send the document's id, or label "
            "nothing",
        )
    ids_by_answer = [_ids_by_content(answer) for answer in answers]
    if any(_have_other_ids(first, second) for first, second in combinations(ids_by_answer, 2)):
        yield ContractFinding(
            "ids_change",
            "a passage gets another `id` in every answer: gold top-1 can't be measured; send the "
            "document's own id",
        )


def _ids_by_content(answer: Iterable[Passage]) -> dict[str, set[str]]:
    # Several passages of one answer may have the same content.
    ids: dict[str, set[str]] = defaultdict(set)
    for passage in answer:
        if passage.id is not None:
            ids[passage.content].add(passage.id)
    return ids


def _have_other_ids(first: Mapping[str, set[str]], second: Mapping[str, set[str]]) -> bool:
    """Does a content that both answers have carry no common id?"""
    return any(first[content].isdisjoint(second[content]) for content in first.keys() & second)


def _scores(passages: Iterable[Passage]) -> Scores:
    return {passage.content: passage.reranker_score for passage in passages}


def _overlap(first: Iterable[str], second: Iterable[str]) -> float:
    """Share of the items in both among all that are in either; 1 for nothing and nothing."""
    first_items = set(first)
    second_items = set(second)
    if not first_items and not second_items:
        return 1.0
    return len(first_items & second_items) / len(first_items | second_items)


def _gap(first: Scores, second: Scores) -> float:
    """The largest difference in score of a common passage; 0 where none is common."""
    common = first.keys() & second.keys()
    return max((abs(first[content] - second[content]) for content in common), default=0.0)


def _refusal(url: str, status: int, said: str, with_rewrite: bool) -> str:
    if with_rewrite and status in (400, 422):
        # The request before, without the field, went well.
        hint = f"it refuses the field `rewritten_query`, see {GUIDE}"
    elif status in (401, 403):
        hint = "check the variable that rag.api_key_env names"
    elif status in (404, 405):
        hint = f"rag.url needs the whole address that takes a POST, with its path ({GUIDE})"
    elif status == 429:
        hint = "ask the service for a higher limit, or come back later"
    elif status >= 500:
        hint = "see the service's own log"
    else:
        hint = f"compare what it expects with {GUIDE}"
    return f"rag {url}: answers HTTP {status}: {shown(said, 120)}; {hint}"
