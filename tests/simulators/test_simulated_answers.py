"""The version of the simulators' answers, which is a part of the ledger's keys."""

import json
from pathlib import Path

import pytest

from qinglan.clients.roles import SIMULATED_ANSWERS
from qinglan.config import Profile, load_profile
from qinglan.data.workbook import read_rows
from qinglan.recipes import get_recipe
from qinglan.recipes.prompts import prompts_about
from qinglan.runs.artifacts import hash_of
from qinglan.simulators.chat_server import SeededRequest, complete
from qinglan.simulators.domains import domain_of

VERSION = "330c99164ac6"
DIGESTS = {
    "embedded": "0ef695ee63dbbeaf113562444251efe2f43a8292a79e8571cc65b4aa17c48717",
    "answer_judge": "cc031b162f628eb93e48836119049c38834edf6dfee5e884b84daada7d571b51",
    "medical": "c7740de28c38d940ef17e345b52bf0b87a65234326351de7a4f147dd067ce63c",
}
"""Digests of the answers below in `VERSION`, by profile."""
ROWS = 30


@pytest.mark.parametrize("name", ["embedded", "answer_judge", "medical"])
def test_other_answers_have_another_version(name: str, tmp_path: Path):
    """An answer that the ledger holds is taken for what a simulator would say now.

    Where the simulators' answers are meant to change, give `SIMULATED_ANSWERS` another value, and
    put that and the digests of the new answers here.
    """
    assert SIMULATED_ANSWERS == VERSION
    answers = [json.dumps(answer, ensure_ascii=False) for answer in answers_of(name, tmp_path)]
    assert hash_of(answers) == DIGESTS[name]


def answers_of(name: str, folder: Path) -> list[dict[str, str]]:
    profile = load_profile(name)
    recipe = get_recipe(profile.recipe)
    sample = domain_of(recipe.NAME).write_sample(folder, profile.embedded)
    answers = []
    rows = read_rows(sample.workbook, profile.data, profile.tenant, inputs=recipe.INPUTS)
    for row, _ in zip(rows, range(ROWS), strict=False):
        for role, messages in prompts_about(row, recipe, profile).items():
            model = model_of(role, profile)
            if model:
                request = {"model": model, "messages": messages, "seed": 3}
                status, body = complete(SeededRequest.model_validate(request))
                assert status == 200, body
                answers.append(body["choices"][0]["message"])
    return answers


def model_of(role: str, profile: Profile) -> str:
    if role == "teacher":
        return profile.teacher.model
    if role == "answerer" and profile.answerer:
        return profile.answerer.model
    if role in ("judge", "relevance", "panel"):
        return profile.judge.model
    return ""
