"""Teachers side by side: who is asked, the figures, which one to buy, and how the report shows
it."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_service import PRICE, SIMULATED
from fixture_types import ProfileOf
from report_fixture import METRICS, comparison, page, scores, shown
from run_stages import stage_result

from qinglan.clients.roles import Addresses
from qinglan.config import Evaluate, Profile
from qinglan.errors import ConfigError
from qinglan.evaluation.models import ArmFigures, Evaluation, Purchase, Report, StageSummary
from qinglan.evaluation.purchase import advise, family
from qinglan.evaluation.reasons import reason
from qinglan.evaluation.report.summary import build_report
from qinglan.evaluation.report.terminal import print_table
from qinglan.evaluation.report.verdict import arms_of as arms_shown
from qinglan.evaluation.report.verdict import verdict
from qinglan.evaluation.teacher_comparison import arms_of, draw, evaluate_teachers, teachers_of
from qinglan.ops.preflight import require
from qinglan.recipes.query_rewrite import RECIPE
from qinglan.rows import Retrieved, Row
from qinglan.runs.artifacts import Artifact, write_json
from qinglan.runs.run import Run, open_run
from qinglan.simulators.services import embedded_services

Advised = Callable[..., Purchase]
EVALUATE = Evaluate(bootstrap_resamples=400)
MISS = Retrieved(ids=("x",), scores=(0.3,))


def question(number: int, **more: Any) -> Row:
    return Row(
        id=f"{number:04}", tenant="t", query=f"问{number}", source="f!A1", gold_id="g"
    ).model_copy(update=more)


def answered(number: int, *, hit: bool = True, cost: float = 0.001) -> Row:
    gold = f"g{number}"
    passages = Retrieved(ids=(gold,), scores=(0.9,)) if hit else MISS
    return question(
        number, answer="改写", answer_cost_usd=cost, answer_latency_ms=100.0, judge_score=4.0,
        answer_retrieved=passages, original_retrieved=MISS, gold_id=gold,
    )  # fmt: skip


def hits(every: int, cost: float = 0.001, count: int = 200) -> list[Row]:
    """Rows whose gold document is found, except for each `every`-th; every row a group of its
    own."""
    return [answered(n, hit=n % every != 0, cost=cost) for n in range(count)]


def profile_with(
    profile_of: ProfileOf, *names: str, judge: str = "small", **compare: Any
) -> Profile:
    teachers = {name: {"model": f"{name}-model"} for name in names}
    models = ["big", judge, *(f"{name}-model" for name in names)]
    return profile_of(
        compare={"teachers": teachers, **compare},
        judge={"model": judge},
        prices=dict.fromkeys(models, PRICE),
    )


@pytest.fixture
def advised(profile_of: ProfileOf) -> Advised:
    def make(
        main: list[Row], judge: str = "small", loss: float = 0.03, **rivals: list[Row]
    ) -> Purchase:
        profile = profile_with(profile_of, *rivals, judge=judge, tolerable_loss=loss)
        arms = arms_of({"teacher": main, **rivals}, {}, RECIPE)
        purchase = advise(profile, evaluate_teachers(arms, main, EVALUATE, RECIPE), arms)
        assert purchase
        return purchase

    return make


def notes_of(found: Purchase) -> str:
    return "\n".join(note.render() for note in found.notes)


def test_draw_is_the_same_whatever_the_order_grows_and_takes_usable_rows_only():
    rows = [question(n) for n in range(50)]
    ids = [row.id for row in draw(rows, 10)]
    assert [row.id for row in draw(rows[::-1], 10)] == ids
    assert [row.id for row in draw(rows, 20)][:10] == ids
    assert ids != sorted(ids)
    half = [row.failed("empty_query") if n % 2 else row for n, row in enumerate(rows)]
    assert {row.id for row in draw(half, 500)} == {row.id for row in rows[::2]}


def test_every_teacher_takes_the_main_ones_place(profile_of: ProfileOf, tmp_path: Path):
    profile = profile_of(
        compare={"teachers": {"cheap": {"model": "small"}}},
        distill={"mode": "batch_api", "max_failed_share": 0.01},
    )
    run = Run(id="r", flow="compare", profile=profile, directory=tmp_path)
    both = teachers_of(
        run,
        partial(Addresses, "http://main", "http://judge", "http://rag", {"cheap": "http://cheap"}),
    )
    teachers = [
        (
            teacher.run.profile.teacher.model,
            teacher.services().teacher_url,
            teacher.stage("distill"),
        )
        for teacher in both
    ]
    assert teachers == [
        ("big", "http://main", "distill"),
        ("small", "http://cheap", "distill-cheap"),
    ]
    assert {teacher.services().judge_url for teacher in both} == {"http://judge"}
    # A teacher that refuses half is a finding, and only a live answer has a latency.
    for teacher in both:
        assert (teacher.run.profile.distill.max_failed_share, teacher.run.profile.distill.mode) == (
            1.0,
            "live",
        )


def test_a_refusal_is_paid_for_and_not_scored():
    rival = [
        answered(0),
        answered(1),
        question(2).failed("teacher_refused"),
        question(3).failed("truncated"),
    ]
    main = [answered(n) for n in range(4)]
    arms = arms_of({"teacher": main, "cheap": rival}, {"cheap": {"0002": 0.004}}, RECIPE)
    evaluation = evaluate_teachers(arms, main, EVALUATE, RECIPE)
    cheap = evaluation.arms["cheap"]
    assert (cheap.n, cheap.failed, cheap.mean("quality")) == (4, 2, 4.0)
    assert cheap.cost_per_1000_usd == pytest.approx(1000 * (0.001 + 0.001 + 0.004) / 2)
    comparisons = {c.metric: c for c in evaluation.comparisons if c.b == "teacher"}
    assert (comparisons["quality"].n, comparisons["quality"].one_sided) == (2, 2)
    assert (comparisons["answered"].n, comparisons["answered"].diff) == (4, -0.5)
    unpaid = [
        row if row.status == "ok" else row.model_copy(update={"reason": "over_budget"})
        for row in rival
    ]
    arms = arms_of({"teacher": main, "cheap": unpaid}, {}, RECIPE)
    comparisons = {c.metric for c in evaluate_teachers(arms, main, EVALUATE, RECIPE).comparisons}
    assert "answered" not in comparisons, "what the budget left out is no refusal"
    refused = arms_of({"teacher": rival[2:], "cheap": [answered(2), answered(3)]}, {}, RECIPE)
    assert refused["original"][0].retrieved == MISS, (
        "the question keeps the score that it has with the rival"
    )


def test_several_rivals_are_corrected_and_one_is_not():
    main = hits(10)
    arms = {"teacher": hits(10), "a": hits(4), "b": hits(9)}
    both = arms_of(arms, {}, RECIPE)
    of_two = evaluate_teachers(both, main, EVALUATE, RECIPE).comparisons
    of_one = evaluate_teachers(
        {k: v for k, v in both.items() if k != "b"}, main, EVALUATE, RECIPE
    ).comparisons
    top1 = next(c for c in of_two if (c.a, c.metric) == ("a", "top1"))
    assert top1.p_holm == pytest.approx(2 * (top1.p_value or 0))
    assert {c.p_holm for c in of_one if c.b == "teacher"} == {None}
    assert [(c.a, c.b) for c in of_two if c.metric == "top1"] == [
        ("a", "teacher"),
        ("b", "teacher"),
        ("teacher", "original"),
        ("a", "original"),
        ("b", "original"),
    ]


@pytest.mark.parametrize(
    ("main", "rival", "loss", "tone", "cost", "difference", "reading"),
    [
        ((10, 0.012), (10, 0.001), 0.03, "better", "less", "no_difference_in", "take_within_noise"),
        ((10, 0.002), (4, 0.001), 0.03, "open", "less", "metric_lower", "trade"),
        ((10, 0.001), (4, 0.002), 0.03, "open", "more", "metric_lower", "keep_worse"),
        ((4, 0.001), (10, 0.002), 0.03, "open", "more", "metric_higher", "trade"),
        ((4, 0.002), (10, 0.001), 0.03, "better", "less", "metric_higher", "take_better"),
        ((10, 0.001), (10, 0.002), 0.03, "open", "more", "no_difference_in", "keep_no_gain"),
        (
            (10, 0.002, 20),
            (7, 0.001, 20),
            0.03,
            "open",
            "less",
            "no_difference_in",
            "purchase_open_rows",
        ),
        ((10, 0.002), (4, 0.001), 0.3, "better", "less", "metric_lower", "take_small_loss"),
        ((10, 0.002, 9), (10, 0.001, 9), 0.03, "open", "less", "no_difference_in", "purchase_open"),
        (
            (10, 0.01),
            (1, 0.001),
            0.03,
            "open",
            "less",
            "metric_lower",
            "keep_not_better_than_question",
        ),
    ],
)
def test_the_advice_weighs_quality_against_price(
    advised: Advised,
    main: tuple[Any, ...],
    rival: tuple[Any, ...],
    loss: float,
    tone: str,
    cost: str,
    difference: str,
    reading: str,
):
    purchase = advised(hits(*main), loss=loss, cheap=hits(*rival))
    sentence: dict[str, Any] = purchase.sentence.values
    assert (sentence["cost"].code, sentence["difference"].code) == (f"cost_{cost}", difference)
    assert (purchase.tone, purchase.reading.code) == (tone, reading)


def test_a_teacher_that_refuses_half_is_not_flattered_and_batch_answers_are_told(advised: Advised):
    rival = [
        row if n % 2 else question(n).failed("teacher_refused")
        for n, row in enumerate(hits(10, cost=0.0005))
    ]
    rival[1] = rival[1].model_copy(update={"answer_latency_ms": None})
    purchase = advised(hits(10, cost=0.002), cheap=rival)
    assert (
        "save $1.50 per 1,000 rewrites and lose 0.500 in share of questions answered"
        in purchase.reading.render()
    )
    assert "cheap left 50.0% of the questions without an answer (teacher_refused 100)" in notes_of(
        purchase
    )
    assert "1 of cheap's answers came by the batch API" in notes_of(purchase)


def test_the_cheapest_of_those_to_take_leads_and_all_are_told(advised: Advised):
    purchase = advised(
        hits(10, cost=0.01), a=hits(10, cost=0.005), b=hits(10, cost=0.001), c=hits(3, cost=0.02)
    )
    assert purchase.rival == "b"
    assert purchase.labels["teacher"] == "big"
    offers = [offer.render() for offer in purchase.offers]
    assert [text.split()[0] for text in offers] == ["a", "b", "c"]
    assert "Keep big: c is worse" in offers[2]


def test_a_judge_of_the_same_family_is_called_out(advised: Advised):
    own, foreign = (
        advised(hits(10), judge=judge, qwen=hits(10))
        for judge in ("Qwen/Qwen3-32B", "deepseek-chat")
    )
    assert "is of the same family as qwen" in notes_of(own)
    assert "same family" not in notes_of(foreign)
    assert [family(model) for model in ("gpt-5", "o3-mini", "7b")] == ["openai", "openai", "7b"]


def test_what_can_not_be_compared(profile_of: ProfileOf):
    main, rival = [question(0).failed("over_budget")], [question(0).failed("over_budget")]
    arms = arms_of({"teacher": main, "cheap": rival}, {}, RECIPE)
    assert (
        advise(
            profile_with(profile_of, "cheap"), evaluate_teachers(arms, main, EVALUATE, RECIPE), arms
        )
        is None
    )
    with pytest.raises(
        ConfigError, match=r"compare\.teachers: names none to compare with; add one"
    ):
        require(profile_of(**SIMULATED), "compare")


@pytest.mark.parametrize("name", ["../x", "x" * 41, "teacher"])
def test_a_teachers_name_is_a_file_name_of_its_own(profile_of: ProfileOf, name: str):
    with pytest.raises(ValueError, match=r"teacher's name|has a meaning"):
        profile_with(profile_of, name)


EVIL = "<img src=x onerror=alert(1)>"
CHEAP = reason("keep_not_better_than_question", rival="qwen3-32b", main="gpt-5")
PURCHASE = Purchase(
    labels={"teacher": "gpt-5", "deepseek": "deepseek", "qwen3-32b": "qwen3-32b"},
    rival="qwen3-32b",
    tone="better",
    sentence=CHEAP,
    reading=reason("take_better", rival="qwen3-32b", main="gpt-5", metric="top-1"),
    offers=[reason("no_gain_over_question", label="deepseek"), CHEAP],
    notes=[reason("label_of_model", label="gpt-5", model=EVIL)],
    simulated=["deepseek"],
)
ARM = ArmFigures(
    n=500,
    **scores(top1=0.81, mean_top1_score=0.8, quality=4.3),
    cost_per_1000_usd=0.4,
    latency_p50_ms=900,
)
REPORT = Report(
    run_id="r",
    profile="p",
    recipe="query_rewrite",
    arms=dict.fromkeys(("deepseek", "qwen3-32b", "teacher", "original"), ARM),  # in no good order
    metrics=METRICS,
    comparisons=[
        comparison(
            rival, "teacher", -0.004, (-0.014, 0.006), metric=metric, p_value=0.031, p_holm=0.062
        )
        for rival in ("deepseek", "qwen3-32b")
        for metric in ("top1", "quality")
    ],
    purchase=PURCHASE,
)


def test_arms_stand_in_order_under_the_models_names_with_every_offer_below(tmp_path: Path):
    assert list(arms_shown(REPORT)) == ["original", "teacher", "deepseek", "qwen3-32b"]
    html = page(tmp_path, REPORT)
    heads = re.findall(r"<th class=\"(?:main)?\">(?:<span class=\"en\">)?([^<]*)<", html)
    assert heads == ["Original", "gpt-5", "deepseek*", "qwen3-32b"]
    assert "deepseek − gpt-5" in html
    assert "Teacher" not in html
    assert "Which teacher to buy</span>" in html
    assert "deepseek is not shown to retrieve better" in html
    assert "0.062" in html
    assert "0.031" in html
    assert "Holm" in html
    assert EVIL not in html
    assert "&lt;img src=x" in html
    text = " ".join(shown(print_table(REPORT)).split())
    assert "Cost of this run:" not in text
    compared = REPORT.model_copy(
        update={"stages": [StageSummary(name="compare", seconds=1.0, rows_in=9, rows_out=9)]}
    )
    assert "Asked: nobody. Cost of this run: $0.00" in " ".join(
        shown(print_table(compared)).split()
    )
    assert "gpt-5" in text
    assert "Against gpt-5:" in text
    assert "p 0.062" in text
    assert "deepseek is not shown to retrieve better" in text
    assert "Teacher" not in text
    assert (verdict(REPORT).tone, verdict(REPORT).sentence.en) == ("better", CHEAP.render())


def outlines(rewrite: int) -> dict[str, Any]:
    of_question = {"label": "original question", "low": 0, "high": 1, "counts": [9, 1]}
    of_rewrite = {"label": "rewrite", "low": 0, "high": 1, "counts": [rewrite, 10 - rewrite]}
    return {"histograms": {"top1_score": [of_question, of_rewrite], "gain": [of_rewrite]}}


def test_the_report_is_built_from_the_compare_stage_with_every_teachers_scores(
    profile_of: ProfileOf, tmp_path: Path
):
    evaluation = Evaluation(
        arms=REPORT.arms, comparisons=REPORT.comparisons, examples=[], shared=[]
    )
    write_json(tmp_path / "evaluation.json", evaluation.model_dump(mode="json"))
    evaluated = {"evaluation": Artifact.of(tmp_path / "evaluation.json")}
    parts: dict[str, dict[str, Any]] = {
        "validate": {"details": outlines(5)},
        "validate-deepseek": {"details": outlines(4)},
        "validate-qwen3-32b": {"details": outlines(3)},
        "compare": {
            "details": {"purchase": PURCHASE.model_dump(mode="json")},
            "artifacts": evaluated,
        },
    }
    with open_run(profile_of(), "compare") as run:
        stages = [stage_result(name, run.id, **more) for name, more in parts.items()]
        built = build_report(run, stages)
    assert (built.purchase, set(built.arms)) == (
        PURCHASE,
        {"original", "teacher", "deepseek", "qwen3-32b"},
    )
    assert Report.read(built.write(tmp_path / "report.json").path) == built
    drawn = built.distributions
    assert [(part.label, part.counts[0]) for part in drawn["top1_score"]] == [
        ("original question", 9), ("gpt-5", 5), ("deepseek", 4), ("qwen3-32b", 3),
    ]  # fmt: skip
    assert "gain" not in drawn


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_simulated_rival_is_served_beside_a_live_teacher(profile_of: ProfileOf, tmp_path: Path):
    live = {"model": "big", "base_url": "http://live/v1"}
    profile = profile_of(
        teacher=live,
        judge={"model": "small", "base_url": "http://live/v1"},
        rag={"url": "http://live/q"},
        compare={"teachers": {"here": {"model": "small"}, "there": live}},
    )
    with embedded_services(profile, tmp_path / "unused") as services:
        assert services().rival_urls["here"].startswith("http://127.0.0.1:")
        assert (services().rival_urls["there"], services().teacher_url) == (
            "http://live/v1",
            "http://live/v1",
        )
