"""`qinglan ledger` and `--dry-run`, as their user sees them."""

import re
from pathlib import Path

import pytest

from qinglan import cli
from qinglan.clients.roles import site_ledger
from qinglan.config import load_profile
from qinglan.ledger import Call, Failure


@pytest.fixture
def at(tmp_path: Path) -> list[str]:
    """Options that keep everything below the test's own folder."""
    (tmp_path / "q.csv").write_text("问题\n虾青素咋吃\n叶黄素啥时候吃\n", encoding="utf-8")
    return [f"paths.state={tmp_path / 'state'}", f"paths.runs={tmp_path / 'runs'}", f"data.workbook={tmp_path}/q.csv"]


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], at: list[str], *words: str) -> str:
    options = [part for setting in at for part in ("--set", setting)]
    monkeypatch.setattr("sys.argv", ["qinglan", *words, *options])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    return f"{ended.value.code or 0}\n{captured.out}{captured.err}"


def record(at: list[str]) -> None:
    who = {"run_id": "20261121-0", "tenant": "t", "role": "teacher", "model": "m"}
    call = Call(
        request_hash="h", text="[b]益生菌[/b] 服用时间", finish_reason="stop", prompt_tokens=1200, completion_tokens=10,
        cost_usd=0.25, latency_ms=812, **who,
    )  # fmt: skip
    with site_ledger(load_profile("embedded", at)) as ledger:
        ledger.record([], [Failure(request_hash="h", reason="http_429", **who)])
        ledger.record([call])


def test_spent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], at: list[str]):
    record(at)
    shown = run(monkeypatch, capsys, at, "ledger", "spent", "--by", "run")
    assert re.search(r"20261121-0 +1 +1 +1,200 +10 +\$0.250", shown)
    assert "20261121-0" not in run(monkeypatch, capsys, at, "ledger", "spent", "--by", "run", "--since", "2999-01-01")
    wrong = run(monkeypatch, capsys, at, "ledger", "spent", "--since", "gestern")
    assert wrong == "2\nerror: --since 'gestern': write a day as 2026-11-01\n"


def test_a_request_and_its_tries(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], at: list[str]):
    record(at)
    shown = run(monkeypatch, capsys, at, "ledger", "request", "h")
    assert re.search(r"http_429.*\n.*stop +812 +\$0.250", shown)
    assert "[b]益生菌[/b] 服用时间" in shown  # an answer is no markup
    assert "error: ledger: there is no request 'x'" in run(monkeypatch, capsys, at, "ledger", "request", "x")


def test_a_dry_run_costs_nothing_and_warns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], at: list[str], tmp_path: Path
):
    settings = [*at, "budget.per_run_usd=0.0001", "budget.per_month_usd=0.0001"]
    shown = run(monkeypatch, capsys, settings, "run", "refresh", "--dry-run")
    assert re.search(r"teacher +distill +simulated-rewriter +2 +0 ", shown)
    assert "more than budget.per_run_usd = 0.0001: the run would stop there" in shown
    assert "of this month that is more than budget.per_month_usd = 0.0001" in shown
    assert not (tmp_path / "runs").exists()
