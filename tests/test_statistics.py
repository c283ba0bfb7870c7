"""Paired statistics over groups: known answers, pairing, signs, missing values, coverage; Cohen's
kappa."""

import math

import numpy as np
import pytest

from qinglan.statistics import (
    ArmScores,
    Comparison,
    agreement,
    compare,
    holm,
    mcnemar_p,
    mean_ci,
    percentile_ci,
    ratio_ci,
    rows_needed,
    sign_flip_p,
)


def arm(name: str, *values: float | None) -> ArmScores:
    return ArmScores(arm=name, scores={"top1": {f"r{i}": value for i, value in enumerate(values)}})


def own_groups(count: int) -> dict[str, str]:
    return {f"r{i}": f"g{i}" for i in range(count)}


def compared(
    a: ArmScores,
    b: ArmScores,
    groups: dict[str, str] | None = None,
    seed: int = 0,
    proportion: bool = False,
) -> Comparison:
    row_groups = groups or own_groups(len(a.scores["top1"]))
    return compare(a, b, "top1", row_groups, resamples=2000, seed=seed, proportion=proportion)


def test_diff_is_a_minus_b_and_counts_wins_ties_losses() -> None:
    result = compared(arm("rl", 1, 1, 1, 0), arm("teacher", 0, 1, 0, 1))
    assert (result.a, result.b, result.n, result.groups) == ("rl", "teacher", 4, 4)
    assert (result.mean_a, result.mean_b, result.diff) == (0.75, 0.5, 0.25)
    assert (result.wins, result.ties, result.losses) == (2, 1, 1)


def test_swapping_the_arms_mirrors_everything() -> None:
    better = arm("a", *[1] * 30, *[0] * 10)
    worse = arm("b", *[1] * 15, *[0] * 25)
    result = compared(better, worse)
    mirrored = compared(worse, better)
    assert result.diff == -mirrored.diff  # type: ignore[operator]
    assert result.p_value == mirrored.p_value
    assert result.ci95 is not None
    assert mirrored.ci95 is not None
    assert result.ci95 == pytest.approx((-mirrored.ci95[1], -mirrored.ci95[0]))


def test_sign_flip_matches_the_exact_answer() -> None:
    # Five groups, all in favour: 2 of 2**5 sign patterns are as extreme.
    assert sign_flip_p(np.ones(5), 50_000, seed=0) == pytest.approx(2 / 32, abs=0.004)


def test_standard_error_matches_the_formula_for_independent_rows() -> None:
    values = np.random.default_rng(0).normal(0.1, 1, 400)
    result = compared(arm("a", *values.tolist()), arm("b", *[0.0] * 400))
    error = values.std() / math.sqrt(400)
    mean = values.mean()
    assert result.detectable_diff == pytest.approx(2.8 * error, rel=0.06)
    assert result.ci95 == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.02)


def test_rows_are_paired_by_id_not_by_place() -> None:
    turned = ArmScores(arm="b", scores={"top1": {"r1": 0.0, "r0": 1.0}})
    result = compared(arm("a", 1, 0), turned)
    assert (result.diff, result.ties) == (0.0, 2)


def test_missing_values_are_left_out_and_counted_never_zero() -> None:
    result = compared(arm("a", 1, 1, None, math.nan, 1), arm("b", 1, None, 0, None, 0))
    assert (result.n, result.left_out, result.one_sided, result.diff) == (2, 3, 2, 0.5)
    assert result.only_a == 1, "b alone has no value"
    never_seen = compared(arm("a", 1, 0, 1), arm("b", 1, 0))
    assert (never_seen.n, never_seen.left_out, never_seen.one_sided) == (2, 1, 1)


@pytest.mark.parametrize(
    ("a", "b", "groups", "diff", "ci95", "p_value"),
    [
        ((None,), (1,), {"r0": "g"}, None, None, None),
        ((1, 1), (0, 0), {"r0": "same", "r1": "same"}, 1.0, None, 1.0),
        ((1, 0, 1), (1, 0, 1), own_groups(3), 0.0, (0.0, 0.0), 1.0),
    ],
    ids=["no common row", "one group", "the same values"],
)
def test_what_shows_nothing_claims_nothing(a, b, groups, diff, ci95, p_value) -> None:
    result = compared(arm("a", *a), arm("b", *b), groups)
    assert (result.diff, result.ci95, result.p_value, result.detectable_diff) == (
        diff,
        ci95,
        p_value,
        None,
    )


def test_groups_are_the_unit_copies_of_a_row_add_no_certainty() -> None:
    values = np.random.default_rng(2).normal(0.2, 1, 40)
    once = compared(arm("a", *values.tolist()), arm("b", *[0.0] * 40))
    copies = {f"r{i}": f"g{i // 10}" for i in range(400)}
    tenfold = compared(arm("a", *np.repeat(values, 10).tolist()), arm("b", *[0.0] * 400), copies)
    assert tenfold.ci95 == pytest.approx(once.ci95)
    assert tenfold.p_value == pytest.approx(once.p_value, abs=0.01)


def test_groups_of_unequal_size_weigh_by_rows() -> None:
    groups = {"r0": "big", "r1": "big", "r2": "big", "r3": "small"}
    assert compared(arm("a", 1, 1, 1, 0), arm("b", 0, 0, 0, 0), groups).diff == 0.75


def test_same_seed_same_numbers() -> None:
    a = arm("a", *[1, 0, 1] * 20)
    b = arm("b", *[0, 1, 1, 1, 0] * 12)
    assert compared(a, b, seed=3) == compared(a, b, seed=3)
    assert compared(a, b, seed=3).p_value != compared(a, b, seed=4).p_value


def test_a_row_without_group_is_refused() -> None:
    with pytest.raises(ValueError, match="1 rows have no group, the first is 'r1'"):
        compared(arm("a", 1, 0), arm("b", 0, 0), {"r0": "g"})


def test_mean_ci_of_one_arm() -> None:
    result = mean_ci({"r0": 1.0, "r1": 0.0, "r2": None}, own_groups(3), resamples=500)
    assert (result.mean, result.n) == (0.5, 2)
    assert result.ci95 == (0.0, 1.0)
    nothing = mean_ci({"r0": None}, {}, resamples=10)
    assert (nothing.mean, nothing.ci95, nothing.n) == (None, None, 0)


def test_mcnemar_is_exact():
    # Seven against one: 2 · (C(8, 0) + C(8, 1)) / 2**8.
    assert mcnemar_p(7, 1) == mcnemar_p(1, 7) == pytest.approx(18 / 256)
    assert (mcnemar_p(0, 0), mcnemar_p(3, 3)) == (1.0, 1.0)


def test_mcnemar_takes_rows_for_independent_and_groups_do_not():
    groups = {f"r{i}": f"g{i // 10}" for i in range(60)}
    result = compared(arm("a", *[1] * 30, *[0] * 30), arm("b", *[0] * 60), groups, proportion=True)
    assert result.p_mcnemar is not None
    assert result.p_mcnemar < 1e-6
    assert result.p_value is not None
    assert result.p_value > 0.1


def test_rows_needed_grow_with_the_square():
    assert rows_needed(100, detectable=0.06, gain=0.03) == 400
    assert rows_needed(100, detectable=0.03, gain=0.06) == 25
    assert (rows_needed(100, None, 0.03), rows_needed(100, 0.06, None)) == (None, None)


def test_holm_is_the_textbooks():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_percentiles_interval():
    values = np.random.default_rng(4).exponential(1, 400).tolist()
    interval = percentile_ci(values, 50)
    assert interval is not None
    assert interval[0] < math.log(2) < interval[1] < interval[0] + 0.35
    assert percentile_ci(values, 50) == interval
    assert (percentile_ci([1.0], 50), percentile_ci([2.0, 2.0], 95)) == (None, (2.0, 2.0))


def test_a_ratios_interval_knows_both_its_sides():
    # One dollar a question, and every second answer is usable: two dollars a usable one.
    pairs = [(1.0, float(n % 2)) for n in range(400)]
    interval = ratio_ci(pairs, 2000)
    assert interval is not None
    assert interval[0] < 2 < interval[1]
    assert interval[0] > 1.7
    assert interval[1] < 2.4
    assert (ratio_ci([(1.0, 0.0)] * 4), ratio_ci([(1.0, 1.0)])) == (None, None)


def test_many_groups_are_resampled_less_often(monkeypatch: pytest.MonkeyPatch):
    values = {f"r{i}": float(i % 3) for i in range(300)}
    whole = mean_ci(values, own_groups(300), resamples=4000)
    monkeypatch.setattr("qinglan.statistics.bootstrap._MOST_DRAWS", 1000)
    fewer = mean_ci(values, own_groups(300), resamples=4000)
    assert fewer.ci95 != whole.ci95
    assert fewer.ci95 == pytest.approx(whole.ci95, abs=0.03)


def test_coverage_and_false_alarms_on_clustered_data() -> None:
    """95% of the intervals should cover 0, and 5% of the p-values be below 0.05.

    There is no true difference in the data.
    """
    rng = np.random.default_rng(5)
    trials = 100
    covered = 0
    alarms = 0
    for trial in range(trials):
        group = np.repeat(np.arange(50), rng.integers(1, 8, 50))
        values = rng.normal(0, 1, 50)[group] + rng.normal(0, 0.5, len(group))
        names = {f"r{i}": f"g{g}" for i, g in enumerate(group)}
        result = compare(
            arm("a", *values.tolist()), arm("b", *[0.0] * len(group)), "top1", names, 500, trial
        )
        assert result.ci95 is not None
        assert result.p_value is not None
        covered += result.ci95[0] <= 0 <= result.ci95[1]
        alarms += result.p_value < 0.05
    assert 0.87 <= covered / trials <= 0.99
    assert 0.01 <= alarms / trials <= 0.11


# Cohen's textbook case: 20 yes/yes, 5 yes/no, 10 no/yes, 15 no/no; 0.7 observed, 0.5 by chance.
PAIRS = [("yes", "yes")] * 20 + [("yes", "no")] * 5 + [("no", "yes")] * 10 + [("no", "no")] * 15
ONE = {str(number): pair[0] for number, pair in enumerate(PAIRS)}
OTHER = {str(number): pair[1] for number, pair in enumerate(PAIRS)}
ALONE = {row: row for row in ONE}


def test_kappa_takes_off_what_chance_would_bring():
    result = agreement(ONE, OTHER, ALONE)
    assert result
    assert (result.share, result.n) == (pytest.approx(0.7), 50)
    assert result.kappa == pytest.approx(0.4)


def test_the_interval_holds_kappa_and_is_wider_where_rows_hang_together():
    groups_of_ten = {row: str(int(row) // 10) for row in ONE}
    alone = agreement(ONE, OTHER, ALONE)
    together = agreement(ONE, OTHER, groups_of_ten)
    assert alone
    assert together
    assert alone.ci95
    assert together.ci95
    assert alone.ci95[0] < 0.4 < alone.ci95[1]
    assert together.ci95[1] - together.ci95[0] > alone.ci95[1] - alone.ci95[0]


def test_judges_who_always_say_the_same_show_nothing():
    same = agreement({"a": "yes", "b": "yes"}, {"a": "yes", "b": "yes"}, {"a": "a", "b": "b"})
    assert same
    assert (same.share, same.kappa, same.ci95) == (1.0, None, None)


def test_a_word_that_one_judge_alone_uses_is_disagreement():
    different = agreement({"a": "yes", "b": "?"}, {"a": "yes", "b": "no"}, {"a": "a", "b": "b"})
    assert different
    assert different.share == 0.5


def test_one_group_says_nothing_about_spread_and_no_row_says_nothing():
    result = agreement({"a": "yes"}, {"a": "yes"}, {"a": "a"})
    assert result
    assert result.ci95 is None
    assert agreement({"a": "yes"}, {"b": "yes"}, {}) is None
