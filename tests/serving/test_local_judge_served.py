"""A judge of our own, served by ms-swift from MLflow's registry, and compared with the judge.

The tiny model holds everything right, so that it agrees with the judge by chance alone.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_service import PRICE, FakeService, Script, asked, completion, recall
from prefect import flow
from registered import Models
from toy_rl import make_judge
from waiting import processes_with

from qinglan.clients.roles import Addresses, site_ledger
from qinglan.config import Profile
from qinglan.errors import StageError
from qinglan.registry import prompt_digest
from qinglan.rows import Row
from qinglan.runs.artifacts import Artifact, StageResult, read_jsonl, write_jsonl
from qinglan.runs.run import Run, open_run
from qinglan.serving.local_judge import released_judge
from qinglan.tasks.local_judge import compare_judges
from qinglan.training.judge_agreement import JudgedPassage

pytestmark = [
    pytest.mark.usefixtures("prefect_server"),
    pytest.mark.slow,
    pytest.mark.extended,
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::ResourceWarning"
    ),  # Prefect's, MLflow's
]
MODEL = "qinglan.t.passage_judge"
ROWS = 12


def retrieve(body: dict[str, Any]) -> Any:
    """The RAG's answer: `g` for the teacher's rewrite, else one with the question's number."""
    is_whole = len(body.get("rewritten_query", "").split()) == 2
    number = body["query"].removeprefix("虾青素").removesuffix("咋吃")
    passage = "g" if is_whole else f"p{number}"
    return 200, recall((passage, 0.9))


def judge_passage(body: dict[str, Any]) -> Any:
    """The judge's answer: right are `g`, and every third question's other passage."""
    _, _, passage = asked(body).rpartition("正文")
    is_right = passage == "g" or int(passage.removeprefix("p")) % 3 == 0
    return 200, completion('{"score": 5}' if is_right else '{"score": 1}')


def test_a_judge_that_agrees_by_chance_alone_stops_rl_and_the_number_is_kept(
    tmp_path: Path, profile_of: Callable[..., Profile], serve: Callable[[Script], FakeService]
):
    rag = serve(retrieve)
    judge = serve(judge_passage)
    models = Models(f"sqlite:///{tmp_path / 'mlflow.db'}", MODEL, tmp_path)

    def profile_with(**local: Any) -> Profile:
        local |= {"model": MODEL, "timeout_s": 300, "price": PRICE}
        return profile_of(
            judge={"model": "small", "base_url": judge.url, "local": local},
            rag={"url": rag.url},
            sft={"torch_dtype": "float32"},
            tracking={"uri": models.uri},
            trainer={"threads": 1},
        )

    prompt = prompt_digest(profile_with().model_copy(update={"recipe": "passage_judge"}))
    weights = Artifact.of(make_judge(tmp_path / "model"))
    candidate = models.candidate(model=weights, recipe="passage_judge", prompt_sha256=prompt)
    models.registry.promote(models.registry.register(candidate).version)
    rows = [
        Row(
            id=f"{n:02}",
            tenant="t",
            query=f"虾青素{n}咋吃",
            source="f",
            split="dev",
            answer=f"虾青素{n} 服用方法",
        )
        for n in range(ROWS)
    ]
    artifacts = {"rows": write_jsonl(tmp_path / "rows.jsonl", rows)}
    dataset = StageResult(stage="dataset", key="d", run_id="r", seconds=1.0, artifacts=artifacts)

    def compare(**local: Any) -> StageResult:
        profile = profile_with(**local)

        def work(run: Run) -> StageResult:
            released = released_judge(profile)
            assert released
            return compare_judges(
                run, partial(Addresses, judge.url, judge.url, rag.url), dataset, released
            )

        with open_run(profile, "train") as run:
            return flow(work, validate_parameters=False)(run)  # type: ignore[return-value]

    with pytest.raises(
        StageError, match=r"κ 0\.00 .*24 passages: κ's 95% interval must .*min_agreement = 0\.6"
    ):
        compare(min_agreement_pairs=2 * ROWS)
    # A live RAG is asked anew, the judges are not.
    result = compare(when_below="go_on")
    assert result.metrics["pairs"] == 2 * ROWS
    assert result.metrics["unreadable"] == 0
    assert result.metrics["failed"] == 0
    assert result.metrics["share"] == pytest.approx(2 / 3)
    assert {pair.local for pair in read_jsonl(result.path("pairs"), JudgedPassage)} == {5.0}
    assert len(judge.bodies) == 2 * ROWS
    with site_ledger(profile_with()) as ledger:
        by_model = {spending.key: spending for spending in ledger.spending("model")}
        calls_by_role = {spending.key: spending.calls for spending in ledger.spending("role")}
    assert calls_by_role == {"judge": 2 * ROWS, "judge.local": 2 * ROWS}
    assert by_model[f"{MODEL}-v1"].cost_usd > 0
    assert processes_with("swift.cli.deploy", f"{MODEL}-v1") == []
