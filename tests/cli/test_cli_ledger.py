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
    """Of a ledger with a failed and a paid try at one request."""
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
    shown = qinglan("ledger", "spent", "--by", "run", profile=profile)[1]
    assert re.search(r"20261121-0 +1 +1 +1,200 +10 +\$0.250", shown)
    assert (
        "20261121-0"
        not in qinglan("ledger", "spent", "--by", "run", "--since", "2999-01-01", profile=profile)[
            1
        ]
    )
    assert "simulated" not in shown
    with site_ledger(profile) as ledger:
        ledger.record([call("s", model="simulated-judge", cost_usd=0.5)])
    shown = qinglan("ledger", "spent", profile=profile)[1]
    assert (
        re.search(r"simulated-judge\* +1 .*\$0.500", shown)
        and "* Simulated: $0.500 of it was paid by no" in shown
    )
    wrong = qinglan("ledger", "spent", "--since", "gestern", profile=profile)
    assert wrong == (2, "", "error: --since 'gestern': write a day as 2026-11-01\n")


def test_a_request_and_its_tries(qinglan: Qinglan, profile: Profile):
    shown = qinglan("ledger", "request", "h", profile=profile)[1]
    assert re.search(r"http_429.*\n.*stop +812 +\$0.250", shown)
    assert "[b]益生菌[/b] 服用时间" in shown  # an answer is no markup
    assert (
        "error: ledger: there is no request 'x'"
        in qinglan("ledger", "request", "x", profile=profile)[2]
    )
    with site_ledger(profile) as ledger:
        ledger.record([], [failure("late", "teacher_timeout", cost_usd=0.5, estimated=True)])
    assert "≤ $0.500" in qinglan("ledger", "request", "late", profile=profile)[1], "an upper bound"


def test_dropping_an_answer_and_a_batch(qinglan: Qinglan, profile: Profile):
    dropped = qinglan("ledger", "drop", "h", profile=profile)
    assert dropped == (0, 'dropped h: teacher m, $0.250: "[b]益生菌[/b] 服用时间"\n', "")
    assert re.search(
        r"http_429.*\n.*dropped +812 +\$0.250",
        qinglan("ledger", "request", "h", profile=profile)[1],
    )
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
    shown = qinglan("run", "refresh", "--dry-run", *low, profile=profile)[1]
    assert re.search(r"teacher +distill +simulated-rewriter +2 +0 ", shown)
    assert "The RAG would be asked at most: validate 4." in shown
    assert "more than budget.per_run_usd = 0.0001: the run would stop there" in shown
    assert "of this month that is more than budget.per_month_usd = 0.0001" in shown
    assert not profile.paths.runs.exists() and "At most $" in shown and "About" not in shown
    used = {"model": "simulated-rewriter", "cost_usd": 0.0}
    with site_ledger(profile) as ledger:
        ledger.record([call(f"h{n}", **used) for n in range(20)])
    low[-1] = "budget.per_month_usd=0.2501"
    shown = qinglan("run", "refresh", "--dry-run", *low, profile=profile)[1]
    assert "About $" in shown and "At most" not in shown, (
        "an answer may be longer than earlier ones"
    )
    assert "of this month" not in shown, "simulated models don't count"
