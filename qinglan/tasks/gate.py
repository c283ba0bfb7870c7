"""The gate stage: decides whether the model may be released."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger

from qinglan.config import Gate
from qinglan.evaluation.gate import alarms_of, decide, with_champion_arm
from qinglan.evaluation.models import Decision, Evaluation
from qinglan.recipes import get_recipe
from qinglan.registry import Released, rival_of
from qinglan.registry.approval import decided_by, rows_to_review, write_approval_workbook
from qinglan.registry.versions import challenger_of
from qinglan.rows import ArmName, ArmRow, Row
from qinglan.runs.artifacts import Artifact, StageResult, json_artifact, read_jsonl
from qinglan.runs.run import Run
from qinglan.tasks.approval import ask
from qinglan.tasks.stage import Outcome, Stage, emit_run_event, perform, stage_task, tracker_of
from qinglan.text import markdown_cell, markdown_table
from qinglan.training.alarms import Alarm

LOSSES = 60
"""Most rows that the challenger lost in the workbook that a person reads before approving."""
SAMPLED = 40
"""Rows at random in that workbook."""
_MARKS = {"pass": "✓", "fail": "✗", "unknown": "?"}


@stage_task("gate")
def decide_release(
    run: Run, evaluated: StageResult, dataset: StageResult, models: Mapping[ArmName, StageResult]
) -> StageResult:
    """The gate's decision about the challenger, or about `gate.fallback` where that one is not
    released.

    Where `gate.approval` asks for it, it takes a person's as well. A model that may not be released
    is a result, not an error.
    """
    profile = run.profile
    gate = profile.gate
    champion = rival_of(run)
    arms: list[ArmName] = [gate.challenger]
    if gate.fallback:
        arms.append(gate.fallback)
    digests = {arm: challenger_of(models, arm).artifacts["model"].sha256 for arm in arms}
    window_steps = profile.rl.alarms.window_steps
    alarms = {arm: alarms_of(models.get(arm), window_steps) for arm in digests}

    def decide_about(arm: ArmName) -> Decision:
        return _decide_about(arm, evaluated, champion, alarms[arm], gate)

    def work(stage: Stage) -> Outcome:
        decision = _decide_in_order(gate, digests, decide_about)
        artifacts: dict[str, Artifact] = {}
        if decision.verdict == "promote" and gate.approval == "required":
            review = _approval_workbook(stage, evaluated, dataset, decision.challenger)
            artifacts["review"] = review
            text = f"{decision_markdown(decision)}\nRows to read: `{review.path}`\n"
            answer = ask(stage, decision.sentence, text, review.path)
            decision = decided_by(decision, answer)
        content = decision.model_dump(mode="json")
        artifacts["decision"] = json_artifact(stage.directory / "decision.json", content)
        _warn_of_latency(run, evaluated, decision.challenger)
        _say(stage, decision)
        return Outcome(
            artifacts=artifacts,
            metrics=_metrics(decision),
            details={"decision": content},
            try_again=_count_unanswered(decision),
        )

    depends_on = {
        "evaluation_sha256": evaluated.artifacts["evaluation"].sha256,
        "model_sha256": digests,
        "models": evaluated.details.get("models", {}),
        "alarms": {arm: _dumped(arm_alarms) for arm, arm_alarms in alarms.items()},
        # For how long a person is waited for changes no decision.
        "gate": gate.model_dump(mode="json", exclude={"approval_timeout_s"}),
        "champion": champion.sha256 if champion else "",
        "champion_version": champion.version if champion else "",
    }
    gated = perform(run, "gate", depends_on, work)
    _publish(run, gated.load("decision", Decision))
    return gated


def _dumped(alarms: Sequence[Alarm]) -> list[dict[str, Any]]:
    return [alarm.model_dump(mode="json") for alarm in alarms]


# ---- the decision ----


def _decide_about(
    arm: ArmName,
    evaluated: StageResult,
    champion: Released | None,
    alarms: Sequence[Alarm],
    gate: Gate,
) -> Decision:
    """The gate's decision about one arm, which is compared with the champion unless it is it."""
    evaluation = evaluated.load("evaluation", Evaluation)
    identities = evaluated.details.get("models", {})
    if champion:
        # None where the arm is the champion itself.
        beside_champion = with_champion_arm(evaluation, identities, champion.sha256, arm)
        if beside_champion:
            return decide(beside_champion, alarms, gate.about(arm), champion.version)
    return decide(evaluation, alarms, gate.about(arm), None)


def _decide_in_order(
    gate: Gate, digests: Mapping[ArmName, str], decide_about: Callable[[ArmName], Decision]
) -> Decision:
    """The decision about the challenger, or about the fallback where only that one is released."""
    preferred = decide_about(gate.challenger)
    # A fallback of the same weights would be refused as well.
    is_same_model = len(set(digests.values())) == 1
    if preferred.verdict == "promote" or gate.fallback is None or is_same_model:
        return preferred
    fallback = decide_about(gate.fallback).model_copy(update={"is_fallback": True})
    if fallback.verdict == "promote":
        return fallback.model_copy(update={"also_tried": preferred})
    return preferred.model_copy(update={"also_tried": fallback})


def _approval_workbook(
    stage: Stage, evaluated: StageResult, dataset: StageResult, challenger: ArmName
) -> Artifact:
    """The rows that a person reads before approving, in the challenger's and other arms' words."""
    profile = stage.run.profile
    arms: dict[ArmName, dict[str, ArmRow]] = {}
    for arm in (challenger, "champion", *profile.gate.rivals, "teacher", "original"):
        if arm not in arms and f"arm_{arm}" in evaluated.artifacts:
            entries = read_jsonl(evaluated.path(f"arm_{arm}"), ArmRow)
            arms[arm] = {entry.row_id: entry for entry in entries}
    rows = list(read_jsonl(dataset.path("test"), Row))
    recipe = get_recipe(profile.recipe)
    chosen_rows = rows_to_review(arms, rows, recipe, challenger, LOSSES, SAMPLED)
    return write_approval_workbook(
        stage.directory / "review.xlsx", chosen_rows, arms, recipe, challenger
    )


# ---- what is said of it ----


def _warn_of_latency(run: Run, evaluated: StageResult, challenger: ArmName) -> None:
    figures = evaluated.load("evaluation", Evaluation).arms.get(challenger)
    p95_ms = 0.0
    if figures:
        p95_ms = figures.latency_p95_ms or 0.0
    if p95_ms > run.profile.serve.deadline_ms:
        get_run_logger().warning(
            "gate: p95 %.0f ms: raise serve.deadline_ms, or slower ones are not used", p95_ms
        )


def _say(stage: Stage, decision: Decision) -> None:
    sentences = [decision.sentence]
    if decision.note:
        sentences.append(decision.note.render())
    stage.say(" ".join(sentences))


def _metrics(decision: Decision) -> dict[str, float]:
    outcomes = [rule.outcome for rule in decision.rules]
    metrics = {"promote": float(decision.verdict == "promote")}
    for outcome in ("pass", "fail", "unknown"):
        metrics[f"rules/{outcome}"] = float(outcomes.count(outcome))
    return metrics


def _count_unanswered(decision: Decision) -> int:
    """1 where a person was asked and gave no answer: a later run asks again."""
    return sum(rule.name == "approval" and rule.outcome == "unknown" for rule in decision.rules)


def _publish(run: Run, decision: Decision) -> None:
    """Show the decision in MLflow and Prefect, and emit it for automations."""
    tags = {"gate.verdict": decision.verdict, "gate.sentence": decision.sentence}
    tracker_of(run.profile).set_tags(run.mlflow_run_id, tags)
    create_markdown_artifact(
        decision_markdown(decision), key="decision", description=decision.sentence
    )
    emit_run_event(
        f"gate.{decision.verdict}",
        run,
        {"sentence": decision.sentence, "challenger": decision.challenger},
    )


def decision_markdown(decision: Decision) -> str:
    """The decision about each arm that was tried, with every rule, for Prefect's UI."""
    lines: list[str] = []
    for arm_decision in decision.in_order:
        heading = markdown_cell(arm_decision.own_reason.render())
        lines += [f"## {heading}", "", _rules_table(arm_decision), ""]
    if decision.note:
        lines += [decision.note.render(), ""]
    return "\n".join(lines)


def _rules_table(decision: Decision) -> str:
    rows = []
    for rule in decision.rules:
        why = rule.reason.render() if rule.reason else ""
        texts = (
            _MARKS[rule.outcome],
            rule.name,
            rule.found.render(),
            rule.required.render(),
            why,
        )
        rows.append([markdown_cell(text) for text in texts])
    return markdown_table(("", "Rule", "Found", "Required", "Why"), rows)
