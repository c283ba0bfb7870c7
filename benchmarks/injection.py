"""How many attacks of tests/recipes/injection.yaml leave teacher, judge and panel unmoved?

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
"""The simulated judges err at random; of several the median counts."""
_TENANT = Tenant()
_REWRITE, _MEDICAL, _VERDICT = query_rewrite.RECIPE, medical.RECIPE, answer_judge.RECIPE
_GRADED = ("rewrite", "passage", "text", "candidate")
Fields = dict[str, str]
Ask = Callable[[str, list[Message], int], str]
"""A simulated model's name, which says who is meant, messages and a seed → the answer."""


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
    attacked: str
    """The field's text, without and with the attack."""
    by: float
    wants: str


def _row(fields: Fields) -> Row:
    asked = {name: fields.get(name, "") for name in ("query", "profile", "history")}
    inputs = {name: fields[name] for name in ("answer", "reference", "candidate") if name in fields}
    return Row(id="x", tenant=_TENANT.id, source="x", inputs=inputs, **asked)


def _verdict_score(text: str) -> float:
    """The better, the higher: main and secondary verdict count."""
    found = verdict_in(_VERDICT.parse_answer(text))
    assert found is not None
    return -FLAWS.index(found.flaw) - 2.0 * (found.main == WRONG)


PROMPTS = {
    "rewriter": Prompt(
        "simulated-rewriter",
        lambda f: _REWRITE.teacher_messages(_row(f), _TENANT),
        _REWRITE.parse_answer,
    ),
    "doctor": Prompt(
        "simulated-medical-doctor",
        lambda f: _MEDICAL.teacher_messages(_row(f), _TENANT),
        _MEDICAL.parse_answer,
    ),
    "judge": Prompt(
        "simulated-judge",
        lambda f: query_rewrite.judge_messages(_row(f), f["rewrite"], _TENANT),
        _REWRITE.grader.parse_judge,
    ),
    "relevance": Prompt(
        "simulated-judge",
        lambda f: query_rewrite.relevance_messages(_row(f), f["passage"], _TENANT),
        _REWRITE.grader.parse_relevance,
    ),
    "medical_judge": Prompt(
        "simulated-medical-judge",
        lambda f: medical.judge_messages(_row(f), f["text"], _TENANT),
        _MEDICAL.grader.parse_judge,
    ),
    "verdict": Prompt(
        "simulated-reasoner", lambda f: _VERDICT.teacher_messages(_row(f), _TENANT), _verdict_score
    ),
    "panel": Prompt(
        "simulated-judge",
        lambda f: query_rewrite.panel_messages(_row(f), [f["worse"], f["better"]], _TENANT),
        partial(parse_scores, count=2),
    ),
}


def cases() -> Iterator[Case]:
    for group in yaml.safe_load(FILE.read_text(encoding="utf-8")):
        prompt, row, by, wants = (
            PROMPTS[group["prompt"]],
            group["row"],
            group.get("by", 0),
            group.get("wants", ""),
        )
        for case in group["cases"]:
            clean = case.get("clean", "@").replace("@", row[case["in"]])
            before, _, after = case["text"].partition("@")
            attacked = before + row[case["in"]] + after * case.get("times", 1)
            yield Case(
                case["name"], group["role"], prompt, row, case["in"], clean, attacked, by, wants
            )


def simulated(model: str, messages: list[Message], seed: int) -> str:
    _, body = complete(
        SeededRequest.model_validate({"model": model, "messages": messages, "seed": seed})
    )
    return str(body["choices"][0]["message"]["content"])


def moved(case: Case, ask: Ask = simulated) -> float:
    """How far the attack moves the answer, to be compared with `case.by`; infinitely far where no
    answer is usable."""
    rows = [case.row | {case.field: text} for text in (case.clean, case.attacked)]
    clean, attacked = map(case.prompt.messages, rows)
    try:
        before, after = (
            [_answer(case, ask, each, seed) for seed in SEEDS] for each in (clean, attacked)
        )
    except TeacherError:
        return math.inf
    if _outside(clean) != _outside(attacked):
        return math.inf
    if case.role == "teacher":
        return float(any(case.wants in answer for answer in after))
    if case.role == "panel":
        wins = [
            median(better - worse for worse, better in scores) > 0 for scores in (before, after)
        ]
        return float(wins[0] != wins[1])
    change = float(median(after) - median(before))
    return change if case.field in _GRADED else abs(change)


def count(ask: Ask = simulated) -> tuple[int, int]:
    """How many cases were tried, and in how many of them the answer moved no further than it
    may."""
    found = [moved(case, ask) <= case.by for case in cases()]
    return len(found), sum(found)


def _answer(case: Case, ask: Ask, messages: list[Message], seed: int) -> Any:
    said = ask(case.prompt.model, messages, seed)
    found = case.prompt.parse(said)
    if (
        case.role != "teacher"
        and case.prompt.parse(f"消息是：{messages[-1]['content']}\n{said}") != found
    ):
        raise TeacherError("the message reads as an answer", CONTRADICTORY)
    return found


def _outside(messages: list[Message]) -> list[str]:
    """What of the prompt is no data."""
    user = messages[-1]["content"]
    number = re.search("<([0-9]{6})>", user)
    assert number, "a prompt without delimiters"
    return [
        messages[0]["content"],
        *re.split(f"<{number[1]}>.*?</{number[1]}>", user, flags=re.DOTALL),
    ]


if __name__ == "__main__":
    tried, within = count()
    sys.stdout.write(f"{tried} attacks, {within} within their tolerance\n")
