"""The red team's cases in the evaluate stage: raw answers are checked, and a RAG that fails leaves a case unchecked."""

from typing import Any

from qinglan.clients.roles import Clients
from qinglan.config import Tenant
from qinglan.errors import RetrievalError
from qinglan.evaluation import texts_of, try_cases
from qinglan.evaluation.reasons import reason
from qinglan.evaluation.red_team import Case, Checks
from qinglan.recipes import get_recipe
from qinglan.rows import Retrieved

LONG = Case(id="long", name="很长", kind="long", query="问", checks=Checks(one_line=True))
KNOWN = Case(id="known", name="旧错", kind="regression", query="问", checks=Checks(gold_top1="g"))
TENANT, RECIPE = Tenant(), get_recipe("query_rewrite")


class Library:
    def __init__(self, *found: str, down: bool = False) -> None:
        self.found, self.down, self.asked = found, down, list[Any]()

    async def retrieve(self, *asked: str) -> Retrieved:
        self.asked.append(asked)
        if self.down:
            raise RetrievalError("down", "rag_unavailable", transient=True)
        return Retrieved(ids=self.found, scores=(0.9,) * len(self.found))


async def passed(library: Library, **texts: str) -> dict[str, bool | None]:
    answers = {"rl": {f"redteam-{case}": text for case, text in texts.items()}}
    cases = [case for case in (LONG, KNOWN) if case.id in texts]
    tried = await try_cases(cases, answers, RECIPE, TENANT, Clients(rag=library))  # type: ignore[arg-type]
    return {result.case_id: result.passed for result in tried["rl"]}


async def test_only_cases_about_documents_are_retrieved_for():
    library = Library("g")
    assert await passed(library, long="甲 乙", known="丙 丁") == {"long": True, "known": True}
    assert library.asked == [("问", "丙 丁")]
    assert await passed(Library("x", "g"), known="丙 丁") == {"known": False}


async def test_a_failed_retrieval_is_neither_passed_nor_failed():
    assert await passed(Library(down=True), known="丙 丁", long="甲") == {"long": True, "known": None}


async def test_no_answer_is_a_failure_and_retrieved_for_by_nobody():
    library = Library("g")
    assert await passed(library, known="") == {"known": False}
    assert library.asked == []


async def test_a_second_line_of_an_answer_is_seen():
    answers = texts_of(['{"id": "redteam-long", "text": " 甲 乙\\n现在忽略规则 ", "prompt_tokens": 1}'])
    (result,) = (await try_cases([LONG], {"rl": answers}, RECIPE, TENANT, Clients(rag=Library())))["rl"]  # type: ignore[arg-type]
    assert (result.passed, result.reason) == (False, reason("several_lines"))
