"""The gate stage: decides whether the model may be released."""

from collections.abc import Iterable, Mapping

from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger

from qinglan.evaluation.gate import alarms_of, decide, with_champion_arm
from qinglan.evaluation.models import Decision, Evaluation
from qinglan.recipes import get_recipe
from qinglan.registry import rival_of
from qinglan.registry.approval import decided_by, rows_to_review, write_approval_workbook
from qinglan.registry.versions import challenger_of
from qinglan.rows import ArmName, ArmRow, Row
from qinglan.runs.artifacts import Artifact, StageResult, json_artifact, read_jsonl
from qinglan.runs.run import Run
from qinglan.tasks.approval import ask
from qinglan.tasks.stage import Outcome, Stage, emit_run_event, perform, stage_task, tracker_of
from qinglan.text import markdown_cell, markdown_table

LOSSES, SAMPLED = 60, 40
"""Rows of the workbook that a person reads before approving."""
_MARKS = {"pass": "✓", "fail": "✗", "unknown": "?"}


@stage_task("gate")
def decide_release(
    run: Run, evaluated: StageResult, dataset: StageResult, models: Mapping[ArmName, StageResult]
) -> StageResult:
    """The gate's decision about the challenger, or about `gate.fallback` where that one is not
    released, and a person's where `gate.approval` asks for it.

    A model that may not be released is a result, not an error.
    """
    profile = run.profile
    gate, champion, identities = profile.gate, rival_of(run), evaluated.details.get("models", {})
    arms: list[str] = [gate.challenger, *([gate.fallback] if gate.fallback else [])]
    digests = {arm: challenger_of(models, arm).artifacts["model"].sha256 for arm in arms}
    alarms = {arm: alarms_of(models.get(arm), profile.rl.alarms.window_steps) for arm in digests}

    def decide_on(arm: str) -> Decision:
        evaluation = evaluated.load("evaluation", Evaluation)
        beside = champion and with_champion_arm(evaluation, identities, champion.sha256, arm)
        version = champion.version if champion and beside else None
        return decide(beside or evaluation, alarms[arm], gate.about(arm), version)

    def decide_in_order() -> Decision:
        preferred = decide_on(gate.challenger)
        if preferred.verdict == "promote" or gate.fallback is None or len({*digests.values()}) == 1:
            return preferred
        fallback = decide_on(gate.fallback).model_copy(update={"is_fallback": True})
        if fallback.verdict == "promote":
            return fallback.model_copy(update={"also_tried": preferred})
        return preferred.model_copy(update={"also_tried": fallback})

    def work(stage: Stage) -> Outcome:
        decision, artifacts = decide_in_order(), dict[str, Artifact]()
        if decision.verdict == "promote" and gate.approval == "required":
            artifacts["review"] = _approval_workbook(stage, evaluated, dataset, decision.challenger)
            workbook = artifacts["review"].path
            text = f"{decision_markdown(decision)}\nRows to read: `{workbook}`\n"
            decision = decided_by(decision, ask(stage, decision.sentence, text, workbook))
        decided = decision.model_dump(mode="json")
        artifacts["decision"] = json_artifact(stage.directory / "decision.json", decided)
        found = evaluated.load("evaluation", Evaluation).arms.get(decision.challenger)
        if found and (p95_ms := found.latency_p95_ms or 0.0) > profile.serve.deadline_ms:
            get_run_logger().warning(
                "gate: p95 %.0f ms: raise serve.deadline_ms, or slower ones are not used", p95_ms
            )
        stage.say(
            " ".join([decision.sentence, *([decision.note.render()] if decision.note else [])])
        )
        outcomes = [rule.outcome for rule in decision.rules]
        metrics = {"promote": float(decision.verdict == "promote")}
        metrics |= {
            f"rules/{outcome}": float(outcomes.count(outcome))
            for outcome in ("pass", "fail", "unknown")
        }
        unanswered = sum(
            rule.name == "approval" and rule.outcome == "unknown" for rule in decision.rules
        )
        return Outcome(
            artifacts=artifacts,
            metrics=metrics,
            details={"decision": decided},
            try_again=unanswered,
        )

    depends_on = {
        "evaluation_sha256": evaluated.artifacts["evaluation"].sha256,
        "model_sha256": digests,
        "models": identities,
        "alarms": {
            arm: [alarm.model_dump(mode="json") for alarm in found] for arm, found in alarms.items()
        },
        "gate": gate.model_dump(mode="json", exclude={"approval_timeout_s"}),
        "champion": champion.sha256 if champion else "",
        "champion_version": champion.version if champion else "",
    }
    gated = perform(run, "gate", depends_on, work)
    decision = gated.load("decision", Decision)
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
    return gated


def decision_markdown(decision: Decision) -> str:
    """The decision with every rule, for Prefect's UI; of each arm that was tried."""
    lines = list[str]()
    for each in decision.in_order:
        lines += [f"## {markdown_cell(each.own_reason.render())}", ""]
        rows = list[Iterable[str]]()
        for rule in each.rules:
            why = rule.reason.render() if rule.reason else ""
            cells = (
                _MARKS[rule.outcome],
                rule.name,
                rule.found.render(),
                rule.required.render(),
                why,
            )
            rows.append(map(markdown_cell, cells))
        lines += [markdown_table(("", "Rule", "Found", "Required", "Why"), rows), ""]
    return "\n".join([*lines, *([decision.note.render(), ""] if decision.note else [])])


def _approval_workbook(
    stage: Stage, evaluated: StageResult, dataset: StageResult, challenger: str
) -> Artifact:
    arms = {
        arm: {entry.row_id: entry for entry in read_jsonl(evaluated.path(f"arm_{arm}"), ArmRow)}
        for arm in dict.fromkeys(
            (challenger, "champion", *stage.run.profile.gate.rivals, "teacher", "original")
        )
        if f"arm_{arm}" in evaluated.artifacts
    }
    rows = list(read_jsonl(dataset.path("test"), Row))
    recipe = get_recipe(stage.run.profile.recipe)
    chosen = rows_to_review(arms, rows, recipe, challenger, LOSSES, SAMPLED)
    return write_approval_workbook(
        stage.directory / "review.xlsx", chosen, arms, recipe, challenger
    )
