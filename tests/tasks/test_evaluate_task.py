"""The evaluate stage: the retrievals that it takes over, the models that it tests, and its key."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import letters
import pytest
from fixture_types import ProfileOf
from run_stages import stage_result

from qinglan.clients.roles import Addresses
from qinglan.config import Profile
from qinglan.errors import StageError
from qinglan.evaluation.measuring import Measured
from qinglan.evaluation.models import Evaluation
from qinglan.evaluation.reasons import Reason, reason
from qinglan.evaluation.red_team import RAG_NO_ANSWER, RedTeamResult
from qinglan.rows import ArmRow, Retrieved, Row
from qinglan.runs.artifacts import Artifact, StageResult, write_jsonl
from qinglan.runs.run import Run
from qinglan.tasks import evaluate as evaluate_module
from qinglan.tasks.evaluate import Asked, Graded

RETRIEVED = Retrieved(ids=("g",), scores=(0.9,))
ROW = Row(
    id="1", tenant="t", query="问", source="f!A1", gold_id="g", split="test",
    answer="改写", original_retrieved=RETRIEVED, answer_retrieved=RETRIEVED, judge_score=4.0,
)  # fmt: skip
URL = "http://x/v1"


class Evaluated:
    """The stage with a fake engine and fake services, and the calls that it made of them."""

    def __init__(
        self, folder: Path, champion: Any = None, unjudged: dict[str, int] | None = None
    ) -> None:
        self.rows = write_jsonl(folder / "rows.jsonl", [ROW])
        self._folder = folder
        self.champion = champion
        self.unjudged = unjudged or {}
        self.depends_on: dict[str, Any] = {}
        self.arms: Mapping[str, list[ArmRow]] = {}
        self.models: dict[str, str] = {}
        self.with_adapter = set[str]()
        self.answers: dict[str, dict[str, Any]] = {}
        """Changes of a model's answers, by model."""
        self.outcome: Any = None
        self.answered = Asked({}, {}, {})
        self.results: dict[str, list[RedTeamResult]] = {}
        """The answers of the teachers."""

    def run(
        self, profile: Profile, dataset_run: str = "now", knowledge_base: str = "", **models: str
    ) -> None:
        run = Run(id="now", flow="evaluate", profile=profile, directory=self._folder)
        run = run.model_copy(update={"knowledge_base_sha256": knowledge_base})
        dataset = stage_result(
            "dataset", dataset_run, artifacts={"test": self.rows, "rows": self.rows}
        )
        trained = {name: self._trained(name, sha256) for name, sha256 in models.items()}
        rivals = dict.fromkeys(profile.compare.teachers, URL)
        evaluate_module.evaluate_arms.fn(
            run, partial(Addresses, URL, URL, URL, rivals), dataset, trained
        )

    def _trained(self, name: str, sha256: str) -> StageResult:
        parts = ["model"]
        if name in self.with_adapter:
            parts.append("adapter")
        artifacts = {part: Artifact(path=Path(f"/{name}/{part}"), sha256=sha256) for part in parts}
        return stage_result(name, artifacts=artifacts)

    def perform(
        self, run: Run, name: str, depends_on: Any, work: Callable[[Any], Any], **_: Any
    ) -> StageResult:
        self.depends_on = depends_on
        directory = self._folder / name
        self.outcome = work(SimpleNamespace(run=run, directory=directory, say=lambda _: None))
        return stage_result(name, run.id)

    def engine(self, stage: Any, command: Any, **_: Any) -> None:
        """Answers every prompt with its own id."""
        prompts = (stage.directory / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
        ids = [json.loads(prompt)["id"] for prompt in prompts]
        numbers = {"prompt_tokens": 9, "completion_tokens": 2, "logprobs": [-0.5]}
        for name, folder in json.loads(command.argv[-1])["models"].items():
            self.models[name] = folder
            changes = self.answers.get(name, {})
            answers = [{"id": id_, "text": id_, "start": id_, **numbers, **changes} for id_ in ids]
            write_jsonl(stage.directory / f"{name}.answers.jsonl", answers)

    def grade(
        self, _run: Any, _services: Any, arms: Any, _rows: Any, cases: Any, red_team: Any
    ) -> Any:
        self.arms = arms
        self.red_team = red_team
        self.cases = cases
        measured = Measured(dict(arms), self.unjudged)
        return Graded(measured, self.results, {"judge": {"cached": 1}})

    def ask_teachers(self, _stage: Any, rivals: Any, _rows: Any, _cases: Any) -> Asked:
        self.asked = [(rival.arm, rival.run.profile.teacher.model) for rival in rivals]
        return self.answered

    @property
    def evaluation(self) -> Evaluation:
        path = self._folder / "evaluate" / "evaluation.json"
        return Evaluation.model_validate_json(path.read_text(encoding="utf-8"))


@pytest.fixture
def evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Evaluated]:
    def make(**options: Any) -> Evaluated:
        fake = Evaluated(tmp_path, **options)
        monkeypatch.setattr(evaluate_module, "run_engine", fake.engine)
        monkeypatch.setattr(evaluate_module, "_grade", fake.grade)
        monkeypatch.setattr(evaluate_module, "_ask_teachers", fake.ask_teachers)
        monkeypatch.setattr(evaluate_module, "perform", fake.perform)
        monkeypatch.setattr(evaluate_module, "champion_of", lambda _: fake.champion)
        return fake

    return make


@pytest.mark.parametrize(
    ("url", "dataset_run", "is_kept"),
    [
        ("http://live/q", "earlier", False),
        ("http://live/q", "now", False),
        ("embedded", "earlier", True),
    ],
)
def test_a_live_service_is_asked_again(
    evaluated: Any, profile_of: ProfileOf, url: str, dataset_run: str, is_kept: bool
):
    fake = evaluated()
    fake.run(profile_of(rag={"url": url}), dataset_run, rl="a")
    for arm in ("original", "teacher"):
        is_retrieved = fake.arms[arm][0].retrieved is not None
        assert is_retrieved is is_kept, arm
    assert fake.arms["teacher"][0].judge_score == 4.0


@pytest.mark.parametrize(
    ("settings", "knowledge_base", "changed"),
    [
        ({"gate": {"smallest_gain": 0.2}, "evaluate": {"retries": 5}}, "a", set()),
        ({"serve": {"backend": "vllm"}}, "a", {"engine"}),
        ({"sft": {"torch_dtype": "float32"}}, "a", {"torch_dtype"}),
        ({}, "b", {"knowledge_base"}),
        ({"rag": {"url": "http://live/q"}}, "a", {"knowledge_base", "rag"}),
    ],
)
def test_what_an_evaluation_depends_on(
    evaluated: Any,
    profile_of: ProfileOf,
    settings: dict[str, Any],
    knowledge_base: str,
    changed: set[str],
):
    fake = evaluated()
    fake.run(profile_of(), knowledge_base="a", rl="a")
    before = fake.depends_on
    assert before["rows_sha256"] == fake.rows.sha256
    load = {"code": "one_at_a_time", "values": {"device": "cpu"}}
    assert before["loads"]["rl"] == load, "a latency has its load"
    fake.run(profile_of(**settings), knowledge_base=knowledge_base, rl="a")
    changed_keys = {key for key in before if before[key] != fake.depends_on[key]}
    assert changed_keys == changed


def test_answers_are_evaluated_without_a_knowledge_base(evaluated: Any, profile_of: ProfileOf):
    fake = evaluated()
    fake.run(profile_of(recipe=letters.__file__), rl="a")
    assert not {"rag", "judge", "knowledge_base"} & fake.depends_on.keys()
    assert set(fake.arms) == {"rl"}, "nobody was asked for the row's answer"


@pytest.mark.parametrize(
    ("champion", "arms"),
    [("c", {"rl": "a", "sft": "b", "champion": "c"}), ("a", {"rl": "a", "sft": "b"})],
)
def test_a_champion_of_its_own_is_an_arm(
    evaluated: Any, profile_of: ProfileOf, champion: str, arms: dict[str, str]
):
    fake = evaluated(champion=SimpleNamespace(folder=Path("/kept"), sha256=champion))
    fake.run(profile_of(), rl="a", sft="b")
    assert fake.depends_on["models"] == arms
    assert fake.models.keys() == arms.keys()


def test_the_red_team_is_asked_and_no_row_of_the_arms(
    evaluated: Any, profile_of: ProfileOf, tmp_path: Path
):
    fake = evaluated()
    own = tmp_path / "own.jsonl"
    fake.run(profile_of(), rl="a", base="b")
    assert [entry.row_id for entry in fake.arms["rl"]] == ["1"]
    assert set(fake.red_team) == {"rl"}, "nobody releases a base model"
    assert fake.cases
    assert list(fake.red_team["rl"]) == [f"redteam-{case.id}" for case in fake.cases]
    before = fake.depends_on["red_team"]
    own.write_text(
        '{"id": "own", "name": "自己的", "kind": "long", "query": "长"}', encoding="utf-8"
    )
    fake.run(profile_of(evaluate={"red_team": str(own)}), rl="a")
    assert fake.depends_on["red_team"] != before
    assert "redteam-own" in fake.red_team["rl"]


def test_what_nobody_judged_is_counted_and_asked_again_where_that_helps(
    evaluated: Any, profile_of: ProfileOf
):
    fake = evaluated(unjudged={"teacher_timeout": 1, "judge_unreadable": 2})
    fake.run(profile_of(), rl="a")
    assert fake.evaluation.unjudged == fake.unjudged
    assert fake.outcome.try_again == 1, "an unreadable answer stays one"
    assert fake.evaluation.arms["rl"].prompt_tokens_per_1000 == 9000


def test_a_model_must_answer_as_it_was_trained(evaluated: Any, profile_of: ProfileOf):
    fake = evaluated()
    fake.with_adapter = {"sft"}
    fake.run(profile_of(), base="b", sft="a")
    (parity,) = fake.evaluation.parity.values()
    assert parity["prompts"] > 0
    assert parity["equal"] == parity["prompts"]
    assert parity["difference"] == 0
    assert fake.models["sft_unmerged"] == "/base/model"
    fake.run(profile_of(serve={"backend": "vllm"}), base="b", rl="a")
    without_adapter = "vLLM's answers are compared without an adapter too"
    assert fake.models["rl_unmerged"] == "/rl/model", without_adapter
    # JSON leaves the separator as it is.
    for name in ("sft", "sft_unmerged"):
        fake.answers[name] = {"text": "a\u2028b"}
    fake.run(profile_of(), base="b", sft="a")
    assert fake.evaluation.parity["sft"]["equal"] == parity["prompts"]
    assert fake.arms["sft"][0].text == "a b"
    for logprobs, difference in ([-1.75], r"1\.2"), ([float("nan")], "nan"):
        fake.answers["sft_unmerged"] |= {"logprobs": logprobs}
        message = f"exported sft model is not what .* differ by {difference} at"
        with pytest.raises(StageError, match=message):
            fake.run(profile_of(), base="b", sft="a")
    fake.answers["sft_unmerged"] = {"start": "another"}
    with pytest.raises(StageError, match=r"0 of \d+ texts are those of the trainer's own code"):
        fake.run(profile_of(), base="b", sft="a")


def test_evaluations_of_other_models_on_the_test_split_are_counted(
    evaluated: Any, profile_of: ProfileOf
):
    fake = evaluated(champion=SimpleNamespace(folder=Path("/kept"), sha256="c"))
    counts = []
    for model in ("a", "b", "c", "b"):
        fake.run(profile_of(), rl=model)
        counts.append(fake.evaluation.earlier_evaluations)
    assert counts == [0, 1, 2, 1], "a model that is evaluated again is no new try"


def unchecked(why: Reason) -> RedTeamResult:
    return RedTeamResult(
        case_id="c", name="c", kind="k", must_pass=True, passed=None, text=None, reason=why
    )


def test_further_teachers_are_asked_and_paid_for_by_name(evaluated: Any, profile_of: ProfileOf):
    on_cases = {"teacher": [ArmRow(row_id="redteam-emoji-mixed", reason="teacher_rate_limited")]}
    teachers = {name: {"base_url": URL, "model": "small"} for name in ("cheap", "other")}
    fake = evaluated()
    fake.answered = Asked(
        {"cheap": [ArmRow(row_id="1", reason="teacher_timeout")]},
        on_cases,
        {"judge": {"cached": 2}},
    )
    failed_call = reason("call_failed", why="teacher_rate_limited")
    fake.results = {
        "teacher": [unchecked(failed_call), unchecked(failed_call)],
        "rl": [unchecked(RAG_NO_ANSWER)],
    }
    fake.run(profile_of(compare={"teachers": teachers}, evaluate={"teachers": ["cheap"]}), rl="a")
    assert fake.asked == [("teacher", "big"), ("cheap", "small")]
    assert list(fake.arms) == ["original", "teacher", "cheap", "rl"]
    assert set(fake.depends_on["teachers"]) == {"teacher", "cheap"}
    assert fake.depends_on["teachers_on_cases"] == ["teacher"]
    assert fake.outcome.details["api"] == {"judge": {"cached": 3}}
    assert fake.outcome.try_again == 3
    failure = reason("call_failed", why="teacher_rate_limited")
    left_out = {"redteam-emoji-mixed": failure}
    assert fake.red_team["teacher"] == left_out, "a failed call leaves its case out"
