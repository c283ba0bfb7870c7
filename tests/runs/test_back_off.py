from qinglan.runs.back_off import BackOff


def test_each_pause_is_twice_the_one_before_up_to_a_limit():
    assert [BackOff(0.5, 3.0).pause_s(failures) for failures in (1, 2, 3, 4, 10_000)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_with_jitter_no_two_callers_return_together():
    drawn = {BackOff(1.0, 8.0, jitter=True).pause_s(3) for _ in range(50)}
    assert len(drawn) == 50
    assert 0 <= min(drawn) <= max(drawn) <= 4
