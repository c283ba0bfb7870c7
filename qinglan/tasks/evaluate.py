"""The evaluate stage: every arm answers the test split, and the arms are compared."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple

from qinglan.clients.roles import ANSWER_FIELDS, Role, Services, open_clients, site_ledger
from qinglan.clients.row_batches import RETRYABLE_REASONS
from qinglan.config import CHANGEABLE, Profile
from qinglan.errors import StageError
from qinglan.evaluation.arms import baseline_arms, student_rows, with_tokens
from qinglan.evaluation.evaluating import evaluate, metrics_of
from qinglan.evaluation.measuring import Measured, measure
from qinglan.evaluation.models import Evaluation
from qinglan.evaluation.reasons import Reason, reason
from qinglan.evaluation.red_team import (
    RAG_NO_ANSWER,
    Case,
    RedTeamResult,
    cases_of,
    row_of,
    texts_of,
    texts_of_teacher,
    try_cases,
)
from qinglan.evaluation.split_uses import note_evaluation
from qinglan.evaluation.teacher_comparison import (
    ComparedTeacher,
    ask_teacher,
    cost_of_unusable,
    teachers_of,
)
from qinglan.ledger import Ledger
from qinglan.recipes import get_recipe
from qinglan.recipes.keys import grading_key
from qinglan.registry import champion_of
from qinglan.rows import ArmName, ArmRow, Row
from qinglan.runs.artifacts import (
    Artifact,
    StageResult,
    hash_of,
    json_artifact,
    read_jsonl,
    write_jsonl,
)
from qinglan.runs.processes import in_event_loop
from qinglan.runs.run import Run
from qinglan.tasks.batches import ask_again
from qinglan.tasks.engine import run_engine
from qinglan.tasks.stage import Outcome, Stage, perform, stage_task
from qinglan.training.engines.generate import UNMERGED, generate_commands

CHAMPION = "champion"
Calls = dict[str, dict[str, int]]
"""The counts of `Clients.call_counts`, by role."""


class Model(NamedTuple):
    """A student to evaluate."""

    folder: str
    identity: str
    """Digest of its files; of a model on a hub, its name."""
    unmerged: tuple[str, str] | None = None
    """The model that it is compared to: base model and adapter that it was merged of; its own
    folder and "" where it has none."""


class Answers(NamedTuple):
    """The students' texts, by student."""

    arms: dict[ArmName, list[ArmRow]]
    red_team: dict[ArmName, dict[str, str]]
    """Texts by prompt id."""
    probed: dict[ArmName, list[ArmRow]]
    parity: dict[ArmName, dict[str, float]]


class Asked(NamedTuple):
    """The teachers' answers, by teacher, and the calls that they took."""

    arms: dict[ArmName, list[ArmRow]]
    red_team: dict[ArmName, list[ArmRow]]
    calls: Calls


class Graded(NamedTuple):
    """The arms' grades, the red team's results, and the calls that both took."""

    measured: Measured
    red_team: dict[ArmName, list[RedTeamResult]]
    calls: Calls


@stage_task("evaluate")
def evaluate_arms(
    run: Run, services: Services, dataset: StageResult, models: Mapping[ArmName, StageResult]
) -> StageResult:
    """Every arm on the test split: generate, retrieve, judge, compare.

    The registry's champion is an arm too.
    """
    profile = run.profile
    students = _students(run, models)
    identities = {name: student.identity for name, student in students.items()}
    cases = cases_of(profile)
    compared = teachers_of(run, services)
    rival_names = {*profile.evaluate.teachers, *profile.gate.rivals}
    rivals = [teacher for teacher in compared if teacher.arm in rival_names]
    loads = _loads(profile, students)

    def work(stage: Stage) -> Outcome:
        rows = list(read_jsonl(dataset.path("test"), Row))
        teachers = _ask_teachers(stage, rivals, rows, cases)
        teacher_arms = _teacher_arms(stage, rows, teachers, compared)
        answers = _generate(stage, rows, cases, students)
        arms = {**teacher_arms, **answers.arms}
        stage.say(f"grading {len(arms)} arms on {len(rows):,} questions")
        red_team_texts: dict[ArmName, Mapping[str, str | Reason]] = {**answers.red_team}
        for name, arm in teachers.red_team.items():
            red_team_texts[name] = texts_of_teacher(arm)
        graded = _grade(stage, services, arms, rows, cases, red_team_texts)
        evaluation = _evaluation(stage, dataset, rows, graded, answers, identities, loads)
        return Outcome(
            rows_in=len(rows),
            rows_out=len(rows),
            artifacts=_write(stage, graded.measured, evaluation),
            metrics=metrics_of(evaluation),
            details={"api": _added(graded.calls, teachers.calls), "models": identities},
            try_again=_count_retryable(graded, teachers),
        )

    depends_on: dict[str, Any] = {
        "test_sha256": dataset.artifacts["test"].sha256,
        # Test and training share rows of it.
        "rows_sha256": dataset.artifacts["rows"].sha256,
        "models": identities,
        "evaluate": profile.evaluate.model_dump(mode="json", exclude=CHANGEABLE["evaluate"]),
        "student": profile.student.model_dump(mode="json"),
        "torch_dtype": profile.sft.torch_dtype,
        "engine": [profile.answer_engine, profile.serve.vllm_arguments],
        "prices": {name: price.model_dump() for name, price in profile.prices.items()},
        "teachers": {rival.arm: _answer_settings(rival) for rival in rivals},
        "teachers_on_cases": [rival.arm for rival in rivals if rival.arm in profile.gate.rivals],
        "red_team": hash_of([case.model_dump(mode="json") for case in cases]),
        "loads": {name: load.model_dump(mode="json") for name, load in loads.items()},
        **grading_key(run),
    }
    return perform(run, "evaluate", depends_on, work)


def _answer_settings(teacher: ComparedTeacher) -> dict[str, Any]:
    """The settings that the teacher's answers depend on."""
    settings = teacher.run.profile.teacher
    return settings.model_dump(mode="json", include=set(ANSWER_FIELDS))


def _loads(profile: Profile, students: Mapping[ArmName, Model]) -> dict[ArmName, Reason]:
    """The load under which each model's latency was measured."""
    teachers = {"teacher": profile.teacher}
    for name in profile.evaluate.teachers:
        teachers[name] = profile.compare.teachers[name]
    loads = {
        name: reason("live_at_once", questions=teacher.concurrency)
        for name, teacher in teachers.items()
    }
    for name in students:
        loads[name] = reason("one_at_a_time", device=profile.trainer.device)
    return loads


# ---- the arms ----


def _students(run: Run, models: Mapping[ArmName, StageResult]) -> dict[ArmName, Model]:
    """The run's models and, unless it is one of them, the champion."""
    students = {name: _model_of(result) for name, result in models.items()}
    for name, base in (("sft", "base"), ("rl", run.profile.rl.start_from)):
        if name not in models:
            continue
        adapter = models[name].artifacts.get("adapter")
        if base in students and adapter:
            unmerged = (students[base].folder, str(adapter.path))
            students[name] = students[name]._replace(unmerged=unmerged)
        elif run.profile.answer_engine == "vllm":
            students[name] = students[name]._replace(unmerged=(students[name].folder, ""))
    champion = champion_of(run)
    identities = {student.identity for student in students.values()}
    if champion and champion.sha256 not in identities:
        students[CHAMPION] = Model(str(champion.folder), champion.sha256)
    return students


def _model_of(result: StageResult) -> Model:
    """A stage's model, or the name of one on a hub."""
    if "model" in result.artifacts:
        return Model(str(result.path("model")), result.artifacts["model"].sha256)
    name = str(result.details["model"])
    return Model(name, name)


def _teacher_arms(
    stage: Stage, rows: Sequence[Row], asked: Asked, compared: Sequence[ComparedTeacher]
) -> dict[ArmName, list[ArmRow]]:
    """The question's and the teachers' arms, with the cost and the tokens of their calls."""
    profile = stage.run.profile
    grader = get_recipe(profile.recipe).grader
    arms = baseline_arms(rows, grader, profile, retrieve_again=True)
    arms.update(asked.arms)
    requests: set[str] = set()
    for arm in arms.values():
        for entry in arm:
            requests.update(entry.requests)
    with site_ledger(profile) as ledger:
        calls = ledger.get_many(requests)
        for teacher in compared:
            if teacher.arm in arms:
                arms[teacher.arm] = _with_wasted_cost(arms[teacher.arm], rows, teacher, ledger)
    return {name: with_tokens(arm, calls) for name, arm in arms.items()}


def _with_wasted_cost(
    arm: Sequence[ArmRow], rows: Sequence[Row], teacher: ComparedTeacher, ledger: Ledger
) -> list[ArmRow]:
    """The teacher's arm with what its unusable answers cost: they were paid for as well."""
    silent_ids = {entry.row_id for entry in arm if entry.text is None}
    silent_rows = [row.without_answer() for row in rows if row.id in silent_ids]
    wasted_usd = cost_of_unusable(teacher.run.profile, silent_rows, ledger)
    return [entry.with_cost(wasted_usd.get(entry.row_id, entry.cost_usd)) for entry in arm]


@in_event_loop
async def _ask_teachers(
    stage: Stage, rivals: Sequence[ComparedTeacher], rows: Sequence[Row], cases: Sequence[Case]
) -> Asked:
    """Ask the further teachers the test questions, and those that the gate names the red team's
    cases that need not pass.

    This comes before anything is generated: where the money doesn't last, it is known now.
    """
    profile = stage.run.profile
    recipe = get_recipe(profile.recipe)
    answers = Asked({}, {}, {})
    calls: Calls = {}
    for rival in rivals:
        questions = list(rows) if rival.arm in profile.evaluate.teachers else []
        case_rows = _compared_cases(cases, profile) if rival.arm in profile.gate.rivals else []
        roles: set[Role] = set()
        for row in (*questions, *case_rows):
            roles.update(recipe.distill_messages(row, profile.tenant))
        if not roles:
            continue
        stage.say(f"asking {rival.arm} {len(questions) + len(case_rows):,} questions")
        async with open_clients(rival.run, rival.services, roles, stage.traced) as clients:
            ask = partial(ask_teacher, recipe=recipe, clients=clients, tenant=profile.tenant)
            again = partial(ask_again, f"ask {rival.arm}", retries=profile.evaluate.retries)
            if questions:
                share = profile.evaluate.max_failed_share
                answers.arms[rival.arm] = await again(
                    partial(ask, questions, max_failed_share=share), clients
                )
            if case_rows:
                # They are few: a failed call leaves its case out.
                answers.red_team[rival.arm] = await again(
                    partial(ask, case_rows, max_failed_share=1.0), clients
                )
            calls = _added(calls, clients.call_counts())
    return answers._replace(calls=calls)


def _compared_cases(cases: Sequence[Case], profile: Profile) -> list[Row]:
    """The cases on which the student is compared to its rivals: those that need not pass."""
    return [row_of(case, profile.tenant) for case in cases if not case.must_pass]


def _generate(
    stage: Stage, rows: Sequence[Row], cases: Sequence[Case], students: Mapping[ArmName, Model]
) -> Answers:
    """Let every student answer the questions, the red team's cases and the recipe's probes."""
    profile = stage.run.profile
    recipe = get_recipe(profile.recipe)
    price = profile.prices.get(profile.student.name)
    usd_per_s = _machine_usd_per_s(profile)
    case_rows = [row_of(case, profile.tenant) for case in cases]
    _run_generation(stage, [*rows, *case_rows, *recipe.probes(rows)], students)
    answers = Answers({}, {}, {}, {})
    probes_from = len(rows) + len(cases)
    for name, student in students.items():
        lines = _answers_file(stage, name).read_bytes().splitlines()
        answers.arms[name] = student_rows(lines[: len(rows)], price, recipe.grader, usd_per_s)
        # The base model is no candidate for a release.
        if name != "base":
            answers.red_team[name] = texts_of(lines[len(rows) : probes_from], recipe)
        answers.probed[name] = student_rows(lines[probes_from:], price, recipe.grader, usd_per_s)
        if student.unmerged:
            answers.parity[name] = _parity(stage, name, lines)
    return answers


def _run_generation(
    stage: Stage, questions: Sequence[Row], students: Mapping[ArmName, Model]
) -> None:
    """Run the engines that write each student's answers, and those of its unmerged form."""
    profile = stage.run.profile
    recipe = get_recipe(profile.recipe)
    prompts = write_jsonl(
        stage.directory / "prompts.jsonl",
        (
            {"id": row.id, "messages": recipe.student_messages(row, profile.tenant)}
            for row in questions
        ),
    )
    stage.say(f"generating with {', '.join(students)}")
    folders = {name: student.folder for name, student in students.items()}
    adapters: dict[str, str] = {}
    for name, student in students.items():
        if student.unmerged:
            base, adapter = student.unmerged
            folders[f"{name}{UNMERGED}"] = base
            adapters[f"{name}{UNMERGED}"] = adapter
    commands = generate_commands(profile, folders, prompts.path, stage.directory, adapters)
    for number, command in enumerate(commands, start=1):
        run_engine(stage, command, name=f"generation {number}", log="generate.log")


def _machine_usd_per_s(profile: Profile) -> float | None:
    """The price of the machine that the student answers on; None where the profile has none."""
    if profile.student.gpu_hour_usd is None:
        return None
    gpus = 1
    if profile.trainer.device == "cuda":
        gpus = profile.rl.tensor_model_parallel_size
    return gpus * profile.student.gpu_hour_usd / 3600


def _answers_file(stage: Stage, model: str) -> Path:
    return stage.directory / f"{model}.answers.jsonl"


def _parity(stage: Stage, name: ArmName, answers: Sequence[bytes]) -> dict[str, float]:
    """`Evaluation.parity` of a model, by its answers' JSON lines.

    Raises:
        StageError: the exported model differs from the trained one beyond the profile's bounds.
    """
    limits = stage.run.profile.evaluate
    unmerged_answers = _answers_file(stage, f"{name}{UNMERGED}").read_bytes().splitlines()
    equal = 0
    differences: list[float] = []
    for line, unmerged_line in zip(answers, unmerged_answers, strict=False):
        merged = json.loads(line)
        unmerged = json.loads(unmerged_line)
        # Only where both texts are the same do their tokens' probabilities compare.
        if merged["start"] != unmerged["start"]:
            continue
        equal += 1
        token_pairs = zip(merged["logprobs"], unmerged["logprobs"], strict=False)
        differences.extend(
            abs(logprob - unmerged_logprob) for logprob, unmerged_logprob in token_pairs
        )
    # NaN counts as the largest: max() alone would keep it or lose it by its place.
    difference = max(differences, key=lambda value: (isnan(value), value), default=0.0)
    has_equal_texts = equal >= limits.parity_min_equal * len(unmerged_answers)
    has_equal_logprobs = difference <= limits.parity_max_difference
    if not has_equal_texts or not has_equal_logprobs:
        raise StageError(
            f"evaluate: the exported {name} model is not what was trained: "
            f"{equal} of {len(unmerged_answers)} texts are those of the trainer's own code "
            f"(parity_min_equal), log-probabilities differ by {difference:.2g} at most "
            "(parity_max_difference)"
        )
    return {"prompts": len(unmerged_answers), "equal": equal, "difference": difference}


# ---- grading and comparing ----


@in_event_loop
async def _grade(
    stage: Stage,
    services: Services,
    arms: Mapping[ArmName, Sequence[ArmRow]],
    rows: Sequence[Row],
    cases: Sequence[Case],
    red_team: Mapping[ArmName, Mapping[str, str | Reason]],
) -> Graded:
    """Grade the arms' texts and try the red team's cases; failed calls are repeated together."""
    profile = stage.run.profile
    recipe = get_recipe(profile.recipe)
    services_asked = recipe.grader.services
    async with open_clients(stage.run, services, services_asked, stage.traced) as clients:

        async def grade() -> tuple[Measured, dict[ArmName, list[RedTeamResult]]]:
            results = await try_cases(cases, red_team, recipe, profile.tenant, clients)
            measured = await measure(arms, rows, recipe.grader, clients, profile)
            return measured, results

        measured, results = await ask_again(
            "grade", grade, clients, retries=profile.evaluate.retries
        )
        return Graded(measured, results, clients.call_counts())


def _evaluation(
    stage: Stage,
    dataset: StageResult,
    rows: Sequence[Row],
    graded: Graded,
    answers: Answers,
    identities: Mapping[ArmName, str],
    loads: Mapping[ArmName, Reason],
) -> Evaluation:
    """The figures of all arms, with what the test split was used for before."""
    profile = stage.run.profile
    train = [
        row
        for row in read_jsonl(dataset.path("rows"), Row)
        if row.split == "train" and row.status == "ok"
    ]
    evaluation = evaluate(
        graded.measured.arms,
        rows,
        profile.evaluate,
        get_recipe(profile.recipe),
        train,
        loads=loads,
        probed=answers.probed,
    )
    trained = {name: digest for name, digest in identities.items() if name != CHAMPION}
    row_ids = (row.id for row in rows)
    earlier = note_evaluation(profile, stage.run.id, hash_of(trained), row_ids)
    return evaluation.model_copy(
        update={
            "red_team": graded.red_team,
            "unjudged": graded.measured.unjudged,
            "earlier_evaluations": earlier,
            "parity": answers.parity,
        }
    )


def _write(stage: Stage, measured: Measured, evaluation: Evaluation) -> dict[str, Artifact]:
    artifacts = {}
    for name, arm in measured.arms.items():
        artifacts[f"arm_{name}"] = write_jsonl(stage.directory / f"arm_{name}.jsonl", arm)
    content = evaluation.model_dump(mode="json")
    artifacts["evaluation"] = json_artifact(stage.directory / "evaluation.json", content)
    return artifacts


def _count_retryable(graded: Graded, asked: Asked) -> int:
    """Texts, questions and cases that lack a grade for a cause that may pass."""
    reasons: list[str | None] = []
    for arm in graded.measured.arms.values():
        reasons.extend(entry.reason for entry in arm if entry.text and not entry.measured)
    for arm in (*asked.arms.values(), *asked.red_team.values()):
        reasons.extend(entry.reason for entry in arm if not entry.text)
    reasons.extend(Counter(graded.measured.unjudged).elements())
    retryable = sum(why in RETRYABLE_REASONS for why in reasons)
    for results in graded.red_team.values():
        # A teacher that gave no text is counted above, by its reason.
        retryable += sum(result.reason == RAG_NO_ANSWER for result in results)
    return retryable


def _added(
    counts: Mapping[str, Mapping[str, int]], more_counts: Mapping[str, Mapping[str, int]]
) -> Calls:
    """Both counts together, by role."""
    total: Calls = {role: Counter(role_counts) for role, role_counts in counts.items()}
    for role, role_counts in more_counts.items():
        total.setdefault(role, Counter()).update(role_counts)
    return total
