"""The report as JSON, HTML and terminal table. The numbers are invented: they show how a page reads, nothing else."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from qinglan.artifacts import Artifact, StageResult
from qinglan.config import Endpoint, Price, Profile, Rag
from qinglan.errors import ArtifactError
from qinglan.plots import Axis, chart, histogram, moving_mean
from qinglan.report import Report, Stage, stand_in_warning, stand_ins_of, starred, verdict
from qinglan.report_html import render_html
from qinglan.report_terminal import print_table
from qinglan.rows import Retrieved, Row
from qinglan.statistics import Comparison
from qinglan.validation import Findings

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{ 7*7 }}"


def comparison(a: str, b: str, diff: float | None, ci95: tuple[float, float] | None, **more: Any) -> Comparison:
    numbers: dict[str, Any] = {
        "metric": "top1", "n": 1000, "groups": 159, "wins": 124, "ties": 823, "losses": 53, "p_value": 0.0121,
        "detectable_diff": 0.078, "mean_a": 0.866, "mean_b": 0.795,
    }  # fmt: skip
    return Comparison(a=a, b=b, diff=diff, ci95=ci95, **{**numbers, **more})


def retrieved(gold_rank: int, title: str, score: float) -> dict[str, Any]:
    ids = ["d1", "d2", "d3"]
    if gold_rank:
        ids[gold_rank - 1] = "gold"
    return {
        "ids": ids,
        "scores": [score, score - 0.1, score - 0.2],
        "titles": [title, "鱼油 储存方法", "鱼油 不良反应"],
    }


def example(query: str = "它一天吃几粒啊，我妈有点高血压", gold_id: str | None = "gold") -> dict[str, Any]:
    return {
        "query": query,
        "profile": "62岁 女 高血压",
        "history": "用户先前问过深海鱼油的成分",
        "gold_id": gold_id,
        "gold_title": "深海鱼油 用法用量",
        "arms": {
            "original": {"text": query, "retrieved": retrieved(0, "维生素C 用法用量", 0.41)},
            "teacher": {"text": "深海鱼油 每日剂量", "retrieved": retrieved(3, "深海鱼油 成分", 0.72)},
            "base": {"text": None, "reason": "empty_rewrite"},
            "sft": {"text": "深海鱼油 服用量", "retrieved": retrieved(2, "深海鱼油 成分", 0.74)},
            "rl": {"text": "深海鱼油 用法用量", "retrieved": retrieved(1, "深海鱼油 用法用量", 0.97)},
        },
    }


def stages() -> list[dict[str, Any]]:
    sha = "4f9a0c61d2" * 6 + "abcd"
    rows = [
        ("load", 1.2, 3200, 3174, {"duplicate": 21, "empty_query": 5}),
        ("distill", 48.0, 2174, 2151, {"empty_rewrite": 14, "teacher_refused": 6, "teacher_timeout": 3}),
        ("validate", 21.7, 2151, 2149, {"rag_error": 2}),
        ("select", 0.4, 2149, 1316, {"below_threshold": 512, "worse_than_original": 287, "too_long": 34}),
        ("dataset", 0.9, 1316, 1316, {}),
        ("sft", 96.2, 0, 0, {}),
        ("rl", 251.0, 0, 0, {}),
        ("evaluate", 64.3, 0, 0, {}),
    ]
    return [
        {
            "name": name, "seconds": seconds, "rows_in": taken, "rows_out": given, "dropped": dropped,
            "artifacts": [{"path": f"runs/20261104-0210-7c1e/{name}/rows.jsonl", "sha256": sha, "rows": given or None}],
            "reused_from": "20261103-0210-55aa" if name == "distill" else None,
        }
        for name, seconds, taken, given, dropped in rows
    ]  # fmt: skip


def curves() -> dict[str, Any]:
    steps = [float(i) for i in range(1, 61)]
    reward = [0.31 * (1 - math.exp(-i / 18)) - 0.06 + 0.035 * math.sin(i * 2.3) for i in steps]
    loss = [0.08 + 3.1 * math.exp(-i / 9) for i in steps]
    return {
        "rl_reward": [{"label": "reward", "x": steps, "y": reward}],
        "sft_loss": [
            {"label": "train", "x": steps, "y": loss},
            {"label": "dev", "x": steps[9::10], "y": [value + 0.09 for value in loss[9::10]]},
        ],
        "pretrain_loss": [{"label": "train", "x": [20 * i for i in steps], "y": [6.2 / i**0.5 for i in steps]}],
    }


def report(**changes: Any) -> Report:
    content: dict[str, Any] = {
        "run_id": "20261104-0210-7c1e", "profile": "embedded", "recipe": "query_rewrite",
        "versions": {"qinglan": "0.1.0", "python": "3.11.9", "verl": "0.9.1", "ms-swift": "4.6.0", "torch": "2.13.0",
                     "ray": "2.60.0", "prefect": "3.8.8", "mlflow": "3.17.2", "prompts": "1"},
        "stages": stages(),
        "api": {
            "teacher": {"calls": 3174, "cached": 2151, "failed": 23, "prompt_tokens": 598_211,
                        "completion_tokens": 40_118, "cost_usd": 1.149},
            "judge": {"calls": 9120, "cached": 310, "failed": 0, "prompt_tokens": 1_204_881,
                      "completion_tokens": 91_204, "cost_usd": 0.42},
            "rag": {"calls": 14_310, "cached": 2204, "failed": 2},
        },
        "arms": {
            "original": {"n": 1000, "top1": 0.132, "mrr10": 0.214, "mean_top1_score": 0.402, "latency_p50_ms": 3.1,
                         "latency_p95_ms": 5.9, "cost_per_1000_usd": 0.0, "top1_ci95": [0.101, 0.166]},
            "teacher": {"n": 1000, "top1": 0.795, "mrr10": 0.841, "mean_top1_score": 0.792, "quality": 4.31,
                        "latency_p50_ms": 812, "latency_p95_ms": 1904, "cost_per_1000_usd": 0.572,
                        "top1_ci95": [0.738, 0.848], "failed": 4},
            "base": {"n": 1000, "top1": 0.021, "mrr10": 0.035, "mean_top1_score": 0.188, "quality": 0.42,
                     "latency_p50_ms": 41, "latency_p95_ms": 77, "cost_per_1000_usd": 0.051,
                     "top1_ci95": [0.01, 0.034], "failed": 61},
            "sft": {"n": 1000, "top1": 0.78, "mrr10": 0.832, "mean_top1_score": 0.801, "quality": 4.25,
                    "latency_p50_ms": 38, "latency_p95_ms": 66, "cost_per_1000_usd": 0.051,
                    "top1_ci95": [0.72, 0.836]},
            "rl": {"n": 1000, "top1": 0.866, "mrr10": 0.897, "mean_top1_score": 0.874, "quality": 4.37,
                   "latency_p50_ms": 37, "latency_p95_ms": 64, "cost_per_1000_usd": 0.051,
                   "top1_ci95": [0.813, 0.912]},
        },
        "comparisons": [
            comparison("rl", "teacher", 0.071, (0.019, 0.128), one_sided=4, left_out=4, n=996),
            comparison("sft", "teacher", -0.015, (-0.045, 0.015), p_value=0.36, detectable_diff=0.043),
            comparison("rl", "sft", 0.086, (0.041, 0.135), p_value=0.0004, detectable_diff=0.067),
            comparison("rl", "teacher", 0.06, (-0.05, 0.17), metric="quality", mean_a=4.37, mean_b=4.31, p_value=0.29),
        ],
        "training": {
            "sft": {"rows": 617, "steps": 304, "loss_first": 3.18, "loss_last": 0.081, "exact_match": 0.81},
            "rl": {"steps": 60, "reward_first": -0.061, "reward_last": 0.248, "invalid_samples": 3},
        },
        "stand_ins": ["teacher", "judge", "rag", "student", "workbook"],
        "examples": [example(), example("血脂高的人能吃那个纳豆吗")] * 5,
        "shared": [
            {"what": "exact questions", "test": 1000, "in_train": 0},
            {"what": "gold documents", "test": 159, "in_train": 0, "note": "product × intent pairs unseen in training"},
            {"what": "products", "test": 44, "in_train": 44},
        ],
        "curves": curves(),
    }  # fmt: skip
    return Report.model_validate(content | changes)


def page(tmp_path: Path, content: Report) -> str:
    return render_html(content, tmp_path / "report.html").path.read_text(encoding="utf-8")


def terminal(content: Report) -> str:
    console = Console(width=100, record=True, file=None, force_terminal=False, quiet=False)
    with console.capture() as capture:
        console.print(print_table(content))
    return capture.get()


class Tags(HTMLParser):
    """Start tags and their attributes, and whether every element is closed."""

    void = frozenset({"meta", "br", "wbr", "line", "circle", "rect", "path"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_report_json_survives_a_round_trip(tmp_path: Path) -> None:
    artifact = report().write(tmp_path / "report.json")
    assert Report.read(artifact.path) == report()


def test_report_json_has_the_documented_keys(tmp_path: Path) -> None:
    content = json.loads(report().write(tmp_path / "report.json").path.read_text(encoding="utf-8"))
    assert {"run_id", "profile", "recipe", "versions", "stages", "api", "arms", "comparisons", "training"} <= set(
        content
    )
    assert {"calls", "cached", "failed", "prompt_tokens", "completion_tokens", "cost_usd"} == set(
        content["api"]["judge"]
    )
    assert content["comparisons"][0]["ci95"] == [0.019, 0.128]
    assert content["training"]["rl"]["invalid_samples"] == 3


def test_nan_is_null(tmp_path: Path) -> None:
    arms = {"teacher": {"n": 3, "top1": math.nan}}
    text = (
        report(arms=arms, comparisons=[], examples=[]).write(tmp_path / "report.json").path.read_text(encoding="utf-8")
    )
    assert json.loads(text)["arms"]["teacher"]["top1"] is None and "NaN" not in text


@pytest.mark.parametrize("content", [None, '{"run_id": "x"}'])
def test_an_unreadable_report_is_one_line(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "report.json"
    if content:
        path.write_text(content)
    with pytest.raises(ArtifactError, match=r"report\.json"):
        Report.read(path)


def test_stage_of_a_reused_result(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    artifacts = {"rows": Artifact.of(tmp_path / "rows.jsonl", 1)}
    result = StageResult(stage="distill", key="k", run_id="old", seconds=2, rows_in=2, rows_out=1,
                         dropped={"empty_rewrite": 1}, artifacts=artifacts)  # fmt: skip
    assert Stage.of(result, "new").reused_from == "old"
    assert Stage.of(result, "old").reused_from is None
    assert Stage.of(result, "new").artifacts[0].rows == 1


def test_verdict_says_who_won_by_how_much() -> None:
    assert verdict(report()).sentence == (
        "RL student 0.866 vs teacher 0.795 top-1 on 996 test questions: +0.071 [0.019, 0.128]"
    )
    assert verdict(report()).tone == "better"


def test_verdict_is_honest_about_a_loss() -> None:
    lost = verdict(report(comparisons=[comparison("rl", "teacher", -0.3, (-0.4, -0.2), mean_a=0.5, mean_b=0.8)]))
    assert lost.tone == "worse" and "−0.300 [−0.400, −0.200]" in lost.sentence and "worse" in lost.reading


def test_verdict_without_a_shown_difference_names_what_could_be_detected() -> None:
    result = verdict(report(comparisons=[comparison("rl", "teacher", 0.02, (-0.03, 0.07))]))
    assert result.tone == "open" and "no difference is shown" in result.reading and "0.078" in result.reading


def test_verdict_falls_back_to_sft_and_to_other_metrics() -> None:
    only_score = comparison("sft", "teacher", 0.03, (0.01, 0.05), metric="mean_top1_score")
    assert verdict(report(comparisons=[only_score])).sentence.startswith("SFT student")
    assert "mean top-1 score" in verdict(report(comparisons=[only_score])).sentence


def test_verdict_of_a_data_only_run() -> None:
    arms = {"original": {"n": 5000, "mean_top1_score": 0.4}, "teacher": {"n": 5000, "mean_top1_score": 0.8}}
    found = comparison("teacher", "original", 0.4, (0.38, 0.42), metric="mean_top1_score", mean_a=0.8, mean_b=0.4)
    sentence = verdict(report(arms=arms, comparisons=[found])).sentence
    assert sentence.startswith("Teacher 0.800 vs original question 0.400") and " on 1,000 questions" in sentence


def test_verdict_of_nothing() -> None:
    assert verdict(report(comparisons=[])).tone == "none"
    assert verdict(report(comparisons=[comparison("rl", "teacher", None, None)])).tone == "none"
    assert "no interval" in verdict(report(comparisons=[comparison("rl", "teacher", 1.0, None)])).reading


def test_page_has_every_section_and_is_well_formed(tmp_path: Path) -> None:
    html = page(tmp_path, report())
    parsed = Tags(html)
    assert parsed.open == []
    heads = re.findall(r"<h2>(.*?)</h2>", html)
    assert heads == ["Arms", "Comparisons", "Where rows fell", "Training", "Examples", "Calls and cost",
                     "What test and train share", "Stages", "Versions"]  # fmt: skip
    assert html.count("gold first") == 10 and "failed: empty_rewrite" in html
    assert "below_threshold" in html and "20261103-0210-55aa" in html


def test_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    html = page(tmp_path, report())
    assert not re.search(r"https?:|url\(|@import|<script|<link|<img|<iframe", html)
    assert "default-src 'none'" in html


def test_untrusted_text_stays_text(tmp_path: Path) -> None:
    evil = example(EVIL)
    evil |= {"profile": EVIL, "history": EVIL, "gold_title": EVIL}
    evil["arms"]["rl"] = {"text": EVIL, "retrieved": retrieved(1, EVIL, 0.9)}
    evil["arms"]["sft"] = {"text": None, "reason": EVIL}
    stage = {"name": EVIL, "seconds": 1, "rows_in": 2, "rows_out": 1, "dropped": {EVIL: 1}}
    shared = [{"what": EVIL, "test": 1, "in_train": 0, "note": EVIL}]
    series = [{"label": EVIL, "x": [1, 2], "y": [1, 2]}]
    html = page(tmp_path, report(run_id=EVIL, examples=[evil], stages=[stage], shared=shared,
                                 versions={EVIL: EVIL}, curves={EVIL: series}))  # fmt: skip
    parsed = Tags(html)
    assert not {"script", "img"} & {tag for tag, _ in parsed.tags}
    assert not [name for _, attrs in parsed.tags for name in attrs if name.startswith("on")]
    assert html.count("&lt;script&gt;alert(1)") >= 12 and "{{ 7*7 }}" in html


def test_stand_ins_are_named_on_the_page_and_in_the_terminal(tmp_path: Path) -> None:
    for text in (page(tmp_path, report()), terminal(report())):
        words = " ".join(text.split())
        assert "The teacher, the judge, the RAG, the base model and the workbook were embedded stand-ins." in words
        assert "nothing about GPT-5 or your data" in words


def test_a_real_run_has_no_warning_and_no_star(tmp_path: Path) -> None:
    real = report(stand_ins=[])
    assert stand_in_warning(real) == "" and "stand-in" not in page(tmp_path, real) and "*" not in terminal(real)


def test_stars_mark_only_what_a_stand_in_made() -> None:
    only_judge = report(stand_ins=["judge"])
    assert starred(only_judge, "quality") and not starred(only_judge, "top1") and not starred(only_judge, "teacher")
    only_rag = report(stand_ins=["rag"])
    assert starred(only_rag, "mrr10") and starred(only_rag, "rl") and not starred(only_rag, "teacher")
    assert "was an embedded stand-in" in stand_in_warning(only_rag)


def test_stand_ins_follow_from_the_profile() -> None:
    endpoint, prices = Endpoint(model="m"), {"m": Price(input_per_million_usd=1, output_per_million_usd=1)}
    profile = Profile(name="p", teacher=endpoint, judge=endpoint, prices=prices, rag=Rag(url="http://rag/recall"))
    assert stand_ins_of(profile) == ["teacher", "judge", "student", "workbook"]


def test_a_data_only_report_renders(tmp_path: Path) -> None:
    arms = {"original": {"n": 5000, "mean_top1_score": 0.4}, "teacher": {"n": 5000, "mean_top1_score": 0.8}}
    small = Report.model_validate({"run_id": "r", "profile": "p", "recipe": "query_rewrite", "arms": arms})
    html = page(tmp_path, small)
    assert "Nothing was compared" in html and "Training" not in html and "mean top-1 score by arm" in html
    assert "Teacher" in terminal(small)


def test_an_empty_report_renders(tmp_path: Path) -> None:
    empty = Report(run_id="r", profile="p", recipe="query_rewrite")
    assert Tags(page(tmp_path, empty)).open == []
    assert "Nothing was compared" in terminal(empty)


def test_terminal_fits_100_columns_uncut() -> None:
    text = terminal(report())
    assert max(map(len, text.splitlines())) <= 100 and "…" not in text
    rl = next(line for line in text.splitlines() if line.lstrip().startswith("RL*"))
    assert rl.split() == [
        "RL*",
        "1,000",
        "0.866",
        "[0.813,",
        "0.912]",
        "0.897",
        "0.874",
        "4.37",
        "37/64",
        "0.051",
    ]


def test_terminal_lists_the_three_comparisons_and_the_failures() -> None:
    text = terminal(report())
    lines = [line.split("  ")[0].strip() for line in text.splitlines() if "w/t/l" in line]
    assert lines == ["RL − Teacher", "SFT − Teacher", "RL − SFT"]
    assert "Failed, left out of the means: teacher 4, base model 61" in text


def test_axis_has_round_ticks_that_cover_the_values() -> None:
    axis = Axis.over([-0.045, 0.135])
    assert axis.low <= -0.045 and axis.high >= 0.135
    assert [axis.label(tick) for tick in axis.ticks] == ["−0.05", "0.00", "0.05", "0.10", "0.15"]
    assert axis.at(axis.low) == 0 and axis.at(axis.high) == 100


@pytest.mark.parametrize("values", [[], [math.nan], [3.0], [0.0, 0.0]])
def test_axis_of_nothing_much(values: list[float]) -> None:
    axis = Axis.over(values)
    assert axis.high > axis.low and len(axis.ticks) >= 2


def test_chart_skips_what_is_not_finite() -> None:
    drawn = chart("t", "step", [("loss", [(1, 2.0), (2, math.nan), (3, math.inf), (4, 1.0)])])
    assert [line.path for line in drawn.lines] == ["M0.0,0.0 L100.0,100.0"]


def test_moving_mean_is_centred() -> None:
    assert moving_mean([(0, 0.0), (1, 3.0), (2, 6.0)], 3) == [(0, 1.5), (1, 3.0), (2, 4.5)]


def validated(rows: int) -> Findings:
    """Rewrites that gain 0.3, except every fifth, which changes nothing, and every tenth, which loses 0.1."""
    findings = Findings()
    for i in range(rows):
        original = 0.2 + 0.4 * (i % 37) / 37
        better = original + (-0.1 if i % 10 == 1 else 0.0 if i % 5 == 0 else 0.3)
        findings.add(
            Row(
                id=str(i), tenant="t", query="q", source="f!A1", rewrite="w",
                original_retrieved=Retrieved(ids=("d",), scores=(original,)),
                rewrite_retrieved=Retrieved(ids=("d",), scores=(better,)),
            )
        )  # fmt: skip
    return findings


def test_the_gain_of_the_rewrites_is_drawn_and_told(tmp_path: Path) -> None:
    html = page(tmp_path, report(distributions=validated(1000).histograms()))
    assert "Of 1,000 rows, 70% score higher with the rewrite, 20% the same (within 0.01) and 10% lower." in html
    assert 'aria-label="Gain in top-1 score, % of rows: rewrite − original, median +0.30"' in html
    assert re.search(r'aria-label="Top-1 score, % of rows: original question, median 0\.\d\d; rewrite, median', html)
    assert Tags(html).open == []


def test_nothing_validated_draws_nothing(tmp_path: Path) -> None:
    assert "What the rewrites gain" not in page(tmp_path, report(distributions=validated(0).histograms()))
    assert "What the rewrites gain" not in page(tmp_path, report())


def test_an_outline_adds_up_to_all_and_ends_at_the_last_value() -> None:
    counts = [0] * 100
    counts[10], counts[11], counts[99] = 300, 200, 500
    drawn = histogram("t", [("line-0", "a", 0.0, 1.0, counts)])
    assert drawn is not None
    points = [tuple(map(float, point.split(","))) for point in drawn.lines[0].path[1:].split(" L")]
    heights = [drawn.y.high * (100 - y) / 100 for _, y in points]
    assert max(heights) == pytest.approx(50, rel=1e-3) and (heights[0], heights[-1]) == (0, 0)
    assert sum(heights[1:-1]) / 2 == pytest.approx(100, rel=1e-3)
    assert (points[0][0], points[-1][0]) == (8, 100)  # 1,000 values are drawn in 25 bins


@pytest.mark.parametrize(("rows", "steps"), [(60, 10), (700, 20), (100_000, 50)])
def test_few_rows_are_drawn_in_few_bins(rows: int, steps: int) -> None:
    drawn = histogram("t", [("line-0", "a", 0.0, 1.0, [rows // 100 or 1] * 100)])
    assert drawn is not None and drawn.lines[0].path.count("L") == 2 * steps + 1
