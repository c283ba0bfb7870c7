"""Evaluation, gate and report of a recipe of answers: they know its metrics by what it declares
alone."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import openpyxl
import pytest
from letters import GRADER, Letters
from report_fixture import page, shown

from qinglan.config import Evaluate, Gate
from qinglan.evaluation.evaluating import evaluate
from qinglan.evaluation.figures import examples
from qinglan.evaluation.gate import decide
from qinglan.evaluation.models import Evaluation, Report
from qinglan.evaluation.report.summary import result_markdown
from qinglan.evaluation.report.terminal import print_table
from qinglan.evaluation.report.verdict import main_comparison, verdict
from qinglan.recipes import JUDGE_SCORE, Finding, FindingRow, Metric
from qinglan.registry.approval import rows_to_review, write_approval_workbook
from qinglan.rows import ArmRow, Row
from qinglan.text import Both

KAPPA = Finding(
    title=Both("Agreement", "一致性"),
    columns=(Both("kappa", "卡帕值"),),
    rows=(FindingRow(label=Both("RL", "强化学习"), values=(0.8125,)),),
    digits=2,
)


class Judged(Letters):
    """A recipe with the judge's score among its metrics, and a table of its own."""

    grader = replace(
        GRADER,
        metrics=(
            Metric("pure", "pure answers", "纯正率"),
            Metric("share", "share of the letter", "字母占比", proportion=False),
            JUDGE_SCORE,
        ),
    )

    def findings(self, arms: Mapping[str, Sequence[ArmRow]], rows: Sequence[Row]) -> list[Finding]:
        return [KAPPA] if arms and rows else []


RECIPE = Judged()
CONFIG = Evaluate(bootstrap_resamples=200)
ROWS = [
    Row(
        id=f"{n:03}", tenant="t", query=f"问{n}", source="f!A1", inputs={"letter": "a"},
        pool="gold" if n < 30 else None,
    )
    for n in range(60)
]  # fmt: skip


def arm(*texts: str | None, **more: Any) -> list[ArmRow]:
    """Answers, graded by the rules; the last one stands for all that follow."""
    all_texts = [*texts, *[texts[-1]] * (len(ROWS) - len(texts))]
    return [
        ArmRow(
            row_id=row.id,
            text=text,
            parts=None if text is None else RECIPE.grader.parts(row, text),
            reason="empty_answer" if text is None else None,
            **more,
        )
        for row, text in zip(ROWS, all_texts, strict=True)
    ]


def evaluation(**arms: list[ArmRow]) -> Evaluation:
    return evaluate(arms, ROWS, CONFIG, RECIPE)


def trained() -> Evaluation:
    """RL is right everywhere, SFT on every third question."""
    return evaluation(
        sft=arm(*["aa", "ab", "b"] * 20, judge_score=3.0),
        rl=arm("aaa", judge_score=4.0, latency_ms=5.0),
    )


def report(found: Evaluation) -> Report:
    content = found.model_dump(exclude={"red_team", "unjudged", "earlier_evaluations"})
    evaluated = {
        "run_id": "r",
        "profile": "p",
        "recipe": "letters",
        "retrieves": False,
        "rivals": ["sft"],
    }
    return Report.model_validate(content | evaluated)


def test_pools_are_slices_and_an_example_shows_what_its_row_brings_and_what_its_answer_is_worth():
    slices = {(part.by, part.value): part for part in trained().slices}
    gold = slices["pool", "gold"]
    assert gold.n == 30
    assert ("pool", "") not in slices
    assert gold.diff("rl", "sft", "pure").diff == pytest.approx(2 / 3)  # type: ignore[union-attr]
    (first, *_) = examples({"rl": arm("ab")}, ROWS, RECIPE)
    assert (first.inputs, first.arms["rl"].values) == ({"letter": "a"}, {"share": 0.5, "pure": 0.0})


def test_gate_and_verdict_go_by_the_recipes_metrics_and_the_profiles_rivals():
    of_students, gate = trained(), Gate(rivals=("sft",))
    mcnemar = {
        comparison.metric: comparison.p_mcnemar is not None
        for comparison in of_students.comparisons
    }
    assert mcnemar == {"pure": True, "share": False, "quality": False}, "a test for what is 0 or 1"
    decision = decide(of_students, [], gate, None)
    assert [rule.name for rule in decision.rules] == [
        "gain_vs_sft",
        "quality_vs_sft",
        "red_team",
        "alarms",
    ]
    gain, quality = decision.rules[:2]
    assert (gain.outcome, quality.outcome) == ("pass", "pass")
    assert gain.found.render().startswith("pure answers +0.667")
    unjudged = decide(
        of_students.model_copy(update={"metrics": of_students.metrics[:2]}), [], gate, None
    )
    assert [rule.name for rule in unjudged.rules] == ["gain_vs_sft", "red_team", "alarms"]
    main = main_comparison(report(of_students))
    assert main
    assert (main.a, main.b, main.metric) == ("rl", "sft", "pure")
    assert verdict(report(of_students)).sentence.en.startswith(
        "RL student 1.000 vs SFT student 0.333 pure answers on 60 "
    )


def test_page_terminal_and_markdown_speak_of_answers_alone(tmp_path: Path):
    text = re.sub(r"<style>.*?</style>", "", page(tmp_path, report(trained())), flags=re.DOTALL)
    foreign = [
        "top-1",
        "Top-1",
        "recall@",
        "RAG",
        "retriev",
        "rewrite",
        "gold document",
        "改写",
        "检索",
        "标准文档",
    ]
    own = [
        "纯正率",
        "share of the letter",
        "Agreement",
        "一致性",
        "0.81",
        "letter</bdi>：<bdi>a</bdi>",
    ]
    assert [word for word in (*foreign, *own) if word in text] == own
    text = shown(print_table(report(trained())))
    assert "RL − SFT" in text
    assert "pure answers" in text
    assert "0.81" in text
    assert "top-1" not in text
    assert (
        "| Arm | n | failed | pure answers | share of the letter | judge score (0–5) |"
        in result_markdown(report(trained()))
    )


def test_who_approves_reads_answers_and_their_values(tmp_path: Path):
    arms = {
        name: {entry.row_id: entry for entry in entries}
        for name, entries in (("rl", arm("b", "a")), ("sft", arm("a")))
    }
    chosen = rows_to_review(arms, ROWS, RECIPE, "rl", losses=5, sampled=1)
    assert [chosen_row.why for chosen_row in chosen] == ["不如SFT", "随机"]
    path = write_approval_workbook(tmp_path / "review.xlsx", chosen, arms, RECIPE, "rl").path
    heads, first = (
        list(row)
        for row in openpyxl.load_workbook(path).active.iter_rows(max_row=2, values_only=True)
    )
    first_line = dict(zip(heads, first, strict=True))
    assert (
        first_line["letter"],
        first_line["RL：回答"],
        first_line["RL：纯正率"],
        first_line["SFT：纯正率"],
    ) == (
        "a",
        "b",
        0,
        1,
    )
    assert "标准文档" not in heads
