"""The stages gate and register, with MLflow's registry but without Prefect's server."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openpyxl
import pytest
from fixture_types import ProfileOf
from run_stages import stage_result

from qinglan.config import Gate, Profile
from qinglan.errors import ConfigError
from qinglan.evaluation.evaluating import evaluate
from qinglan.evaluation.gate import decide, with_champion_arm
from qinglan.evaluation.models import Decision, Evaluation, Rule, Verdict
from qinglan.evaluation.reasons import reason
from qinglan.evaluation.red_team import RedTeamResult
from qinglan.ops.preflight import inspect_profile
from qinglan.recipes.query_rewrite import RECIPE
from qinglan.registry import Registry, registry_of
from qinglan.registry.approval import (
    Approval,
    lacks_only_approval,
    rows_to_review,
    write_approval_workbook,
)
from qinglan.registry.versions import candidate_of, challenger_of
from qinglan.rows import ArmRow, Retrieved, Row
from qinglan.runs.artifacts import Artifact, StageResult, write_json, write_jsonl
from qinglan.runs.run import Run, finish_run, open_run
from qinglan.runs.tracking import Tracker
from qinglan.tasks import gate, register
from qinglan.tasks import stage as stage_module
from qinglan.tasks.gate import decide_release
from qinglan.tasks.register import register_model

HIT = Retrieved(ids=("g",), scores=(0.9,), titles=("答案",))
MISS = Retrieved(ids=("x",), scores=(0.5,), titles=("别的",))
ROWS = [
    Row(id=name, tenant="t", query=f"问{name}", source=f"q!A{name}", gold_id="g", split="test")
    for name in "abc"
]
Make = Callable[..., "Finished"]


def arm(**retrieved: Retrieved) -> list[ArmRow]:
    """The rows of an arm, which hits but where `retrieved` says otherwise."""
    return [
        ArmRow(row_id=row.id, text=f"词{row.id}", retrieved=retrieved.get(row.id, HIT))
        for row in ROWS
    ]


class Finished:
    """An evaluated run: what its stages left, and the verdict that the gate will give."""

    def __init__(self, profile: Profile, folder: Path) -> None:
        self.profile = profile
        self.folder = folder
        self.verdict: Verdict = "promote"
        self.verdicts: dict[str, Verdict] = {}
        """Other verdicts than that, by arm."""
        self.rivals: dict[str, tuple[str, ...]] = {}
        """The rivals with which the gate compared an arm, by arm."""
        self.markdown: dict[str, str] = {}
        self.events: list[str] = []
        self.weights = {"base": "base", "sft": "sft", "rl": "rl"}
        self.answer: Approval | None = None

    @property
    def registry(self) -> Registry:
        return registry_of(self.profile)

    def show(self, text: str, key: str, **_: str) -> None:
        self.markdown[key] = text

    def emit(self, event: str, _run: Run, _payload: dict[str, Any]) -> None:
        self.events.append(event)

    def decide(
        self, evaluation: Evaluation, alarms: Any, config: Gate, champion: str | None
    ) -> Decision:
        self.rivals[config.challenger] = config.rivals
        verdict = self.verdicts.get(config.challenger, self.verdict)
        outcome = {"promote": "pass", "refuse": "fail", "undecided": "unknown"}[verdict]
        rule = Rule(
            name="cost",
            outcome=outcome,  # type: ignore[arg-type]
            found=reason("approved", reviewer="a|b", comment=""),
            required=reason("cost_at_most", ratio=0.5),
        )
        return Decision(
            verdict=verdict, challenger=config.challenger, champion=champion, rules=[rule]
        )

    def sha256(self, arm: str) -> str:
        return self.models()[arm].artifacts["model"].sha256

    def models(self) -> dict[str, StageResult]:
        return {name: self._model(name, weights) for name, weights in self.weights.items()}

    def _model(self, name: str, weights: str) -> StageResult:
        folder = self.folder / weights
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_text(weights)
        details = {"model": str(folder), "alarms": [], "summary": {"chosen_step": 3}}
        return stage_result(name, artifacts={"model": Artifact.of(folder)}, details=details)

    def evaluated(self) -> StageResult:
        timed = [entry.model_copy(update={"latency_ms": 5.0}) for entry in arm(a=MISS)]
        arms = {"teacher": arm(c=MISS), "sft": arm(), "rl": timed}
        evaluation = evaluate(arms, ROWS, self.profile.evaluate, RECIPE)
        write_json(self.folder / "evaluation.json", evaluation.model_dump(mode="json"))
        artifacts = {
            f"arm_{name}": write_jsonl(self.folder / f"{name}.jsonl", rows)
            for name, rows in arms.items()
        }
        artifacts["evaluation"] = Artifact.of(self.folder / "evaluation.json")
        digests = {name: result.artifacts["model"].sha256 for name, result in self.models().items()}
        return stage_result("evaluate", artifacts=artifacts, details={"models": digests})

    def dataset(self) -> StageResult:
        artifacts = {"test": write_jsonl(self.folder / "test.jsonl", ROWS)}
        return stage_result("dataset", artifacts=artifacts)

    def release(self, run: Run) -> tuple[StageResult, StageResult]:
        inputs = (self.evaluated(), self.dataset(), self.models())
        gated = decide_release.fn(run, *inputs)
        return gated, register_model.fn(run, gated, *inputs)

    def run(self) -> tuple[StageResult, StageResult]:
        """A run to its end; the next one is another."""
        with open_run(self.profile, "release") as run:
            results = self.release(run)
            finish_run(run)
        return results


@pytest.fixture
def finished(
    profile_of: ProfileOf, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Make:
    def make(**sections: Any) -> Finished:
        release = {"name": f"m.{tmp_path.name}"} | sections.pop("release", {})
        profile = profile_of(tracking={"uri": database}, release=release, **sections)
        fake = Finished(profile, tmp_path)
        tracker = Tracker(database, profile.tracking, tmp_path)
        for module in (stage_module, gate, register):
            monkeypatch.setattr(
                module, "get_run_logger", lambda: logging.getLogger("test"), raising=False
            )
            monkeypatch.setattr(module, "tracker_of", lambda _: tracker)
            monkeypatch.setattr(module, "create_markdown_artifact", fake.show, raising=False)
        monkeypatch.setattr(gate, "decide", fake.decide)
        monkeypatch.setattr(gate, "ask", lambda *_: fake.answer)
        monkeypatch.setattr(gate, "emit_run_event", fake.emit)
        return fake

    return make


@pytest.mark.parametrize(
    ("verdict", "role", "aliases"),
    [
        ("promote", "champion", {"champion": "1"}),
        ("promote", "challenger", {"challenger": "1"}),
        ("promote", "none", {}),
        ("refuse", "champion", {}),
        ("undecided", "champion", {}),
    ],
)
def test_a_model_that_passes_gets_its_alias(
    finished: Make, verdict: Verdict, role: str, aliases: dict[str, str]
):
    site = finished(release={"promote": role})
    site.verdict = verdict
    gated, registered = site.run()
    assert site.registry.aliases() == aliases
    assert registered.details["released"]["aliases"] == [*aliases]
    assert gated.load("decision", Decision).verdict == verdict
    assert site.registry.version("1").verdict == verdict
    assert site.events == [f"gate.{verdict}"]
    assert gated.metrics["promote"] == (verdict == "promote")
    row = "| cost | approved by a\\|b | at most 50% of the teacher's |"
    assert row in site.markdown["decision"]


@pytest.mark.parametrize(
    ("verdict", "of_sft", "released", "aliases", "sentence"),
    [
        ("promote", "promote", "rl", {"champion": "1"}, "^Release the RL student: [^.]*[.]$"),
        (
            "refuse",
            "promote",
            "sft",
            {"champion": "1"},
            "^Do not release the RL .* So the .* Release the SFT student",
        ),
        (
            "undecided",
            "promote",
            "sft",
            {"champion": "1"},
            "^Undecided about the RL .* Release the SFT student",
        ),
        (
            "refuse",
            "undecided",
            "rl",
            {},
            "^Do not release the RL .* Undecided about the SFT student",
        ),
    ],
)
def test_the_fallback_is_tried_where_the_challenger_is_not_released(
    finished: Make,
    verdict: Verdict,
    of_sft: Verdict,
    released: str,
    aliases: dict[str, str],
    sentence: str,
):
    site = finished(gate={"fallback": "sft"})
    site.verdict = verdict
    site.verdicts = {"sft": of_sft}
    gated, _ = site.run()
    decision = gated.load("decision", Decision)
    version = site.registry.version("1")
    assert decision.challenger == released
    assert version.arm == released
    assert version.sha256 == site.sha256(released)
    assert site.registry.aliases() == aliases
    assert re.match(sentence, decision.sentence)
    _, _, after_first_heading = site.markdown["decision"].partition("\n")
    has_second_heading = "## " in after_first_heading
    assert has_second_heading is (verdict != "promote"), "each with its rules"


@pytest.mark.parametrize(
    ("gate", "weights", "rivals"),
    [
        ({"rivals": ["teacher", "sft"]}, "rl", {"rl": ("teacher", "sft"), "sft": ("teacher",)}),
        ({"rivals": ["sft"]}, "rl", {"rl": ("sft",), "sft": ("base",)}),
        ({"rivals": ["sft"]}, "sft", {"rl": ("sft",)}),
        ({"rivals": ["base"], "challenger": "sft"}, "rl", {"sft": ("base",)}),
    ],
    ids=["no rival of itself", "of base instead", "of the same weights", "the challenger itself"],
)
def test_a_fallback_is_compared_with_others_alone(
    finished: Make, gate: dict[str, Any], weights: str, rivals: dict[str, tuple[str, ...]]
):
    site = finished(gate={"fallback": "sft"} | gate)
    site.verdict = "refuse"
    site.weights["rl"] = weights
    site.run()
    assert site.rivals == rivals


def test_a_run_that_goes_on_after_its_promotion_decides_as_before(finished: Make):
    site = finished()
    site.run()
    site.weights["rl"] = "better"
    with open_run(site.profile, "release") as run:
        before, _ = site.release(run)
        again, _ = site.release(run)
    assert before.load("decision", Decision) == again.load("decision", Decision)
    assert again.load("decision", Decision).champion == "1"
    assert site.registry.aliases() == {"champion": "2", "previous": "1"}


def test_a_champion_that_came_meanwhile_stays(finished: Make, monkeypatch: pytest.MonkeyPatch):
    site = finished()
    site.run()
    site.weights["rl"] = "better"
    before = site.decide
    monkeypatch.setattr(gate, "decide", lambda *a: before(*a).model_copy(update={"champion": None}))
    site.run()
    assert site.registry.aliases() == {"champion": "1"}
    assert "version 1 became the champion meanwhile" in site.registry.version("2").history[-1]


@pytest.mark.parametrize(
    ("gate_verdict", "answer", "verdict"),
    [
        ("promote", Approval(approve=True, reviewer="李雷", comment="看过了"), "promote"),
        ("promote", Approval(approve=False, reviewer="x"), "refuse"),
        ("promote", None, "undecided"),
        ("refuse", Approval(approve=True, reviewer="x"), "refuse"),
    ],
)
def test_a_persons_yes_is_needed(
    finished: Make, gate_verdict: Verdict, answer: Approval | None, verdict: Verdict
):
    site = finished(gate={"approval": "required"})
    site.verdict = gate_verdict
    site.answer = answer
    gated, _ = site.run()
    decision = gated.load("decision", Decision)
    assert (decision.verdict, gated.try_again) == (verdict, int(answer is None))
    assert lacks_only_approval(decision) is (answer is None), "which can still be given"
    assert site.registry.aliases() == ({"champion": "1"} if verdict == "promote" else {})
    if gate_verdict == "refuse":
        assert "review" not in gated.artifacts, "nobody is asked"
        return
    assert decision.rules[-1].required == reason("approval_needed")
    sheet = openpyxl.load_workbook(gated.path("review")).active
    assert sheet is not None
    lines = [[cell.value for cell in line] for line in sheet.iter_rows()]
    assert lines[1][:2] == ["不如教师", "问a"], "where it loses comes first"
    assert {line[0] for line in lines[2:]} == {"随机"}
    assert [title for title in lines[0] if "改写" in str(title)] == ["RL：改写", "教师：改写"]


def test_a_model_that_is_slower_than_the_routers_deadline_is_told_of(
    finished: Make, caplog: pytest.LogCaptureFixture
):
    finished(serve={"deadline_ms": 1}).run()
    assert "raise serve.deadline_ms, or slower ones are not used" in caplog.text


def test_a_champion_that_is_the_sft_model_is_compared_as_such(finished: Make):
    site = finished()
    evaluated = site.evaluated()
    tried = RedTeamResult(case_id="c", name="n", kind="long", must_pass=False, passed=True)
    digests = evaluated.details["models"]
    evaluation = evaluated.load("evaluation", Evaluation)
    evaluation = evaluation.model_copy(update={"red_team": {"sft": [tried], "rl": []}})
    with open_run(site.profile, "release") as run:
        tracker = Tracker(site.profile.tracking_uri, site.profile.tracking, site.folder)
        child = tracker.start_run("register", {})
        decision = site.decide(evaluation, [], Gate(), None)
        candidate = candidate_of(run, decision, evaluated, site.dataset(), site.models(), child)
    champion = site.registry.register(candidate)
    beside_itself = with_champion_arm(evaluation, digests, champion.sha256, "rl")
    assert beside_itself is None, "the challenger is the champion itself"
    beside_sft = with_champion_arm(evaluation, digests, digests["sft"], "rl")
    assert beside_sft is not None
    assert differences(beside_sft, "rl", "champion") == differences(evaluation, "rl", "sft")
    assert beside_sft.red_team == {"sft": [tried], "rl": [], "champion": [tried]}
    beside_rl = with_champion_arm(evaluation, digests, digests["rl"], "sft")
    config = Gate(challenger="sft", rivals=("rl",))
    decision = decide(beside_rl or evaluation, [], config, "1")
    rules = {rule.name: rule for rule in decision.rules}
    assert rules["gain_vs_champion"].found == rules["gain_vs_rl"].found
    assert rules["gain_vs_rl"].found != reason("not_compared")


def differences(evaluation: Evaluation, a: str, b: str) -> dict[str, float | None]:
    """Differences of two arms by metric."""
    return {
        comparison.metric: comparison.diff
        for comparison in evaluation.comparisons
        if (comparison.a, comparison.b) == (a, b)
    }


def test_a_challenger_that_was_not_trained_is_one_line(finished: Make):
    models = finished().models()
    del models["rl"]
    with pytest.raises(ConfigError, match=r"fallback = rl: this run has no such model.*base, sft"):
        challenger_of(models, "rl")


def test_a_champion_without_weights_is_noticed_before_training(finished: Make):
    site = finished(release={"max_artifact_mb": 1e-6})
    assert champion_problem(site.profile) is None
    site.run()
    assert champion_problem(site.profile) is None
    (site.folder / "rl").rename(site.folder / "away")
    problem = champion_problem(site.profile)
    assert problem is not None
    assert "is gone" in problem
    assert "\n" not in problem


def champion_problem(profile: Profile) -> str | None:
    (check,) = [check for check in inspect_profile(profile, "evaluate") if check.name == "champion"]
    return check.problem


def test_a_check_of_the_champion_makes_no_database_and_waits_for_no_server(
    profile_of: ProfileOf, tmp_path: Path
):
    assert champion_problem(profile_of()) is None
    assert not (tmp_path / "state" / "mlflow.db").exists()
    problem = champion_problem(profile_of(tracking={"uri": "http://127.0.0.1:9"}))
    assert problem is not None
    assert "tracking.uri can't be reached" in problem


def test_a_failed_answer_is_no_loss_and_listed_by_itself():
    failed = ArmRow(row_id="a", text="词", reason="rag_timeout")
    arms = {
        "rl": {"a": failed, "b": arm(b=MISS)[1]},
        "teacher": {row_id: arm()[0] for row_id in "ab"},
    }
    chosen = rows_to_review(arms, ROWS[:2], RECIPE, "rl", losses=5, sampled=2)
    reasons = [(review.row.id, review.why) for review in chosen]
    assert reasons == [("b", "不如教师"), ("a", "无结果")]


def test_an_empty_answer_is_a_loss_and_shown_as_one(tmp_path: Path):
    arms = {
        "rl": {"a": ArmRow(row_id="a", reason="empty_answer", retrieved=Retrieved())},
        "teacher": {"a": arm()[0]},
    }
    chosen = rows_to_review(arms, ROWS[:1], RECIPE, "rl", losses=5, sampled=0)
    workbook = write_approval_workbook(tmp_path / "r.xlsx", chosen, arms, RECIPE, "rl")
    sheet = openpyxl.load_workbook(workbook.path).active
    assert sheet is not None
    first_row = [cell.value for cell in sheet[2]]
    assert first_row[0] == "不如教师"
    assert "（empty_answer）" in first_row
