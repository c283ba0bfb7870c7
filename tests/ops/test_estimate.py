"""The cost of a run in advance: known answers are free, others are measured or an upper bound."""

from pathlib import Path

import pytest
from fixture_types import ProfileOf
from ledger_calls import call

from qinglan.clients.completions import request_of
from qinglan.clients.roles import key_salt, site_ledger
from qinglan.config import Dataset, FlowName, Profile
from qinglan.data.dataset.splits import split_of
from qinglan.evaluation.teacher_comparison import draw
from qinglan.ops.estimate import Estimate, estimate
from qinglan.ops.estimate.counting import count_questions
from qinglan.recipes.query_rewrite import RECIPE
from qinglan.recipes.requests import extract_requests
from qinglan.rows import DIALOGUE, Row, Split

CASES = 26
"""Cases of the red team that need not pass: the gate's rival is asked them."""


def rows_of(split: Split, count: int) -> list[Row]:
    """Rows that the dataset stage would place into a split by itself."""
    ids = [str(n) for n in range(500) if split_of(str(n), Dataset()) == split]
    return [
        Row(id=row_id, tenant="default", query=f"虾青素{row_id}咋吃", source=f"q.csv:{row_id}")
        for row_id in ids[:count]
    ]


ROWS = [*rows_of("train", 40), *rows_of("dev", 5), *rows_of("test", 5)]


@pytest.fixture
def profile(profile_of: ProfileOf) -> Profile:
    return profile_of(
        teacher={"model": "big", "max_tokens": 100}, rl={"total_steps": 10, "train_batch_size": 64}
    )


def pay(profile: Profile, rows: list[Row], role: str = "teacher") -> None:
    model = "big" if role == "teacher" else "small"
    with site_ledger(profile) as ledger:
        for row in rows:
            messages = RECIPE.teacher_messages(row, profile.tenant)
            key = request_of(profile.teacher, key_salt(profile, "teacher"), messages).request_hash
            paid = call(key, role=role, model=model, prompt_tokens=200, completion_tokens=20)
            ledger.record([paid])


def estimates(
    profile: Profile, flow: FlowName = "refresh", rows: list[Row] = ROWS
) -> list[Estimate]:
    with site_ledger(profile) as ledger:
        return estimate(profile, flow, count_questions(profile, rows, ledger), ledger)


def parts_of(profile: Profile, flow: FlowName = "refresh") -> dict[str, tuple[int, int, int]]:
    return {
        part.what: (part.questions, part.known, part.measured_on)
        for part in estimates(profile, flow)
    }


def test_a_new_model_is_bounded_from_above(profile: Profile):
    (distill, *_) = estimates(profile, rows=[*ROWS, ROWS[0].failed("duplicate")])
    assert (distill.questions, distill.known, distill.measured_on) == (50, 0, 0)
    assert distill.completion_tokens == 100
    assert distill.cost_usd > 50 * 100 * 10 / 1e6  # answers alone, each as long as it may get


def test_shares_of_pools_decide_how_many_prompts_rl_has(profile: Profile):
    shared = profile.model_copy(update={"dataset": Dataset(rl_shares={"red": 0.5})})
    rows = [row.with_pool("red" if n % 2 else None) for n, row in enumerate(ROWS[:30])]
    assert count_questions(profile, rows).rl_prompts == 30
    assert count_questions(shared, rows).rl_prompts == 30
    shared.dataset.rl_shares["red"] = 0.9
    assert count_questions(shared, rows).rl_prompts > 2 * 30, (
        "rows of a pool that has too few are repeated"
    )


def test_what_the_ledger_has_is_free_the_rest_measured_and_the_batch_api_half_the_price(
    profile: Profile,
):
    pay(profile, ROWS[:30])
    distill = estimates(profile)[0]
    assert (distill.questions, distill.known, distill.measured_on) == (50, 30, 30)
    assert distill.cost_usd == pytest.approx(20 * (distill.prompt_tokens * 1 + 20 * 10) / 1e6)

    cheap = profile.model_copy(
        update={"distill": profile.distill.model_copy(update={"mode": "batch_api"})}
    )
    assert estimates(cheap)[0].cost_usd == pytest.approx(distill.cost_usd / 2)


def test_prompts_are_as_long_as_all_questions_are_on_average(profile: Profile):
    pay(profile, ROWS[:30])
    longer = [row.with_query(row.query * 100) for row in ROWS[1:]]
    for long, short in zip(
        estimates(profile, rows=[ROWS[0], *longer]), estimates(profile), strict=True
    ):
        assert long.prompt_tokens > short.prompt_tokens + 500, (
            "the first row's is no longer, nor are earlier calls'"
        )


def test_a_comparison_says_what_is_known_of_each_teacher(profile_of: ProfileOf):
    rival = {"model": "small", "base_url": "http://x/v1"}
    profile = profile_of(
        teacher={"model": "big"}, compare={"rows": 20, "teachers": {"cheap": rival}}
    )
    pay(profile, draw(ROWS, 20)[:15])
    parts = parts_of(profile, "compare")
    assert (parts["distill teacher"], parts["distill cheap"]) == ((20, 15, 0), (20, 0, 0))
    pay(profile.model_copy(update={"teacher": profile.compare.teachers["cheap"]}), ROWS)
    assert parts_of(profile, "compare")["distill cheap"][:2] == (20, 20)


def test_dialogues_are_counted_and_what_is_known_of_them_is_free(profile: Profile):
    rows = [row.with_inputs({DIALOGUE: f"用户：孕{n}周"}) for n, row in enumerate(ROWS)]
    extract, distill, *_ = estimates(profile, rows=[*rows, *ROWS])
    assert (extract.what, extract.questions, extract.known) == ("extract", 50, 0)
    assert distill.questions == 100
    assert extract.cost_usd > 50 * 100 * 10 / 1e6
    request = extract_requests(profile)(rows[1])
    assert request is not None
    with site_ledger(profile) as ledger:
        ledger.record(
            [call(request.request_hash, model="big", text='{"profile": "孕1周", "history": ""}')]
        )
    assert estimates(profile, rows=rows)[0].known == 1


def test_every_flow_says_what_it_asks(profile: Profile):
    assert parts_of(profile) == {"distill": (50, 0, 0), "validate": (50, 0, 0)}
    # Ten steps of 64; the dev split before the first and after each.
    assert parts_of(profile, "pipeline")["rl"] == (640 + 11 * 5, 0, 0)
    rl = next(part for part in estimates(profile, "pipeline") if part.what == "rl")
    assert rl.expected_usd == pytest.approx(profile.budget.rl_new_share * rl.cost_usd)
    assert set(parts_of(profile, "train")) == {"rl", "rl passages", "evaluate teacher", "evaluate"}
    assert parts_of(profile, "evaluate") == {
        "evaluate teacher": (CASES, 0, 0),
        "evaluate": (2 * 5, 0, 0),
    }
    marked = [row.with_split("test") for row in ROWS[:10]] + ROWS[10:]
    counts = count_questions(profile, marked)
    assert (counts.train, counts.dev, counts.test) == (30, 5, 15), (
        "the others as the dataset stage will"
    )


def test_a_panel_or_a_passage_is_never_taken_for_a_single_judgement(profile: Profile):
    pay(profile, ROWS[:30], role="judge")
    parts = {part.what: part for part in estimates(profile, "pipeline")}
    measured_on = {part.what: part.measured_on for part in parts.values() if part.role == "judge"}
    assert measured_on == {"validate": 30, "rl": 30, "rl passages": 0, "evaluate": 0}
    assert parts["evaluate"].prompt_tokens > 100


def test_further_teachers_are_asked_the_test_questions(profile_of: ProfileOf):
    teacher = {"base_url": "http://x/v1", "model": "small"}
    compare = {"teachers": {"cheap": teacher, "dear": teacher}}
    evaluate = {"teachers": ["cheap"]}
    profile = profile_of(compare=compare, evaluate=evaluate, gate={"rivals": ["sft"]})
    assert parts_of(profile, "evaluate") == {"evaluate cheap": (5, 0, 0), "evaluate": (10, 0, 0)}
    profile = profile_of(compare=compare, evaluate=evaluate, gate={"rivals": ["cheap"]})
    assert parts_of(profile, "evaluate") == {
        "evaluate cheap": (5 + CASES, 0, 0),
        "evaluate": (10, 0, 0),
    }


@pytest.mark.parametrize(
    ("labelled", "reward", "asked"),
    [
        (20, {}, 417),
        (50, {}, 0),
        (50, {"use_labels": False}, 695),
        (0, {"relevance_gate": False}, 0),
    ],
)
def test_rl_asks_about_unlabelled_passages(
    profile_of: ProfileOf, labelled: int, reward: dict[str, bool], asked: int
):
    profile = profile_of(rl={"total_steps": 10, "train_batch_size": 64}, reward=reward)
    with_gold = [row.model_copy(update={"gold_id": "d"}) for row in ROWS]
    tests = [row.with_split("test") for row in with_gold]
    rows = with_gold[:labelled] + ROWS[labelled:] + tests
    parts = {part.what: part for part in estimates(profile, "train", rows)}
    assert parts["rl"].questions == 640 + 11 * 5, (
        "the dev split is a tenth of the rows that are not marked"
    )
    if asked == 0:
        assert "rl passages" not in parts
    else:
        assert parts["rl passages"].questions == asked
        assert parts["rl passages"].prompt_tokens > parts["rl"].prompt_tokens + 400


def test_every_role_of_distillation_is_counted_and_own_answers_cost_nothing(profile_of: ProfileOf):
    recipe = str(Path(__file__).parents[1] / "support" / "judging_recipe.py")
    profile = profile_of(recipe=recipe, answerer={"model": "small", "base_url": "http://weak/v1"})
    rows = [row.with_inputs({"hint": "甲"}) for row in ROWS]
    parts = [
        (part.role, part.what, part.questions) for part in estimates(profile, "pipeline", rows)
    ]
    assert parts == [("answerer", "distill", 50), ("teacher", "distill", 50)], (
        "the recipe asks no judge"
    )
    own = [row.with_inputs({"hint": "甲", "given": "乙"}) for row in ROWS]
    plain = profile.model_copy(update={"recipe": recipe.replace("judging", "capitals")})
    assert [part.questions for part in estimates(plain, rows=own)] == [0]
