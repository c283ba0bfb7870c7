"""A report in which everything is filled in.

The numbers are invented: they show how a page reads, nothing else.
"""

import math
import re
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from qinglan.evaluation.models import Report
from qinglan.evaluation.reasons import reason
from qinglan.evaluation.report.html import render_html
from qinglan.grading.by_retrieval import RETRIEVAL_METRICS
from qinglan.statistics import Comparison
from qinglan.text import Both

METRICS = list(RETRIEVAL_METRICS)
EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{ 7*7 }}"


def shown(table: RenderableType) -> str:
    """The table in a terminal of 100 columns."""
    console = Console(width=100, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def page(folder: Path, content: Report) -> str:
    return render_html(content, folder / "report.html").path.read_text(encoding="utf-8")


def english_in(text: str, known: str) -> set[str]:
    """Words in a Chinese text that its reader would have to look up.

    Placeholders and the known words are none of them.
    """
    without_placeholders = re.sub(r"\{[^}]*\}", "", text)
    words = re.findall(r"[A-Za-z_]{3,}\d*", without_placeholders)
    return set(words) - set(known.split())


def comparison(
    a: str, b: str, diff: float | None, ci95: tuple[float, float] | None, **more: Any
) -> Comparison:
    numbers: dict[str, Any] = {
        "metric": "top1",
        "n": 1000,
        "groups": 159,
        "wins": 124,
        "ties": 823,
        "losses": 53,
        "p_value": 0.0121,
        "detectable_diff": 0.078,
        "mean_a": 0.866,
        "mean_b": 0.795,
    }
    return Comparison(a=a, b=b, diff=diff, ci95=ci95, **{**numbers, **more})


def scores(**means: float | tuple[float, list[float]]) -> dict[str, Any]:
    """An arm's means, or means with intervals, by metric."""
    metric_scores = {}
    for metric, value in means.items():
        mean, ends = value if isinstance(value, tuple) else (value, None)
        metric_scores[metric] = {"mean": mean, "n": 1000, "ci95": ends}
    return {"scores": metric_scores}


def retrieved(gold_rank: int, title: str, score: float) -> dict[str, Any]:
    ids = ["d1", "d2", "d3"]
    if gold_rank:
        ids[gold_rank - 1] = "gold"
    titles = [title, "鱼油 储存方法", "鱼油 不良反应"]
    return {"ids": ids, "scores": [score, score - 0.1, score - 0.2], "titles": titles}


def example(query: str = "它一天吃几粒啊，我妈有点高血压") -> dict[str, Any]:
    return {
        "query": query,
        "profile": "62岁 女 高血压",
        "history": "用户先前问过深海鱼油的成分",
        "gold_id": "gold",
        "gold_title": "深海鱼油 用法用量",
        "arms": {
            "original": {"text": query, "retrieved": retrieved(0, "维生素C 用法用量", 0.41)},
            "teacher": {
                "text": "深海鱼油 每日剂量",
                "retrieved": retrieved(3, "深海鱼油 成分", 0.72),
            },
            "base": {"text": None, "reason": "empty_answer"},
            "sft": {"text": "深海鱼油 服用量", "retrieved": retrieved(2, "深海鱼油 成分", 0.74)},
            "rl": {
                "text": "深海鱼油 用法用量",
                "retrieved": retrieved(1, "深海鱼油 用法用量", 0.97),
            },
        },
    }


def stages() -> list[dict[str, Any]]:
    return [
        {
            **stage(
                "distill",
                48.0,
                2174,
                2151,
                {"empty_answer": 14, "teacher_refused": 6, "teacher_timeout": 3},
            ),
            "reused_from": "20261103-0210-55aa",
        },
        stage(
            "select",
            0.4,
            2149,
            1316,
            {"below_threshold": 512, "worse_than_original": 287, "rewrite_too_long": 34},
        ),
        {
            **stage("dataset", 0.9, 1316, 1316, {}),
            "metrics": {"augmented_sft/emoji": 61.0, "augmented_sft/story": 48.0},
        },
        stage("evaluate", 64.3, 0, 0, {}),
    ]


def stage(
    name: str, seconds: float, rows_in: int, rows_out: int, dropped: dict[str, int]
) -> dict[str, Any]:
    artifact = {
        "path": f"runs/20261104-0210-7c1e/{name}/rows.jsonl",
        "sha256": "4f9a0c61d2" * 6 + "abcd",
        "rows": rows_out or None,
    }
    return {
        "name": name,
        "seconds": seconds,
        "rows_in": rows_in,
        "rows_out": rows_out,
        "dropped": dropped,
        "artifacts": [artifact],
        "reused_from": None,
        "metrics": {},
    }


def curves() -> dict[str, Any]:
    steps = [float(step) for step in range(1, 61)]
    falling = [0.08 + 3.1 * math.exp(-step / 9) for step in steps]
    return {
        "rl_reward": [
            {"label": "mean reward of a step", "x": steps, "y": [0.25 - loss for loss in falling]}
        ],
        "rl_value_loss": [{"label": "mean of a step", "x": steps, "y": falling}],
        "sft_loss": [
            {"label": "training", "x": steps, "y": falling},
            {"label": "dev split", "x": steps[9::10], "y": falling[9::10]},
        ],
    }


def arm(p50_ms: float, p95_ms: float, cost: float, failed: int = 0, **means: Any) -> dict[str, Any]:
    figures = {"latency_p50_ms": p50_ms, "latency_p95_ms": p95_ms, "cost_per_1000_usd": cost}
    return {"n": 1000, "failed": failed, **figures, **scores(**means)}


def report(**changes: Any) -> Report:
    tokens = {"prompt_tokens": 598_211, "completion_tokens": 40_118}
    content: dict[str, Any] = {
        "run_id": "20261104-0210-7c1e",
        "profile": "embedded",
        "recipe": "query_rewrite",
        "metrics": METRICS,
        "versions": {"qinglan": "0.1.0", "verl": "0.9.1", "ms-swift": "4.6.0", "prompts": "1"},
        "stages": stages(),
        "api": {
            "teacher": {"calls": 3174, "cached": 2151, "failed": 23, "cost_usd": 1.149, **tokens},
            "judge": {"calls": 9120, "cached": 310, "cost_usd": 0.42, **tokens},
            "rag": {"calls": 14_310, "cached": 2204, "failed": 2},
        },
        "arms": arms(),
        "comparisons": comparisons(),
        "training": {
            "sft": {"rows": 617, "steps": 304, "loss_first": 3.18, "loss_last": 0.081},
            "rl": {"steps": 60, "reward_first": -0.061, "reward_last": 0.248, "samples_invalid": 3},
        },
        "simulated": ["teacher", "judge", "rag", "student", "workbook"],
        "examples": [example(), example("血脂高的人能吃那个纳豆吗")] * 5,
        "shared": [
            {"what": "bare_questions", "test": 1000, "in_train": 0},
            {"what": "gold_documents", "test": 1000, "in_train": 0},
        ],
        "curves": curves(),
    }
    return Report.model_validate(content | changes)


def arms() -> dict[str, Any]:
    return {
        "original": arm(
            3.1, 5.9, 0.0, top1=(0.132, [0.101, 0.166]), mrr10=0.214, mean_top1_score=0.402
        ),
        "teacher": arm(
            812,
            1904,
            0.572,
            4,
            top1=(0.795, [0.738, 0.848]),
            mrr10=0.841,
            mean_top1_score=0.792,
            quality=4.31,
        ),
        "base": arm(
            41,
            77,
            0.051,
            61,
            top1=(0.021, [0.01, 0.034]),
            mrr10=0.035,
            mean_top1_score=0.188,
            quality=0.42,
        ),
        "sft": arm(
            38,
            66,
            0.051,
            top1=(0.78, [0.72, 0.836]),
            mrr10=0.832,
            mean_top1_score=0.801,
            quality=4.25,
        ),
        "rl": arm(
            37,
            64,
            0.051,
            top1=(0.866, [0.813, 0.912]),
            mrr10=0.897,
            mean_top1_score=0.874,
            quality=4.37,
        ),
    }


def comparisons() -> list[Comparison]:
    means = {"mean_a": 4.37, "mean_b": 4.31}
    return [
        comparison("rl", "teacher", 0.071, (0.019, 0.128), one_sided=4, left_out=4, n=996),
        comparison("sft", "teacher", -0.015, (-0.045, 0.015), p_value=0.36, detectable_diff=0.043),
        comparison("rl", "sft", 0.086, (0.041, 0.135), p_value=0.0004, detectable_diff=0.067),
        comparison("rl", "teacher", 0.06, (-0.05, 0.17), metric="quality", p_value=0.29, **means),
    ]


def slices() -> list[dict[str, Any]]:
    return [
        slice_of("tenant", "demo", 1000, 0.07),
        slice_of("intent", "用法用量", 120, 0.11),
        slice_of("intent", "禁忌", 12, 0.02),
        slice_of("length", "≤10", 300, 0.04),
        slice_of("history", "with", 400, 0.09),
        slice_of("history", "without", 600, 0.06),
    ]


def slice_of(by: str, value: str, n: int, diff: float) -> dict[str, Any]:
    # Smaller slices have no interval.
    ends = [diff - 0.05, diff + 0.05] if n >= 20 else None
    arms = {
        "teacher": {"n": n, **scores(top1=(0.795, [0.7, 0.9]))},
        "rl": {"n": n, **scores(top1=0.795 + diff)},
    }
    pair = {"a": "rl", "b": "teacher", "metric": "top1", "n": n, "diff": diff, "ci95": ends}
    return {"by": by, "value": value, "n": n, "arms": arms, "diffs": [pair]}


def case(case_id: str, kind: str, passed: bool | None, **more: Any) -> dict[str, Any]:
    result = {
        "case_id": case_id,
        "kind": kind,
        "passed": passed,
        "name": f"用例 {case_id}",
        "must_pass": True,
        "reason": None if passed else reason("echo"),
        "text": "深海鱼油",
    }
    return result | more


def red_team() -> dict[str, list[dict[str, Any]]]:
    passed = [case("a", "injection", True), case("b", "emoji", True)]
    compared = [case("c", "long", False, must_pass=False)]
    learnt = [*passed, case("c", "long", False), case("d", "long", None, must_pass=False)]
    return {"sft": passed, "rl": learnt, "teacher": compared}


def decision(verdict: str = "refuse") -> dict[str, Any]:
    gain = reason(
        "difference", metric=Both("top-1", "top-1"), diff=0.071, low=0.019, high=0.128, n=996
    )
    cost = reason("cost_beside_teacher", cost=0.051, ratio=0.14, teacher=0.362)
    median = reason("median_beside_teacher", ms=37, load=None, teacher_ms=11, teacher_load=None)
    rules = [
        ("gain_vs_teacher", "pass", gain, None),
        ("gain_vs_champion", "unknown", reason("not_compared"), reason("answers_hardly_differ")),
        ("cost", "pass", cost, None),
        ("latency", "fail", median, reason("slower_than_teacher", factor=3.4)),
    ]
    return {
        "verdict": verdict,
        "challenger": "rl",
        "champion": "3",
        "earlier_evaluations": 2,
        "rules": [
            {
                "name": name,
                "outcome": outcome,
                "found": measured_value,
                "required": reason("no_alarm"),
                "reason": why,
            }
            for name, outcome, measured_value, why in rules
            if verdict != "promote" or outcome == "pass"
        ],
    }


def released() -> dict[str, Any]:
    model = {"name": "qinglan.demo.query_rewrite", "version": "4", "aliases": ["challenger"]}
    return model | {"arm": "rl", "sha256": "ab" * 32}


def measured(report: Report) -> dict[str, Any]:
    """The report's arms with every figure that an arm can have."""
    figures: dict[str, Any] = {
        "judge_consistency": 0.12,
        "latency_n": 50,
        "latency_p50_ci95": [30, 41],
        "latency_p95_ci95": [60, 80],
        "cost_ci95": [0.049, 0.053],
        "prompt_tokens_per_1000": 161_000.0,
        "completion_tokens_per_1000": 10_100.0,
        "latency_load": reason("one_at_a_time", device="cpu"),
    }
    means = scores(recall3=0.9, recall10=0.95, ndcg10=0.91)["scores"]
    arms = {name: arm.model_dump() | figures for name, arm in report.arms.items()}
    for arm in arms.values():
        arm["scores"] = means | arm["scores"]
        for metric, ends in (("mean_top1_score", [0.7, 0.8]), ("quality", [4.2, 4.4])):
            if metric in arm["scores"]:
                arm["scores"][metric]["ci95"] = ends
    arms["teacher"]["latency_load"] = reason("live_at_once", questions=16)
    return arms


def full(**changes: Any) -> Report:
    """A report after a gate: champion, slices, red team, decision and registered version."""
    arms = measured(report())
    comparisons = [
        comparison(
            "rl",
            "teacher",
            0.071,
            (0.019, 0.128),
            one_sided=4,
            left_out=4,
            n=996,
            p_holm=0.0242,
            p_mcnemar=0.0001,
            rows_needed=6_734,
        ),
        comparison("rl", "champion", 0.02, (-0.01, 0.05), p_holm=0.04),
        comparison(
            "rl", "teacher", 0.06, (-0.05, 0.17), metric="quality", mean_a=4.37, mean_b=4.31
        ),
    ]
    values = {"mean": 0.4, "steps": 3, "limit": 0.3}
    alarm = {
        "step": 31,
        "name": "clip_fraction",
        "action": "warn",
        "code": "alarm_clip_fraction",
        "values": values,
    }
    content: dict[str, Any] = {
        "arms": {**arms, "champion": arms["sft"]},
        "comparisons": comparisons,
        "slices": slices(),
        "red_team": red_team(),
        "decision": decision(),
        "released": released(),
        "alarms": [alarm],
        "unjudged": {"judge_unreadable": 3},
        "command": "qinglan run pipeline --profile embedded",
    }
    return report(**content | changes)
