"""Counts the attacks of tests/recipes/injection.yaml that leave teacher, judge and panel unmoved.

    make bench NAME=injection          (seconds)

Every case is asked twice, without and with its attack, through the recipes' own prompts and
parsers. An answer must read the same where the model quotes the whole message first, as one that
thinks aloud does. The simulated models obey nobody, so what is shown is that no text gets into
another place of a prompt, or reads as an answer. How readily a real model obeys only that model can
show: give `count` a function that asks it.
"""

import math
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import yaml

from qinglan.config import Tenant
from qinglan.errors import TeacherError
from qinglan.grading.judge_answers import CONTRADICTORY, parse_scores
from qinglan.recipes import Message, answer_judge, medical, query_rewrite
from qinglan.recipes.answer_judge import FLAWS, verdict_in
from qinglan.recipes.passage_judge import WRONG
from qinglan.rows import Row
from qinglan.simulators.chat_server import SeededRequest, complete

FILE = Path(__file__).parents[1] / "tests/recipes/injection.yaml"
SEEDS = range(5)
"""The simulated judges err at random: the median over these seeds counts."""
_TENANT = Tenant()
_REWRITE = query_rewrite.RECIPE
_MEDICAL = medical.RECIPE
_VERDICT = answer_judge.RECIPE
_GRADED = ("rewrite", "passage", "text", "candidate")
"""Fields whose text is graded: an attack there wants a better score, and a worse one is no harm."""
Fields = dict[str, str]
Ask = Callable[[str, list[Message], int], str]
"""Takes a simulated model's name, which says who is meant, messages and a seed; gives the
answer."""


class Prompt(NamedTuple):
    model: str
    messages: Callable[[Fields], list[Message]]
    parse: Callable[[str], Any]


class Case(NamedTuple):
    name: str
    role: str
    prompt: Prompt
    row: Fields
    field: str
    clean: str
    """The field's text without the attack."""
    attacked: str
    """The field's text with the attack."""
    by: float
    """The movement of the answer that is tolerated."""
    wants: str
    """The words that the attack wants in a teacher's answer."""


def _row(fields: Fields) -> Row:
    inputs = {name: fields[name] for name in ("answer", "reference", "candidate") if name in fields}
    return Row(
        id="x",
        tenant=_TENANT.id,
        source="x",
        query=fields.get("query", ""),
        profile=fields.get("profile", ""),
        history=fields.get("history", ""),
        inputs=inputs,
    )


def _verdict_score(text: str) -> float:
    """A verdict as a number, the higher the better: main and secondary verdict count."""
    verdict = verdict_in(_VERDICT.parse_answer(text))
    assert verdict is not None
    score = -float(FLAWS.index(verdict.flaw))
    return score - 2.0 if verdict.main == WRONG else score


PROMPTS = {
    "rewriter": Prompt(
        "simulated-rewriter",
        lambda fields: _REWRITE.teacher_messages(_row(fields), _TENANT),
        _REWRITE.parse_answer,
    ),
    "doctor": Prompt(
        "simulated-medical-doctor",
        lambda fields: _MEDICAL.teacher_messages(_row(fields), _TENANT),
        _MEDICAL.parse_answer,
    ),
    "judge": Prompt(
        "simulated-judge",
        lambda fields: query_rewrite.judge_messages(_row(fields), fields["rewrite"], _TENANT),
        _REWRITE.grader.parse_judge,
    ),
    "relevance": Prompt(
        "simulated-judge",
        lambda fields: query_rewrite.relevance_messages(_row(fields), fields["passage"], _TENANT),
        _REWRITE.grader.parse_relevance,
    ),
    "medical_judge": Prompt(
        "simulated-medical-judge",
        lambda fields: medical.judge_messages(_row(fields), fields["text"], _TENANT),
        _MEDICAL.grader.parse_judge,
    ),
    "verdict": Prompt(
        "simulated-reasoner",
        lambda fields: _VERDICT.teacher_messages(_row(fields), _TENANT),
        _verdict_score,
    ),
    "panel": Prompt(
        "simulated-judge",
        lambda fields: query_rewrite.panel_messages(
            _row(fields), [fields["worse"], fields["better"]], _TENANT
        ),
        partial(parse_scores, count=2),
    ),
}


def cases() -> Iterator[Case]:
    """All cases of the file; `@` in its texts stands for the field's own text."""
    for group in yaml.safe_load(FILE.read_text(encoding="utf-8")):
        row = group["row"]
        for case in group["cases"]:
            field = case["in"]
            before, _, after = case["text"].partition("@")
            yield Case(
                name=case["name"],
                role=group["role"],
                prompt=PROMPTS[group["prompt"]],
                row=row,
                field=field,
                clean=case.get("clean", "@").replace("@", row[field]),
                attacked=before + row[field] + after * case.get("times", 1),
                by=group.get("by", 0),
                wants=group.get("wants", ""),
            )


def simulated(model: str, messages: list[Message], seed: int) -> str:
    """The answer of one of the embedded models."""
    request = SeededRequest.model_validate({"model": model, "messages": messages, "seed": seed})
    _, body = complete(request)
    return str(body["choices"][0]["message"]["content"])


def moved(case: Case, ask: Ask = simulated) -> float:
    """The distance by which the attack moves the answer, to be compared with `case.by`.

    It is infinite if no answer is usable, or if the attack left its place in the prompt.
    """
    clean = case.prompt.messages({**case.row, case.field: case.clean})
    attacked = case.prompt.messages({**case.row, case.field: case.attacked})
    try:
        # The same seeds on both sides: the answers differ by the attack alone.
        before = [_answer(case, ask, clean, seed) for seed in SEEDS]
        after = [_answer(case, ask, attacked, seed) for seed in SEEDS]
    except TeacherError:
        return math.inf
    # Whatever was answered: text of the attack stands where instructions do.
    if _outside(clean) != _outside(attacked):
        return math.inf
    if case.role == "teacher":
        return float(any(case.wants in answer for answer in after))
    if case.role == "panel":
        return float(_better_wins(before) != _better_wins(after))
    change = float(median(after) - median(before))
    return change if case.field in _GRADED else abs(change)


def _better_wins(scores: list[tuple[float, float]]) -> bool:
    """Does the panel give the better text more than the worse one?"""
    return median(better - worse for worse, better in scores) > 0


def count(ask: Ask = simulated) -> tuple[int, int]:
    """The number of cases, and of those whose answer moved no further than it may."""
    verdicts = [moved(case, ask) <= case.by for case in cases()]
    return len(verdicts), sum(verdicts)


def _answer(case: Case, ask: Ask, messages: list[Message], seed: int) -> Any:
    """The parsed answer, which must not change where the model quotes the message before it."""
    text = ask(case.prompt.model, messages, seed)
    answer = case.prompt.parse(text)
    if case.role == "teacher":
        return answer
    if case.prompt.parse(f"消息是：{messages[-1]['content']}\n{text}") != answer:
        raise TeacherError("the message reads as an answer", CONTRADICTORY)
    return answer


def _outside(messages: list[Message]) -> list[str]:
    """The parts of the prompt that are no data."""
    user = messages[-1]["content"]
    number = re.search("<([0-9]{6})>", user)
    assert number, "a prompt without delimiters"
    around_data = re.split(f"<{number[1]}>.*?</{number[1]}>", user, flags=re.DOTALL)
    return [messages[0]["content"], *around_data]


if __name__ == "__main__":
    tried, within = count()
    sys.stdout.write(f"{tried} attacks, {within} within their tolerance\n")
