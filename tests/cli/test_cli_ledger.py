"""`qinglan ledger` and `--dry-run`, as their user sees them."""

import re
from pathlib import Path

import pytest
from fake_service import SIMULATED
from fixture_types import ProfileOf, Qinglan
from ledger_calls import call, failure

from qinglan.clients.roles import site_ledger
from qinglan.config import Profile
from qinglan.ledger import BatchJob


@pytest.fixture
def profile(profile_of: ProfileOf, tmp_path: Path) -> Profile:
    """The profile of a site whose ledger has a failed and a paid try at one request."""
    (tmp_path / "q.csv").write_text("问题\n虾青素咋吃\n叶黄素啥时候吃\n", encoding="utf-8")
    profile = profile_of(data={"workbook": str(tmp_path / "q.csv")}, **SIMULATED)
    answered = call(
        text="[b]益生菌[/b] 服用时间", run_id="20261121-0", prompt_tokens=1200, latency_ms=812
    )
    with site_ledger(profile) as ledger:
        ledger.record([], [failure(reason="http_429", run_id="20261121-0")])
        ledger.record([answered])
    return profile


def test_spent(qinglan: Qinglan, profile: Profile):
    output = qinglan("ledger", "spent", "--by", "run", profile=profile)[1]
    assert re.search(r"20261121-0 +1 +1 +1,200 +10 +\$0.250", output)
    assert "simulated" not in output
    far_future = ["--since", "2999-01-01"]
    output = qinglan("ledger", "spent", "--by", "run", *far_future, profile=profile)[1]
    assert "20261121-0" not in output
    with site_ledger(profile) as ledger:
        ledger.record([call("s", model="simulated-judge", cost_usd=0.5)])
    output = qinglan("ledger", "spent", profile=profile)[1]
    assert re.search(r"simulated-judge\* +1 .*\$0.500", output)
    assert "* Simulated: $0.500 of it was paid by no" in output
    wrong = qinglan("ledger", "spent", "--since", "gestern", profile=profile)
    assert wrong == (2, "", "error: --since 'gestern': write a day as 2026-11-01\n")


def test_a_request_and_its_tries(qinglan: Qinglan, profile: Profile):
    output = qinglan("ledger", "request", "h", profile=profile)[1]
    assert re.search(r"http_429.*\n.*stop +812 +\$0.250", output)
    assert "[b]益生菌[/b] 服用时间" in output, "an answer is no markup"
    err = qinglan("ledger", "request", "x", profile=profile)[2]
    assert "error: ledger: there is no request 'x'" in err
    with site_ledger(profile) as ledger:
        ledger.record([], [failure("late", "teacher_timeout", cost_usd=0.5, estimated=True)])
    assert "≤ $0.500" in qinglan("ledger", "request", "late", profile=profile)[1], "an upper bound"


def test_dropping_an_answer_and_a_batch(qinglan: Qinglan, profile: Profile):
    dropped = qinglan("ledger", "drop", "h", profile=profile)
    assert dropped == (0, 'dropped h: teacher m, $0.250: "[b]益生菌[/b] 服用时间"\n', "")
    output = qinglan("ledger", "request", "h", profile=profile)[1]
    assert re.search(r"http_429.*\n.*dropped +812 +\$0.250", output)
    job = {
        "digest": "d",
        "server": "s",
        "role": "teacher",
        "status": "submitted",
        "batch_id": "b1",
        "created_s": 1.0,
    }
    with site_ledger(profile) as ledger:
        ledger.save_batch(BatchJob.model_validate(job | {"request_hashes": ["x", "y"]}))
        dropped = qinglan("ledger", "drop", "b1", profile=profile)
        assert dropped == (0, "dropped batch b1; requests that may be asked again: 2\n", "")
        assert not ledger.open_batches(server="s", role="teacher")


def test_a_dry_run_costs_nothing_and_warns(qinglan: Qinglan, profile: Profile):
    low = ["--set", "budget.per_run_usd=0.0001", "--set", "budget.per_month_usd=0.0001"]
    output = qinglan("run", "refresh", "--dry-run", *low, profile=profile)[1]
    assert re.search(r"teacher +distill +simulated-rewriter +2 +0 ", output)
    assert "The RAG would be asked at most: validate 4." in output
    assert "more than budget.per_run_usd = 0.0001: the run would stop there" in output
    assert "of this month that is more than budget.per_month_usd = 0.0001" in output
    assert not profile.paths.runs.exists()
    assert "At most $" in output
    assert "About" not in output
    free = {"model": "simulated-rewriter", "cost_usd": 0.0}
    with site_ledger(profile) as ledger:
        ledger.record([call(f"h{n}", **free) for n in range(20)])
    low[-1] = "budget.per_month_usd=0.2501"
    output = qinglan("run", "refresh", "--dry-run", *low, profile=profile)[1]
    assert "About $" in output, "an answer may be longer than earlier ones"
    assert "At most" not in output
    assert "of this month" not in output, "simulated models don't count"
