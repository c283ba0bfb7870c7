"""The data stages and a comparison of teachers under a real Prefect server, MLflow on SQLite,
services by script."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from batch_api_simulator import SimulatedBatchStore, app_with_batches, running_app
from doubles import raising
from fake_service import PRICE, FakeService, Script, asked, completion, recall
from fixture_types import ProfileOf, Serve
from prefect import flow
from prefect.client.orchestration import get_client
from waiting import wait_until

from qinglan.clients.roles import Addresses, open_clients, site_ledger
from qinglan.config import BatchApi, Columns, Profile
from qinglan.errors import BudgetError, EngineError, LedgerError, StageError
from qinglan.evaluation.arms import original_rows
from qinglan.evaluation.measuring import grade_arms
from qinglan.evaluation.models import Report
from qinglan.evaluation.report.summary import build_report
from qinglan.evaluation.teacher_comparison import ask_teacher, teachers_of
from qinglan.ledger import Ledger
from qinglan.recipes import get_recipe
from qinglan.rows import ArmRow, Row
from qinglan.runs.artifacts import MANIFEST, StageResult, read_jsonl
from qinglan.runs.run import Run, finish_run, open_run
from qinglan.runs.tracking import open_client
from qinglan.tasks import batches, stage
from qinglan.tasks.attempts import Started
from qinglan.tasks.compare import compare_teachers
from qinglan.tasks.distill import distill_rows
from qinglan.tasks.extract import with_extracted
from qinglan.tasks.ingest import ingest_workbook
from qinglan.tasks.sample import draw_questions
from qinglan.tasks.session import send_what_is_queued
from qinglan.tasks.validate import validate_rows

pytestmark = [
    pytest.mark.usefixtures("prefect_server"),
    # Prefect's server alone takes 10 s.
    pytest.mark.slow,
    # They are Prefect's and MLflow's.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]
ROWS = 30
DRAWN = 40
SiteOf = Callable[..., "Site"]
COST_USD = 0.0002
"""Cost of one answer at the test profile's prices."""


def write_workbook(folder: Path, rows: int) -> Path:
    path = folder / "q.csv"
    path.write_text("问题\n" + "".join(f"虾青素{n}咋吃\n" for n in range(rows)), encoding="utf-8")
    return path


class Site:
    """A profile with a workbook of 30 questions, and its scripted services."""

    def __init__(
        self,
        folder: Path,
        profile_of: ProfileOf,
        tracking: str,
        teacher: FakeService,
        rag: FakeService,
    ) -> None:
        self.workbook = write_workbook(folder, ROWS)
        self.teacher = teacher
        self.rag = rag
        self.profile = profile_of(
            teacher={"model": "big", "base_url": teacher.url, "max_retries": 0},
            rag={"url": rag.url, "max_retries": 0},
            distill={"batch_rows": 10, "retries": 1},
            tracking={"uri": tracking},
            validation={"batch_rows": 10, "retries": 0, "judge_baseline": False},
        )
        self.services = partial(Addresses, teacher.url, teacher.url, rag.url)

    def run(
        self, work: Callable[[Run], StageResult], profile: Profile | None = None
    ) -> StageResult:
        with open_run(profile or self.profile, "refresh") as opened:
            result: StageResult = flow(work, validate_parameters=False)(opened)  # type: ignore[assignment]
            finish_run(opened)
            return result

    def distill(self, run: Run) -> StageResult:
        return distill_rows(run, self.services, ingest_workbook(run, self.workbook))

    def validate(self, run: Run) -> StageResult:
        return validate_rows(run, self.services, self.distill(run))


def changed(profile: Profile, **sections: dict[str, Any]) -> Profile:
    """The profile with some keys of some sections changed."""
    update = {
        name: getattr(profile, name).model_copy(update=keys) for name, keys in sections.items()
    }
    return profile.model_copy(update=update)


def rewritten(body: dict[str, Any]) -> Any:
    return 200, completion(asked(body).replace("咋吃", " 服用方法"))


def failing_once(questions: Iterable[str]) -> Script:
    """Rewrites, but fails the first time that it is asked one of these questions."""
    failing = set(questions)

    def teacher(body: dict[str, Any]) -> Any:
        question = asked(body)
        if question in failing:
            failing.remove(question)
            return 503, {}
        return rewritten(body)

    return teacher


def retrieved(body: dict[str, Any]) -> Any:
    return 200, recall(("g", 0.9 if "rewritten_query" in body else 0.5))


@pytest.fixture
def site_of(
    tmp_path: Path,
    profile_of: ProfileOf,
    database: str,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
) -> SiteOf:
    monkeypatch.setattr(stage, "RETRY_DELAYS_S", [0.0])

    def make(teacher: Script = rewritten, rag: Script = retrieved) -> Site:
        return Site(tmp_path, profile_of, database, serve(teacher), serve(rag))

    return make


def test_faults_cost_no_row_and_no_second_payment(site_of: SiteOf):
    site = site_of(failing_once(f"虾青素{n}咋吃" for n in (3, 13, 14)))
    result = site.run(site.validate)
    rows = list(read_jsonl(result.path("rows"), Row))
    assert (result.rows_out, result.metrics["success_rate"]) == (ROWS, 1.0)
    assert rows[3].answer == "虾青素3 服用方法"
    assert len(site.teacher.bodies) == ROWS + 3
    with site_ledger(site.profile) as ledger:
        usage = ledger.usage(result.run_id, "teacher")
    assert (usage.calls, usage.failed) == (ROWS + 3, 3)


def test_a_ledger_whose_server_restarts_is_opened_again(
    site_of: SiteOf, monkeypatch: pytest.MonkeyPatch
):
    site = site_of()
    problems = [LedgerError("ledger: the database system is starting up", unreachable=True)]

    def open_ledger(url: str) -> Ledger:
        if problems:
            raise problems.pop()
        return Ledger(url)

    monkeypatch.setattr("qinglan.clients.roles.Ledger", open_ledger)
    assert site.run(site.distill).rows_out == ROWS
    problems.append(LedgerError("ledger: damaged"))
    with pytest.raises(LedgerError, match="damaged"):
        site.run(site.validate)
    assert not problems


def test_dialogues_are_read_once_and_a_row_whose_extraction_failed_goes_no_further(site_of: SiteOf):
    faults = {"虾青素5。"}

    def teacher(body: dict[str, Any]) -> Any:
        _, is_dialogue, said = asked(body).partition("对话：用户：孕妇，问过")
        if not is_dialogue:
            return rewritten(body)
        if said in faults:
            faults.remove(said)
            return 503, {}
        profile = "高血压" if said == "虾青素3。" else "孕妇"
        extracted = {"profile": profile, "history": f"问过{said}"}
        return 200, completion(json.dumps(extracted, ensure_ascii=False))

    site = site_of(teacher)
    lines = "".join(f"咋吃,用户：孕妇，问过虾青素{n}。\n" for n in range(ROWS))
    site.workbook.write_text(f"问题,对话\n{lines}", encoding="utf-8")
    dialogues = changed(
        site.profile,
        data={"columns": Columns(dialogue="对话")},
        extract={"batch_rows": 10, "retries": 1},
    )

    def distill(run: Run) -> StageResult:
        stages = with_extracted(run, site.services, ingest_workbook(run, site.workbook))
        assert [result.stage for result in stages] == ["ingest", "extract"]
        return distill_rows(run, site.services, stages[-1])

    result = site.run(distill, dialogues)
    rows = list(read_jsonl(result.path("rows"), Row))
    first = rows[0]
    failed = rows[3]
    repeated = rows[5]
    assert (first.profile, first.history, first.inputs) == ("孕妇", "问过虾青素0。", {})
    assert (failed.reason, failed.answer) == ("not_in_dialogue", None)
    assert (failed.profile, failed.history, failed.inputs) == ("", "", {})
    assert repeated.status == "ok"
    folder = dialogues.paths.runs / result.run_id
    assert StageResult.read(folder / "extract" / MANIFEST).dropped == {"not_in_dialogue": 1}
    ingested_ids = [row.id for row in read_jsonl(folder / "ingest" / "rows.jsonl", Row)]
    assert [row.id for row in rows] == ingested_ids
    assert len(set(ingested_ids)) == ROWS
    assert len(site.teacher.bodies) == ROWS + 1 + ROWS - 1
    site.run(distill, changed(dialogues, extract={"batch_rows": 7}, distill={"batch_rows": 7}))
    assert len(site.teacher.bodies) == 2 * ROWS


@pytest.mark.parametrize("allowed", [0.0, 1.0], ids=["too many failed", "some failed"])
def test_an_evaluation_repeats_the_calls_that_failed_and_no_others(site_of: SiteOf, allowed: float):
    site = site_of(failing_once(["虾青素1咋吃", "虾青素4咋吃"]))
    rows = [Row(id=str(n), tenant="t", query=f"虾青素{n}咋吃", source="test") for n in range(5)]

    async def ask(run: Run, retries: int) -> list[ArmRow]:
        async with open_clients(run, site.services, ["teacher"]) as clients:
            recipe = get_recipe(site.profile.recipe)
            work = partial(ask_teacher, rows, recipe, clients, site.profile.tenant, allowed)
            return await batches.ask_again("ask", work, clients, retries=retries)

    with open_run(site.profile, "evaluate") as run:
        arm = asyncio.run(flow(ask, validate_parameters=False)(run, 1))  # type: ignore[arg-type]
    assert [entry.text for entry in arm] == [f"虾青素{n} 服用方法" for n in range(5)]
    assert len(site.teacher.bodies) == 5 + 2


def test_a_repeat_asks_only_for_what_was_lost_and_can_lose_no_more(site_of: SiteOf):
    attempts = 0
    cached: list[int] = []

    def teacher(body: dict[str, Any]) -> Any:
        if asked(body) == "虾青素0咋吃":
            return 200, completion("")
        return rewritten(body)

    def rag(body: dict[str, Any]) -> Any:
        if body["query"] == "虾青素4咋吃" or attempts > 1:
            return 503, {}
        return retrieved(body)

    site = site_of(teacher, rag)
    rows = [Row(id=str(n), tenant="t", query=f"虾青素{n}咋吃", source="test") for n in range(5)]
    recipe = get_recipe(site.profile.recipe)
    arms = {"original": original_rows(rows)}

    async def ask(run: Run) -> list[list[ArmRow]]:
        async with open_clients(run, site.services, ["teacher", "rag"]) as clients:

            async def work() -> list[list[ArmRow]]:
                nonlocal attempts
                attempts += 1
                taught = await ask_teacher(rows, recipe, clients, site.profile.tenant, 0.2)
                graded = await grade_arms(arms, rows, recipe.grader, clients, site.profile)
                return [taught, *graded.arms.values()]

            answers = await batches.ask_again("ask", work, clients, retries=2)
            cached.append(clients.call_counts()["teacher"]["cached"])
            return answers

    with open_run(site.profile, "evaluate") as run:
        taught, graded = asyncio.run(flow(ask, validate_parameters=False)(run))  # type: ignore[arg-type]
    assert [entry.reason for entry in taught] == ["empty_answer", None, None, None, None]
    assert [entry.reason for entry in graded] == [None, None, None, None, "rag_unavailable"]
    assert attempts == 3
    assert cached == [0]
    assert len(site.teacher.bodies) == 5 + 1, "a blank is asked for twice, and no more"


def test_calls_of_a_stage_are_traced_at_its_run_once_and_without_the_key(
    site_of: SiteOf, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("A_KEY", "sk-secret")
    site = site_of(failing_once(f"虾青素{n}咋吃" for n in range(ROWS)))
    copying = changed(
        site.profile, tracking={"rows": "copy", "traces_per_stage": 20}, distill={"retries": 2}
    )
    copying = changed(copying, teacher={"api_key_env": "A_KEY"}, rag={"api_key_env": "A_KEY"})

    def traces(result: StageResult) -> list[Any]:
        started = Started.read(result.path("rows").parent)
        assert started is not None
        run = started.mlflow_run_id
        places = [client.get_run(run).info.experiment_id]
        found_traces = client.search_traces(locations=places, run_id=run)
        return [trace.data.spans[0] for trace in found_traces]

    client = open_client(copying.tracking_uri)
    distilled = site.run(site.distill, copying)
    validated = site.run(site.validate, copying)
    teacher_calls = traces(distilled)
    statuses = Counter(call.attributes["status"] for call in teacher_calls)
    assert statuses == {"http_503": 10, "ok": 10}
    assert {call.attributes["attempt"] for call in teacher_calls if call.outputs} == {2}
    for call in teacher_calls:
        assert call.outputs in (None, asked(call.inputs).replace("咋吃", " 服用方法"))
    rag_calls = traces(validated)
    assert {call.outputs[0]["id"] for call in rag_calls} == {"g"}
    assert {call.name for call in rag_calls} == {"rag"}
    assert len(rag_calls) == 20
    again = site.run(site.distill, changed(copying, distill={"batch_rows": 5}))
    assert again.run_id == distilled.run_id or traces(again) == []
    assert b"sk-secret" not in Path(copying.tracking_uri.removeprefix("sqlite:///")).read_bytes()


def test_a_second_run_pays_nothing_and_another_prompt_is_asked_anew(site_of: SiteOf):
    site = site_of()
    first = site.run(site.distill)
    assert site.run(site.distill).key == first.key
    assert len(site.teacher.bodies) == ROWS
    in_other_domain = changed(site.profile, tenant={"domain": "药品"})
    assert site.run(site.distill, in_other_domain).key != first.key
    assert len(site.teacher.bodies) == 2 * ROWS


def test_too_many_failures_stop_the_stage_and_what_was_paid_is_kept(site_of: SiteOf):
    down = True
    paid = []

    def teacher(body: dict[str, Any]) -> Any:
        question = asked(body)
        if down and "1" in question:
            return 500, {}
        paid.append(question)
        return rewritten(body)

    site = site_of(teacher)
    with pytest.raises(
        StageError,
        match=r"distill: \d+ of 30 rows failed, more than distill.max_failed_share = 10%",
    ):
        site.run(site.distill)
    down = False
    assert site.run(site.distill).rows_out == ROWS
    assert len(paid) == ROWS


def test_a_spent_budget_stops_the_run_and_a_higher_one_goes_on(site_of: SiteOf):
    site = site_of()
    poor = changed(
        site.profile, budget={"per_month_usd": 10 * COST_USD}, teacher={"concurrency": 2}
    )
    with pytest.raises(
        BudgetError, match=r"budget\.per_month_usd = 0.002: nothing is left to spend"
    ):
        site.run(site.distill, poor)
    assert 10 <= len(site.teacher.bodies) <= 12
    assert site.run(site.distill).rows_out == ROWS
    assert len(site.teacher.bodies) == ROWS


def test_a_run_may_go_on_with_what_it_could_pay_for(site_of: SiteOf):
    site = site_of()
    budget = {"per_run_usd": 10 * COST_USD, "when_spent": "go_on"}
    result = site.run(
        site.validate, changed(site.profile, budget=budget, teacher={"concurrency": 2})
    )
    rows = list(read_jsonl(result.path("rows"), Row))
    paid = len(site.teacher.bodies)
    assert 10 <= paid <= 12
    assert result.rows_out == paid
    assert sum(row.reason == "over_budget" for row in rows) == ROWS - paid
    # The next night has a budget of its own.
    again = site.run(site.distill, changed(site.profile, budget=budget))
    assert again.rows_out > paid


def test_scores_that_the_budget_left_out_are_asked_for_by_a_later_run(site_of: SiteOf):
    def models(body: dict[str, Any]) -> Any:
        if "评审" in str(body):
            return 200, completion('{"score": 4}')
        return rewritten(body)

    def validate(run: Run) -> StageResult:
        return site.validate(run.model_copy(update={"knowledge_base_sha256": "kb"}))

    site = site_of(models)
    judging = changed(site.profile, validation={"judge_baseline": True}, judge={"concurrency": 2})
    site.run(site.distill, judging)
    for per_run_usd, is_enough in ((10 * COST_USD, False), (100.0, True)):
        budgeted = changed(judging, budget={"per_run_usd": per_run_usd, "when_spent": "go_on"})
        result = site.run(validate, budgeted)
        judged = sum(row.judge_score is not None for row in read_jsonl(result.path("rows"), Row))
        assert result.rows_out == ROWS
        assert judged + result.try_again == ROWS
        assert (judged == ROWS) is is_enough


@pytest.mark.parametrize("reply", [(500, {}), (200, completion(" "))], ids=["outage", "blank"])
def test_a_row_without_an_answer_is_asked_again_in_the_next_run(site_of: SiteOf, reply: Any):
    is_lost = True

    def teacher(body: dict[str, Any]) -> Any:
        if is_lost and "虾青素7咋吃" in str(body):
            return reply
        return rewritten(body)

    site = site_of(teacher)
    first = site.run(site.distill)
    assert (first.rows_out, first.try_again) == (ROWS - 1, 1)
    assert len(site.teacher.bodies) == ROWS - 1 + 2
    is_lost = False
    assert site.run(site.distill).rows_out == ROWS
    assert len(site.teacher.bodies) == ROWS + 2


def test_a_batch_api_answers_at_half_the_price(site_of: SiteOf):
    site = site_of()
    settings = {"mode": "batch_api", "batch_api": BatchApi(poll_every_s=0.1)}
    prices = {**site.profile.prices, "simulated-rewriter": site.profile.prices["big"]}
    with running_app(app_with_batches(SimulatedBatchStore())) as address:
        url = f"{address}/v1"
        teacher = {"base_url": url, "model": "simulated-rewriter"}
        profile = changed(site.profile, distill=settings, teacher=teacher)
        profile = profile.model_copy(update={"prices": prices})
        site.services = partial(Addresses, url, url, site.rag.url)
        result = site.run(site.distill, profile)
    with site_ledger(profile) as ledger:
        usage = ledger.usage(result.run_id, "teacher")
    full_usd = (usage.prompt_tokens + 10 * usage.completion_tokens) / 1e6
    assert (result.rows_out, usage.calls) == (ROWS, ROWS)
    assert usage.cost_usd == pytest.approx(full_usd / 2)


def test_prefect_keeps_no_text_of_a_row(caplog: pytest.LogCaptureFixture):
    bug = ValueError("虾青素咋吃")
    dead = EngineError("sft ended with status 1; full log: sft.log", "铁剂咋吃")

    def work() -> None:
        tried = {"retries": 1, "retry_delay_seconds": 0, "retry_condition_fn": lambda *_: True}
        stage.stage_task("sft")(raising(dead)).with_options(**tried)(return_state=True)
        stage.stage_task("rl")(raising(bug)).with_options(**tried)()

    failed = flow(work)(return_state=True).result(raise_on_failure=False)
    assert failed.__cause__ is bug
    assert str(bug) in caplog.text, "the terminal shows all of it"
    send_what_is_queued()
    with get_client(sync_client=True) as client:

        def records(kind: str) -> str:
            return client.request("POST", cast(Any, f"/{kind}/filter"), json={}).text

        def has_both_events() -> bool:
            return records("events").count(str(failed)) > 1

        wait_until("the events of flow run and task run", has_both_events)
        kinds = ("flow_runs", "task_runs", "logs", "events")
        texts = "".join(records(kind) for kind in kinds)
    assert str(dead) in texts
    assert str(bug) not in texts
    assert dead.said not in texts


def test_a_rag_that_ignores_rewrites_stops_the_run(site_of: SiteOf):
    site = site_of(rag=lambda _: (200, recall(("g", 0.5))))
    with pytest.raises(StageError, match="seems to ignore the rewrite"):
        site.run(site.validate)


def refusing_half(body: dict[str, Any]) -> Any:
    question = asked(body)
    if sum(map(ord, question)) % 2:
        return 200, completion(None, refusal="I can't")
    return rewritten(body)


def test_a_rival_that_refuses_half_is_found_out(
    tmp_path: Path, profile_of: ProfileOf, database: str, serve: Serve
):
    workbook = write_workbook(tmp_path, 60)
    with workbook.open("a", encoding="utf-8") as stream:
        stream.writelines(f"虾青素软胶囊早上空腹吃好还是晚上饭后吃好啊{n}\n" for n in range(20))
    main = serve(rewritten)
    rival = serve(refusing_half)
    rag = serve(retrieved)
    judge = serve(lambda _: (200, completion('{"score": 4, "reason": "ok"}')))
    half_price = {name: value / 2 for name, value in PRICE.items()}
    profile = profile_of(
        teacher={"model": "big", "base_url": main.url},
        judge={"model": "small", "base_url": judge.url},
        rag={"url": rag.url},
        compare={"teachers": {"Rival_1.0": {"model": "shy", "base_url": rival.url}}, "rows": DRAWN},
        prices={"big": PRICE, "small": PRICE, "shy": half_price},
        evaluate={"bootstrap_resamples": 200},
        tracking={"uri": database},
    )
    services = partial(Addresses, main.url, judge.url, rag.url, {"Rival_1.0": rival.url})

    def stages_of(run: Run) -> list[StageResult]:
        sample = draw_questions(run, ingest_workbook(run, workbook))
        stages = [sample]
        validated = {}
        for teacher in teachers_of(run, services):
            distilled = distill_rows(
                teacher.run, teacher.services, sample, teacher.stage("distill")
            )
            validated[teacher.arm] = validate_rows(
                teacher.run, teacher.services, distilled, teacher.stage("validate")
            )
            stages += [distilled, validated[teacher.arm]]
        return [*stages, compare_teachers(run, services, validated)]

    def report() -> Report:
        with open_run(profile, "compare", fresh=True) as run:
            stages = flow(stages_of, validate_parameters=False)(run)
            finish_run(run)
            return build_report(run, stages)  # type: ignore[arg-type]

    first = report()
    assert (len(main.bodies), len(rival.bodies)) == (DRAWN, DRAWN)
    shy = first.arms["Rival_1.0"]
    big = first.arms["teacher"]
    answered = DRAWN - shy.failed
    assert 0 < answered < DRAWN
    assert big.failed == 0
    # Half the price a call, and every refusal is paid for.
    cost = (big.cost_per_1000_usd or 0) / 2 * DRAWN / answered
    assert shy.cost_per_1000_usd == pytest.approx(cost)
    assert first.purchase is not None
    assert "in share of questions answered" in first.purchase.reading.render()
    for comparison in first.comparisons:
        assert comparison.groups < comparison.n, "near-duplicates are one group"
    notes = " ".join(note.render() for note in first.purchase.notes)
    assert "(teacher_refused" in notes
    # Every stage anew: the ledger has all answers, the refusals among them.
    second = report()
    assert (len(main.bodies), len(rival.bodies)) == (DRAWN, DRAWN)
    assert second.arms["Rival_1.0"] == shy
    assert (second.api.teacher.calls, second.api.teacher.cached) == (0, DRAWN + DRAWN)
