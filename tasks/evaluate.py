"""The evaluate stage: every arm answers the test split, and the arms are compared."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from math import isnan
from typing import Any, NamedTuple

from qinglan.clients.roles import ANSWER_FIELDS, Services, open_clients, site_ledger
from qinglan.clients.row_batches import RETRYABLE_REASONS
from qinglan.config import CHANGEABLE
from qinglan.errors import StageError
from qinglan.evaluation.arms import baseline_arms, student_rows, with_tokens
from qinglan.evaluation.evaluating import evaluate, metrics_of
from qinglan.evaluation.measuring import Measured, measure
from qinglan.evaluation.reasons import Reason, reason
from qinglan.evaluation.red_team import (
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
from qinglan.recipes import get_recipe
from qinglan.recipes.keys import scoring_key
from qinglan.registry import champion_of
from qinglan.rows import ArmName, ArmRow, Row
from qinglan.runs.artifacts import StageResult, hash_of, json_artifact, read_jsonl, write_jsonl
from qinglan.runs.processes import in_event_loop
from qinglan.runs.run import Run
from qinglan.tasks.batches import ask_again
from qinglan.tasks.engine import run_engine
from qinglan.tasks.stage import Outcome, Stage, perform, stage_task
from qinglan.training.engines.generate import UNMERGED, generate_commands

Calls = dict[str, dict[str, int]]
"""By role, what `Clients.call_counts` gives."""


class Model(NamedTuple):
    """A student to evaluate."""

    folder: str
    identity: str
    """Digest of its files; of a model on a hub, its name."""
    unmerged: tuple[str, str] | None = None
    """What it is compared to: base model and adapter that it was merged of; its own folder and ""
    where it has none."""


class Answers(NamedTuple):
    """What the students wrote, by student."""

    arms: dict[ArmName, list[ArmRow]]
    red_team: dict[ArmName, dict[str, str]]
    """By prompt id."""
    probed: dict[ArmName, list[ArmRow]]
    parity: dict[ArmName, dict[str, float]]


class Asked(NamedTuple):
    """What the teachers answered, by teacher, and the calls that it took."""

    arms: dict[ArmName, list[ArmRow]]
    red_team: dict[ArmName, list[ArmRow]]
    calls: Calls


@stage_task("evaluate")
def evaluate_arms(
    run: Run, services: Services, dataset: StageResult, models: Mapping[ArmName, StageResult]
) -> StageResult:
    """Every arm on the test split: generate, retrieve, judge, compare. The registry's champion is
    an arm too."""
    profile, recipe = run.profile, get_recipe(run.profile.recipe)
    students, cases = _students(run, models), cases_of(profile)
    compared, named = teachers_of(run, services), {*profile.evaluate.teachers, *profile.gate.rivals}
    rivals = [each for each in compared if each.arm in named]
    teachers = {"teacher": profile.teacher} | {
        n: profile.compare.teachers[n] for n in profile.evaluate.teachers
    }
    # What else a model had to do while its latency was measured.
    loads = {
        name: reason("live_at_once", questions=asked.concurrency)
        for name, asked in teachers.items()
    }
    loads |= dict.fromkeys(students, reason("one_at_a_time", device=profile.trainer.device))
    identities = {name: student.identity for name, student in students.items()}

    def work(stage: Stage) -> Outcome:
        rows = list(read_jsonl(dataset.path("test"), Row))
        arms = baseline_arms(rows, recipe.grader, profile, retrieve_again=True)
        asked = _ask_teachers(stage, rivals, rows, cases)
        arms |= asked.arms
        keys = {key for arm in arms.values() for entry in arm for key in entry.requests}
        with site_ledger(profile) as ledger:
            calls = ledger.get_many(keys)
            for teacher in compared:
                arm = arms.get(teacher.arm, [])
                silent = {entry.row_id for entry in arm if entry.text is None}
                asked_in_vain = [
                    row.model_copy(update={"answer": None}) for row in rows if row.id in silent
                ]
                wasted_usd = cost_of_unusable(teacher.run.profile, asked_in_vain, ledger)
                for number, each in enumerate(arm):
                    arm[number] = each.model_copy(
                        update={"cost_usd": wasted_usd.get(each.row_id, each.cost_usd)}
                    )
        arms = {name: with_tokens(arm, calls) for name, arm in arms.items()}
        answers = _generate(stage, rows, cases, students)
        arms |= answers.arms
        stage.say(f"grading {len(arms)} arms on {len(rows):,} questions")
        tried = answers.red_team | {
            name: texts_of_teacher(arm) for name, arm in asked.red_team.items()
        }
        done, red_team, made = _complete(stage, services, arms, rows, cases, tried)
        train = [
            row
            for row in read_jsonl(dataset.path("rows"), Row)
            if row.split == "train" and row.status == "ok"
        ]
        found = evaluate(
            done.arms, rows, profile.evaluate, recipe, train, loads=loads, probed=answers.probed
        )
        trained = hash_of(
            {name: identity for name, identity in identities.items() if name != "champion"}
        )
        earlier = note_evaluation(profile, run.id, trained, (row.id for row in rows))
        also = {"red_team": red_team, "unjudged": done.unjudged, "earlier_evaluations": earlier}
        found = found.model_copy(update=also | {"parity": answers.parity})
        files = {f"arm_{name}": arm for name, arm in done.arms.items()}
        artifacts = {
            name: write_jsonl(stage.directory / f"{name}.jsonl", arm) for name, arm in files.items()
        }
        artifacts["evaluation"] = json_artifact(
            stage.directory / "evaluation.json", found.model_dump(mode="json")
        )
        details = {"api": _added(made, asked.calls), "models": identities}
        lost = [
            entry.reason
            for arm in done.arms.values()
            for entry in arm
            if entry.text and not entry.measured
        ]
        of_teachers = (*asked.arms.values(), *asked.red_team.values())
        lost += [entry.reason for arm in of_teachers for entry in arm if not entry.text]
        try_again = sum(
            why in RETRYABLE_REASONS for why in (*lost, *Counter(done.unjudged).elements())
        )
        try_again += sum(each.passed is None for each in chain.from_iterable(red_team.values()))
        return Outcome(len(rows), len(rows), {}, artifacts, metrics_of(found), details, try_again)

    depends_on: dict[str, Any] = {
        "test_sha256": dataset.artifacts["test"].sha256,
        "rows_sha256": dataset.artifacts["rows"].sha256,  # what test and training share
        "models": identities,
        "evaluate": profile.evaluate.model_dump(mode="json", exclude=CHANGEABLE["evaluate"]),
        "student": profile.student.model_dump(mode="json"),
        "torch_dtype": profile.sft.torch_dtype,
        "engine": [profile.answer_engine, profile.serve.vllm_arguments],
        "prices": {name: price.model_dump() for name, price in profile.prices.items()},
        "teachers": {
            each.arm: each.run.profile.teacher.model_dump(mode="json", include=set(ANSWER_FIELDS))
            for each in rivals
        },
        "teachers_on_cases": [each.arm for each in rivals if each.arm in profile.gate.rivals],
        "red_team": hash_of([case.model_dump(mode="json") for case in cases]),
        "loads": {name: load.model_dump(mode="json") for name, load in loads.items()},
        **scoring_key(profile),
    }
    if (
        "rag" in recipe.grader.services
    ):  # as in validation: a live service's knowledge base changes unseen
        depends_on["knowledge_base"] = run.knowledge_base_key
    return perform(run, "evaluate", depends_on, work)


def _students(run: Run, models: Mapping[ArmName, StageResult]) -> dict[ArmName, Model]:
    """The run's models and, unless it is one of them, the champion."""
    students = {
        name: Model(str(result.path("model")), result.artifacts["model"].sha256)
        if "model" in result.artifacts
        else Model(str(result.details["model"]), str(result.details["model"]))
        for name, result in models.items()
    }
    bases: dict[ArmName, ArmName] = {
        "sft": "base",
        "rl": "sft" if run.profile.rl.start_from == "sft" else "base",
    }
    for name, base in bases.items():
        if (
            base in students
            and name in models
            and (adapter := models[name].artifacts.get("adapter"))
        ):
            students[name] = students[name]._replace(
                unmerged=(students[base].folder, str(adapter.path))
            )
        elif name in models and run.profile.answer_engine == "vllm":
            students[name] = students[name]._replace(unmerged=(students[name].folder, ""))
    champion = champion_of(run)
    if champion and champion.sha256 not in {student.identity for student in students.values()}:
        students["champion"] = Model(str(champion.folder), champion.sha256)
    return students


@in_event_loop
async def _ask_teachers(
    stage: Stage, rivals: Sequence[ComparedTeacher], rows: Sequence[Row], cases: Sequence[Case]
) -> Asked:
    """The further teachers on the test questions, and those that the gate names on the red team's
    cases that need not pass; before anything is generated: where the money doesn't last, it is
    known now."""
    profile, calls = stage.run.profile, Calls()
    recipe, tenant = get_recipe(profile.recipe), profile.tenant
    arms, red_team = dict[ArmName, list[ArmRow]](), dict[ArmName, list[ArmRow]]()
    for rival in rivals:
        questions = list(rows) if rival.arm in profile.evaluate.teachers else []
        compared = [
            row_of(each, tenant)
            for each in cases
            if not each.must_pass and rival.arm in profile.gate.rivals
        ]
        roles = {
            role for row in (*questions, *compared) for role in recipe.distill_messages(row, tenant)
        }
        if not roles:
            continue
        stage.say(f"asking {rival.arm} {len(questions) + len(compared):,} questions")
        async with open_clients(rival.run, rival.services, roles, stage.traced) as clients:
            ask = partial(ask_teacher, recipe=recipe, clients=clients, tenant=tenant)
            again = partial(ask_again, f"ask {rival.arm}", retries=profile.evaluate.retries)
            if questions:
                share = profile.evaluate.max_failed_share
                arms[rival.arm] = await again(
                    partial(ask, questions, max_failed_share=share), clients
                )
            if compared:  # few: a failed call leaves its case out
                red_team[rival.arm] = await again(
                    partial(ask, compared, max_failed_share=1.0), clients
                )
            calls = _added(calls, clients.call_counts())
    return Asked(arms, red_team, calls)


def _generate(
    stage: Stage, rows: Sequence[Row], cases: Sequence[Case], students: Mapping[ArmName, Model]
) -> Answers:
    profile = stage.run.profile
    recipe, hour_usd = get_recipe(profile.recipe), profile.student.gpu_hour_usd
    price = profile.prices.get(profile.student.name)
    gpus = profile.rl.tensor_model_parallel_size if profile.trainer.device == "cuda" else 1
    usd_per_s = None if hour_usd is None else gpus * hour_usd / 3600
    prompts = stage.directory / "prompts.jsonl"
    questions = [*rows, *(row_of(case, profile.tenant) for case in cases), *recipe.probes(rows)]
    asked = (
        {"id": row.id, "messages": recipe.student_messages(row, profile.tenant)}
        for row in questions
    )
    write_jsonl(prompts, asked)
    stage.say(f"generating with {', '.join(students)}")
    unmerged = {
        f"{name}{UNMERGED}": each.unmerged for name, each in students.items() if each.unmerged
    }
    folders = {name: student.folder for name, student in students.items()}
    folders |= {name: base for name, (base, _) in unmerged.items()}
    adapters = {name: adapter for name, (_, adapter) in unmerged.items()}
    for number, command in enumerate(
        generate_commands(profile, folders, prompts, stage.directory, adapters), 1
    ):
        run_engine(stage, command, name=f"generation {number}", log="generate.log")
    answers = Answers({}, {}, {}, {})
    probes_from = len(rows) + len(cases)
    for name, student in students.items():
        lines = (stage.directory / f"{name}.answers.jsonl").read_bytes().splitlines()
        answers.arms[name] = student_rows(lines[: len(rows)], price, recipe.grader, usd_per_s)
        if name != "base":
            answers.red_team[name] = texts_of(lines[len(rows) : probes_from], recipe)
        answers.probed[name] = student_rows(lines[probes_from:], price, recipe.grader, usd_per_s)
        if student.unmerged:
            answers.parity[name] = _parity(stage, name, lines)
    return answers


def _parity(stage: Stage, name: ArmName, answers: Sequence[bytes]) -> dict[str, float]:
    """`Evaluation.parity` of a model, by its answers' JSON lines; StageError beyond the profile's
    bounds."""
    limits, path = stage.run.profile.evaluate, stage.directory / f"{name}{UNMERGED}.answers.jsonl"
    unmerged = path.read_bytes().splitlines()
    pairs = zip(map(json.loads, answers), map(json.loads, unmerged), strict=False)
    equal = [(one, other) for one, other in pairs if one["start"] == other["start"]]
    tokens = [
        pair
        for one, other in equal
        for pair in zip(one["logprobs"], other["logprobs"], strict=False)
    ]
    difference = max(
        (abs(one - other) for one, other in tokens),
        key=lambda each: (isnan(each), each),
        default=0.0,
    )
    if (
        len(equal) < limits.parity_min_equal * len(unmerged)
        or not difference <= limits.parity_max_difference
    ):
        found = f"{len(equal)} of {len(unmerged)} texts are those of the trainer's own code (parity_min_equal)"
        differ = f"log-probabilities differ by {difference:.2g} at most (parity_max_difference)"
        raise StageError(
            f"evaluate: the exported {name} model is not what was trained: {found}, {differ}"
        )
    return {"prompts": len(unmerged), "equal": len(equal), "difference": difference}


@in_event_loop
async def _complete(
    stage: Stage,
    services: Services,
    arms: Mapping[ArmName, Sequence[ArmRow]],
    rows: Sequence[Row],
    cases: Sequence[Case],
    red_team: Mapping[ArmName, Mapping[str, str | Reason]],
) -> tuple[Measured, dict[ArmName, list[RedTeamResult]], Calls]:
    """What the arms are worth, the red team's results, and the calls that both took."""
    profile, recipe = stage.run.profile, get_recipe(stage.run.profile.recipe)
    async with open_clients(stage.run, services, recipe.grader.services, stage.traced) as clients:

        async def grade() -> tuple[Measured, dict[ArmName, list[RedTeamResult]]]:
            tried = await try_cases(cases, red_team, recipe, profile.tenant, clients)
            return await measure(arms, rows, recipe.grader, clients, profile), tried

        measured, tried = await ask_again("grade", grade, clients, retries=profile.evaluate.retries)
        return measured, tried, clients.call_counts()


def _added(one: Mapping[str, Mapping[str, int]], other: Mapping[str, Mapping[str, int]]) -> Calls:
    """Both counts together, by role."""
    total: Calls = {role: Counter(counts) for role, counts in one.items()}
    for role, counts in other.items():
        total.setdefault(role, Counter()).update(counts)
    return total
