"""Noise in questions: what it is made of, and that it leaves what is asked."""

import json
import re
from pathlib import Path
from random import Random
from typing import get_args

import pytest
import yaml

from qinglan import noise
from qinglan.config import NoiseKind
from qinglan.evaluation.red_team import BUILT_IN
from qinglan.noise import add_noise
from qinglan.rows import normalise

QUESTION = "请问辅酶Q10一天吃5.6克，吃多久见效？"
KINDS = get_args(NoiseKind)
TEXTS = yaml.safe_load(Path(noise.__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def variants(kind: NoiseKind, text: str = QUESTION) -> list[str]:
    return [add_noise(kind, text, Random(f"{kind}{n}")) for n in range(100)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_changes_the_question_by_its_seed_alone(kind: NoiseKind) -> None:
    first = variants(kind)
    assert first == variants(kind)
    assert QUESTION not in first
    assert len(set(first)) > 20 or kind in ("full_width", "traditional", "pinyin")
    assert variants(kind, "") == [""] * 100
    assert variants(kind, " ") == [" "] * 100


@pytest.mark.parametrize("kind", ["story", "number", "latin"])
def test_what_comes_around_a_question_leaves_its_words(kind: NoiseKind) -> None:
    assert [text for text in variants(kind) if QUESTION not in text] == []


@pytest.mark.parametrize("kind", ["full_width", "invisible", "punctuation", "emoji"])
def test_what_comes_into_a_question_is_nothing_to_read(kind: NoiseKind) -> None:
    plain = {
        re.sub("|".join(map(re.escape, TEXTS["kaomoji"])), "", text) for text in variants(kind)
    }
    assert {normalise(text) for text in plain} == {normalise(QUESTION)}


def test_other_scripts_say_the_same_character_by_character_and_word_by_word() -> None:
    simplified = {ord(pair[1]): pair[0] for pair in TEXTS["traditional"].split()}
    assert {text.translate(simplified) for text in variants("traditional")} == {QUESTION}
    words = {pinyin: word for word, pinyin in TEXTS["pinyin"].items()}
    spelt = re.compile("|".join(sorted(words, key=len, reverse=True)))
    in_words = {spelt.sub(lambda match: words[match.group()], text) for text in variants("pinyin")}
    assert in_words == {QUESTION}


def test_stutter_repeats_words_and_never_digits() -> None:
    for text in variants("stutter", "辅酶10吃5.6克呢"):
        assert re.findall(r"\d+", text) == ["10", "5", "6"], text
    assert add_noise("stutter", "10-20", Random(1)) == "10-20"


@pytest.mark.parametrize("text", ["Q10", "5.6", "NMN"])
@pytest.mark.parametrize("kind", ["emoji", "invisible", "punctuation"])
def test_a_number_or_a_latin_word_stays_whole(kind: NoiseKind, text: str) -> None:
    assert [noisy for noisy in variants(kind, text) if text not in noisy] == []


def test_the_table_of_characters_holds_each_once_and_no_wrong_script() -> None:
    pairs = TEXTS["traditional"].split()
    assert len({pair[0] for pair in pairs}) == len(pairs)
    assert {len(pair) for pair in pairs} == {2}
    for simplified, traditional in pairs:
        assert simplified.encode("gb2312")
        assert traditional.encode("big5")
        assert simplified != traditional


def test_noise_says_nothing_of_what_a_red_team_says() -> None:
    cases = []
    for path in BUILT_IN.glob("*.jsonl"):
        cases += map(json.loads, path.read_text("utf-8").splitlines())
    case_texts = [f"{case['query']}|{case.get('history')}|{case.get('profile')}" for case in cases]
    red_team = normalise("|".join(case_texts))
    noise_texts = [*TEXTS["openings"], *TEXTS["sentences"], *TEXTS["requests"]]
    assert [text for text in noise_texts if shares_words(normalise(text), red_team)] == []
    emoji = {character for case in cases for character in case["query"] if ord(character) > 0xFFFF}
    assert emoji & set(noise._EMOJI) == set()


def shares_words(text: str, other_text: str) -> bool:
    """Do six characters in a row of a text occur in the other one?"""
    starts = range(max(1, len(text) - 5))
    return any(text[start : start + 6] in other_text for start in starts)
