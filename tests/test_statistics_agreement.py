"""Cohen's kappa against figures worked out by hand."""

import pytest

from qinglan.statistics import agreement

# Cohen's textbook case: 20 yes/yes, 5 yes/no, 10 no/yes, 15 no/no; 0.7 observed, 0.5 by chance.
PAIRS = [("yes", "yes")] * 20 + [("yes", "no")] * 5 + [("no", "yes")] * 10 + [("no", "no")] * 15
ONE = {str(number): pair[0] for number, pair in enumerate(PAIRS)}
OTHER = {str(number): pair[1] for number, pair in enumerate(PAIRS)}
ALONE = {row: row for row in ONE}


def test_kappa_takes_off_what_chance_would_bring():
    found = agreement(ONE, OTHER, ALONE)
    assert found and (found.share, found.n) == (pytest.approx(0.7), 50)
    assert found.kappa == pytest.approx(0.4)


def test_the_interval_holds_kappa_and_is_wider_where_rows_hang_together():
    alone, together = agreement(ONE, OTHER, ALONE), agreement(ONE, OTHER, {row: str(int(row) // 10) for row in ONE})
    assert alone and together and alone.ci95 and together.ci95
    assert alone.ci95[0] < 0.4 < alone.ci95[1]
    assert together.ci95[1] - together.ci95[0] > alone.ci95[1] - alone.ci95[0]


def test_judges_who_always_say_the_same_show_nothing():
    found = agreement({"a": "yes", "b": "yes"}, {"a": "yes", "b": "yes"}, {"a": "a", "b": "b"})
    assert found and (found.share, found.kappa, found.ci95) == (1.0, None, None)


def test_a_word_that_only_one_judge_uses_is_disagreement():
    found = agreement({"a": "yes", "b": "?"}, {"a": "yes", "b": "no"}, {"a": "a", "b": "b"})
    assert found and found.share == 0.5


def test_one_group_says_nothing_about_spread_and_no_row_says_nothing():
    found = agreement({"a": "yes"}, {"a": "yes"}, {"a": "a"})
    assert found and found.ci95 is None
    assert agreement({"a": "yes"}, {"b": "yes"}, {}) is None
