"""A comparison of teachers under a real Prefect server: teachers, judge and RAG by script over real HTTP."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_service import PRICE, FakeService, Script, completion, recall
from prefect import flow
from prefect.testing.utilities import prefect_test_harness

from qinglan.clients.roles import Addresses
from qinglan.evaluation.models import Report
from qinglan.evaluation.summary import build_report
from qinglan.evaluation.teacher_comparison import contenders
from qinglan.runs.artifacts import StageResult
from qinglan.runs.run import Run, finish_run, open_run
from qinglan.tasks.compare import compare_teachers, draw_questions
from qinglan.tasks.distill import distill_rows
from qinglan.tasks.ingest import ingest_workbook
from qinglan.tasks.validate import validate_rows

pytestmark = [
    pytest.mark.slow,  # 10 s for Prefect's server alone
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),  # Prefect's, MLflow's
]
ROWS, DRAWN = 60, 40


@pytest.fixture(scope="module", autouse=True)
def prefect() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=300):
        yield


def rewritten(body: dict[str, Any]) -> Any:
    return 200, completion(body["messages"][-1]["content"].replace("咋吃", " 服用方法"))


def refusing_half(body: dict[str, Any]) -> Any:
    question = body["messages"][-1]["content"]
    if sum(map(ord, question)) % 2:
        return 200, completion(None, refusal="I can't")
    return rewritten(body)


def judged(_body: dict[str, Any]) -> Any:
    return 200, completion('{"score": 4, "reason": "ok"}')


def retrieved(body: dict[str, Any]) -> Any:
    return 200, recall(("g", 0.9 if "rewritten_query" in body else 0.5))


def test_a_rival_that_refuses_half_is_found_out_and_a_second_run_pays_nothing(
    tmp_path: Path, profile_of: Callable[..., Any], serve: Callable[[Script], FakeService]
):
    workbook = tmp_path / "q.csv"
    workbook.write_text("问题\n" + "".join(f"虾青素{n}咋吃\n" for n in range(ROWS)), encoding="utf-8")
    main, rival, judge, rag = serve(rewritten), serve(refusing_half), serve(judged), serve(retrieved)
    half_price = {name: value / 2 for name, value in PRICE.items()}
    profile = profile_of(
        teacher={"model": "big", "base_url": main.url},
        judge={"model": "small", "base_url": judge.url},
        rag={"url": rag.url},
        compare={"teachers": {"Rival_1.0": {"model": "shy", "base_url": rival.url}}, "rows": DRAWN},
        prices={"big": PRICE, "small": PRICE, "shy": half_price},
        evaluate={"bootstrap_resamples": 200},
        tracking={"uri": f"sqlite:///{tmp_path / 'mlflow.db'}"},
    )
    services = partial(Addresses, main.url, judge.url, rag.url, {"Rival_1.0": rival.url})

    def stages_of(run: Run) -> list[StageResult]:
        sample = draw_questions(run, ingest_workbook(run, workbook))
        stages, validated = [sample], {}
        for each in contenders(run, services):
            distilled = distill_rows(each.run, each.services, sample, each.stage("distill"))
            validated[each.arm] = validate_rows(each.run, each.services, distilled, None, each.stage("validate"))
            stages += [distilled, validated[each.arm]]
        return [*stages, compare_teachers(run, services, validated)]

    def report() -> Report:
        with open_run(profile, "compare", fresh=True) as run:
            done = flow(stages_of, validate_parameters=False)(run)
            finish_run(run)
            return build_report(run, done)  # type: ignore[arg-type]

    first = report()
    assert (len(main.bodies), len(rival.bodies)) == (DRAWN, DRAWN)
    shy, big = first.arms["Rival_1.0"], first.arms["teacher"]
    answered = DRAWN - shy.failed
    assert 0 < answered < DRAWN and big.failed == 0
    # Half the price a call, and every refusal is paid for.
    assert shy.cost_per_1000_usd == pytest.approx((big.cost_per_1000_usd or 0) / 2 * DRAWN / answered)
    assert first.purchase and "in share of questions answered" in first.purchase.reading.render()
    assert any("(teacher_refused" in note.render() for note in first.purchase.notes)
    # Every stage anew: the ledger has all answers, the refusals among them.
    second = report()
    assert (len(main.bodies), len(rival.bodies)) == (DRAWN, DRAWN)
    assert second.arms["Rival_1.0"] == shy
    assert (second.api.teacher.calls, second.api.teacher.cached) == (0, DRAWN + DRAWN)
