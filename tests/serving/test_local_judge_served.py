"""A judge of our own, served for real by ms-swift from MLflow's registry, and compared with the judge.

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
from qinglan.rows import Row
from qinglan.runs.artifacts import Artifact, StageResult, read_jsonl, write_jsonl
from qinglan.runs.run import Run, open_run
from qinglan.serving.local_judge import released_judge
from qinglan.serving.registry import prompt_digest
from qinglan.tasks.local_judge import compare_judges
from qinglan.training.judge_agreement import JudgedPassage

pytestmark = [
    pytest.mark.usefixtures("prefect_server"),
    pytest.mark.slow,
    pytest.mark.extended,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),  # Prefect's, MLflow's
]
MODEL, ROWS = "qinglan.t.passage_judge", 12


def found(body: dict[str, Any]) -> Any:
    """The teacher's whole rewrite finds `g`, anything else a passage that bears the question's number."""
    whole = len(body.get("rewritten_query", "").split()) == 2
    number = body["query"].removeprefix("虾青素").removesuffix("咋吃")
    return 200, recall(("g" if whole else f"p{number}", 0.9))


def judged(body: dict[str, Any]) -> Any:
    """What the teacher's rewrites find is right, and of the other passages those of every third question."""
    passage = asked(body).rpartition("正文")[2]
    right = passage == "g" or int(passage.removeprefix("p")) % 3 == 0
    return 200, completion('{"score": 5}' if right else '{"score": 1}')


class Site:
    """A profile whose local judge is registered, its scripted services, and a dataset of dev rows."""

    def __init__(self, folder: Path, profile: Profile, rag: FakeService, judge: FakeService) -> None:
        self.profile, self.judge = profile, judge
        self.services = partial(Addresses, judge.url, judge.url, rag.url)
        rows = [
            Row(id=f"{n:02}", tenant="t", query=f"虾青素{n}咋吃", source="f", split="dev", answer=f"虾青素{n} 服用方法")
            for n in range(ROWS)
        ]
        artifacts = {"rows": write_jsonl(folder / "rows.jsonl", rows)}
        self.dataset = StageResult(stage="dataset", key="d", run_id="r", seconds=1.0, artifacts=artifacts)

    def with_local(self, **settings: Any) -> Profile:
        local = self.profile.judge.local.model_copy(update=settings)
        return self.profile.model_copy(update={"judge": self.profile.judge.model_copy(update={"local": local})})

    def compare(self, profile: Profile) -> StageResult:
        def work(run: Run) -> StageResult:
            judge = released_judge(profile)
            assert judge
            return compare_judges(run, self.services, self.dataset, judge)

        with open_run(profile, "train") as run:
            return flow(work, validate_parameters=False)(run)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("judge")
    made = Models(f"sqlite:///{folder / 'mlflow.db'}", MODEL, folder)
    made.weights = make_judge(folder / "model")  # type: ignore[attr-defined]
    return made


@pytest.fixture
def site(tmp_path: Path, models: Models, profile_of: Callable[..., Profile], serve: Callable[[Script], Any]) -> Site:
    rag, judge = serve(found), serve(judged)
    profile = profile_of(
        judge={"model": "small", "base_url": judge.url, "local": {"model": MODEL, "timeout_s": 300, "price": PRICE}},
        rag={"url": rag.url},
        sft={"torch_dtype": "float32"},
        tracking={"uri": models.uri},
        trainer={"threads": 1},
    )
    prompt = prompt_digest(profile.model_copy(update={"recipe": "passage_judge"}))
    weights = Artifact.of(models.weights)  # type: ignore[attr-defined]
    candidate = models.candidate(model=weights, recipe="passage_judge", prompt_sha256=prompt)
    models.registry.promote(models.registry.register(candidate).version)
    return Site(tmp_path, profile, rag, judge)


def test_a_judge_that_agrees_by_chance_alone_stops_rl_and_the_number_is_kept(site: Site):
    with pytest.raises(StageError, match=r"κ 0\.00 .*24 passages: κ's 95% interval must .*min_agreement = 0\.6"):
        site.compare(site.with_local(min_agreement_pairs=2 * ROWS))
    result = site.compare(site.with_local(when_below="go_on"))  # a live RAG is asked anew, the judges are not
    assert (result.metrics["pairs"], result.metrics["unreadable"], result.metrics["failed"]) == (2 * ROWS, 0, 0)
    assert result.metrics["share"] == pytest.approx(2 / 3)
    pairs = list(read_jsonl(result.path("pairs"), JudgedPassage))
    assert {pair.local for pair in pairs} == {5.0}
    assert len(site.judge.bodies) == 2 * ROWS
    with site_ledger(site.profile) as ledger:
        models = {each.key: each for each in ledger.spending("model")}
        roles = {each.key: each.calls for each in ledger.spending("role")}
    assert roles == {"judge": 2 * ROWS, "judge.local": 2 * ROWS}
    assert models[f"{MODEL}-v1"].cost_usd > 0
    assert processes_with("swift.cli.deploy", f"{MODEL}-v1") == []
