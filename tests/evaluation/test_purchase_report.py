"""A comparison of teachers on the page, in the terminal and in Markdown; and what is checked before it starts."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_fixture import METRICS, scores
from rich.console import Console

from qinglan.config import Profile
from qinglan.errors import ConfigError
from qinglan.evaluation.models import ArmFigures, Evaluation, Purchase, Report
from qinglan.evaluation.reasons import reason
from qinglan.evaluation.report.html import render_html
from qinglan.evaluation.report.terminal import print_table
from qinglan.evaluation.report.verdict import arms_of, verdict
from qinglan.evaluation.summary import build_report
from qinglan.ops.preflight import inspect_profile, require
from qinglan.runs.artifacts import Artifact, StageResult, write_json
from qinglan.runs.run import open_run
from qinglan.simulators.services import embedded_services
from qinglan.statistics import Comparison

ProfileOf = Callable[..., Profile]
EVIL = "<img src=x onerror=alert(1)>"
CHEAP = reason("keep_not_better_than_question", rival="qwen3-32b", main="gpt-5")


def comparison(rival: str, metric: str, diff: float, **more: Any) -> Comparison:
    numbers: dict[str, Any] = {
        "n": 500, "groups": 420, "wins": 10, "ties": 480, "losses": 10, "p_value": 0.031, "p_holm": 0.062,
        "detectable_diff": 0.02, "ci95": (diff - 0.01, diff + 0.01), "mean_a": 0.8, "mean_b": 0.8 - diff,
    }  # fmt: skip
    return Comparison(a=rival, b="teacher", metric=metric, diff=diff, **(numbers | more))


def purchase(**changes: Any) -> Purchase:
    content: dict[str, Any] = {
        "labels": {"teacher": "gpt-5", "deepseek": "deepseek", "qwen3-32b": "qwen3-32b"},
        "rival": "qwen3-32b", "tone": "better", "sentence": CHEAP,
        "reading": reason("take_better", rival="qwen3-32b", main="gpt-5", metric="top-1"),
        "offers": [reason("no_gain_over_question", label="deepseek"), CHEAP],
        "notes": [reason("label_of_model", label="gpt-5", model=EVIL)], "simulated": ["deepseek"],
    }  # fmt: skip
    return Purchase.model_validate(content | changes)


def report(**changes: Any) -> Report:
    arm = ArmFigures(
        n=500, **scores(top1=0.81, mean_top1_score=0.8, quality=4.3), cost_per_1000_usd=0.4, latency_p50_ms=900
    )
    names = ("deepseek", "qwen3-32b", "teacher", "original")  # in no good order
    found = [comparison(rival, metric, -0.004) for rival in names[:2] for metric in ("top1", "quality")]
    content: dict[str, Any] = {
        "run_id": "r", "profile": "p", "recipe": "query_rewrite", "arms": dict.fromkeys(names, arm),
        "metrics": METRICS,
        "comparisons": found, "purchase": purchase(),
    }  # fmt: skip
    return Report.model_validate(content | changes)


def test_arms_stand_in_order_under_the_models_names_with_every_offer_below(tmp_path: Path):
    assert list(arms_of(report())) == ["original", "teacher", "deepseek", "qwen3-32b"]
    page = render_html(report(), tmp_path / "report.html").path.read_text(encoding="utf-8")
    heads = re.findall(r"<th class=\"(?:main)?\">(?:<span class=\"en\">)?([^<]*)<", page)
    assert heads == ["Original", "gpt-5", "deepseek*", "qwen3-32b"]
    assert "deepseek − gpt-5" in page and "Teacher" not in page
    assert "Which teacher to buy</span>" in page and "deepseek is not shown to retrieve better" in page
    assert "0.062" in page and "0.031" in page and "Holm" in page
    assert EVIL not in page and "&lt;img src=x" in page
    console = Console(width=100, force_terminal=False)
    with console.capture() as capture:
        console.print(print_table(report()))
    text = " ".join(capture.get().split())
    assert "gpt-5" in text and "Against gpt-5:" in text and "p 0.062" in text
    assert "deepseek is not shown to retrieve better" in text and "Teacher" not in text
    assert (verdict(report()).tone, verdict(report()).sentence.en) == ("better", CHEAP.render())


def outlines(rewrite: int) -> dict[str, Any]:
    parts = [{"label": label, "low": 0, "high": 1, "counts": counts}
             for label, counts in (("original question", [9, 1]), ("rewrite", [rewrite, 10 - rewrite]))]  # fmt: skip
    return {"histograms": {"top1_score": parts, "gain": parts[1:]}}


def test_the_report_is_built_from_the_compare_stage_with_every_teachers_scores(profile_of: ProfileOf, tmp_path: Path):
    evaluation = Evaluation(arms=report().arms, comparisons=report().comparisons, examples=[], shared=[])
    write_json(tmp_path / "evaluation.json", evaluation.model_dump(mode="json"))
    evaluated = {"evaluation": Artifact.of(tmp_path / "evaluation.json")}
    parts: dict[str, dict[str, Any]] = {
        "validate": {"details": outlines(5)},
        "validate-deepseek": {"details": outlines(4)},
        "validate-qwen3-32b": {"details": outlines(3)},
        "compare": {"details": {"purchase": purchase().model_dump(mode="json")}, "artifacts": evaluated},
    }
    with open_run(profile_of(), "compare") as run:
        stages = [StageResult(stage=name, key="k", run_id=run.id, seconds=1, **more) for name, more in parts.items()]
        built = build_report(run, stages)
    assert (built.purchase, set(built.arms)) == (purchase(), {"original", "teacher", "deepseek", "qwen3-32b"})
    assert Report.read(built.write(tmp_path / "report.json").path) == built
    drawn = built.distributions
    assert [(part.label, part.counts[0]) for part in drawn["top1_score"]] == [
        ("original question", 9), ("gpt-5", 5), ("deepseek", 4), ("qwen3-32b", 3),
    ]  # fmt: skip
    assert "gain" not in drawn


def test_every_rival_is_checked_before_anything_is_asked(profile_of: ProfileOf):
    price = {"input_per_million_usd": 1.0, "output_per_million_usd": 1.0}
    down = {"model": "far", "base_url": "http://127.0.0.1:9/v1"}
    profile = profile_of(
        teacher={"model": "simulated-rewriter"},
        judge={"model": "simulated-judge"},
        compare={"teachers": {"here": {"model": "simulated-keywords"}, "down": down}},
        prices=dict.fromkeys(("simulated-rewriter", "simulated-keywords", "simulated-judge", "far"), price),
    )
    checks = {check.name: check.problem for check in inspect_profile(profile, "compare")}
    assert list(checks) == [
        "recipe", "workbook", "teacher", "judge", "compare", "compare.teachers.here", "compare.teachers.down", "rag",
        "ledger",
    ]  # fmt: skip
    assert [name for name, problem in checks.items() if problem] == ["compare.teachers.down"]
    assert "can't be reached" in str(checks["compare.teachers.down"])


def test_nobody_to_compare_with_is_one_line(profile_of: ProfileOf):
    price = {"input_per_million_usd": 1.0, "output_per_million_usd": 1.0}
    names = {"teacher": {"model": "simulated-rewriter"}, "judge": {"model": "simulated-judge"}}
    prices = dict.fromkeys(("simulated-rewriter", "simulated-judge"), price)
    with pytest.raises(ConfigError, match=r"compare\.teachers: names no teacher to compare with; add one"):
        require(profile_of(**names, prices=prices), "compare")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_stand_in_rival_is_served_beside_a_live_teacher(profile_of: ProfileOf, tmp_path: Path):
    live = {"model": "big", "base_url": "http://live/v1"}
    profile = profile_of(
        teacher=live,
        judge={"model": "small", "base_url": "http://live/v1"},
        rag={"url": "http://live/q"},
        compare={"teachers": {"here": {"model": "small"}, "there": live}},
    )
    with embedded_services(profile, tmp_path / "unused") as services:
        assert services().rival_urls["here"].startswith("http://127.0.0.1:")
        assert (services().rival_urls["there"], services().teacher_url) == ("http://live/v1", "http://live/v1")
