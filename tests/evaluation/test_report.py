"""The report as JSON, its verdict, the table for the terminal, and what it draws."""

import json
import math
import re
from pathlib import Path
from typing import Any

import letters
import pytest
from report_fixture import METRICS, comparison, decision, full, page, report, scores, shown

from qinglan.config import Endpoint, Judge, Price, Profile, Rag
from qinglan.errors import ArtifactError
from qinglan.evaluation.frames import RunFrames
from qinglan.evaluation.models import ArmFigures, Distribution, Report, StageSummary
from qinglan.evaluation.reasons import reason
from qinglan.evaluation.report.plots import (
    DISTRIBUTIONS,
    Axis,
    arm_dots,
    chart,
    distributions,
    histogram,
    slice_plots,
)
from qinglan.evaluation.report.tables import side_by_side
from qinglan.evaluation.report.terminal import print_intervals, print_table
from qinglan.evaluation.report.verdict import (
    main_comparison,
    simulated_roles_of,
    simulator_warning,
    star,
    verdict,
)
from qinglan.grading.validation_statistics import RetrievalStatistics
from qinglan.rows import Row
from qinglan.runs.artifacts import MANIFEST, Artifact, StageResult, write_json, write_jsonl
from qinglan.statistics import Comparison
from qinglan.text import Both

NAME = Both("a", "甲")
UNKNOWN_GAIN = ("gain_vs_champion", "unknown")


def terminal(content: Report) -> str:
    return shown(print_table(content))


def test_the_documentation_lists_every_key() -> None:
    contracts = (Path(__file__).parents[2] / "docs" / "reference" / "file-formats.md").read_text(
        encoding="utf-8"
    )
    report_keys, arm_keys = contracts.split("## report.json")[1].split("An arm:")
    for model, text in ((Report, report_keys), (ArmFigures, arm_keys)):
        first_cells = " ".join(
            line.split("|")[1] for line in text.splitlines() if line.startswith("| `")
        )
        assert model.model_fields.keys() <= set(re.findall(r"`(\w+)`", first_cells))


def test_nan_is_null_and_the_rest_survives(tmp_path: Path) -> None:
    assert Report.read(full().write(tmp_path / "report.json").path) == full()
    arms = {"teacher": {"n": 3, "cost_per_1000_usd": math.nan, **scores(top1=math.nan)}}
    written = report(arms=arms, comparisons=[], examples=[]).write(tmp_path / "report.json")
    text = written.path.read_text(encoding="utf-8")
    teacher = json.loads(text)["arms"]["teacher"]
    assert (teacher["scores"]["top1"]["mean"], teacher["cost_per_1000_usd"]) == (
        None,
        None,
    )
    assert "NaN" not in text


@pytest.mark.parametrize("content", [None, '{"run_id": "x"}'])
def test_an_unreadable_report_is_one_line(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "report.json"
    if content:
        path.write_text(content)
    with pytest.raises(ArtifactError, match=r"report\.json"):
        Report.read(path)


def test_samples_are_read_without_the_outages_between_them_and_a_missing_log_is_one_line(
    tmp_path: Path,
) -> None:
    stage = StageResult(stage="rl", key="k", run_id=tmp_path.name, seconds=1)
    write_json(tmp_path / "rl" / MANIFEST, stage.model_dump(mode="json"))
    sample = {"row_id": "a", "text": "鱼油"}
    log = write_jsonl(
        tmp_path / "rl" / "samples.jsonl", [{"outage": "rag", "seconds": 3}, sample]
    ).path
    assert RunFrames(tmp_path).samples().to_dict("records") == [sample]
    log.unlink()
    with pytest.raises(ArtifactError, match=r"samples\.jsonl is missing; run its stage again"):
        RunFrames(tmp_path).samples()


def test_a_stage_that_was_reused_or_continued_over_other_code(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    artifacts = {"rows": Artifact.of(tmp_path / "rows.jsonl", 1)}
    result = StageResult(
        stage="distill",
        key="k",
        run_id="old",
        seconds=2,
        rows_in=2,
        rows_out=1,
        details={"continued_anyway": ["recipe.reward"]},
        artifacts=artifacts,
    )
    assert StageSummary.of(result, "new").reused_from == "old"
    assert StageSummary.of(result, "old").reused_from is None
    summary = StageSummary.of(result, "new")
    assert (summary.artifacts[0].rows, summary.continued_anyway) == (1, ["recipe.reward"])
    rl = StageSummary(name="rl", seconds=1, continued_anyway=["recipe.reward"])
    content = report(stages=[rl])
    assert "rl continued from its checkpoint although the code of recipe.reward" in terminal(
        content
    )
    assert "rl 中断期间" in page(tmp_path, content)


@pytest.mark.parametrize(
    ("found", "tone", "text"),
    [
        (
            comparison("rl", "teacher", 0.071, (0.019, 0.128), n=996),
            "better",
            "on 996 test questions: +0.071 [0.019, 0",
        ),
        (comparison("rl", "teacher", -0.3, (-0.4, -0.2)), "worse", "−0.300 [−0.400, −0.200]"),
        (comparison("rl", "teacher", 0.02, (-0.03, 0.07)), "open", "can detect 0.078"),
        (
            comparison("sft", "teacher", 0.03, (0.01, 0.05), metric="mean_top1_score"),
            "better",
            "mean top-1 score",
        ),
        (
            comparison("teacher", "original", 0.4, (0.38, 0.42)),
            "better",
            "Teacher 0.866 vs original question 0.795",
        ),
        (comparison("rl", "teacher", None, None), "none", "Nothing was compared"),
        (
            comparison("rl", "teacher", 1.0, (1.0, 1.0), groups=9),
            "open",
            "groups of questions: 9; a verdict",
        ),
    ],
)
def test_the_verdict_says_who_won_by_how_much(found: Comparison, tone: str, text: str) -> None:
    result = verdict(report(comparisons=[found]))
    assert result.tone == tone
    assert text in f"{result.sentence.en} {result.reading.en}"


def test_a_refresh_that_kept_no_row_did_not_work_however_good_the_rewrites() -> None:
    stage = {
        "name": "select",
        "seconds": 1,
        "rows_in": 9,
        "rows_out": 0,
        "dropped": {"below_threshold": 9},
    }
    result = verdict(
        report(comparisons=[comparison("teacher", "original", 0.4, (0.38, 0.42))], stages=[stage])
    )
    assert result.tone == "worse"
    assert "No row may teach" in result.reading.en


def test_what_the_verdict_is_about() -> None:
    names = {"mean_top1_score": 0.03, "quality": 0.2}
    leading = [
        comparison("rl", "teacher", diff, (0.01, 0.3), metric=metric)
        for metric, diff in names.items()
    ]
    arms = {
        name: {"n": 9, **scores(mean_top1_score=0.8, quality=4.0)} for name in ("teacher", "rl")
    }
    unlabelled = report(arms=arms, comparisons=leading)
    main = main_comparison(unlabelled)
    assert main, "as the gate's rule of the gain"
    assert main.metric == "mean_top1_score", "as the gate's rule of the gain"
    both = [
        comparison("rl", "teacher", 0.07, (0.01, 0.1)),
        comparison("sft", "teacher", 0.02, (0.01, 0.03)),
    ]
    leading = main_comparison(report(comparisons=both, decision=decision() | {"challenger": "sft"}))
    assert leading, "the gate's challenger leads"
    assert leading.a == "sft", "the gate's challenger leads"
    both = [
        comparison("rl", "sft", 0.07, (0.01, 0.1)),
        comparison("sft", "teacher", 0.02, (0.01, 0.03)),
    ]
    leading = main_comparison(
        report(comparisons=both, decision=decision() | {"challenger": "sft"}, rivals=["rl"])
    )
    assert leading
    assert (leading.a, leading.b, leading.diff, leading.ci95) == (
        "sft",
        "rl",
        -0.07,
        (-0.1, -0.01),
    )
    table = side_by_side(unlabelled)
    assert table
    assert [(line.key, line.main) for line in table.lines] == [
        ("mean_top1_score", True),
        ("quality", False),
    ]


def test_stars_mark_only_what_a_simulator_made() -> None:
    only_judge = report(simulated=["judge"])
    assert star(only_judge, "quality")
    assert not star(only_judge, "top1")
    assert not star(only_judge, "teacher")
    only_rag = report(simulated=["rag"])
    assert star(only_rag, "mrr10")
    assert star(only_rag, "rl")
    assert not star(only_rag, "teacher")
    assert star(only_rag, "champion")
    assert not star(report(simulated=[]), "champion")
    warning = simulator_warning(only_rag)
    assert warning
    assert "The RAG was simulated." in warning.en
    assert simulator_warning(report(simulated=[])) is None
    assert "*" not in terminal(report(simulated=[]))
    endpoint, prices = (
        Endpoint(model="m"),
        {"m": Price(input_per_million_usd=1, output_per_million_usd=1)},
    )
    profile = Profile(
        name="p",
        teacher=endpoint,
        judge=Judge(model="m"),
        prices=prices,
        rag=Rag(url="http://rag/recall"),
    )
    assert simulated_roles_of(profile) == ["teacher", "judge", "student", "workbook"]


def test_terminal_fits_100_columns_uncut_and_names_decision_and_version() -> None:
    text = terminal(report())
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
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
    assert not [part for part in ("dropped, and why", "Gate:", "Registered") if part in text]
    lines = [line.split("  ")[0].strip() for line in text.splitlines() if "w/t/l" in line]
    assert lines == ["RL − Teacher", "SFT − Teacher", "RL − SFT"]
    text = terminal(full())
    assert "Gate: Do not release the RL student" in text
    assert "RL − Champion" in text
    assert "Registered as qinglan.demo.query_rewrite, version 4 (challenger)" in text
    assert "clip_fraction (step 31)" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("rules", "step"),
    [
        ([("cost", "pass"), ("gain_vs_teacher", "fail")], "add training questions of that kind"),
        ([UNKNOWN_GAIN, ("red_team", "fail")], "add training questions of that kind"),
        (
            [UNKNOWN_GAIN, ("latency", "fail")],
            "`gate.max_latency_ratio` and run `qinglan run release --profile x`",
        ),
        ([("alarms", "fail"), UNKNOWN_GAIN], "docs/reference/reward.md"),
        (
            [("cost", "unknown")],
            "what the rule cost lacks, and run `qinglan run evaluate --profile x`",
        ),
        ([("approval", "fail")], None),
    ],
)
def test_a_refusal_says_what_to_do_next(rules: list[tuple[str, str]], step: str | None) -> None:
    texts = {"found": reason("not_known"), "required": reason("no_alarm")}
    refusal = decision() | {
        "rules": [{"name": name, "outcome": outcome} | texts for name, outcome in rules]
    }
    said = " ".join(terminal(report(profile="x", decision=refusal)).split())
    assert said.count("Next:") == (step is not None)
    assert (step or "") in said


def test_a_fallback_that_is_released_is_said_in_both_languages(tmp_path: Path) -> None:
    tried = decision("promote") | {
        "challenger": "sft",
        "is_fallback": True,
        "also_tried": decision(),
    }
    released_report = full(decision=tried)
    said = " ".join(terminal(released_report).split())
    assert "So the gate tried the SFT student by the same rules. Release the SFT student" in said
    assert "Next:" not in said
    html = page(tmp_path, released_report)
    assert "门禁因此按同样的规则检验了SFT 学生。可以发布SFT 学生" in html
    assert html.count('class="stack gate"') == 2, "the rules of both"


def test_the_terminal_shows_the_candidate_with_every_interval() -> None:
    text = shown(print_intervals(report()))
    assert re.search(r"top-1 +0\.\d{3} \[.+\] +0\.\d{3} \[.+\] +[+−]0\.\d{3} \[.+\]", text)
    lines = ("judge score", "latency p50, ms", "cost per 1,000")
    assert [line for line in lines if line not in text] == []
    assert "These numbers say that the machinery works" in " ".join(text.split())
    alone = report().model_copy(update={"arms": {"teacher": report().arms["teacher"]}})
    assert "no student and teacher" in shown(print_intervals(alone))


def stage(name: str, rows_in: int, rows_out: int, **more: Any) -> StageSummary:
    return StageSummary(name=name, seconds=1.5, rows_in=rows_in, rows_out=rows_out, **more)


def test_the_terminal_shows_of_a_refresh_what_became_of_the_rows() -> None:
    card = {"path": "/state/datasets/t.r/v1/version.json", "sha256": "0"}
    tokens = {"prompt_tokens": 1, "completion_tokens": 1}
    refresh = Report.model_validate({
        "run_id": "r", "profile": "p", "recipe": "medical", "retrieves": False,
        "simulated": ["judge"],
        "stages": [
            stage("ingest", 1300, 1290, dropped={"duplicate": 3, "empty_query": 7}),
            stage("distill", 1290, 1290, reused_from="r0"),
            stage("validate", 1290, 1290, metrics={"judge_mean": 4.383, "flawed_share": 0.0333}),
            stage("dataset", 1290, 1288),
            stage("publish", 1288, 1288, artifacts=[card]),
        ],
        "api": {
            "teacher": {"calls": 1, "cached": 4, "cost_usd": 0.5} | tokens,
            "judge": {"calls": 1290, "failed": 2, "cost_usd": 0.25} | tokens,
        },
    })  # fmt: skip
    text = terminal(refresh)
    assert "1,288 of 1,300 rows are in the dataset." in text
    assert re.search(r"ingest +1,300 +1,290 +1.5 s +empty_query 7, duplicate 3", text)
    assert re.search(r"distill .* from run r0", text)
    assert "Answers, on average: judge 4.383, flawed share 0.033" in text
    one_line = " ".join(text.split())
    assert (
        "teacher 1 call, 4 known answers, $0.500; judge* 1,290 calls, 2 failed, $0.250." in one_line
    )
    assert "Cost of this run: $0.750" in one_line
    assert "Dataset: /state/datasets/t.r/v1" in text
    assert max(map(len, text.splitlines())) <= 100
    compared = terminal(refresh.model_copy(update={"arms": report().arms, "metrics": METRICS}))
    assert "1,288 of 1,300 rows" in compared, "the arms say it"
    assert "Answers, on average" not in compared, "the arms say it"


def test_axis_has_round_ticks_that_cover_what_is_finite() -> None:
    axis = Axis.over([-0.045, 0.135])
    assert axis.low <= -0.045
    assert axis.high >= 0.135
    assert [axis.label(tick) for tick in axis.ticks] == ["−0.05", "0.00", "0.05", "0.10", "0.15"]
    assert axis.at(axis.low) == 0
    assert axis.at(axis.high) == 100
    for values in ([], [math.nan], [3.0], [0.0, 0.0]):
        axis = Axis.over(values)
        assert axis.high > axis.low
        assert len(axis.ticks) >= 2
    drawn = chart(NAME, [(NAME, [(1, 2.0), (2, math.nan), (3, math.inf), (4, 1.0)])])
    assert [line.path for line in drawn.lines] == ["M0.0,0.0 L100.0,100.0"]


def test_an_outline_adds_up_to_all_and_ends_at_the_last_value() -> None:
    counts = [0] * 100
    counts[10], counts[11], counts[99] = 300, 200, 500
    drawn = histogram(NAME, [("line-0", Distribution(label="x", low=0.0, high=1.0, counts=counts))])
    assert drawn is not None
    points = [tuple(map(float, point.split(","))) for point in drawn.lines[0].path[1:].split(" L")]
    heights = [drawn.y.high * (100 - y) / 100 for _, y in points]
    assert max(heights) == pytest.approx(50, rel=1e-3)
    assert (heights[0], heights[-1]) == (0, 0)
    assert sum(heights[1:-1]) / 2 == pytest.approx(100, rel=1e-3)
    assert (points[0][0], points[-1][0]) == (8, 100)  # 1,000 values are drawn in 25 bins


def test_every_histogram_of_validation_is_drawn() -> None:
    judged = letters.JUDGED_GRADER.validation_statistics()
    judged.add(
        Row(id="1", tenant="t", query="q", source="s", parts={"format": 1.0}, judge_score=4.0)
    )
    for histograms in (judged.histograms(), RetrievalStatistics().histograms()):
        assert histograms
        assert histograms.keys() <= DISTRIBUTIONS.keys()
    by_name = {
        name: [Distribution.model_validate(part) for part in plot]
        for name, plot in judged.histograms().items()
    }
    assert [plot.title.en for plot in distributions(by_name)] == ["Judge's score, 0–5, % of rows"]


def test_slices_are_drawn_by_kind_and_arms_on_the_best_metric() -> None:
    plots = slice_plots(full())
    assert [plot.by.en for plot in plots] == ["tenant", "intent", "length in characters", "history"]
    assert plots[0].pair == Both("RL − Teacher", "RL − 教师")
    assert plots[3].plot.dots[0].label == Both("with (400)", "有（400）")
    assert slice_plots(full(comparisons=[])) == []
    part = full().slices[1]
    many = [part.model_copy(update={"value": str(i)}) for i in range(40)]
    assert len(slice_plots(full(slices=many))[0].plot.dots) == 12, "only the largest"
    arms = {"teacher": {"n": 9, **scores(mean_top1_score=(0.8, [0.7, 0.9]))}, "original": {"n": 9}}
    metric, plot = arm_dots(report(arms=arms), ["original", "teacher"]) or (NAME, None)
    assert metric.en == "mean top-1 score"
    assert plot
    assert plot.dots[0].text == "0.800 [0.700, 0.900]"
