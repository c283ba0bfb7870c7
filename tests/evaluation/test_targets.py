"""Targets beside what was found: a target that the run says nothing of is neither met nor
missed."""

import pytest
from fixture_types import ProfileOf

from qinglan.evaluation.models import Api, ArmFigures, Report, StageSummary
from qinglan.evaluation.targets import target_findings, target_lines
from qinglan.ledger import Usage
from qinglan.recipes import Finding, get_recipe
from qinglan.statistics import Comparison
from qinglan.text import number


def stage(name: str, rows: int = 0, seconds: float = 0.0) -> StageSummary:
    return StageSummary(name=name, seconds=seconds, rows_in=rows, rows_out=rows)


@pytest.fixture
def report() -> Report:
    arms = {"a": "rl", "b": "teacher", "metric": "top1", "n": 100, "groups": 100}
    comparison = Comparison(
        **arms,
        diff=0.05,
        ci95=(0.01, 0.09),
        p_value=0.02,
        detectable_diff=0.06,
        wins=9,
        losses=4,
        ties=87,
    )
    return Report(
        run_id="r",
        profile="p",
        recipe="query_rewrite",
        metrics=list(get_recipe("query_rewrite").grader.metrics),
        stages=[
            stage("ingest", 800),
            stage("select", 300),
            stage("sft", seconds=3600),
            stage("rl", seconds=7200),
        ],
        arms={
            "rl": ArmFigures(n=100, cost_per_1000_usd=0.05, latency_p50_ms=200),
            "teacher": ArmFigures(n=100, cost_per_1000_usd=1.05, latency_p50_ms=400),
        },
        comparisons=[comparison],
        api=Api(teacher=Usage(cost_usd=15), judge=Usage(cost_usd=10), earlier_usd=5),
    )


def test_targets_are_met_missed_or_open(profile_of: ProfileOf, report: Report):
    targets = {
        "gain": 0.03,
        "quality_loss": 0.0,
        "cost_saving": 0.9,
        "latency_saving": 0.55,
        "run_usd": 25,
    }
    profile = profile_of(targets=targets | {"rows": {"select": [0.4, 0.9]}})
    met = [line.is_met for line in target_lines(report, profile)]
    # Gain, quality (no judge's score), cost, latency (half is not 55%), rows at least and at most,
    # dollars.
    assert met == [True, None, True, False, False, True, False]
    of_data = report.model_copy(update={"stages": report.stages[:2], "arms": {}, "comparisons": []})
    (finding,) = target_findings(of_data, profile)
    read_again = Finding.model_validate_json(finding.model_dump_json())
    assert [number(row.values[-1]) for row in read_again.rows] == ["✗", "✓", "✗"], (
        "a refresh says nothing of models"
    )
    assert (
        list(target_lines(report.model_copy(update={"purchase": "of another teacher"}), profile))
        == []
    )
    behind_sft = profile_of(targets={"cost_saving": 0.9}, gate={"rivals": ["sft"]})
    assert [line.is_met for line in target_lines(report, behind_sft)] == [True], (
        "the saving is the teacher's cost"
    )


def test_the_volume_that_pays_for_the_training(profile_of: ProfileOf, report: Report):
    profile = profile_of(student={"gpu_hour_usd": 2.0})
    (costs,) = target_findings(report, profile)
    values = [row.values[0] for row in costs.rows]
    # Three hours at $2, $30 of calls, $1 saved per 1,000 questions: $36 are back after 36,000.
    assert values == pytest.approx([6, 30, 1.0, 36_000])
    assert list(target_findings(report, profile_of())) == []
    reused = [summary.model_copy(update={"reused_from": "r0"}) for summary in report.stages]
    (again,) = target_findings(report.model_copy(update={"stages": reused}), profile)
    assert [row.values[0] for row in again.rows] == values, (
        "what an earlier run paid for has its price too"
    )
